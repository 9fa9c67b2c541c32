"""Multi-head attention: scores, shared key heads, packed projections, masks, gradients, compilation."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import oracles
from regard.core.biases import relative
from regard.core.masks import causal, padding, segments, window
from regard.core.normalizers import Entmax, Hard, Sigmoid
from regard.core.requests import Top, entropy, full, received, rows, top
from regard.core.scores import Additive, Cosine, ScaledDot
from regard.nn.multihead import MultiHeadAttention
from regard.nn.positions import Alibi, RelativePositions, Rotary

SCORES = ["scaled_dot", "dot", "cosine", "bilinear", "additive"]
KINDS = ["none", "rotary", "alibi", "relative"]
PAIRS = [(score, kind) for score in SCORES for kind in KINDS if kind != "relative" or score in ("dot", "scaled_dot")]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positions_of(kind: str, heads: int, head_size: int) -> Rotary | Alibi | RelativePositions | None:
    made = {"rotary": Rotary(head_size), "alibi": Alibi(heads), "relative": RelativePositions(head_size, 2)}
    return made.get(kind)


def by_loops(
    layer: MultiHeadAttention, score: str, query: Tensor, key: Tensor, value: Tensor, allowed: oracles.Allowed
) -> tuple[Tensor, Tensor]:
    """Return output and weights of multi-head attention: projections, one loop per head, and the output projection."""
    q_rows, kv_rows = layer.heads * layer.head_size, layer.kv_heads * layer.head_size
    parameters = dict(layer.named_parameters())
    if "projection.weight" in parameters:
        weights = parameters["projection.weight"].split([q_rows, kv_rows, kv_rows])
    elif "projection.memory_weight" in parameters:
        memory = parameters["projection.memory_weight"]
        weights = (parameters["projection.query_weight"], memory[:kv_rows], memory[kv_rows:])
    else:
        weights = tuple(parameters[f"projection.{name}_weight"] for name in ("query", "key", "value"))
    shifts = parameters["projection.bias"].split([q_rows, kv_rows, kv_rows])

    def heads(source: Tensor, weight: Tensor, shift: Tensor) -> list[Any]:
        projected = source @ weight.mT + shift
        size = layer.head_size
        return [
            [batch[:, start : start + size].tolist() for start in range(0, batch.shape[1], size)] for batch in projected
        ]

    learned = parameters.get("score.weight")
    rules = {
        "scaled_dot": lambda q, k, h: oracles.scaled_dot(q, k),
        "dot": lambda q, k, h: oracles.dot(q, k),
        "cosine": lambda q, k, h: oracles.cosine(q, k),
        "bilinear": lambda q, k, h: oracles.bilinear(q, k, learned[h].tolist()),  # type: ignore[index]
        "additive": lambda q, k, h: oracles.additive(q, k, learned[h].tolist()),  # type: ignore[index]
    }
    each = [heads(s, w, b) for s, w, b in zip((query, key, value), weights, shifts, strict=True)]
    answer = oracles.attend(*each, rules[score], oracles.softmax, allowed)
    joined = torch.tensor(answer.output, dtype=torch.float64).transpose(1, 2).flatten(-2)
    return layer.output(joined), torch.tensor(answer.weights, dtype=torch.float64)


def with_biases(layer: MultiHeadAttention) -> MultiHeadAttention:
    """Set the biases of a layer to random numbers, because biases of 0 would hide errors."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return layer


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(3, 3, None), (6, 2, 5), (5, 1, 7)])
@pytest.mark.parametrize("score", SCORES)
def test_self_attention_is_each_head_by_itself(score: str, heads: int, kv_heads: int, head_size: int | None) -> None:
    layer = MultiHeadAttention(12, heads, kv_heads=kv_heads, head_size=head_size, score=score).double()
    with_biases(layer)
    x = rand(2, 7, 12)
    found = layer(x, mask=causal(), weights=full())
    output, weights = by_loops(layer, score, x, x, x, oracles.causal())
    assert found.output.shape == (2, 7, 12)
    assert_close(found.output, output, rtol=0, atol=1e-11)
    assert_close(found.weights, weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("key_size", "value_size"), [(None, None), (5, None), (5, 13), (12, 13), (None, 13)])
@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
def test_cross_attention_takes_sources_of_any_size(score: str, key_size: int | None, value_size: int | None) -> None:
    layer = MultiHeadAttention(12, 4, key_size=key_size, value_size=value_size, kv_heads=2, score=score).double()
    with_biases(layer)
    query, key = rand(3, 7, 12), rand(3, 11, key_size or 12)
    value = None if value_size is None else rand(3, 11, value_size)
    found = layer(query, key, value, mask=padding(torch.tensor([11, 5, 0])), weights=full())
    source = key if value is None else value
    output, weights = by_loops(layer, score, query, key, source, oracles.padding([11, 5, 0]))
    assert_close(found.output, output, rtol=0, atol=1e-11)
    assert_close(found.weights, weights, rtol=0, atol=1e-12)


def test_keys_and_values_of_two_sources_of_one_size() -> None:
    for size in (None, 5):
        layer = with_biases(MultiHeadAttention(12, 4, key_size=size).double())
        query, key, value = rand(2, 3, 12), rand(2, 7, size or 12), rand(2, 7, size or 12)
        output, _ = by_loops(layer, "scaled_dot", query, key, value, oracles.everywhere)
        assert_close(layer(query, key, value).output, output, rtol=0, atol=1e-11)


class Operations(TorchDispatchMode):
    """Records the names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["none", "rotary"])
def test_projections_are_packed_and_nothing_is_copied(kind: str) -> None:
    layer = MultiHeadAttention(12, 3, positions=positions_of(kind, 3, 4))
    x, memory = torch.randn(2, 7, 12), torch.randn(2, 5, 12)
    for products, call in ((2, lambda: layer(x)), (2, lambda: layer(x, x, x)), (3, lambda: layer(x, memory))):
        with Operations() as seen:
            call()
        # Self-attention projects queries, keys and values by one matrix product; cross-attention projects queries
        # separately.
        assert seen.names.count("addmm") == products
        assert "clone" not in seen.names
        assert kind == "rotary" or "cat" not in seen.names


def test_a_query_given_three_times_is_self_attention() -> None:
    for kind in KINDS:
        layer, x = MultiHeadAttention(12, 3, positions=positions_of(kind, 3, 4)).double(), rand(2, 7, 12)
        alone = layer(x).output
        assert_close(layer(x, x).output, alone, rtol=0, atol=0)
        assert_close(layer(x, x, x).output, alone, rtol=0, atol=0)
        assert_close(layer(x, x.clone()).output, alone, rtol=0, atol=1e-12)


# Tests of positional encodings inside of multi-head attention.


def test_rotary_turns_queries_and_keys_not_values() -> None:
    layer, x = (
        MultiHeadAttention(12, 6, kv_heads=3, head_size=4, positions=Rotary(4), bias=False).double(),
        rand(2, 7, 12),
    )
    assert layer.projection.weight is not None
    query, key, value = (
        (x @ part.mT).unflatten(-1, (-1, 4)).transpose(1, 2) for part in layer.projection.weight.split([24, 12, 12])
    )
    query, key = Rotary(4)(query), Rotary(4)(key).repeat_interleave(2, 1)
    weights = (query @ key.mT / 2).softmax(-1)
    expected = layer.output((weights @ value.repeat_interleave(2, 1)).transpose(1, 2).flatten(-2))
    assert_close(layer(x).output, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_alibi_is_added_to_any_score(score: str) -> None:
    layer = MultiHeadAttention(12, 4, score=score, positions=Alibi(4)).double()
    bare = MultiHeadAttention(12, 4, score=score).double()
    bare.load_state_dict(layer.state_dict())
    x = rand(2, 7, 12)
    distance = (torch.arange(7) - torch.arange(7)[:, None]).abs()
    bias = -Alibi(4).slopes.double()[:, None, None] * distance
    assert_close(layer(x).output, bare(x, bias=bias).output, rtol=0, atol=1e-12)
    more = rand(4, 7, 7)
    assert_close(layer(x, bias=more).output, bare(x, bias=bias + more).output, rtol=0, atol=1e-12)
    row = rand(7)
    assert_close(layer(x, bias=row).output, bare(x, bias=bias + row).output, rtol=0, atol=1e-12)


def test_relative_positions_act_inside_the_layer() -> None:
    positions = RelativePositions(4, 2)
    layer = MultiHeadAttention(12, 6, kv_heads=2, head_size=4, positions=positions).double()
    x = rand(2, 7, 12)
    assert layer.projection.weight is not None
    projected = layer.projection(x).split([6, 2, 2], 1)
    inner = positions.attend(*projected, mask=causal(), weights=full())
    found = layer(x, mask=causal(), weights=full())
    assert_close(found.output, layer.output(inner.output.transpose(1, 2).flatten(-2)), rtol=0, atol=0)
    assert_close(found.weights, inner.weights)
    with torch.no_grad():
        positions.key_table.zero_()
        positions.value_table.zero_()
    bare = MultiHeadAttention(12, 6, kv_heads=2, head_size=4).double()
    bare.load_state_dict({k: v for k, v in layer.state_dict().items() if "table" not in k})
    assert_close(layer(x).output, bare(x).output, rtol=0, atol=1e-12)


# Tests of properties that the layer has with every score and every positional encoding.


@pytest.mark.parametrize(("score", "kind"), PAIRS)
def test_a_changed_future_leaves_the_past_bit_equal(score: str, kind: str) -> None:
    layer, x = MultiHeadAttention(12, 3, score=score, positions=positions_of(kind, 3, 4)), torch.randn(2, 11, 12)
    before = layer(x, mask=causal()).output
    changed = x.clone()
    changed[:, 5:] = torch.randn(2, 6, 12) * 3
    after = layer(changed, mask=causal()).output
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize(("score", "kind"), PAIRS)
def test_padding_changes_nothing(score: str, kind: str) -> None:
    layer, x = MultiHeadAttention(12, 3, score=score, positions=positions_of(kind, 3, 4)).double(), rand(3, 11, 12)
    lengths = [11, 4, 7]
    whole = layer(x, mask=padding(torch.tensor(lengths))).output
    real = torch.arange(11) < torch.tensor(lengths)[:, None]
    dense = layer(x, mask=real[:, None, None]).output
    for b, length in enumerate(lengths):
        alone = layer(x[b : b + 1, :length]).output[0]
        assert_close(whole[b, :length], alone, rtol=0, atol=1e-12)
        assert_close(dense[b, :length], alone, rtol=0, atol=1e-12)


def test_packed_sequences_do_not_see_each_other() -> None:
    layer, x = MultiHeadAttention(12, 3).double(), rand(1, 9, 12)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    packed = layer(x, mask=segments(ids, ids) & causal()).output
    assert_close(packed[:, 4:], layer(x[:, 4:], mask=causal()).output, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_see_nothing_give_the_output_bias(kind: str) -> None:
    layer, x = with_biases(MultiHeadAttention(12, 3, positions=positions_of(kind, 3, 4))), torch.randn(2, 7, 12)
    allowed = torch.ones(7, 7, dtype=torch.bool)
    allowed[2] = False
    found = layer(x, mask=allowed, weights=full())
    assert_close(found.output[:, 2], layer.output.bias.expand(2, 12))
    assert isinstance(found.weights, Tensor)
    assert torch.equal(found.weights[:, :, 2], torch.zeros(2, 3, 7))
    found.output.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_masks_and_biases_broadcast_to_heads() -> None:
    layer, x = MultiHeadAttention(12, 3).double(), rand(2, 5, 12)
    by_head = torch.rand(3, 5, 5) > 0.3
    weights = layer(x, mask=by_head, weights=full()).weights
    assert isinstance(weights, Tensor)
    assert torch.equal(weights > 0, by_head.expand(2, 3, 5, 5))
    table = rand(3, 5).requires_grad_()
    layer(x, bias=relative(table), mask=window(2, 2)).output.sum().backward()
    assert table.grad is not None
    assert table.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_requests_agree_with_all_weights(kind: str) -> None:
    layer, x = MultiHeadAttention(12, 3, positions=positions_of(kind, 3, 4)).double(), rand(2, 7, 12)
    everything = layer(x, weights=full()).weights
    assert isinstance(everything, Tensor)
    assert everything.shape == (2, 3, 7, 7)
    assert_close(everything.sum(-1), torch.ones(2, 3, 7, dtype=torch.float64))
    assert layer(x).weights is None
    assert_close(layer(x, weights=rows([4, -1])).weights, everything[:, :, [4, 6]])
    assert_close(layer(x, weights=received()).weights, everything.sum(-2))
    assert_close(layer(x, weights=entropy()).weights, -(everything * everything.log()).sum(-1))
    largest = layer(x, weights=top(2)).weights
    assert isinstance(largest, Top)
    assert_close(largest.values, everything.topk(2).values)


@pytest.mark.parametrize("normalize", [Entmax(1.5), Sigmoid(-1.0)])
def test_other_normalisers(normalize: Entmax | Sigmoid) -> None:
    layer, x = MultiHeadAttention(12, 3, normalize=normalize).double(), rand(2, 5, 12) * 5
    found = layer(x, weights=full()).weights
    assert isinstance(found, Tensor)
    bare = MultiHeadAttention(12, 3).double()
    bare.load_state_dict(layer.state_dict())
    soft = bare(x, weights=full()).weights
    assert isinstance(soft, Tensor)
    assert_close(found, normalize(soft.log()) if isinstance(normalize, Entmax) else found)
    assert (found == 0).any() if isinstance(normalize, Entmax) else (found.sum(-1) != 1).any()


def test_hard_attention_samples_in_training_and_decides_after() -> None:
    layer, x = MultiHeadAttention(12, 3, normalize=Hard()), torch.randn(2, 7, 12)
    choices = [layer(x, weights=full()).weights for _ in range(5)]
    assert all(isinstance(each, Tensor) and torch.equal(each.sum(-1), torch.ones(2, 3, 7)) for each in choices)
    assert any(not torch.equal(choices[0], each) for each in choices[1:])  # type: ignore[arg-type]
    layer.eval()
    assert torch.equal(layer(x).output, layer(x).output)
    assert layer(x).log_prob is not None
    drawn = [layer(x, generator=torch.Generator().manual_seed(seed)).output for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_for_training(kind: str) -> None:
    layer, x = MultiHeadAttention(12, 3, dropout=0.5, positions=positions_of(kind, 3, 4)), torch.randn(2, 7, 12)
    assert not torch.equal(layer(x).output, layer(x).output)
    one, two = (layer(x, generator=torch.Generator().manual_seed(3)).output for _ in range(2))
    assert torch.equal(one, two)
    still = MultiHeadAttention(12, 3, positions=positions_of(kind, 3, 4))
    still.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x).output, still(x).output)


@pytest.mark.parametrize(("score", "kind"), [pair for pair in PAIRS if pair[0] in ("scaled_dot", "additive")])
def test_gradients_of_inputs_and_parameters(score: str, kind: str) -> None:
    layer = MultiHeadAttention(4, 2, kv_heads=1, score=score, positions=positions_of(kind, 2, 2)).double()
    x = rand(1, 3, 4).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *given: Tensor) -> Tensor:
        swapped = dict(zip(names, given, strict=True))
        return torch.func.functional_call(layer, swapped, (x,), {"mask": causal()}).output

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def test_gradients_of_a_cross_call() -> None:
    layer = with_biases(MultiHeadAttention(4, 2, kv_heads=1).double())
    query, memory = rand(1, 3, 4).requires_grad_(), rand(1, 5, 4).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(query: Tensor, memory: Tensor, *given: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (query, memory)).output

    assert torch.autograd.gradcheck(run, (query, memory, *parameters), fast_mode=True)


# Tests of the names, initial values and copies of the layer's parameters.


def test_parameters_are_named_and_travel() -> None:
    shapes = {name: tuple(p.shape) for name, p in MultiHeadAttention(12, 3, score="additive").named_parameters()}
    assert shapes == {
        "projection.weight": (36, 12),
        "projection.bias": (36,),
        "score.weight": (3, 4),
        "output.weight": (12, 12),
        "output.bias": (12,),
    }
    assert [n for n, _ in MultiHeadAttention(12, 3, bias=False).named_parameters()] == [
        "projection.weight",
        "output.weight",
    ]
    for kind in KINDS:
        one = MultiHeadAttention(12, 3, key_size=5, positions=positions_of(kind, 3, 4))
        two = MultiHeadAttention(12, 3, key_size=5, positions=positions_of(kind, 3, 4))
        two.load_state_dict(one.state_dict())
        query, memory = torch.randn(2, 7, 12), torch.randn(2, 3, 5)
        assert torch.equal(one(query, memory).output, two(query, memory).output)
        assert torch.equal(copy.deepcopy(one)(query, memory).output, one(query, memory).output)


def test_parameters_start_as_wide_as_torchs() -> None:
    ours, theirs = MultiHeadAttention(128, 8), nn.MultiheadAttention(128, 8)
    assert ours.projection.weight is not None
    assert theirs.in_proj_weight is not None
    assert_close(ours.projection.weight.std(), theirs.in_proj_weight.std(), rtol=0.02, atol=0)
    assert ours.projection.weight.abs().max() <= math.sqrt(6 / (4 * 128))


def test_records_serve_as_scores() -> None:
    x = torch.randn(2, 5, 12)
    plain = MultiHeadAttention(12, 3)
    for score in (ScaledDot(scale=0.5), lambda q, k: q @ k.mT / 2):
        layer = MultiHeadAttention(12, 3, score=score)
        layer.load_state_dict(plain.state_dict())
        assert_close(layer(x).output, plain(x).output)  # the default scale for heads of size 4 is 1/√4 = 0.5
    sharper = MultiHeadAttention(12, 3, score=Cosine(scale=20.0))
    named = MultiHeadAttention(12, 3, score="cosine")
    named.load_state_dict(sharper.state_dict())
    assert not torch.allclose(sharper(x).output, named(x).output)
    owned = MultiHeadAttention(12, 3, score=Additive(nn.Parameter(torch.randn(3, 4))))
    assert "score.weight" in dict(owned.named_parameters())
    owned(x).output.sum().backward()
    assert owned.score.weight is not None
    assert owned.score.weight.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str) -> None:
    layer, x = MultiHeadAttention(12, 3, positions=positions_of(kind, 3, 4)), torch.randn(2, 7, 12)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, mask=causal()).output
        found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), layer(x, mask=causal()).output, rtol=0.05, atol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, "size must be a multiple of heads, got 12 and 5"),
        ({"heads": 4, "kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"heads": 0}, "heads and kv_heads must be 1 or more, got 0 and 0"),
        ({"heads": 3, "dropout": 1.5}, "dropout must be between 0 and 1, got 1.5"),
        ({"heads": 3, "score": "luong"}, "score must be one of .* got 'luong'"),
        ({"heads": 3, "positions": Alibi(4)}, "positions are for 4 heads, the layer has 3"),
        ({"heads": 3, "positions": Rotary(6)}, "positions are for heads of size 6, the layer's have 4"),
        ({"heads": 3, "positions": RelativePositions(6, 2)}, "positions are for heads of size 6"),
        ({"heads": 3, "positions": RelativePositions(4, 2), "score": "cosine"}, "dot and scaled_dot scores"),
    ],
)
def test_layers_that_cannot_be_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(12, **arguments)


@pytest.mark.usefixtures("as_installed")
def test_a_normaliser_by_name_is_refused_when_the_layer_is_made() -> None:
    with pytest.raises(TypeError, match=r"normalize must be a regard normaliser .*, got the str"):
        MultiHeadAttention(12, 3, normalize="softmax")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (((2, 3, 11),), "query has size 11, the layer expects 12"),
        (((2, 3, 12),), "key has size 12, the layer expects 5"),
        (((2, 3, 12), (2, 4, 5), (2, 4, 7)), "value has size 7, the layer expects 5"),
        (((2, 3, 12), (2, 4, 7)), "key has size 7, the layer expects 5"),
        (((2, 3, 12), (1, 4, 5)), "query has a batch of 2, key of 1"),
        (((2, 3, 12), None, (2, 4, 5)), "value was given without key"),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs: tuple[Any, ...], message: str, as_installed: None) -> None:
    layer = MultiHeadAttention(12, 3, key_size=5)
    with pytest.raises(ValueError, match=message):
        layer(*(None if shape is None else torch.randn(shape) for shape in inputs))


def test_inputs_without_a_batch_are_named(as_installed: None) -> None:
    with pytest.raises(ValueError, match=r"query must be \(batch, length, size\), got shape \(3, 12\)"):
        MultiHeadAttention(12, 3)(torch.randn(3, 12))


def compiled_once_or_twice(layer: MultiHeadAttention, call: Callable[[Tensor], Tensor]) -> None:
    """Check the compiled layer's output and gradients at several lengths, for which at most two graphs compile."""
    graphs = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend=count)
    for length in (5, 7, 11, 13):
        x, upstream = torch.randn(2, length, 12, requires_grad=True), torch.randn(2, length, 12)
        right, found = call(x), compiled(x)
        assert_close(found, right)
        both = [torch.autograd.grad(output, (x, *layer.parameters()), upstream) for output in (found, right)]
        for own, expected in zip(*both, strict=True):
            assert_close(own, expected, rtol=1e-4, atol=1e-4)
    assert len(graphs) <= 2


@pytest.mark.slow
@pytest.mark.installed
@pytest.mark.parametrize("mask", [None, causal()], ids=["open", "causal"])
@pytest.mark.parametrize("rotary", [False, True])
def test_compiled_in_one_graph_for_any_length(rotary: bool, mask: Any) -> None:
    layer = MultiHeadAttention(12, 6, kv_heads=3, head_size=4, positions=Rotary(4) if rotary else None)
    compiled_once_or_twice(layer, lambda x: layer(x, mask=mask).output)


@pytest.mark.slow
@pytest.mark.installed
def test_compiled_over_a_memory() -> None:
    layer = MultiHeadAttention(12, 6, kv_heads=3, head_size=4)
    memory, real = torch.randn(2, 9, 12), torch.arange(9) < torch.tensor([[9], [4]])
    compiled_once_or_twice(layer, lambda x: layer(x, memory, mask=real[:, None, None]).output)


@pytest.mark.slow
@pytest.mark.installed
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # the filtered warning comes from torch's own compiler
@pytest.mark.parametrize("positions", [None, "alibi", "relative"])
def test_compiled_with_its_weights(positions: str | None) -> None:
    made = {None: lambda: None, "alibi": lambda: Alibi(3), "relative": lambda: RelativePositions(4, 2)}
    layer, lengths = MultiHeadAttention(12, 3, positions=made[positions]()), torch.tensor([3, 5])

    def with_weights(x: Tensor) -> Tensor:
        found = layer(x, mask=causal() & padding(lengths), weights=full())
        return found.output + found.weights.mean(1) @ x

    compiled_once_or_twice(layer, with_weights)


class Only(nn.Module):
    """A module that returns only the output of a layer, without its weights."""

    def __init__(self, layer: MultiHeadAttention, mask: Any) -> None:
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, mask=self.mask).output


@pytest.mark.slow
@pytest.mark.installed
@pytest.mark.parametrize("rotary", [False, True])
def test_exported_for_any_length(rotary: bool) -> None:
    mask = causal() if rotary else None
    layer = MultiHeadAttention(12, 6, kv_heads=3, head_size=4, positions=Rotary(4) if rotary else None)
    length = torch.export.Dim("n", min=2)
    exported = torch.export.export(
        Only(layer, mask).eval(), (torch.randn(2, 7, 12),), dynamic_shapes={"x": {1: length}}
    )
    x = torch.randn(2, 13, 12)
    assert_close(exported.module()(x), layer(x, mask=mask).output)


def test_a_layer_says_what_it_is() -> None:
    said = repr(MultiHeadAttention(12, 4, kv_heads=2, score="additive"))
    assert "4 heads of size 3, 2 key heads, bias=True" in said
    assert "additive, weight (4, 3)" in said
