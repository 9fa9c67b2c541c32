"""Triton kernels that return weights or summaries of weights (entropy, sums, largest), against float64 softmax."""

import pytest
import torch
from drawn_masks import mask_of
from torch import Tensor

import regard
from interpreting import DEVICES

KINDS = ("received", "entropy", "logsumexp")
# Calls by name: (batch, heads, key heads, queries, keys, size), and settings of the masks, bias and scale.
CASES = {
    "plain": ((2, 2, 2, 37, 71, 16), {}),
    "causal": ((1, 2, 1, 67, 67, 24), {"band": (None, 0)}),
    "window": ((1, 1, 1, 131, 67, 16), {"band": (-7, 3)}),
    "padding": ((3, 2, 1, 37, 41, 16), {"lengths": [41, 5, 0]}),
    "segments": ((2, 2, 2, 67, 67, 16), {"segments": True, "band": (None, 0)}),
    "dense": ((2, 2, 1, 37, 41, 16), {"mask": True}),
    "bias": ((2, 2, 1, 37, 41, 16), {"bias": True}),
    "large scores": ((1, 1, 1, 37, 41, 16), {"scale": 300.0}),
}


def expected(query: Tensor, key: Tensor, scale: float, allowed: Tensor, bias: Tensor | float, kind: str) -> Tensor:
    """Return the requested weights or summary by its formula in float64; a fully masked row has weights of 0."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale + bias
    filled = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, scores, torch.where(filled, -torch.inf, 0.0).double())
    weights = torch.where(filled, torch.softmax(scores, -1), 0.0)
    if kind == "received":
        return weights.sum(-2)
    if kind == "entropy":
        return -(weights * torch.where(weights > 0, weights, 1).log()).sum(-1)
    if kind == "full":
        return weights
    return torch.where(filled.squeeze(-1), torch.logsumexp(scores, -1), -torch.inf)


def problem_of(case: str, device: str, kind: str):  # type: ignore[no-untyped-def]
    """Return the arguments of a call (`Problem`) with its requested weights, the query and key, and the scale, mask and
    bias for `expected`."""
    from regard.core.problem import build

    (b, h, g, q, k, d), given = CASES[case]
    torch.manual_seed(5)
    query, key = (torch.randn(b, x, n, d).to(device) for x, n in ((h, q), (g, k)))
    bias = torch.randn(1, h, q, k).to(device) if "bias" in given else None
    if bias is not None:
        bias[..., 3] = -torch.inf
    query, key = (t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (query, key))
    mask, scale = mask_of(given, b, q, k, device), given.get("scale", 0.3)
    request = regard.top(5) if kind == "top" else getattr(regard, kind)()
    problem = build(
        query, key, torch.zeros(b, g, k, 1, device=device), regard.ScaledDot(scale), regard.Softmax(), mask, bias, 0.0,
        request, None,
    )  # fmt: skip
    allowed = torch.ones(b, h, q, k, dtype=torch.bool, device=device)
    if mask is not None:
        allowed = allowed & mask.aligned((b, h, q, k)).allowed(range(q), range(k), torch.device(device))
    if bias is not None:
        allowed = allowed & (bias != -torch.inf)
    numbers = 0.0 if bias is None else bias.double().nan_to_num(neginf=0.0)
    return problem, (query, key), (scale, allowed, numbers)


@pytest.fixture(params=["one tile", "many tiles"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel of all weights process the keys of a test in one tile, or in several."""
    if request.param == "many tiles":
        from regard.kernels.triton import full_weights

        monkeypatch.setattr(full_weights, "_FEW_SINGLE", 0)
        monkeypatch.setattr(full_weights, "_FEW_HALF", 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("case", "known"), [(case, False) for case in CASES] + [("causal", True)])
def test_summaries(case: str, known: bool, kind: str, device: str) -> None:
    from regard.core import summaries

    problem, leaves, (scale, allowed, bias) = problem_of(case, device, kind)
    true = [t.detach().double().requires_grad_() for t in leaves]
    real = expected(*true, scale, allowed, bias, kind)
    lse = expected(*true, scale, allowed, bias, "logsumexp") if known else None
    found = summaries.weights(problem, lse)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double(), real, rtol=1e-5, atol=2e-4 if case == "large scores" else 1e-5)
    change = torch.randn_like(real)
    filled = torch.where(real == -torch.inf, 0, change)
    grads = torch.autograd.grad(found, leaves, filled.float())
    for a, t in zip(grads, torch.autograd.grad(torch.where(real == -torch.inf, 0, real), true, filled), strict=True):
        limit = 1e-2 if case == "large scores" else 2e-5
        assert (a.double() - t).norm() <= limit * max(t.norm().item(), 1e-3)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "known"), [(case, False) for case in CASES] + [("padding", True)])
def test_all_weights(case: str, known: bool, device: str) -> None:
    from regard.core import summaries

    problem, leaves, (scale, allowed, bias) = problem_of(case, device, "full")
    true = [t.detach().double() for t in leaves]
    lse = expected(*true, scale, allowed, bias, "logsumexp") if known else None
    found = summaries.weights(problem, lse)
    assert isinstance(found, Tensor)
    real = expected(*true, scale, allowed, bias, "full")
    torch.testing.assert_close(found.double(), real, rtol=1e-5, atol=2e-4 if case == "large scores" else 1e-5)
    assert (found[~allowed] == 0).all()


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("b", "h", "g", "q", "k", "d", "e"),
    [(2, 4, 2, 70, 131, 24, 17), (1, 3, 3, 5, 7, 64, 40), (1, 1, 1, 1, 1, 1, 1), (1, 2, 1, 35, 30, 24, 72)],
)
def test_output_and_weights_by_one_kernel(
    b: int, h: int, g: int, q: int, k: int, d: int, e: int, dtype: torch.dtype, device: str
) -> None:
    from regard.kernels.triton.full_weights import attended

    torch.manual_seed(4)
    query = torch.randn(b, q, h, d, device=device).to(dtype).transpose(1, 2)
    key, value = (torch.randn(b, g, k, size, device=device).to(dtype) for size in (d, e))
    output, weights = attended(query, key, value, 0.3, torch.float32)(query, key, value)
    real = expected(query.double(), key.double(), 0.3, torch.ones(b, h, q, k, device=device).bool(), 0.0, "full")
    torch.testing.assert_close(weights.double(), real, rtol=1e-5, atol=1e-6)
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    true = real @ value.double().repeat_interleave(h // g, 1)
    torch.testing.assert_close(output.double(), true, rtol=limit, atol=limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["full", "entropy"])
def test_two_axes_before_the_heads(kind: str, device: str) -> None:
    from regard.core import summaries
    from regard.core.problem import build

    torch.manual_seed(9)
    query, key = (torch.randn(2, 3, 2, n, 16, device=device) for n in (37, 41))
    own, other = (torch.arange(n, device=device).expand(2, 3, n) // 10 for n in (37, 41))
    problem = build(
        query, key, key, regard.ScaledDot(0.3), regard.Softmax(), regard.segments(own, other), None, 0.0,
        getattr(regard, kind)(), None,
    )  # fmt: skip
    allowed = own[0, 0, :, None] == other[0, 0]
    tensors = (t.double().flatten(0, 1) for t in (query, key))
    real = expected(*tensors, 0.3, allowed.expand(6, 2, 37, 41), 0.0, kind)
    found = summaries.weights(problem)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double().flatten(0, 1), real, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_of_some_rows_by_one_kernel(device: str) -> None:
    from regard.kernels.triton.full_weights import attended, picks_rows

    torch.manual_seed(7)
    query, key, value = (torch.randn(2, 3, n, 24, device=device) for n in (37, 19, 19))
    assert picks_rows(query, key, value)
    places = torch.full((37,), -1, dtype=torch.int32, device=device)
    places[[36, 0, 20]] = torch.arange(3, dtype=torch.int32, device=device)
    run = attended(query, key, value, 0.3, torch.float32, rows=3)
    output, weights = run(query, key, value, places=places)
    real = expected(query.double(), key.double(), 0.3, torch.ones(2, 3, 37, 19, device=device).bool(), 0.0, "full")
    torch.testing.assert_close(weights.double(), real[:, :, [36, 0, 20]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.double(), real @ value.double(), rtol=1e-5, atol=1e-5)
    assert not picks_rows(query, key.repeat(1, 1, 10, 1), value)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("raw", [False, True], ids=["aligned", "as given"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "large scores"])
def test_masked_output_and_weights_by_one_kernel(case: str, raw: bool, device: str) -> None:
    """Values of NaN and Inf reach the output of the rows that attend to them and of no others, and change no weight."""
    from regard.core.backends.kernel_arguments import by_pairs, pairs_of
    from regard.kernels.triton.full_weights import attended

    problem, leaves, (scale, allowed, bias) = problem_of(case, device, "full")
    assert by_pairs(problem)
    (b, h, g, q, k, _), given = CASES[case]
    mask = mask_of(given, b, q, k, device) if raw else problem.mask
    query, key = (t.detach() for t in leaves)
    value = torch.randn(b, g, k, 17, device=device)
    value[:, :, 9] = torch.nan
    value[:, 0, 31, 4] = torch.inf
    pairs = pairs_of(problem)(mask, problem.bias, query.device)
    output, weights = attended(query, key, value, scale, torch.float32, masked=True)(query, key, value, pairs)
    real = expected(query.double(), key.double(), scale, allowed, bias, "full")
    torch.testing.assert_close(weights.double(), real, rtol=1e-5, atol=1e-6)
    value = value.double().repeat_interleave(h // g, 1)
    reached = (allowed.double() @ (~value.isfinite()).double()) > 0
    true = (real @ value.nan_to_num(0.0, 0.0, 0.0)).masked_fill(reached, torch.nan)
    assert output.isfinite()[~reached.any(-1)].all()
    assert not output.isfinite()[reached].any()
    found = output.double().masked_fill(reached.any(-1, keepdim=True), 0)
    torch.testing.assert_close(found, true.masked_fill(reached.any(-1, keepdim=True), 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "bias",
    [regard.alibi([0.5, 0.25]), regard.relative(torch.linspace(-1, 1, 14).view(2, 7))],
    ids=["alibi", "relative"],
)
def test_bias_rules_by_one_kernel(bias: regard.Bias, device: str) -> None:
    from regard.core.backends.kernel_arguments import pairs_of
    from regard.core.problem import build
    from regard.kernels.triton.full_weights import attended

    torch.manual_seed(6)
    bias = bias.holding(lambda tensor: tensor.to(device))
    query, key, value = (torch.randn(2, 2, n, 16, device=device) for n in (37, 41, 41))
    problem = build(
        query, key, value, regard.ScaledDot(), regard.Softmax(), regard.causal(3), bias, 0.0, regard.full(), None
    )
    pairs = pairs_of(problem)(regard.causal(3), bias, query.device)
    output, weights = attended(query, key, value, 0.25, torch.float32, masked=True)(query, key, value, pairs)
    numbers = bias.aligned((2, 2, 37, 41)).values(range(37), range(41), torch.float64)
    allowed = torch.ones(37, 41, dtype=torch.bool, device=device).tril(3).expand(2, 2, -1, -1)
    real = expected(query.double(), key.double(), 0.25, allowed, numbers, "full")
    torch.testing.assert_close(weights.double(), real, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.double(), real @ value.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["full", "entropy", "top"])
@pytest.mark.parametrize("end", [0.7, -torch.inf])
def test_distances_beyond_a_table_of_relative_positions(end: float, kind: str, device: str) -> None:
    """Tiles that lie beyond the table have one bias, the first or the last of the table; −inf masks their pairs."""
    from regard.core import summaries
    from regard.core.problem import build

    torch.manual_seed(8)
    query, key = (torch.randn(1, 2, 290, 16, device=device) for _ in range(2))
    table = torch.randn(2, 9, device=device)
    table[1, 0], table[0, 8] = end, end
    request = regard.top(5) if kind == "top" else getattr(regard, kind)()
    problem = build(
        query, key, key, regard.ScaledDot(0.3), regard.Softmax(), regard.causal(100), regard.relative(table), 0.0,
        request, None,
    )  # fmt: skip
    distance = torch.arange(290, device=device) - torch.arange(290, device=device).unsqueeze(-1)
    numbers = table.double()[:, distance.clamp(-4, 4) + 4].unsqueeze(0)
    allowed = (distance <= 100) & (numbers > -torch.inf)
    numbers = numbers.nan_to_num(neginf=0.0)
    real = expected(query.double(), key.double(), 0.3, allowed, numbers, "full" if kind == "top" else kind)
    assert_same(summaries.weights(problem), real, kind)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row", [[torch.nan, 0.0], [-torch.inf, -torch.inf], [torch.inf, 0.0]], ids=str)
def test_one_kernel_keeps_nan(row: list[float], device: str) -> None:
    """The weights of a row with a score of NaN or +inf, or with scores of -inf only, are NaN, as by torch's softmax."""
    from regard.kernels.triton.full_weights import attended

    query = torch.tensor([[row, [0.0, 1.0], [1.0, 1.0]]], device=device).unsqueeze(0)
    key = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 1.0]], device=device).abs().expand(1, 1, 3, 2).contiguous()
    output, weights = attended(query, key, key, 1.0, torch.float32)(query, key, key)
    real = (query.double() @ key.double().mT).softmax(-1)
    torch.testing.assert_close(weights.double(), real, equal_nan=True)
    torch.testing.assert_close(output.double(), real @ key.double(), equal_nan=True)


NONFINITE = [(case, False) for case in CASES if case != "large scores"] + [("plain", True), ("causal", True)]


def assert_same(found: Tensor | regard.Top, real: Tensor, kind: str) -> None:
    """Compare requested weights with the expected ones, including NaN; the indices of NaN weights are not compared."""
    if isinstance(found, regard.Top):
        found, indices = found
        real = real.topk(5, -1).values
        assert ((indices == -1) == (found == 0)).all()
    torch.testing.assert_close(found.double(), real.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, "full", "top"])
@pytest.mark.parametrize(("case", "known"), NONFINITE)
def test_nan_is_not_lost(case: str, known: bool, kind: str, device: str) -> None:
    """Results of a row with a query of NaN, or with a key of NaN that it attends, are NaN.

    With `known`, the kernel receives the rows' log-sum-exp, which is +inf for such a row.
    """
    from regard.core import summaries

    problem, leaves, (scale, allowed, bias) = problem_of(case, device, kind)
    with torch.no_grad():
        leaves[0][0, 0, 29, 2] = torch.nan
        leaves[1][0, :, 23, 1] = torch.nan
        leaves[1][-1, :, 40, 1] = torch.nan
    true = [t.detach().double() for t in leaves]
    lse = expected(*true, scale, allowed, bias, "logsumexp") if known else None
    lse = None if lse is None else torch.where(lse.isnan(), torch.inf, lse)
    assert_same(
        summaries.weights(problem, lse), expected(*true, scale, allowed, bias, "full" if kind == "top" else kind), kind
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, "full", "top"])
@pytest.mark.parametrize("case", [case for case, known in NONFINITE if not known])
def test_weights_of_scores_of_minus_infinity(case: str, kind: str, device: str) -> None:
    """If all scores that a row attends overflow to -inf, its weights are NaN; with a bias, -inf means masked."""
    from regard.core import summaries

    problem, leaves, (scale, allowed, bias) = problem_of(case, device, kind)
    with torch.no_grad():
        leaves[0][..., 0] = 0
        leaves[0][0, 0, 29, 0] = 2.0**100
        leaves[1][..., 0] = -(2.0**100)
    if case == "bias":
        allowed[0, 0, 29] = False
    real = expected(*(t.detach() for t in leaves), scale, allowed, bias, "full" if kind == "top" else kind)
    assert_same(summaries.weights(problem), real, kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [case for case in CASES if case != "large scores"])
def test_largest(case: str, device: str) -> None:
    from regard.core import summaries

    problem, leaves, (scale, allowed, bias) = problem_of(case, device, "top")
    real = expected(*(t.detach().double() for t in leaves), scale, allowed, bias, "full")
    values, indices = summaries.weights(problem)
    torch.testing.assert_close(values.double(), real.topk(5, -1).values, rtol=1e-5, atol=1e-5)
    assert ((indices == -1) == (values == 0)).all()
    named = torch.where(indices < 0, 0.0, real.gather(-1, indices.clamp_min(0)))
    torch.testing.assert_close(named, values.double(), rtol=1e-5, atol=1e-5)
    repeated = indices.sort(-1).values
    assert ((repeated[..., 1:] != repeated[..., :-1]) | (repeated[..., 1:] == -1)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["causal", "bias"])
def test_gradients_of_the_largest(case: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel computes the largest weights; their first and second derivatives come from recomputed weights."""
    from regard.core import recompute, summaries

    monkeypatch.setattr(summaries, "serves", lambda problem: True)
    problem, leaves, (scale, allowed, bias) = problem_of(case, device, "top")
    true = [t.detach().double().requires_grad_() for t in leaves]
    values, indices = recompute.weights(problem, None)
    assert not indices.requires_grad
    real = expected(*true, scale, allowed, bias, "full").topk(5, -1).values
    change = torch.randn_like(real)
    for second in (False, True):
        found, wanted = (
            torch.autograd.grad((x * change.to(x.dtype)).sum(), of, create_graph=second)
            for x, of in ((values, leaves), (real, true))
        )
        if second:
            found, wanted = (
                torch.autograd.grad(sum(t.square().sum() for t in grads), of)
                for grads, of in ((found, leaves), (wanted, true))
            )
        for one, other in zip(found, wanted, strict=True):
            assert (one.double() - other).norm() <= 2e-5 * max(other.norm().item(), 1e-3)
        values, _ = recompute.weights(problem, None)
        real = expected(*true, scale, allowed, bias, "full").topk(5, -1).values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("count", "high"), [(8, None), (5, 0), (8, -3)])
def test_largest_of_half_precision(count: int, high: int | None, dtype: torch.dtype, device: str) -> None:
    """The largest weights of float16 and bfloat16 scores; some rows have fewer keys than requested, or none."""
    from regard.kernels.triton.additive.pairs import Pairs
    from regard.kernels.triton.largest_weights import top
    from regard.kernels.triton.score_tiles import Scored

    torch.manual_seed(3)
    query, key = (torch.randn(1, heads, 141, 24, device=device).to(dtype) for heads in (2, 1))
    scores = query.double() @ key.double().mT * 0.5
    if high is not None:
        distance = torch.arange(141, device=device) - torch.arange(141, device=device).unsqueeze(-1)
        scores = scores.masked_fill(distance > high, -torch.inf)
    real = scores.softmax(-1).nan_to_num(0.0)
    values, indices = top(Scored(query, key, Pairs(high=high), 0.5), scores.logsumexp(-1).float(), count)
    torch.testing.assert_close(values.double(), real.topk(count, -1).values, rtol=1e-5, atol=1e-6)
    assert ((indices == -1) == (values == 0)).all()
    named = torch.where(indices < 0, 0.0, real.gather(-1, indices.clamp_min(0)))
    torch.testing.assert_close(named, values.double(), rtol=1e-5, atol=1e-6)
    repeated = indices.sort(-1).values
    assert ((repeated[..., 1:] != repeated[..., :-1]) | (repeated[..., 1:] == -1)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [64, 128])
@pytest.mark.parametrize("count", [5, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_largest_weights_at_equal_distances(dtype: torch.dtype, count: int, step: int, device: str) -> None:
    """The largest scores are `step` keys apart, so that one column of the kernel's tiles has more of them than the
    kernel stores for a column."""
    from regard.kernels.triton.additive.pairs import Pairs
    from regard.kernels.triton.largest_weights import top
    from regard.kernels.triton.score_tiles import Scored

    length = 6 * step + 1
    # Multiples of 1/1024 below 1 are exact in float16.
    scores = (torch.randperm(length, device=device) / 1024).reshape(1, 1, length, 1)
    scores[0, 0, 7::step] = 2.0 + torch.arange(scores[0, 0, 7::step].shape[0], device=device).unsqueeze(-1)
    query = torch.ones(1, 1, 3, 1, device=device, dtype=dtype)
    lse = scores.squeeze(-1).logsumexp(-1, keepdim=True).expand(1, 1, 3).contiguous()
    values, indices = top(Scored(query, scores.to(dtype), Pairs(), 1.0), lse, count)
    real, order = scores[0, 0, :, 0].softmax(0).topk(count)
    assert torch.equal(indices, order.expand(1, 1, 3, count))
    torch.testing.assert_close(values, real.expand(1, 1, 3, count))
