"""The Triton kernels of additive attention against explicit pairs in float64: interpreted here, compiled on CUDA."""

import importlib.resources
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from interpreting import DEVICES
from regard.core.scores import ACTIVATIONS

# Sizes are all different and mostly prime; there are more keys than a span of 32.
BATCH, HEADS, GROUPS, QUERIES, KEYS, FEATURES, SIZE = 2, 2, 1, 31, 41, 11, 5


def explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    activation: str,
    allowed: Tensor,
    bias: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Compute every pair-feature; a row that attends to nothing gives 0 and a log-sum-exp of -inf."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    hidden = ACTIVATIONS[activation](query[:, :, :, None] + key[:, :, None])
    scores = (hidden * weight[:, None, None, :]).sum(-1) + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, -1)
    return torch.where(allowed.any(-1, keepdim=True), weights, 0.0) @ value, scores.logsumexp(-1)


def allowed_pairs(settings: dict[str, Any], shape: tuple[int, int, int, int], device: str) -> Tensor:
    i = torch.arange(shape[2], device=device)[:, None]
    j = torch.arange(shape[3], device=device)[None, :]
    allowed = torch.ones(shape, dtype=torch.bool, device=device)
    low, high = settings.get("band", (None, None))
    if low is not None:
        allowed &= j - i >= low
    if high is not None:
        allowed &= j - i <= high
    if "lengths" in settings:
        allowed &= j < settings["lengths"][:, None, None, None]
    if "query_ids" in settings:
        allowed &= settings["query_ids"][:, None, :, None] == settings["key_ids"][:, None, None, :]
    if "mask" in settings:
        allowed &= settings["mask"]
    return allowed


def added(extra: dict[str, Tensor], queries: int, keys: int, device: str) -> Tensor | float:
    total: Tensor | float = extra.get("bias", 0.0)
    if "relative" in extra:
        radius = extra["relative"].shape[1] // 2
        step = torch.arange(keys, device=device)[None] - torch.arange(queries, device=device)[:, None]
        total = total + extra["relative"][:, step.clamp(-radius, radius) + radius]
    return total


def compare(
    dtype: torch.dtype,
    device: str,
    *,
    settings: Callable[..., dict[str, Any]] | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
    activation: str = "tanh",
    groups: int = GROUPS,
    keys: int = KEYS,
    form: str = "auto",
    heavy: float = 1.0,
    batch: int = BATCH,
) -> None:
    """Check output, log-sum-exp and every gradient, each within a few roundings of the dtype."""
    from regard.kernels.additive.fused import additive_attention

    torch.manual_seed(7)
    shape = (batch, HEADS, QUERIES, keys)
    query = torch.randn(batch, HEADS, QUERIES, FEATURES) * scale + shift
    key = torch.randn(batch, groups, keys, FEATURES) * scale - shift
    value = torch.randn(batch, groups, keys, SIZE)
    weight = heavy * torch.randn(HEADS, FEATURES) / FEATURES**0.5
    out_grad, lse_grad = torch.randn(*shape[:3], SIZE, device=device), torch.randn(shape[:3], device=device)
    chosen = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in (settings() if settings else {}).items()}
    leaves = [x.to(device, dtype) for x in (query, key, value, weight)]
    learned = {name: chosen.pop(name) for name in ("bias", "relative") if name in chosen}
    allowed = allowed_pairs(chosen, shape, device)

    def run(cast: torch.dtype | None, attend: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        mine = [x.to(cast or x.dtype, copy=True).requires_grad_() for x in (*leaves, *learned.values())]
        extra = dict(zip(learned, mine[4:], strict=True))
        out, lse = attend(*mine[:4], extra)
        real = torch.where(lse == float("-inf"), 0.0, lse)
        loss = (out.double() * out_grad).sum() + (real.double() * lse_grad).sum()
        return [out.detach(), real.detach(), *torch.autograd.grad(loss, mine)]

    true = run(torch.float64, lambda *x: explicit(*x[:4], activation, allowed, added(x[4], QUERIES, keys, device)))
    found = run(None, lambda *x: additive_attention(*x[:4], activation=activation, form=form, **chosen, **x[4]))
    most = {torch.float32: 3e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    names = ["out", "lse", "query", "key", "value", "weight", *learned]
    for name, a, t in zip(names, found, true, strict=True):
        error = ((a.double() - t).norm() / t.norm()).item()
        assert error < most, f"{name}: relative error {error:.1e}"


def _lengths() -> dict[str, Any]:
    return {"lengths": torch.tensor([0, KEYS - 20])}


def _segments() -> dict[str, Any]:
    """Return ids that differ only beyond 32 bits."""
    ids = {"query_ids": torch.arange(QUERIES) // 17 * 2**32, "key_ids": torch.arange(KEYS) // 13 * 2**32}
    return {name: t.expand(BATCH, -1) for name, t in ids.items()}


def _everything() -> dict[str, Any]:
    return {
        **_segments(),
        "band": (-23, 19),
        "lengths": torch.tensor([KEYS - 29, 2**40]),  # the second one: all keys
        "mask": torch.rand(BATCH, 1, QUERIES, KEYS) > 0.2,
        "bias": torch.randn(1, HEADS, QUERIES, KEYS),
        "relative": torch.randn(HEADS, 31),
    }


FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (FULL, {}),
    "bfloat16, several tiles": (BRAIN, {"keys": 149}),
    "float16": (HALF, {}),
    "float16, heavy weights": (HALF, {"heavy": 8.0}),  # weights far below their ceiling would underflow
    "float16, heavy weights, exact": (HALF, {"heavy": 8.0, "form": "exact"}),
    "every head its keys": (FULL, {"groups": HEADS}),
    "causal": (FULL, {"settings": lambda: {"band": (None, 0)}}),
    "window": (BRAIN, {"settings": lambda: {"band": (-11, 7)}}),
    "lengths": (FULL, {"settings": _lengths}),
    "segments": (BRAIN, {"settings": _segments}),
    "everything float32": (FULL, {"settings": _everything}),
    "everything bfloat16": (BRAIN, {"settings": _everything}),
    "key bias": (FULL, {"settings": lambda: {"bias": torch.randn(BATCH, 1, 1, KEYS)}}),
    "sigmoid": (FULL, {"activation": "sigmoid"}),
    "gelu": (FULL, {"activation": "gelu"}),
    "leaky_relu": (FULL, {"activation": "leaky_relu"}),
    "gelu bfloat16": (BRAIN, {"activation": "gelu"}),
    "times 10": (FULL, {"scale": 10.0}),
    "times 100": (FULL, {"scale": 100.0}),
    "times 10 bfloat16": (BRAIN, {"scale": 10.0}),
    "a 60, b -59": (FULL, {"shift": 59.5}),
}

# The interpreter is slow: cases that differ from another only in dtype or mask shape run on a GPU only.
ON_GPUS = ("float16", "every head its keys", "causal", "key bias", "segments", "everything bfloat16", "gelu bfloat16")
INTERPRETED = [name for name in CASES if name not in (*ON_GPUS, "times 10 bfloat16")]


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


@pytest.mark.parametrize("device", DEVICES)
def test_dropout(device: str) -> None:
    """The same seed drops the same pairs, forward and backward; weights that are not dropped are scaled."""
    from regard.kernels.additive.fused import additive_attention

    torch.manual_seed(3)
    query, key = torch.randn(1, 2, 23, 7, device=device), torch.randn(1, 2, 79, 7, device=device)
    value, weight = torch.ones(1, 2, 79, 3, device=device), torch.randn(7, device=device) * 0.2
    value.requires_grad_()
    runs = [additive_attention(query, key, value, weight, dropout=0.25, seed=seed)[0] for seed in (7, 7, 8)]
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    assert not torch.equal(runs[0], runs[2])
    torch.testing.assert_close(runs[0].mean(), torch.ones((), device=device), rtol=0.03, atol=0)
    grads = [torch.autograd.grad(run.sum(), value)[0] for run in runs[:2]]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    # Σ over keys and columns of dL/dV · V is the loss, if both passes drop the same pairs
    torch.testing.assert_close((grads[0] * value).sum(), runs[0].sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [FULL, BRAIN], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_poison(device: str, dtype: torch.dtype) -> None:
    """NaN and Inf at masked positions change nothing; at attended ones they give NaN."""
    from regard.kernels.additive.fused import additive_attention

    torch.manual_seed(3)
    query, key = torch.randn(1, 1, 17, 7), torch.randn(1, 1, 45, 7)
    value, weight = torch.randn(1, 1, 45, 3), torch.randn(7)
    query, key, value, weight = (x.to(device, dtype) for x in (query, key, value, weight))
    mask = torch.ones(1, 1, 17, 45, dtype=torch.bool, device=device)
    mask[..., 11] = False
    settings = {"lengths": torch.tensor([37], device=device), "mask": mask}
    # Both calls have gradients, or neither: in half precision these use two fits of the series.
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


UNLIKE = torch.logspace(-1.5, 0.5, 67)  # more units than one tile processes


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
    """Without gradients half precision uses separate series, whose slopes and constants enter the log-sum-exp.

    Each hidden unit uses the fit of its own range, so that units of different ranges do not affect each other.
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
        found = additive_attention(*inputs, activation=activation)
    ours, theirs = ([((a.double() - t).norm() / t.norm()).item() for a, t in zip(x, true, strict=True)]
                    for x in (found, plain))  # fmt: skip
    if device == "cpu":  # the interpreter truncates where a GPU rounds
        theirs = [{BRAIN: 1e-2, HALF: 1e-3}[dtype] / 1.5, 1e-3 / 1.5]
    assert all(a < 1.5 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [FULL, BRAIN])
def test_repeatable(dtype: torch.dtype) -> None:
    """With deterministic algorithms, two runs agree bit for bit."""
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
            out = additive_attention(*leaves[:4], bias=leaves[4], relative=leaves[5], band=(-90, 70))[0]
            found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("device", DEVICES)
def test_wide_values(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of many columns are processed in parts: the same output and the same gradients."""
    from regard.kernels.additive import fused

    torch.manual_seed(10)
    found = []
    leaves = [torch.randn(1, 1, n, d) for n, d in ((13, 7), (37, 7), (37, 5))] + [torch.randn(1, 7)]
    leaves = [x.to(device).requires_grad_() for x in leaves]
    for columns in (5, 3):
        monkeypatch.setattr(fused, "_COLUMNS", columns)
        out, lse = fused.additive_attention(*leaves, dropout=0.25, seed=3, band=(-9, 30))
        found.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Batch, heads, key heads, whether each head and item has its own settings, dropout; the numbers of heads per call, then
# of the whole
HALVES = [(1, 2, 2, True, 0.0, [1, 1], [2]), (2, 1, 1, False, 0.2, [1, 1], [2])]
# Many heads take the interpreter long.
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
    """Processing half of the heads, or of the batch, at a time gives the same gradients, with any settings per head or
    item."""
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
            *leaves[:4], bias=leaves[4], relative=leaves[5], dropout=dropout, seed=3, **settings
        )
        loss = out.float().square().sum() + torch.where(lse == float("-inf"), 0.0, lse).sin().sum()
        found.append(torch.autograd.grad(loss, leaves))
    for leaf, a, b in zip(leaves, *found, strict=True):
        assert a.shape == leaf.shape
        assert a.dtype == leaf.dtype
        assert (a - b).norm() <= 1e-2 * b.norm()
    assert [len(units) for units in turns] == parts + whole


@pytest.mark.parametrize("device", DEVICES)
def test_direct(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortcut takes simple calls, equals the kernels, and leaves all other calls to the general path."""
    from regard.core.backends import additive

    if device == "cpu":
        # These tensors are on the CPU, which has no device index.
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    torch.manual_seed(11)
    query, key, value = (torch.randn(2, 3, n, d, device=device) for n, d in ((13, 7), (17, 7), (17, 5)))
    for weight in (torch.randn(7, device=device), torch.randn(3, 7, device=device)):
        found = additive.directly(query, key, value, regard.Additive(weight))
        mask = torch.ones(2, 3, 13, 17, dtype=torch.bool, device=device)
        wide = [x.double() for x in (query, key, value, weight.expand(3, 7))]
        true = explicit(*wide, "tanh", mask, 0.0)[0]
        assert found is not None
        assert (found.double() - true).norm() <= 3e-6 * true.norm()
    score = regard.Additive(torch.randn(7, device=device))
    for other in (
        (query[:, :, :8], key, value), (query, key[:, :1], value[:, :1]), (query, key, value[:, :, :16]),
        (query.double(), key.double(), value.double()), (query[0], key[0], value[0]), (query[:, :, :0], key, value),
        (query.half(), key, value),
    ):  # fmt: skip
        assert additive.directly(*other, score) is None
    assert additive.directly(query, key, value, regard.Additive(torch.randn(2, 7, device=device))) is None


def test_fits_keep_their_word() -> None:
    """Every series of the table is close to its function over its range: checked from the numbers alone."""
    from regard.kernels.additive.series import BUDGETS, Row, Series

    text = importlib.resources.files("regard.kernels.additive").joinpath("series.json").read_text()

    functions = {"tanh": torch.tanh, "gelu": lambda x: torch.nn.functional.gelu(x) - x / 2}
    for name, table in json.loads(text).items():
        target, dtype, direction = name.split()
        rows = [Row(together, tuple(Series(*fit) for fit in fits)) for together, fits in table]
        assert [row.reach for row in rows] == sorted(row.reach for row in rows)
        assert [row.together for row in rows] == sorted(row.together for row in rows)
        most = BUDGETS[dtype, direction][0] * (1.26 if direction == "forward" else 1.01)  # checked at fewer points
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
    """ALiBi and shifted tables reach the kernels as one number for each head and distance j - i."""
    from regard.core.backends.kernel_arguments import bias_arguments
    from regard.core.problem import build

    torch.manual_seed(2)
    query, key, value = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 11, 4), torch.randn(2, 3, 11, 2)
    score = regard.Additive(torch.ones(4))
    rules = [regard.alibi([0.5, 0.25, 1.0]), regard.alibi([0.5, 0.25, 1.0], offset=6), regard.alibi([0.3])]
    rules += [regard.relative(torch.randn(3, 7), offset=n) for n in (0, 4, -9)] + [regard.relative(torch.randn(7), 2)]
    for bias in rules:
        problem = build(query, key, value, score, regard.Softmax(), None, bias, 0.0, None, None)
        table = bias_arguments(problem, query.shape[:1])["relative"]
        reach = table.shape[1] // 2
        place = (torch.arange(11) - torch.arange(5)[:, None]).clamp(-reach, reach) + reach
        torch.testing.assert_close(table[:, place], bias.values(range(5), range(11), FULL).expand(3, 5, 11))


def test_wants_cuda() -> None:
    from regard.kernels.additive.fused import additive_attention

    with pytest.raises(ValueError, match="run on CUDA"):
        additive_attention(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), torch.ones(3))


@pytest.mark.cuda
def test_a_direct_call_equals_the_general_one() -> None:
    query, key, value = (torch.randn(2, 4, 150, 32, device="cuda", dtype=BRAIN, requires_grad=True) for _ in range(3))
    score = regard.Additive(torch.randn(32, device="cuda", dtype=BRAIN, requires_grad=True))
    found = [regard.attention(query, key, value, score=score, backend=way).output for way in ("auto", "additive")]
    leaves = [query, key, value, score.weight]
    ways = [(out, *torch.autograd.grad(out.float().square().sum(), leaves)) for out in found]
    for a, b in zip(*ways, strict=True):
        assert (a.float() - b.float()).norm() <= 1e-5 * b.float().norm()


@pytest.mark.cuda
def test_in_a_graph() -> None:
    """A call has no synchronisation, so a CUDA graph can capture it."""
    from regard.kernels.additive.fused import additive_attention

    query, key, value = (torch.randn(1, 2, n, 61, device="cuda", dtype=BRAIN) for n in (211, 307, 307))
    weight = torch.randn(61, device="cuda", dtype=BRAIN)
    true = additive_attention(query, key, value, weight)[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = additive_attention(query, key, value, weight)[0]
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, true, rtol=0, atol=0)
