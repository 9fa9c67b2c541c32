"""The Triton kernels of additive attention against explicit pairs in float64: interpreted, and compiled on CUDA."""

import importlib.resources
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from additive_cases import BATCH, BRAIN, CASES, FULL, HALF, compare, explicit
from interpreting import DEVICES

# Triton's interpreter is slow, so cases that differ from another case only in dtype or mask run on a GPU only.
ON_GPUS = ("float16", "every head its keys", "causal", "key bias", "segments", "everything bfloat16", "gelu bfloat16")
# These cases are not interpreted, because "everything float32" and "times 100" cover what they test.
ALIKE = ("window", "float32", "times 10", "times 10 bfloat16")
INTERPRETED = [name for name in CASES if name not in (*ON_GPUS, *ALIKE)]


@pytest.mark.interpreted
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str) -> None:
    dtype, settings = CASES[name]
    compare(dtype, "cpu", batch=BATCH if "settings" in settings else 1, **settings)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str) -> None:
    dtype, settings = CASES[name]
    compare(dtype, "cuda", **settings)


@pytest.mark.parametrize("form", ["stored", "exact"])
@pytest.mark.parametrize("device", DEVICES)
def test_dropout(device: str, form: str) -> None:
    """The same seed drops the same pairs, forward and backward; weights that are not dropped are scaled."""
    from regard.kernels.additive.fused import additive_attention

    torch.manual_seed(3)
    query, key = torch.randn(1, 2, 23, 7, device=device), torch.randn(1, 2, 79, 7, device=device)
    value, weight = torch.ones(1, 2, 79, 3, device=device), torch.randn(7, device=device) * 0.2
    value.requires_grad_()
    settings = {"dropout": 0.25, "form": form}
    runs = [additive_attention(query, key, value, weight, seed=seed, **settings)[0] for seed in (7, 7, 8)]
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    assert not torch.equal(runs[0], runs[2])
    torch.testing.assert_close(runs[0].mean(), torch.ones((), device=device), rtol=0.03, atol=0)
    grads = [torch.autograd.grad(run.sum(), value)[0] for run in runs[:2]]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    # The loss L is a sum of outputs, which are linear in the values V: Σ dL/dV · V is L if both passes drop the same
    # pairs.
    torch.testing.assert_close((grads[0] * value).sum(), runs[0].sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("dtype", "form"), [(FULL, "exact"), (BRAIN, "series"), (FULL, "stored")], ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("closed_by", ["mask", "bias"])
def test_poison(device: str, dtype: torch.dtype, form: str, closed_by: str) -> None:
    """NaN and Inf in masked keys and values have no effect; an attended value of NaN gives an output of NaN."""
    from regard.kernels.additive.fused import additive_attention

    torch.manual_seed(3)
    query, key = torch.randn(1, 1, 17, 7), torch.randn(1, 1, 45, 7)
    value, weight = torch.randn(1, 1, 45, 3), torch.randn(7)
    query, key, value, weight = (x.to(device, dtype) for x in (query, key, value, weight))
    mask = torch.ones(1, 1, 17, 45, dtype=torch.bool, device=device)
    mask[..., 11] = False
    closing = {"mask": mask} if closed_by == "mask" else {"bias": torch.where(mask, 0.0, -torch.inf)}
    settings = {"lengths": torch.tensor([37], device=device), "form": form, **closing}
    # Both calls compute gradients: in half precision, calls without gradients use other coefficients of the series for
    # tanh.
    clean = additive_attention(query.clone().requires_grad_(), key, value, weight, **settings)[0]
    for what in (float("nan"), float("inf")):
        bad_key, bad_value = key.clone(), value.clone()
        bad_key[:, :, 37:] = bad_value[:, :, 37:] = what
        bad_key[:, :, 11], bad_value[:, :, 11] = float("nan"), float("inf")
        leaves = [x.requires_grad_() for x in (query.clone(), bad_key, bad_value)]
        out = additive_attention(*leaves, weight, **settings)[0]
        torch.testing.assert_close(out, clean)
        with torch.no_grad():
            both = [additive_attention(query, *x, weight, **settings)[0] for x in ((key, value), (bad_key, bad_value))]
        torch.testing.assert_close(both[0], both[1])
        for grad in torch.autograd.grad(out.float().square().sum(), leaves):
            assert grad.isfinite().all()
    value[:, :, 3] = float("nan")
    assert additive_attention(query, key, value, weight, **settings)[0].isnan().all()


UNLIKE = torch.logspace(-1.5, 0.5, 67)  # a scale for each of 67 hidden units, more than one tile of the kernel holds


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", HALF, marks=pytest.mark.interpreted, id="interpreted-float16"),
        pytest.param("cuda", HALF, marks=pytest.mark.cuda, id="cuda-float16"),
        pytest.param("cuda", BRAIN, marks=pytest.mark.cuda, id="cuda-bfloat16"),
    ],
)
@pytest.mark.parametrize(
    ("activation", "units", "scale"),
    [("tanh", 17, 1.0), ("tanh", 17, 2.5), ("gelu", 17, 1.5), pytest.param("tanh", 67, UNLIKE, id="unlike ranges")],
)
def test_forward_alone(device: str, dtype: torch.dtype, activation: str, units: int, scale: float | Tensor) -> None:
    """Without gradients, half precision approximates the activation by other series, each with a slope and a constant.

    Each hidden unit uses the series fitted to its own range of inputs, so that units do not affect each other.
    """
    from regard.kernels.additive.fused import additive_attention

    torch.manual_seed(8)
    queries, keys = (41, 139) if device == "cuda" else (19, 47)
    query, key = torch.randn(1, 2, queries, units) * scale, torch.randn(1, 1, keys, units) * scale
    value, weight = torch.randn(1, 1, keys, 5), torch.randn(2, units) / units**0.5
    inputs = [x.to(device, dtype) for x in (query, key, value, weight)]
    mask = torch.ones(1, 2, queries, keys, dtype=torch.bool, device=device)
    nothing = torch.zeros((), device=device)
    true = explicit(*(x.double() for x in inputs), activation, mask, nothing)
    plain = explicit(*inputs, activation, mask, nothing.to(dtype))
    with torch.no_grad():
        found = additive_attention(*inputs, activation=activation, form="series")
    ours, theirs = ([((a.double() - t).norm() / t.norm()).item() for a, t in zip(x, true, strict=True)]
                    for x in (found, plain))  # fmt: skip
    if device == "cpu":  # the tolerance is larger where Triton's interpreter truncates numbers that a GPU rounds
        theirs = [{BRAIN: 1e-2, HALF: 1e-3}[dtype] / 1.5, 1e-3 / 1.5]
    assert all(a < 1.5 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "form"), [(FULL, "exact"), (BRAIN, "series"), (BRAIN, "stored")], ids=str)
def test_repeatable(dtype: torch.dtype, form: str) -> None:
    """With `torch.use_deterministic_algorithms(True)`, two runs agree bit for bit."""
    from regard.kernels.additive.fused import additive_attention

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            torch.manual_seed(9)
            leaves = [torch.randn(2, 4, n, d) for n, d in ((131, 17), (211, 17), (211, 9))]
            leaves += [torch.randn(4, 17) / 4, torch.randn(1, 4, 1, 211), torch.randn(4, 31)]
            kinds = [dtype] * 4 + [FULL] * 2
            leaves = [x.to("cuda", kind).requires_grad_() for x, kind in zip(leaves, kinds, strict=True)]
            out = additive_attention(*leaves[:4], bias=leaves[4], relative=leaves[5], band=(-90, 70), form=form)[0]
            found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("device", DEVICES)
def test_wide_values(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide values are processed a few columns at a time, which changes neither the output nor the gradients."""
    from regard.kernels.additive import fused

    torch.manual_seed(10)
    found = []
    leaves = [torch.randn(1, 1, n, d) for n, d in ((13, 7), (37, 7), (37, 5))] + [torch.randn(1, 7)]
    leaves = [x.to(device).requires_grad_() for x in leaves]
    for columns in (5, 3):
        monkeypatch.setattr(fused, "COLUMNS", columns)
        out, lse = fused.additive_attention(*leaves, dropout=0.25, seed=3, band=(-9, 30), form="exact")
        found.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Batch, heads, key heads, whether weight, bias and mask differ by head and sequence, dropout, the numbers of heads of
# each step if the call is split, and the number of heads if it is not.
HALVES = [(1, 2, 2, True, 0.0, [1, 1], [2]), (2, 1, 1, False, 0.2, [1, 1], [2])]
# These cases have too many heads for Triton's slow interpreter.
MORE = [(1, 4, 2, False, 0.2, [1, 1], [2]), (3, 4, 2, True, 0.0, [3, 3], [6]), (3, 2, 1, False, 0.0, [1, 2], [3])]


@pytest.mark.parametrize(
    ("device", "batch", "heads", "groups", "own", "dropout", "parts", "whole"),
    [pytest.param("cpu", *case, marks=pytest.mark.interpreted) for case in HALVES]
    + [pytest.param("cuda", *case, marks=pytest.mark.cuda) for case in HALVES + MORE],
)
def test_halves(
    device: str,
    batch: int,
    heads: int,
    groups: int,
    own: bool,
    dropout: float,
    parts: list[int],
    whole: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradients are the same if half of the heads, or of the batch, are processed at a time.

    This is tested with weights, biases and masks that differ by head or sequence, and with shared ones.
    """
    from regard.kernels.additive.fused import additive_attention
    from regard.kernels.triton.additive import backward as backward_pass

    large, write, turns = backward_pass._LARGE, backward_pass.write_features, []

    def counted(*arguments: Any) -> None:
        turns.append(arguments[3].units)
        write(*arguments)

    monkeypatch.setattr(backward_pass, "write_features", counted)
    torch.manual_seed(12)
    shapes = [(batch, heads, 33, 9), (batch, groups, 37, 9), (batch, groups, 37, 5), (heads, 9) if own else (9,)]
    shapes += [(batch, heads, 33, 37) if own else (1, 1, 1, 37), (heads, 11)]
    kinds = [BRAIN] * 4 + [FULL] * 2
    leaves = [torch.randn(x).to(device, kind).requires_grad_() for x, kind in zip(shapes, kinds, strict=True)]
    settings = {
        "mask": (torch.rand(batch if own else 1, heads if own else 1, 33, 37) > 0.2).to(device),
        "lengths": torch.tensor([30, 37, 11][:batch], device=device),
        "query_ids": torch.randint(2, (batch, 33), device=device),
        "key_ids": torch.randint(2, (batch, 37), device=device),
    }
    found = []
    for most in (0, large):
        monkeypatch.setattr(backward_pass, "_LARGE", most)
        out, lse = additive_attention(
            *leaves[:4], bias=leaves[4], relative=leaves[5], dropout=dropout, seed=3, form="series", **settings
        )
        loss = out.float().square().sum() + torch.where(lse == float("-inf"), 0.0, lse).sin().sum()
        found.append(torch.autograd.grad(loss, leaves))
    for leaf, a, b in zip(leaves, *found, strict=True):
        assert a.shape == leaf.shape
        assert a.dtype == leaf.dtype
        assert (a - b).norm() <= 1e-2 * b.norm()
    assert [len(units) for units in turns] == parts + whole


def test_fits_keep_their_word() -> None:
    """Every series in `series.json` approximates its activation within the error budget, evaluated in float64."""
    from regard.kernels.additive.series import BUDGETS, Row, Series

    text = importlib.resources.files("regard.kernels.additive").joinpath("series.json").read_text()

    functions = {"tanh": torch.tanh, "gelu": lambda x: torch.nn.functional.gelu(x) - x / 2}
    for name, table in json.loads(text).items():
        target, dtype, direction = name.split()
        rows = [Row(together, tuple(Series(*fit) for fit in fits)) for together, fits in table]
        assert [row.reach for row in rows] == sorted(row.reach for row in rows)
        assert [row.together for row in rows] == sorted(row.together for row in rows)
        # The coefficients were fitted at fewer points than are checked here, so the limits are slightly above the
        # budget.
        most = BUDGETS[dtype, direction][0] * (1.26 if direction == "forward" else 1.01)
        for row in rows:
            assert len({fit.harmonics for fit in row.fits}) == 1
            assert [fit.reach for fit in row.fits] == sorted((fit.reach for fit in row.fits), reverse=True)
            for fit in row.fits:
                x = torch.linspace(-fit.reach, fit.reach, 4001, dtype=torch.float64)
                step, first = torch.pi / (2 * fit.period), 2 if fit.slope else 1
                wave = torch.sin if target == "tanh" else torch.cos
                found = fit.constant + fit.slope * x
                found += sum(c * wave((first + 2 * r) * step * x) for r, c in enumerate(fit.waves))
                error = (found - functions[target](x)).abs()
                middle = x.abs() <= (0.3 if direction == "forward" else 1.0) * fit.reach
                assert error[middle].max() <= most, (target, dtype, direction, fit.reach)
                assert error.max() <= 3 * most, (target, dtype, direction, fit.reach)


def test_rules_of_distance_as_tables() -> None:
    """ALiBi and relative biases with an offset become one number for each head and distance j - i for the kernels."""
    from regard.core.backends.kernel_arguments import bias_arguments
    from regard.core.problem import build

    torch.manual_seed(2)
    query, key, value = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 11, 4), torch.randn(2, 3, 11, 2)
    score = regard.Additive(torch.ones(4))
    rules = [regard.alibi([0.5, 0.25, 1.0]), regard.alibi([0.5, 0.25, 1.0], offset=6), regard.alibi([0.3])]
    rules += [regard.relative(torch.randn(3, 7), offset=n) for n in (0, 4, -9)] + [regard.relative(torch.randn(7), 2)]
    for bias in rules:
        problem = build(query, key, value, score, regard.Softmax(), None, bias, 0.0, None, None)
        table = bias_arguments(problem.bias, problem.shape, query.shape[:1])["relative"]
        reach = table.shape[1] // 2
        place = (torch.arange(11) - torch.arange(5)[:, None]).clamp(-reach, reach) + reach
        torch.testing.assert_close(table[:, place], bias.values(range(5), range(11), FULL).expand(3, 5, 11))


def test_wants_cuda() -> None:
    from regard.kernels.additive.fused import additive_attention

    with pytest.raises(ValueError, match="run on CUDA"):
        additive_attention(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), torch.ones(3))


MASKS = {
    "nothing": lambda: None,
    "causal": regard.causal,
    "padding": lambda: regard.padding(torch.tensor([150, 61], device="cuda")),
    "padding & causal": lambda: regard.padding(torch.tensor([0, 61], device="cuda")) & regard.causal(),
    "padding of 32 bits": lambda: regard.padding(torch.tensor([150, 61], device="cuda", dtype=torch.int32)),
    "dense": lambda: (torch.arange(150, device="cuda") % 3 > 0).expand(150, -1),
    "dense, one row": lambda: (torch.arange(150, device="cuda") % 3 > 0)[None, None, None],
}


@pytest.mark.cuda
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("name", MASKS)
def test_a_direct_call_equals_the_general_one(name: str, groups: int) -> None:
    """A repeated call, which runs the kernel directly with cached arguments for the mask, equals the first call."""
    sizes = ((4, 150, 32), (groups, 150, 32), (groups, 150, 16))
    query, key, value = (torch.randn(2, *x, device="cuda", dtype=BRAIN, requires_grad=True) for x in sizes)
    score = regard.Additive(torch.randn(32, device="cuda", dtype=BRAIN, requires_grad=True))
    leaves, mask = [query, key, value, score.weight], MASKS[name]()
    ways = []
    # The second call stores the choice of its kernel, which later calls reuse.
    for way in ("additive", "auto", "auto", "auto"):
        out = regard.attention(query, key, value, score=score, mask=mask, backend=way).output
        ways.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for other in ways[1:]:
        for a, b in zip(ways[0], other, strict=True):
            assert (a.float() - b.float()).norm() <= 1e-5 * b.float().norm()


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["stored", "series"])
def test_in_a_graph(form: str) -> None:
    """A call does not synchronise with the GPU, so a CUDA graph can capture it."""
    from regard.kernels.additive.fused import additive_attention

    query, key, value = (torch.randn(1, 2, n, 61, device="cuda", dtype=BRAIN) for n in (211, 307, 307))
    weight = torch.randn(61, device="cuda", dtype=BRAIN)
    true = additive_attention(query, key, value, weight, form=form)[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = additive_attention(query, key, value, weight, form=form)[0]
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, true, rtol=0, atol=0)
