"""KeyValueCache: single steps equal the whole pass; beams, capacity, errors, cached encoder outputs and fixed
shapes."""

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import forked
from regard.core.biases import alibi, relative
from regard.core.masks import Mask, causal, padding, window
from regard.core.requests import full
from regard.nn.cache import KeyValueCache
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHeadAttention
from regard.nn.positions import Alibi, RelativePositions, Rotary
from regard.nn.transformer import TransformerDecoderLayer

SCORES = ["scaled_dot", "dot", "cosine", "bilinear", "additive"]
KINDS: dict[str, Callable[[], Rotary | Alibi | RelativePositions | None]] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(4),
    "alibi": lambda: Alibi(6),
    "relative": lambda: RelativePositions(4, 2),
}
PAIRS = [(score, kind) for score in SCORES for kind in KINDS if kind != "relative" or score in ("dot", "scaled_dot")]


def layer_of(score: str = "scaled_dot", kind: str = "none") -> MultiHeadAttention:
    return MultiHeadAttention(10, 6, kv_heads=3, head_size=4, score=score, positions=KINDS[kind]()).double().eval()


def step_by_step(
    layer: MultiHeadAttention, x: Tensor, cache: KeyValueCache, mask: Mask | None = None, first: int = 1
) -> Tensor:
    """Return the outputs of a layer with a cache: the `first` positions at once, then one after another."""
    parts = [x[:, :first], *x[:, first:].split(1, 1)]
    return torch.cat([layer(part, mask=mask, cache=cache).output for part in parts], 1)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("score", "kind"), PAIRS)
@torch.no_grad()
def test_token_by_token_equals_the_whole_pass(score: str, kind: str, static: bool) -> None:
    layer, x = layer_of(score, kind), rand(3, 7, 10)
    whole = layer(x, mask=causal()).output
    for first in (1, 5):
        cache = KeyValueCache(11 if static else None, static)
        assert_close(step_by_step(layer, x, cache, causal(), first), whole, rtol=0, atol=1e-12)
        assert cache.length == 7


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("window", window(3, 0)),
        ("both", causal() & window(4, 2)),
        ("either", window(1, 0) | (causal() & window(5, -0))),
        ("not", ~window(2, 2) & causal()),
    ],
)
@torch.no_grad()
def test_bands_move_with_the_cache_wherever_they_stand(name: str, mask: Mask, static: bool) -> None:
    layer, x = layer_of(kind="rotary"), rand(2, 11, 10)
    cache = KeyValueCache(11, static)
    assert_close(
        step_by_step(layer, x, cache, mask & causal(), 4),
        layer(x, mask=mask & causal()).output,
        rtol=0,
        atol=1e-12,
        msg=lambda message: f"{name}: {message}",
    )


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_without_a_mask_all_that_was_written_is_seen_and_nothing_else(static: bool) -> None:
    layer, x = layer_of(), rand(3, 7, 10)
    cache = KeyValueCache(19, static)
    assert_close(layer(x[:, :5], cache=cache).output, layer(x[:, :5]).output, rtol=0, atol=1e-12)
    last = layer(x[:, 5:], cache=cache, weights=full())
    assert_close(last.output, layer(x).output[:, 5:], rtol=0, atol=1e-12)
    assert isinstance(last.weights, Tensor)
    assert last.weights.shape == (3, 6, 2, 19 if static else 7)
    assert_close(last.weights[..., :7].sum(-1), torch.ones(3, 6, 2, dtype=torch.float64))


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_bias_of_distance_moves_and_tensors_stay(static: bool) -> None:
    layer, x = layer_of(kind="alibi"), rand(2, 9, 10)
    rule, numbers = relative(rand(6, 7)), rand(9, 9)
    for bias in (rule, numbers):
        cache = KeyValueCache(9, static)
        whole = layer(x, mask=causal(), bias=bias).output
        parts = []
        for t in range(9):
            row = bias if bias is rule else numbers[t : t + 1, : 9 if static else t + 1]
            parts.append(layer(x[:, t : t + 1], mask=causal(), bias=row, cache=cache).output)
        assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


@torch.no_grad()
def test_padded_prompts_go_on() -> None:
    """At every step, a mask over all keys so far masks the padding before a shorter prompt."""
    layer, x = layer_of(), rand(2, 9, 10)
    real = torch.arange(9) >= torch.tensor([[0], [3]])  # the second prompt is padded on its left
    cache = KeyValueCache()
    layer(x[:, :5], mask=causal() & real[:, None, None, :5], cache=cache)
    steps = [layer(x[:, t : t + 1], mask=real[:, None, None, : t + 1], cache=cache).output for t in range(5, 9)]
    alone = layer(x[1:, 3:], mask=causal()).output[:, 2:]
    assert_close(torch.cat(steps, 1)[1:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_reordered_beams_equal_beams_read_anew(kind: str, static: bool) -> None:
    layer, x = layer_of(kind=kind), rand(4, 11, 10)
    cache = KeyValueCache(11, static)
    history = x[:, :5]
    layer(history, mask=causal(), cache=cache)
    for t, order in enumerate(([2, 2, 0, 1], [3, 1, 1, 0], [0, 0, 0, 0]), start=5):
        index = torch.tensor(order)
        cache.reorder(index)
        history = torch.cat((history[index], x[:, t : t + 1]), 1)
        found = layer(x[:, t : t + 1], mask=causal(), cache=cache).output
        assert_close(found, layer(history, mask=causal()).output[:, -1:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_one_sentence_becomes_many_beams(static: bool) -> None:
    layer, x = layer_of(), rand(2, 6, 10)
    cache = KeyValueCache(9, static)
    layer(x[:, :5], mask=causal(), cache=cache)
    index = torch.tensor([0, 0, 0, 1, 1, 1])
    cache.reorder(index)
    assert cache.length == 5
    found = layer(x[index, 5:], mask=causal(), cache=cache).output
    assert_close(found, layer(x, mask=causal()).output[index, 5:], rtol=0, atol=1e-12)


def test_an_empty_cache_reorders_to_itself() -> None:
    cache = KeyValueCache()
    cache.reorder(torch.tensor([1, 0]))
    assert cache.length == 0
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.read()


# Tests of the capacity of a key-value cache.


def test_room_doubles_and_copies_seldom() -> None:
    """Of 1000 single steps, at most six reallocate the storage, and the result contains all positions."""
    cache = KeyValueCache()
    places, keys, values = set(), [], []
    for _ in range(1000):
        key, value = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 5)
        keys.append(key)
        values.append(value)
        found, _ = cache.update(key, value)
        places.add(found.data_ptr())
    assert len(places) <= 7
    found_keys, found_values = cache.read()
    assert torch.equal(found_keys, torch.cat(keys, 2))
    assert torch.equal(found_values, torch.cat(values, 2))


def test_storage_stays_within_the_capacity() -> None:
    cache = KeyValueCache(capacity=37)
    for _ in range(37):
        keys, _ = cache.update(torch.randn(1, 1, 1, 2), torch.randn(1, 1, 1, 2))
    assert keys.untyped_storage().nbytes() == 37 * 2 * 4


def test_what_was_read_before_does_not_change() -> None:
    cache = KeyValueCache()
    first, _ = cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
    kept = first.clone()
    for _ in range(70):
        cache.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
    cache.reorder(torch.tensor([0, 0]))
    assert torch.equal(first, kept)


def held(cache: KeyValueCache) -> tuple[int, Tensor, Tensor]:
    keys, values = cache.read()
    return cache.length, keys.clone(), values.clone()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ((2, 3, 3, 4), (2, 3, 3, 5), "capacity of 7 and holds 5: 3 more do not fit"),
        ((1, 3, 1, 4), (1, 3, 1, 5), "key has a batch of 1, the cache holds a batch of 2"),
        ((2, 2, 1, 4), (2, 2, 1, 5), "key has 2 heads of size 4, the cache holds 3 heads of size 4"),
        ((2, 3, 1, 4), (2, 3, 1, 6), "value has 3 heads of size 6, the cache holds 3 heads of size 5"),
        ((2, 3, 1, 4), (2, 3, 2, 5), "key is .2, 3, 1, 4., value is .2, 3, 2, 5."),
    ],
)
def test_an_error_leaves_the_cache_as_it_was(
    key: tuple[int, ...], value: tuple[int, ...], message: str, static: bool, as_installed: None
) -> None:
    cache = KeyValueCache(7, static)
    cache.update(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 5))
    before = held(cache)
    with pytest.raises(ValueError, match=message):
        cache.update(torch.randn(key), torch.randn(value))
    after = held(cache)
    assert after[0] == before[0]
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[2], before[2])
    cache.update(torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2, 5))  # after this error, the cache still works
    assert cache.length == 7


def test_another_dtype_is_refused() -> None:
    cache = KeyValueCache()
    cache.update(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 5))
    with pytest.raises(ValueError, match=r"key is torch.float64 on cpu, the cache holds torch.float32 on cpu"):
        cache.update(rand(2, 3, 1, 4), rand(2, 3, 1, 5))


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_call_that_fails_adds_nothing(static: bool) -> None:
    """A mask that does not fit raises before the cache is changed."""
    layer, x = layer_of(), rand(2, 6, 10)
    cache = KeyValueCache(9, static)
    layer(x[:, :5], mask=causal(), cache=cache)
    with pytest.raises(ValueError, match="mask has shape"):
        layer(x[:, 5:], mask=torch.ones(2, 1, 1, 3, dtype=torch.bool), cache=cache)
    with pytest.raises(ValueError, match=r"query has a batch of|key has a batch of 1, the cache holds a batch of 2"):
        layer(x[:1, 5:], cache=cache)
    assert cache.length == 5


SHIFTED: dict[str, Callable[[int], dict[str, object]]] = {
    "causal": lambda length: {"mask": causal(offset=length)},
    "window": lambda length: {"mask": window(2, 0, offset=length)},
    "window that might have none": lambda length: {"mask": window(4, 5, offset=length) & causal()},
    "strictly before": lambda _: {"mask": causal(-1)},
    "and": lambda length: {"mask": padding(9) & causal(offset=length)},
    "or": lambda length: {"mask": (causal() & padding(9)) | window(1, 0, offset=length)},
    "not": lambda length: {"mask": ~~causal(offset=length)},
    "alibi": lambda length: {"mask": causal(), "bias": alibi([0.5] * 6, offset=length)},
    "relative": lambda length: {"mask": causal(), "bias": relative(torch.randn(5), offset=length)},
}


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_lengths_of_whole_sequences_serve_at_every_step(static: bool) -> None:
    """With a cache, a padding length may exceed the number of cached keys; without a cache this is an error."""
    layer, x, mask = layer_of(), rand(2, 9, 10), causal() & padding(torch.tensor([9, 5]))
    found = step_by_step(layer, x, KeyValueCache(9, static), mask, 3)
    assert_close(found, layer(x, mask=mask).output, rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", SHIFTED)
@torch.no_grad()
def test_an_offset_beside_a_cache_is_refused(kind: str, static: bool) -> None:
    """The layer shifts a mask by the number of cached keys; a mask that the caller has shifted too would allow later
    positions."""
    layer, x = layer_of(), rand(2, 9, 10)
    cache = KeyValueCache(9, static)
    layer(x[:, :3], mask=causal(offset=0), cache=cache)
    with pytest.raises(ValueError, match=r"offset of .* cache .* without an offset"):
        layer(x[:, 3:6], cache=cache, **SHIFTED[kind](cache.length))
    assert cache.length == 3


@torch.no_grad()
def test_an_offset_beside_the_cache_of_a_decoder_layer_is_refused() -> None:
    parts = MultiHeadAttention(8, 2), MultiHeadAttention(8, 2), FeedForward(8, 16)
    layer, x, memory = TransformerDecoderLayer(*parts), torch.randn(1, 6, 8), torch.randn(1, 5, 8)
    cache = KeyValueCache()
    layer(x[:, :3], memory, mask=causal(), cache=cache)
    with pytest.raises(ValueError, match=r"mask has an offset of 3 and the cache holds 3 positions: .* causal\(\)"):
        layer(x[:, 3:], memory, mask=causal(offset=cache.length), cache=cache)


@torch.no_grad()
def test_an_offset_with_an_empty_or_a_fixed_cache_is_the_callers_own() -> None:
    layer, x = layer_of(), rand(2, 5, 10)
    expected = layer(x, mask=causal(-1)).output
    assert_close(layer(x, mask=causal(-1), cache=KeyValueCache()).output, expected, rtol=0, atol=1e-12)
    memory = KeyValueCache()
    layer(x[:, :2], x, mask=causal(2), cache=memory)
    found = layer(x[:, :2], x, mask=causal(2), cache=memory).output
    assert_close(found, layer(x[:, :2], x, mask=causal(2)).output, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyValueCache(0), "capacity must be at least 1, got 0"),
        (lambda: KeyValueCache(static=True), "give capacity"),
    ],
)
def test_capacity_is_checked(make: Callable[[], KeyValueCache], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_reset_forgets() -> None:
    for static in (False, True):
        cache = KeyValueCache(7, static)
        cache.update(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 5))
        cache.reset()
        assert cache.length == 0
        cache.update(torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 5))
        assert cache.length == 7


# Tests of a cache of the projected keys and values of an encoder's output (cross-attention).


@torch.no_grad()
def test_an_encoders_memory_is_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, memory = MultiHeadAttention(10, 2, key_size=7).double(), rand(3, 6, 10), rand(3, 11, 7)
    whole = layer(x, memory).output
    lengths: list[int] = []
    linear = torch.nn.functional.linear

    def listening(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        lengths.append(source.shape[1])
        return linear(source, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", listening)
    cache = KeyValueCache()
    found = torch.cat([layer(x[:, t : t + 1], memory, cache=cache).output for t in range(6)], 1)
    assert_close(found, whole, rtol=0, atol=1e-12)
    # The keys and values of the encoder's output are projected by one matrix product, at the first step only.
    assert lengths.count(11) == 1
    # Each of the six steps has one matrix product for the query projection and one for the output projection.
    assert lengths.count(1) == 12
    # Without the encoder's output as argument, the layer uses its cached keys and values.
    assert_close(layer(x, cache=cache).output, whole, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_fixed_memory_is_read_only_and_follows_its_beams() -> None:
    layer, x, memory = MultiHeadAttention(10, 2).double(), rand(3, 6, 10), rand(3, 11, 10)
    cache = KeyValueCache()
    layer(x, memory, cache=cache)
    assert cache.is_fixed
    before = held(cache)
    with pytest.raises(ValueError, match="fixed memory of 11 positions: it is read, not added to"):
        cache.update(rand(3, 2, 1, 5), rand(3, 2, 1, 5))
    with pytest.raises(ValueError, match="fills an empty cache, this one holds 11"):
        cache.fixed(rand(3, 2, 1, 5), rand(3, 2, 1, 5))
    with pytest.raises(ValueError, match="query has a batch of 2, the cache holds a batch of 3"):
        layer(x[:2], cache=cache)
    with pytest.raises(ValueError, match="filled with 11 positions, key has 4"):
        layer(x, memory[:, :4], cache=cache)
    assert torch.equal(held(cache)[1], before[1])
    index = torch.tensor([2, 2, 0, 0])
    cache.reorder(index)
    assert_close(layer(x[index], cache=cache).output, layer(x, memory).output[index], rtol=0, atol=1e-12)
    real = padding(torch.tensor([3, 5, 7, 11]))
    masked = layer(x[index], cache=cache, mask=real).output
    assert_close(masked, layer(x[index], memory[index], mask=real).output, rtol=0, atol=1e-12)


def test_positions_have_no_place_in_a_cached_memory() -> None:
    layer = layer_of(kind="rotary")
    with pytest.raises(ValueError, match="a cached memory has no positions"):
        layer(rand(1, 2, 10), rand(1, 3, 10), cache=KeyValueCache())


# Tests of gradients through a key-value cache, copies of a cache, and compiled graphs.


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_a_growing_cache(kind: str) -> None:
    layer, x = layer_of(kind=kind), rand(2, 7, 10).requires_grad_()
    upstream = rand(2, 7, 10)
    leaves = [x, *layer.parameters()]
    right = torch.autograd.grad(layer(x, mask=causal()).output, leaves, upstream)
    found = torch.autograd.grad(step_by_step(layer, x, KeyValueCache(), causal(), 3), leaves, upstream)
    for own, expected in zip(found, right, strict=True):
        assert_close(own, expected, rtol=0, atol=1e-12)


def test_a_prompt_read_without_gradients_can_be_trained_after() -> None:
    layer, x = layer_of(), rand(2, 7, 10)
    cache = KeyValueCache()
    with torch.no_grad():
        layer(x[:, :4], mask=causal(), cache=cache)
    output = step_by_step(layer, x[:, 4:], cache, causal())
    output.sum().backward()
    assert_close(output, layer(x, mask=causal()).output[:, 4:], rtol=0, atol=1e-12)


def test_a_static_cache_is_for_inference() -> None:
    cache = KeyValueCache(5, static=True)
    with pytest.raises(ValueError, match=r"use torch\.no_grad"):
        layer_of()(rand(2, 3, 10), cache=cache)
    assert cache.length == 0


@torch.no_grad()
def test_a_copied_cache_goes_its_own_way() -> None:
    layer, x = layer_of(kind="rotary"), rand(2, 9, 10)
    for static in (False, True):
        cache = KeyValueCache(9, static)
        layer(x[:, :5], mask=causal(), cache=cache)
        other = copy.deepcopy(cache)
        layer(rand(2, 2, 10), mask=causal(), cache=other)
        assert (cache.length, other.length) == (5, 7)
        rest = layer(x[:, 5:], mask=causal(), cache=cache).output
        assert_close(rest, layer(x, mask=causal()).output[:, 5:], rtol=0, atol=1e-12)


COMPILED = """
import torch
from torch.testing import assert_close
from regard.core.masks import causal
from regard.nn import Alibi, KeyValueCache, MultiHeadAttention, RelativePositions, Rotary

graphs = []
def count(graph, example):
    graphs.append(graph)
    return graph.forward

x = torch.randn(2, 11, 12)
for positions in (None, Rotary(4), Alibi(3), RelativePositions(4, 2)):
    layer = MultiHeadAttention(12, 3, positions=positions).eval()
    torch.compiler.reset()
    graphs.clear()
    with torch.no_grad():
        step = lambda x, cache: layer(x, mask=causal(), cache=cache).output
        compiled = torch.compile(step, fullgraph=True, backend=count)
        cache = KeyValueCache(13, static=True)
        parts = [step(x[:, :3], cache)]
        place = cache.read()[0].data_ptr()
        parts += [compiled(x[:, t : t + 1], cache) for t in range(3, 11)]
        assert_close(torch.cat(parts, 1), layer(x, mask=causal()).output)
        assert len(graphs) == 1, len(graphs)
        assert cache.length == 11
        assert cache.read()[0].data_ptr() == place
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_compiled_step_is_compiled_once() -> None:
    """With a cache of fixed shapes, whose length is a tensor, all decoding steps use one compiled graph and one
    storage.

    Runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests.
    """
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", ["mask", "bias"])
def test_a_tensor_for_all_queries_beside_a_cache_is_refused_with_what_to_cut(part: str) -> None:
    layer, cache, x = layer_of(), KeyValueCache(), torch.randn(2, 5, 10, dtype=torch.float64)
    layer(x[:, :4], cache=cache)
    whole = torch.ones(5, 5).bool() if part == "mask" else torch.zeros(5, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"{part}.*with a cache, .* the new queries, 1, and all keys so far, 5"):
        layer(x[:, 4:], cache=cache, **{part: whole})
    assert layer(x[:, 4:], cache=cache, **{part: whole[4:]}).output.shape == (2, 1, 10)
