"""Attention in O(n) equals its formula, summed pair by pair; Performer features approximate softmax attention."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import regard
from regard.core import features as feature_maps
from regard.core import linear
from regard.core.linear import LinearState, linear_step

LogMap = Callable[[list[float]], list[float]]


# The oracle: linear attention from its definition, in loops over Python floats. The feature maps return the logarithms
# of the features.


def performer_logs(record: regard.PerformerFeatures) -> LogMap:
    rows = record.projection.double().tolist()

    def logs(x: list[float]) -> list[float]:
        x = [number / len(x) ** 0.25 for number in x]
        square = sum(number * number for number in x)
        return [
            sum(w * number for w, number in zip(row, x, strict=True)) - square / 2 - math.log(len(rows)) / 2
            for row in rows
        ]

    return logs


def elu_logs(x: list[float]) -> list[float]:
    return [math.log(number + 1) if number > 0 else number for number in x]


def one_head(
    query: Tensor, key: Tensor, value: Tensor, logs: LogMap, causal: bool, keep: list[bool] | None
) -> list[list[float]]:
    keys, values, size = [logs(k) for k in key.tolist()], value.tolist(), value.shape[-1]
    output = []
    for i, q in enumerate(query.tolist()):
        seen = [j for j in range(len(keys)) if (not causal or j <= i) and (keep is None or keep[j])]
        terms = {j: [a + b for a, b in zip(logs(q), keys[j], strict=True)] for j in seen}
        largest = max((term for j in seen for term in terms[j]), default=0.0)
        weights = {j: sum(math.exp(term - largest) for term in terms[j]) for j in seen}
        total = sum(weights.values())
        output.append([sum(weights[j] * values[j][c] for j in seen) / total if seen else 0.0 for c in range(size)])
    return output


def oracle(
    query: Tensor, key: Tensor, value: Tensor, logs: LogMap, causal: bool = False, lengths: list[int] | None = None
) -> Tensor:
    """Return the oracle's output for query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e)."""
    share = query.shape[1] // key.shape[1]
    batches = []
    for b in range(query.shape[0]):
        keep = None if lengths is None else [j < lengths[b] for j in range(key.shape[2])]
        heads = [
            one_head(query[b, h], key[b, h // share], value[b, h // share], logs, causal, keep)
            for h in range(query.shape[1])
        ]
        batches.append(heads)
    return torch.tensor(batches, dtype=torch.float64).reshape(*query.shape[:3], value.shape[-1])


def inputs(
    batch: int = 2, heads: int = 6, groups: int = 3, queries: int = 7, keys: int = 7, size: int = 5, out: int = 4,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    query = torch.randn(batch, heads, queries, size, dtype=dtype)
    key, value = torch.randn(batch, groups, keys, size, dtype=dtype), torch.randn(batch, groups, keys, out, dtype=dtype)
    return query, key, value


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def performer(size: int = 5, count: int = 11, seed: int = 3) -> regard.PerformerFeatures:
    return regard.PerformerFeatures.draw(size, count, generator=seeded(seed), dtype=torch.float64)


def squared(x: Tensor) -> Tensor:
    """Return the features x² + 0.1 and |x|, as a user-defined feature map."""
    return torch.cat([x.square() + 0.1, x.abs()], -1)


def squared_logs(x: list[float]) -> list[float]:
    return [math.log(number * number + 0.1) for number in x] + [math.log(abs(number)) for number in x]


FEATURES = {
    "performer": (performer(), performer_logs(performer())),
    "elu": (regard.EluFeatures(), elu_logs),
    "function": (squared, squared_logs),
}
every_map = pytest.mark.parametrize("name", FEATURES)
both_ways = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the chunks and segments, into which the code splits sequences, so short that a few positions cross their
    boundaries."""
    monkeypatch.setattr(linear, "CHUNK", 4)
    monkeypatch.setattr(linear, "ROWS", 16)


# Tests of linear attention against its formula.


@every_map
@both_ways
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 1), (11, 3), (3, 11), (2, 1), (1, 5)])
def test_it_is_the_formula(name: str, causal: bool, queries: int, keys: int) -> None:
    features, logs = FEATURES[name]
    query, key, value = inputs(queries=queries, keys=keys)
    output = regard.linear_attention(query, key, value, features=features, causal=causal)
    assert_close(output, oracle(query, key, value, logs, causal), rtol=1e-12, atol=1e-12)


@every_map
@both_ways
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33])
def test_chunks_and_segments_leave_no_trace(name: str, causal: bool, length: int) -> None:
    features, logs = FEATURES[name]
    query, key, value = inputs(1, 2, 1, length, length)
    output = regard.linear_attention(query, key, value, features=features, causal=causal)
    assert_close(output, oracle(query, key, value, logs, causal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [63, 64, 65, 127, 131])
def test_chunks_as_they_are(length: int) -> None:
    query, key, value = inputs(1, 1, 1, length, length, 3, 2)
    features = performer(3, 5)
    output = regard.linear_attention(query, key, value, features=features, causal=True)
    assert_close(output, oracle(query, key, value, performer_logs(features), True), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@given(
    sizes=st.tuples(
        *(st.integers(low, high) for low, high in [(1, 2), (1, 2), (1, 3), (1, 19), (1, 19), (1, 4), (1, 3)])
    ),
    count=st.integers(1, 9),
    causal=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_the_formula_for_any_shape(
    sizes: tuple[int, ...], count: int, causal: bool, padded: bool, seed: int
) -> None:
    batch, groups, share, queries, keys, size, out = sizes
    torch.manual_seed(seed)
    query, key, value = inputs(batch, groups * share, groups, queries, keys, size, out)
    features = performer(size, count, seed)
    lengths = torch.randint(0, keys + 1, (batch,)) if padded else None
    mask = None if lengths is None else regard.padding(lengths)
    output = regard.linear_attention(query, key, value, features=features, causal=causal, mask=mask)
    expected = oracle(query, key, value, performer_logs(features), causal, lengths.tolist() if padded else None)
    assert_close(output, expected, rtol=1e-11, atol=1e-11)


@every_map
@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inputs_thirty_times_larger_still_give_the_formula(name: str, causal: bool, dtype: torch.dtype) -> None:
    features, logs = FEATURES[name]
    query, key, value = inputs(queries=19, keys=19, dtype=dtype)
    query, key = (30 * query).requires_grad_(), (30 * key).requires_grad_()
    output = regard.linear_attention(query, key, value, features=features, causal=causal)
    gradients = torch.autograd.grad(output.square().sum(), (query, key))
    assert all(gradient.isfinite().all() for gradient in gradients)
    # The exponents reach thousands, so rounding errors are multiplied by as much.
    close = 1e4 * torch.finfo(dtype).eps
    expected = oracle(query.detach(), key.detach(), value, logs, causal)
    assert_close(output.detach().double(), expected, rtol=close, atol=close)


@both_ways
def test_performer_inputs_without_measure_stay_finite(causal: bool) -> None:
    query, key, value = (1e4 * x for x in inputs(queries=70, keys=70, size=16, dtype=torch.float32))
    query.requires_grad_(), key.requires_grad_()
    output = regard.linear_attention(query, key, value, causal=causal)
    output.sum().backward()
    assert output.isfinite().all()
    assert query.grad.isfinite().all()
    assert key.grad.isfinite().all()


@both_ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(causal: bool, dtype: torch.dtype) -> None:
    query, key, value = inputs(queries=67, keys=67, dtype=dtype)
    features = performer()
    output = regard.linear_attention(query, key, value, features=features, causal=causal)
    exact = regard.linear_attention(query.double(), key.double(), value.double(), features=features, causal=causal)
    assert output.dtype == dtype
    # The only rounding to half precision is that of the output.
    assert_close(output.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@both_ways
@pytest.mark.parametrize("queries", [67, 200])
def test_elu_features_in_bfloat16_err_as_the_plain_products_do(queries: int, causal: bool) -> None:
    leaves = [
        x.requires_grad_() for x in inputs(1, 2, 2, queries, 200 if not causal else queries, 16, 8, torch.bfloat16)
    ]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    change = torch.randn(1, 2, queries, 8, dtype=torch.float64)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (torch.nn.functional.elu(query) + 1) @ (torch.nn.functional.elu(key) + 1).mT
        weights = weights.tril() if causal else weights
        return weights @ value / weights.sum(-1, keepdim=True)

    def results(call: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        output = call(*given)
        grads = torch.autograd.grad(output, given, change.to(output.dtype))
        return [t.double() for t in (output, *grads)]

    mine = results(lambda *x: regard.linear_attention(*x, features=regard.EluFeatures(), causal=causal), leaves)
    for result, usual, true in zip(mine, results(plain, leaves), results(plain, exact), strict=True):
        assert (result - true).norm() <= 2 * (usual - true).norm()


def test_autocast_casts_the_inputs_and_computes_in_float32() -> None:
    query, key, value = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = regard.linear_attention(query, key.bfloat16(), value, causal=True)
    plain = regard.linear_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), causal=True)
    assert_close(output, plain, rtol=0, atol=0)


# Tests of linear attention of tensors with other shapes and strides.


@every_map
@both_ways
def test_leading_axes_broadcast_and_heads_may_be_missing(name: str, causal: bool) -> None:
    features, _ = FEATURES[name]
    query, key, value = inputs(queries=5)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.linear_attention(query, key, value, features=features, causal=causal)

    expected = run(query, key, value)
    assert expected.shape == (2, 6, 5, 4)
    repeated = run(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))
    assert_close(expected, repeated)
    assert_close(run(query[0, 0], key[0, 0], value[0, 0]), expected[0, 0])
    assert_close(run(query[0], key[0], value[0]), expected[0])
    assert_close(run(query[None], key, value[None, None]), expected[None, None])
    # Tensors broadcast: a batch of queries attends to keys and values of one sequence, and one query attends to a batch
    # of keys and values.
    assert_close(run(query, key[:1], value[:1])[1], run(query[1], key[0], value[0]))
    assert_close(run(query[0], key, value)[1], run(query[0], key[1], value[1]))
    assert_close(
        run(query[:1].expand(7, 6, 5, 5), key[:1].expand(7, 3, 7, 5), value[:1].expand(7, 3, 7, 4))[4], expected[0]
    )


@every_map
@both_ways
def test_empty_inputs_give_the_right_shape(name: str, causal: bool) -> None:
    features, _ = FEATURES[name]
    for shape in ({"batch": 0}, {"queries": 0}, {"keys": 0}, {"keys": 0, "queries": 0}, {"out": 0}):
        query, key, value = (x.requires_grad_() for x in inputs(**shape))
        output = regard.linear_attention(query, key, value, features=features, causal=causal)
        assert output.shape == (*query.shape[:-1], value.shape[-1])
        assert torch.count_nonzero(output) == 0 or "keys" not in shape
        output.sum().backward()
        assert query.grad.isfinite().all()


@both_ways
def test_strides_do_not_matter(causal: bool) -> None:
    # One projection has the output (b, n, 3, h, d).
    packed = torch.randn(2, 13, 3, 4, 5, dtype=torch.float64)
    query, key, value = (packed[:, :, i].transpose(1, 2) for i in range(3))
    output = regard.linear_attention(query, key, value, features=performer(), causal=causal)
    plain = (x.contiguous() for x in (query, key, value))
    assert_close(output, regard.linear_attention(*plain, features=performer(), causal=causal))


# Tests of masks in linear attention.


@every_map
@both_ways
@pytest.mark.usefixtures("small_blocks")
def test_padded_is_shorter_and_nan_in_the_padding_does_not_leak(name: str, causal: bool) -> None:
    features, _ = FEATURES[name]
    lengths = [11, 0, 6]
    query, key, value = inputs(batch=3, queries=13, keys=13)
    query[1], key[1], value[1] = math.nan, math.nan, math.nan
    key[2, :, 6:], value[2, :, 6:], value[0, :, 11:] = math.inf, math.nan, -math.inf
    inputs_ = [x.requires_grad_() for x in (query, key, value)]
    output = regard.linear_attention(*inputs_, features=features, causal=causal, mask=regard.padding(lengths))
    gradients = torch.autograd.grad(output.square().sum(), inputs_)
    for item, length in enumerate(lengths):
        short = [
            query[item].detach().requires_grad_(),
            *(x[item, :, :length].detach().requires_grad_() for x in (key, value)),
        ]
        if length == 0:
            assert torch.count_nonzero(output[item]) == 0
            assert all(torch.count_nonzero(gradient[item]) == 0 for gradient in gradients)
            continue
        expected = regard.linear_attention(*short, features=features, causal=causal)
        assert_close(output[item], expected)
        for i, gradient in enumerate(torch.autograd.grad(expected.square().sum(), short)):
            assert_close(gradients[i][item, :, : gradient.shape[1]], gradient)
            assert torch.count_nonzero(gradients[i][item, :, gradient.shape[1] :]) == 0


@both_ways
def test_masks_that_say_the_same_do_the_same(causal: bool) -> None:
    query, key, value = inputs(queries=5)
    lengths = torch.tensor([4, 6])
    keep = torch.arange(7) < lengths[:, None]

    def run(mask: regard.Mask | Tensor) -> Tensor:
        return regard.linear_attention(query, key, value, causal=causal, mask=mask)

    expected = run(regard.padding(lengths))
    assert_close(run(keep[:, None, None]), expected)
    assert_close(run(keep[:, None, None].expand(2, 6, 1, 7)), expected)
    assert_close(run(regard.padding(lengths[:, None].expand(2, 6))), expected)
    assert_close(run(~~regard.padding(lengths) & torch.ones(1, 1, dtype=torch.bool)), expected)
    assert_close(run(regard.padding(lengths) | regard.padding(torch.tensor([2, 1]))), expected)


@both_ways
def test_a_mask_may_differ_by_head(causal: bool) -> None:
    query, key, value = inputs(batch=1)
    keep = torch.rand(1, 6, 1, 7) < 0.7
    output = regard.linear_attention(query, key, value, mask=keep, causal=causal)
    for h in range(6):
        one = (query[0, h], key[0, h // 2], value[0, h // 2])
        assert_close(output[0, h], regard.linear_attention(*one, mask=keep[0, h], causal=causal))


def test_causal_rows_before_the_first_key_kept_give_zeros() -> None:
    query, key, value = inputs(batch=1, queries=9, keys=9)
    query[..., :3, :] = math.nan
    keep = torch.arange(9) >= 3
    output = regard.linear_attention(query, key, value, features=performer(), causal=True, mask=keep)
    assert torch.count_nonzero(output[..., :3, :]) == 0
    rest = (x[..., 3:, :] for x in (query, key, value))
    assert_close(output[..., 3:, :], regard.linear_attention(*rest, features=performer(), causal=True))


# Tests that outputs of causal linear attention depend on earlier positions only.


@every_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("change", [1e3, -1.0, math.nan, math.inf], ids=str)
def test_the_future_does_not_change_one_bit_of_the_past(name: str, dtype: torch.dtype, change: float) -> None:
    features, _ = FEATURES[name]
    query, key, value = inputs(1, 2, 1, 141, 141, dtype=dtype)
    output = regard.linear_attention(query, key, value, features=features, causal=True)
    for position in (1, 31, 63, 64, 65, 100, 140):
        later = [x.clone() for x in (query, key, value)]
        for x in later:
            x[..., position:, :] *= change
        changed = regard.linear_attention(*later, features=features, causal=True)
        assert torch.equal(changed[..., :position, :], output[..., :position, :])


@pytest.mark.usefixtures("small_blocks")
def test_the_future_is_not_touched_by_the_past_gradient() -> None:
    leaves = [x.requires_grad_() for x in inputs(1, 2, 1, 29, 29)]
    output = regard.linear_attention(*leaves, features=performer(), causal=True)
    for gradient in torch.autograd.grad(output[..., :10, :].sum(), leaves):
        assert torch.count_nonzero(gradient[..., 10:, :]) == 0
        assert torch.count_nonzero(gradient[..., :10, :]) > 0


# Tests of the gradients of linear attention.


@pytest.mark.slow
@every_map
@both_ways
@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.usefixtures("small_blocks")
def test_gradients(name: str, causal: bool, length: int) -> None:
    features, _ = FEATURES[name]
    leaves = tuple(x.requires_grad_() for x in inputs(1, 2, 1, length, length, 5, 1))
    mask = torch.arange(length) != 2
    assert torch.autograd.gradcheck(
        lambda *x: regard.linear_attention(*x, features=features, causal=causal, mask=mask),
        leaves,
        fast_mode=length == 9,
    )


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("features", [performer(2, 3), regard.EluFeatures()], ids=["performer", "elu"])
def test_second_gradients(features: feature_maps.Features, causal: bool, length: int) -> None:
    leaves = tuple(x.requires_grad_() for x in inputs(1, 1, 1, length, length, 2, 1))
    assert torch.autograd.gradgradcheck(
        lambda *x: regard.linear_attention(*x, features=features, causal=causal), leaves
    )


@both_ways
@pytest.mark.parametrize("repeated", [0, 1, 2], ids=["query", "key", "value"])
def test_each_repeat_of_an_input_has_its_own_gradient(repeated: int, causal: bool) -> None:
    """An input may be repeated in memory with stride 0: as an expanded leaf, as a view of a leaf, or because the call
    broadcasts it."""
    plain = inputs(batch=3, queries=5, keys=5)
    one, shape, features = plain[repeated][:1], plain[repeated].shape, performer()

    def loss(x: Tensor, times: int = 1) -> Tensor:
        arguments = [x if i == repeated else y.expand(times, *y.shape) for i, y in enumerate(plain)]
        mask = regard.padding(torch.tensor([[5, 2, 4]]))
        return regard.linear_attention(*arguments, features=features, causal=causal, mask=mask).square().sum()

    def gradient(x: Tensor, times: int = 1) -> Tensor:
        return torch.autograd.grad(loss(x, times), x)[0]

    expected = gradient(one.repeat(3, 1, 1, 1).requires_grad_())
    leaf, source = one.expand(shape).detach().requires_grad_(), one.clone().requires_grad_()
    assert leaf.stride(0) == 0
    assert_close(gradient(leaf), expected)
    assert_close(gradient(source.expand(shape)), expected)
    assert_close(gradient(leaf, times=2), 2 * expected)
    assert_close(gradient(source), expected.sum(0, keepdim=True))
    assert_close(torch.autograd.grad(loss(source.expand(shape)), source)[0], expected.sum(0, keepdim=True))
    assert_close(torch.func.grad(loss)(one.expand(shape)), expected)
    split = torch.func.grad(lambda x: torch.func.vmap(loss, -1)(x).sum())(one.expand(shape).unsqueeze(-1))
    assert_close(split.squeeze(-1), expected)


def test_a_memory_that_repeats_is_read_once() -> None:
    """If the call broadcasts a key over the batch, or without gradients, features of the repeated key are computed
    once."""
    seen: list[int] = []

    def counting(x: Tensor) -> Tensor:
        seen.append(x.numel() // x.shape[-1])
        return x.exp()

    query, key, value = inputs(batch=3, queries=5, keys=7)
    for memory in (key[:1].requires_grad_(), key[:1].detach().expand_as(key)):
        seen.clear()
        regard.linear_attention(query, memory, value, features=counting)
        # The features of 7 keys in 3 key heads of one sequence, and of 5 queries in 6 heads of 3 sequences.
        assert sorted(seen) == [3 * 7, 3 * 6 * 5]


@pytest.mark.usefixtures("small_blocks")
def test_a_learned_feature_map_learns() -> None:
    layer = torch.nn.Linear(5, 8, dtype=torch.float64)
    query, key, value = inputs(1, 2, 1, 19, 19)

    def loss(causal: bool) -> Tensor:
        output = regard.linear_attention(query, key, value, features=lambda x: layer(x).exp(), causal=causal)
        return output.square().sum()

    for causal in (False, True):
        (gradient,) = torch.autograd.grad(loss(causal), layer.weight)
        step = 1e-6 * torch.randn_like(gradient)
        with torch.no_grad():
            start = loss(causal)
            layer.weight += step
            moved = loss(causal)
        assert_close(moved - start, (gradient * step).sum(), rtol=1e-3, atol=0)


def test_training_keeps_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the inputs and the running sums at the start of each segment are stored for the backward pass."""
    monkeypatch.setattr(linear, "ROWS", 64)
    count, length = 32, 8 * linear.ROWS
    leaves = [x.requires_grad_() for x in inputs(1, 1, 1, length, length, 4, 4, dtype=torch.float32)]
    features = regard.PerformerFeatures.draw(4, count)
    for causal in (False, True):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = regard.linear_attention(*leaves, features=features, causal=causal)
        assert sum(kept.values()) < length * count * 4, "one tensor of features would be as large"
        output.sum().backward()


# Tests of `linear_step`, which continues causal linear attention from the sums over earlier positions.


@every_map
@pytest.mark.parametrize("steps", [[1] * 13, [7, 1, 1, 4], [13], [1, 12], [0, 9, 0, 4]], ids=str)
def test_steps_add_up_to_the_causal_pass(name: str, steps: list[int]) -> None:
    features, logs = FEATURES[name]
    query, key, value = inputs(queries=13, keys=13)
    state: LinearState | None = None
    outputs, start = [], 0
    for length in steps:
        part = (x[..., start : start + length, :] for x in (query, key, value))
        output, state = linear_step(state, *part, features)
        outputs.append(output)
        start += length
    together = torch.cat(outputs, -2)
    assert_close(together, regard.linear_attention(query, key, value, features=features, causal=True))
    assert_close(together, oracle(query, key, value, logs, True), rtol=1e-12, atol=1e-12)
    assert state.summary.shape == (2, 3, state.shift.shape[-1], 4)
    assert state.normalizer.shape == state.shift.shape[:-1] + state.summary.shape[-2:-1]


def test_steps_without_features_use_the_same_defaults() -> None:
    query, key, value = inputs(queries=3, keys=3, dtype=torch.float32)
    state, outputs = None, []
    for i in range(3):
        output, state = linear_step(state, *(x[..., i : i + 1, :] for x in (query, key, value)))
        outputs.append(output)
    assert_close(torch.cat(outputs, -2), regard.linear_attention(query, key, value, causal=True))


# Tests of Performer features.


@pytest.mark.slow
def test_the_kernel_estimate_is_unbiased() -> None:
    query, key = 0.8 * torch.randn(2, 7, dtype=torch.float64)
    exact = math.exp(float(query @ key) / math.sqrt(7))
    for orthogonal in (False, True):
        generator, draws = seeded(5), 1500
        estimates = []
        for _ in range(draws):
            features = regard.PerformerFeatures.draw(
                7, 9, orthogonal=orthogonal, generator=generator, dtype=torch.float64
            )
            estimates.append(features(query) @ features(key))
        mean, error = torch.stack(estimates).mean(), torch.stack(estimates).std() / math.sqrt(draws)
        assert abs(float(mean) - exact) < 4 * error
        assert error < 0.03 * exact


def softmax_error(count: int, orthogonal: bool, draws: int = 20) -> float:
    """Return the root mean square error of Performer features against softmax attention, over several samples."""
    generator = seeded(11)
    query, key, value = (torch.randn(1, n, 16, generator=generator, dtype=torch.float64) / 3 for n in (13, 31, 31))
    exact = torch.softmax(query @ key.mT / 4, -1) @ value
    total = 0.0
    for _ in range(draws):
        features = regard.PerformerFeatures.draw(
            16, count, orthogonal=orthogonal, generator=generator, dtype=torch.float64
        )
        total += float((regard.linear_attention(query, key, value, features=features) - exact).square().mean())
    return math.sqrt(total / draws)


@pytest.mark.parametrize("orthogonal", [False, True])
def test_the_error_falls_with_the_root_of_the_count(orthogonal: bool) -> None:
    errors = [softmax_error(count, orthogonal) for count in (16, 64, 256, 1024)]
    for larger, smaller in itertools.pairwise(errors):
        assert 1.7 < larger / smaller < 2.4, errors


@pytest.mark.parametrize("count", [16, 64, 256])
def test_orthogonal_directions_err_less(count: int) -> None:
    assert softmax_error(count, True) < softmax_error(count, False)


def test_orthogonal_directions_are_gaussian_one_by_one() -> None:
    generator = seeded(7)
    rows = []
    for _ in range(400):
        projection = regard.PerformerFeatures.draw(5, 12, generator=generator, dtype=torch.float64).projection
        for block in (projection[:5], projection[5:10], projection[10:]):
            products = block @ block.mT
            assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-12)
        rows.append(projection)
    drawn = torch.stack(rows)  # sampled projections: (sample, row, entry)
    for row in (0, 4, 11):
        one = drawn[:, row]
        assert_close(one.mean(0), torch.zeros(5).double(), rtol=0, atol=0.25)
        assert_close(one.mT.cov(), torch.eye(5).double(), rtol=0, atol=0.35)
        # The squared norm of five Gaussian entries has the distribution χ²(5), whose variance is 10.
        assert_close(one.square().sum(-1).var(), torch.tensor(10.0).double(), rtol=0.35, atol=0)


def test_features_are_the_formula() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = [[math.exp(log) for log in performer_logs(performer())(row)] for row in x.tolist()]
    assert_close(performer()(x), torch.tensor(expected, dtype=torch.float64))
    expected = [[math.exp(log) for log in elu_logs(row)] for row in x.tolist()]
    assert_close(regard.EluFeatures()(x), torch.tensor(expected, dtype=torch.float64))


def test_elu_features_keep_their_precision_far_below_zero() -> None:
    x = torch.tensor([-30.0, -1.0, 0.0, 3.0], requires_grad=True)
    features = regard.EluFeatures()(x)
    assert_close(features, torch.tensor([math.exp(-30), math.exp(-1), 1.0, 4.0]), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(features.sum(), x)
    assert_close(gradient, torch.tensor([math.exp(-30), math.exp(-1), 1.0, 1.0]), rtol=1e-6, atol=0)


def test_a_draw_and_a_redraw_repeat_by_generator_and_differ_otherwise() -> None:
    record = regard.PerformerFeatures.draw(6, 20, orthogonal=False, generator=seeded(1), dtype=torch.float64)
    again = regard.PerformerFeatures.draw(6, 20, orthogonal=False, generator=seeded(1), dtype=torch.float64)
    assert torch.equal(record.projection, again.projection)
    first, second, third = record.redraw(seeded(2)), record.redraw(seeded(2)), record.redraw()
    assert torch.equal(first.projection, second.projection)
    assert not torch.equal(first.projection, record.projection)
    assert not torch.equal(third.projection, first.projection)
    for new in (first, third):
        assert new.projection.shape == (20, 6)
        assert new.projection.dtype == torch.float64
        assert new.orthogonal is False
    blocks = regard.PerformerFeatures.draw(6, 6).redraw().projection.double()
    assert_close((blocks @ blocks.mT).fill_diagonal_(0), torch.zeros(6, 6).double(), rtol=0, atol=1e-4)


def test_the_default_features_are_the_same_every_time() -> None:
    query, key, value = inputs(size=16)
    torch.manual_seed(1)
    with torch.inference_mode():
        first = regard.linear_attention(query, key, value)
    torch.manual_seed(2)
    # Features sampled in inference mode must be usable in training.
    second = regard.linear_attention(query.requires_grad_(), key, value)
    second.sum().backward()
    assert_close(first, second.detach(), rtol=0, atol=0)
    drawn = regard.PerformerFeatures.draw(16, generator=seeded(0), dtype=torch.float64)
    assert drawn.projection.shape == (44, 16)  # a projection has d ln d rows: 16 · ln 16 is 44.4
    assert_close(second.detach(), regard.linear_attention(query, key, value, features=drawn).detach(), rtol=0, atol=0)


def test_the_default_features_are_drawn_outside_of_transforms() -> None:
    x = torch.randn(2, 3, 5, 7)
    expected = regard.linear_attention(x, x, x)
    for randomness in ("error", "different", "same"):
        feature_maps._cached.cache_clear()
        mapped = torch.func.vmap(lambda a: regard.linear_attention(a, a, a), randomness=randomness)(x)
        assert_close(mapped, expected)
        assert_close(regard.linear_attention(x, x, x), expected, rtol=0, atol=0)


@both_ways
@pytest.mark.usefixtures("small_blocks")
def test_gradients_of_torch_func(causal: bool) -> None:
    x = torch.randn(2, 1, 33, 3, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return regard.linear_attention(x, x, x, causal=causal).square().sum()

    expected = torch.autograd.functional.jacobian(loss, x)
    assert_close(torch.func.grad(loss)(x), expected)
    assert_close(torch.func.vmap(torch.func.grad(loss))(x), expected)
    _, slope = torch.func.jvp(loss, (x,), (x.flip(0),))
    assert_close(slope, (expected * x.flip(0)).sum())


@pytest.mark.parametrize("drawn", [False, True], ids=["first", "after real ones"])
def test_fake_tensors_leave_the_default_features_alone(drawn: bool) -> None:
    x = torch.randn(2, 3, 5, 7)
    expected = regard.linear_attention(x, x, x)
    if not drawn:
        feature_maps._cached.cache_clear()
    with FakeTensorMode():
        fake = torch.empty(2, 3, 5, 7)
        assert regard.linear_attention(fake, fake, fake).shape == x.shape
    assert_close(regard.linear_attention(x, x, x), expected, rtol=0, atol=0)


@both_ways
def test_vectors_without_entries_see_all_keys_alike(causal: bool) -> None:
    query, key, value = inputs(queries=9, size=0)
    mask = regard.padding([6, 0])
    output = regard.linear_attention(query.requires_grad_(), key, value, causal=causal, mask=mask)
    seen = mask & regard.causal() if causal else mask
    assert_close(output, regard.attention(query, key, value, mask=seen).output)
    assert torch.autograd.grad(output.sum(), query)[0].shape == query.shape


# Tests of invalid calls of linear attention.

QUERY, KEY, VALUE = inputs()
BAD_CALLS = {
    "lengths differ": ({"value": VALUE[..., 1:, :]}, ["key", "value", "7", "6"]),
    "sizes differ": ({"query": QUERY[..., 1:]}, ["query", "key", "size", "4", "5"]),
    "heads not a multiple": ({"query": QUERY[:, 1:]}, ["query", "key", "5", "3", "multiple"]),
    "batches differ": ({"query": torch.randn(5, 6, 7, 5).double()}, ["query", "key", "5", "2"]),
    "dtypes differ": ({"key": KEY.float()}, ["query", "key", "float64", "float32"]),
    "devices differ": ({"value": VALUE.to("meta")}, ["value", "meta", "cpu"]),
    "integers": ({"query": QUERY.long()}, ["query", "int64"]),
    "one axis": ({"key": torch.ones(5).double()}, ["key", "(5,)"]),
    "integer mask": ({"mask": torch.ones(7).long()}, ["mask", "bool", "int64"]),
    "mask of pairs": ({"mask": torch.ones(7, 7, dtype=torch.bool)}, ["mask", "padding", "(…, 1, 7)", "(1, 1, 7, 7)"]),
    "causal mask": ({"mask": regard.causal()}, ["mask", "padding", "causal=True", "differs by query"]),
    "causal in a mask": ({"mask": regard.causal() & regard.padding([3, 4])}, ["mask", "padding", "causal=True"]),
    "mask of other keys": ({"mask": torch.ones(8, dtype=torch.bool)}, ["mask", "8", "7"]),
    "lengths of another batch": ({"mask": regard.padding([1, 2, 3])}, ["lengths", "3", "2"]),
    "features of another size": ({"features": performer(6)}, ["features", "6", "5"]),
    "features elsewhere": (
        {"features": regard.PerformerFeatures(torch.ones(3, 5, device="meta"))}, ["features", "meta", "cpu"],
    ),
    "features of another shape": ({"features": lambda x: x.sum(-2)}, ["features", "(…, m)"]),
    "features that return nothing": ({"features": lambda x: None}, ["features", "tensor", "NoneType"]),
    "features of whole numbers": ({"features": lambda x: x.long()}, ["features", "float", "int64"]),
    "causal in words": ({"causal": "no"}, ["causal", "True or False", "'no'"]),
    "causal as a number": ({"causal": 1}, ["causal", "True or False", "int"]),
}  # fmt: skip


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("call", BAD_CALLS)
def test_a_bad_call_is_refused_by_name(call: str) -> None:
    changes, words = BAD_CALLS[call]
    arguments = {"query": QUERY, "key": KEY, "value": VALUE} | changes
    with pytest.raises((ValueError, TypeError)) as refusal:
        regard.linear_attention(**arguments)
    message = str(refusal.value)
    assert not [word for word in words if word not in message], message


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(("key", "came"), [(None, "NoneType"), (KEY.long(), "torch.int64")], ids=["none", "integers"])
def test_a_bad_call_under_autocast_is_refused_by_name(key: Tensor | None, came: str) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=f"key must be a .*tensor.*, got {came}"):
        regard.linear_attention(QUERY.float(), key, VALUE.float())


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(
    ("size", "count", "wrong"), [(1.5, None, "size"), ("a", None, "size"), (True, None, "size"), (4, 2.5, "count")]
)
def test_a_draw_of_no_whole_number_is_refused(size: object, count: object, wrong: str) -> None:
    came = type(count if wrong == "count" else size).__name__
    with pytest.raises(TypeError, match=f"{wrong} of PerformerFeatures must be an int, got {came}"):
        regard.PerformerFeatures.draw(size, count)


@pytest.mark.parametrize(("size", "count"), [(0, None), (0, 3), (4, 0), (4, -1)])
def test_a_draw_of_nothing_is_refused(size: int, count: int | None) -> None:
    with pytest.raises(ValueError, match=r"(size|count) of PerformerFeatures must be 1 or more, got (0|-1)"):
        regard.PerformerFeatures.draw(size, count)


def test_a_bad_step_is_refused() -> None:
    _, state = linear_step(None, QUERY, KEY, VALUE, performer())
    with pytest.raises(ValueError, match="query has 6 positions, key has 7"):
        linear_step(state, QUERY[..., 1:, :], KEY, VALUE, performer())
    with pytest.raises(ValueError, match=r"state has a summary \(2, 3, 11, 4\).*\(2, 3, 13, 4\)"):
        linear_step(state, QUERY, KEY, VALUE, performer(count=13))
    with pytest.raises(ValueError, match=r"state has a summary \(2, 3, 11, 4\)"):
        linear_step(state, QUERY, KEY, VALUE[..., 1:], performer())


@pytest.mark.cuda
@every_map
@both_ways
def test_a_cuda_device_gives_the_same(name: str, causal: bool) -> None:
    features, _ = FEATURES[name]
    query, key, value = inputs(queries=701, keys=701)
    expected = regard.linear_attention(query, key, value, features=features, causal=causal)
    if name == "performer":
        features = regard.PerformerFeatures(features.projection.cuda())
    leaves = [x.cuda().requires_grad_() for x in (query, key, value)]
    output = regard.linear_attention(*leaves, features=features, causal=causal)
    assert_close(output.detach().cpu(), expected)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), leaves))
    default = regard.linear_attention(*(x.detach() for x in leaves), causal=causal)
    assert_close(default.cpu(), regard.linear_attention(query, key, value, causal=causal))
    if causal:
        later = [x.detach().clone() for x in leaves]
        for x in later:
            x[..., 600:, :] = math.nan
        assert torch.equal(
            regard.linear_attention(*later, features=features, causal=True)[..., :600, :], output[..., :600, :]
        )


@pytest.mark.parametrize("largest", [1.0, 1e15], ids=["moderate", "large value"])
@both_ways
def test_many_sequences_are_computed_a_few_at_a_time(causal: bool, largest: float) -> None:
    """Output and gradients equal explicit products of all pairs in float64, for transposed tensors (b, n, h, d)."""
    leaves = [torch.randn(450, 20, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    with torch.no_grad():
        leaves[2][-1, -1, -1, 0] = largest
    true = [x.detach().double().requires_grad_() for x in leaves]
    query, key = (torch.where(x > 0, x + 1, x.exp()) for x in true[:2])
    pairs = query @ key.mT
    pairs = pairs.tril() if causal else pairs
    real = pairs @ true[2] / pairs.sum(-1, keepdim=True)
    output = regard.linear_attention(*leaves, features=regard.EluFeatures(), causal=causal)
    change = torch.randn_like(output)
    results = (output, *torch.autograd.grad(output, leaves, change))
    for mine, exact in zip(results, (real, *torch.autograd.grad(real, true, change.double())), strict=True):
        assert_close(mine[:-1], exact[:-1].float(), rtol=1e-4, atol=1e-5)
        assert_close(mine[-1], exact[-1].float(), rtol=1e-4, atol=1e-5 * largest)


# Tests of linear attention with inputs of extreme values.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1e3, 3e4, 1e6, 1e10, 1e15, 1e18])
def test_performer_features_are_right_however_large_the_inputs(scale: float, causal: bool) -> None:
    """For large inputs one key has all the weight; which one is clear unless two scores are equal in float32."""
    features = regard.PerformerFeatures.draw(8, 32, generator=torch.Generator().manual_seed(1))
    query, key, value = (torch.randn(2, 70, 8) for _ in range(3))
    query, key = (query * scale).requires_grad_(), key * scale
    found = regard.linear_attention(query, key, value, features=features, causal=causal)
    exact = regard.PerformerFeatures(features.projection.double())
    logs = [exact.log_features(t.detach().double()) for t in (query, key)]
    scores = torch.logsumexp(logs[0].unsqueeze(-2) + logs[1].unsqueeze(-3), -1)
    if causal:
        scores = scores.masked_fill(torch.ones(70, 70).triu(1).bool(), -math.inf)
    assert_close(found.double(), scores.softmax(-1) @ value.double(), rtol=0, atol=1e-5)
    assert torch.autograd.grad(found.sum(), query)[0].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [3e4, 1e19, 1e25, 1e30])
@pytest.mark.parametrize("name", ["elu", "relu"])
def test_features_without_logarithms_do_not_overflow_by_their_products(name: str, scale: float, causal: bool) -> None:
    features = regard.EluFeatures() if name == "elu" else lambda x: torch.relu(x) + 1e-3
    query, key, value = (torch.randn(2, 70, 8) for _ in range(3))
    query, key = (t.sign() * t.abs().add(0.1) * scale for t in (query, key))
    # All queries and keys are positive in the first feature, so that no denominator is 0.
    query[..., 0], key[..., 0] = query[..., 0].abs(), key[..., 0].abs()
    found = regard.linear_attention(query, key, value, features=features, causal=causal)
    weights = features(query.double()) @ features(key.double()).mT
    weights = weights.tril() if causal else weights
    assert_close(found.double(), weights / weights.sum(-1, keepdim=True) @ value.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", [None, regard.EluFeatures()], ids=["performer", "elu"])
def test_inputs_of_any_finite_size_give_finite_outputs(features: regard.EluFeatures | None, causal: bool) -> None:
    query, key, value = (torch.randn(2, 70, 8) for _ in range(3))
    found = regard.linear_attention(query * 3e30, key * 3e30, value, features=features, causal=causal)
    assert found.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("negative", [torch.tanh, torch.sin, lambda x: x], ids=["tanh", "sin", "identity"])
def test_negative_features_are_refused(negative: Callable[[Tensor], Tensor], causal: bool) -> None:
    x = torch.randn(2, 9, 5)
    with pytest.raises(ValueError, match=r"features must be 0 or more, got -"):
        regard.linear_attention(x, x, x, features=negative, causal=causal)
    with pytest.raises(ValueError, match=r"features must be 0 or more, got -"):
        linear_step(None, x, x, x, negative)


def test_negative_features_that_nobody_can_read_give_nan() -> None:
    x = torch.randn(3, 2, 9, 5)
    found = torch.func.vmap(lambda x: regard.linear_attention(x, x, x, features=torch.tanh))(x)
    assert found.isnan().all()
    fine = torch.func.vmap(lambda x: regard.linear_attention(x, x, x, features=torch.exp))(x)
    assert_close(fine, regard.linear_attention(x, x, x, features=torch.exp))


@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_gradients_do_not_cancel(causal: bool) -> None:
    """The mean of the values is far from 0, so the gradient of a query is a small difference of large numbers."""
    torch.manual_seed(0)
    leaves = [(torch.randn(1, 2, 70, 8) + shift).bfloat16() for shift in (0, 0, 10)]
    change = torch.randn(1, 2, 70, 8)
    found, true = (
        torch.autograd.grad(
            regard.linear_attention(*given, features=regard.EluFeatures(), causal=causal), given, change.to(dtype)
        )
        for dtype in (torch.bfloat16, torch.float64)
        for given in [[leaf.to(dtype).requires_grad_() for leaf in leaves]]
    )
    for one, other in zip(found, true, strict=True):
        assert (one.double() - other).norm() <= 0.05 * other.norm()


@pytest.mark.slow
@pytest.mark.parametrize("learned", [(0,), (1, 2)], ids=str)
def test_second_derivatives_of_some_inputs(learned: tuple[int, ...]) -> None:
    tensors = [torch.randn(1, 1, 6, 3, dtype=torch.float64) for _ in range(3)]

    def total(*given: Tensor) -> Tensor:
        replaced = dict(zip(learned, given, strict=True))
        return regard.linear_attention(*(replaced.get(n, tensor) for n, tensor in enumerate(tensors)), causal=True)

    assert torch.autograd.gradgradcheck(total, [tensors[n].clone().requires_grad_() for n in learned])


@pytest.mark.parametrize("causal", [False, True])
def test_a_default_device_is_not_that_of_the_tensors(causal: bool) -> None:
    x = torch.randn(1, 2, 100, 8)
    expected = regard.linear_attention(x, x, x, causal=causal)
    with torch.device("meta"):
        found = regard.linear_attention(x, x, x, causal=causal)
    assert torch.equal(found, expected)
