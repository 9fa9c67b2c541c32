"""Triton kernels for masks that allow ranges of keys (padding, bands, segments), against float64 with a dense mask."""

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels import availability


class Case(NamedTuple):
    """The sizes, masks and biases of a call; `lengths` and ids have one entry for each sequence of the batch."""

    b: int
    h: int
    g: int
    q: int
    k: int
    d: int = 16
    e: int = 16
    low: int | None = None
    high: int | None = None
    lengths: list[int] | None = None
    query_ids: list[list[int]] | None = None
    key_ids: list[list[int]] | None = None
    slopes: list[float] | None = None
    offset: int = 0
    table: tuple[int, int] | None = None  # the shape of a table of relative biases: heads and entries
    bias: tuple[int, ...] | None = None  # the shape of a dense bias, some of whose entries are -inf
    dense: tuple[int, ...] | None = None  # the shape of a dense mask
    cap: float | None = None
    shift: float | None = None


# Segment ids of documents for two sequences; the second shows that ids need not be sorted.
DOCUMENTS = [[0] * 90 + [1] * 7 + [2] * 60, [5] * 20 + [-3] * 130 + [9] * 7]
APART = [[i % 3 for i in range(157)], [7] * 157]
CASES = {
    "padding": Case(3, 2, 2, 97, 211, lengths=[211, 70, 0]),
    "lengths beyond the keys": Case(2, 1, 1, 71, 71, lengths=[90, -2]),
    "causal padding, grouped": Case(2, 4, 2, 151, 151, high=0, lengths=[151, 33]),
    "causal with an offset": Case(1, 2, 1, 67, 131, 32, 16, high=64),
    "shifted before the first key": Case(1, 1, 1, 131, 131, high=-70),
    "wide window": Case(1, 2, 2, 197, 197, low=-150, high=20),
    "window behind": Case(1, 1, 1, 71, 211, 16, 32, low=60, high=90, lengths=[150]),
    "nothing": Case(1, 1, 1, 71, 41, low=-5, high=-30),
    "documents": Case(2, 2, 1, 157, 157, query_ids=DOCUMENTS, key_ids=DOCUMENTS),
    "causal documents": Case(2, 1, 1, 157, 157, high=0, query_ids=DOCUMENTS, key_ids=DOCUMENTS),
    "documents, padded window": Case(
        2, 2, 2, 157, 157, low=-40, high=3, lengths=[140, 157], query_ids=DOCUMENTS, key_ids=DOCUMENTS
    ),
    "scattered segments": Case(2, 1, 1, 157, 157, query_ids=APART, key_ids=DOCUMENTS),
    "causal ALiBi": Case(1, 3, 1, 157, 157, 64, 32, high=0, slopes=[0.5, 0.0, 0.03], offset=2),
    "padding, sizes 40 and 24": Case(2, 1, 1, 37, 67, 40, 24, lengths=[67, 20]),
    "window, size 7": Case(1, 2, 1, 19, 19, 7, 7, low=-9, high=0),
    "few queries, grouped": Case(2, 4, 2, 3, 75, 16, 48, lengths=[75, 0]),
    "few keys": Case(2, 1, 1, 142, 15, 72, 72, lengths=[15, 4]),
    "documents, size 200": Case(2, 1, 1, 157, 157, 200, 132, high=0, query_ids=DOCUMENTS, key_ids=DOCUMENTS),
    "large tiles": Case(1, 2, 1, 261, 261, 128, 128, high=0, lengths=[201]),
    "softcap": Case(2, 4, 2, 67, 131, 40, 24, lengths=[131, 20], cap=1.5),
    "softcap, causal ALiBi, size 128": Case(1, 2, 1, 131, 131, 128, 128, high=0, cap=2.0, slopes=[0.1, 0.3], offset=1),
    "sigmoid": Case(2, 2, 1, 67, 67, 24, 40, high=0, lengths=[67, 0], shift=-1.5),
    "sigmoid, softcap, documents": Case(
        2, 1, 1, 157, 157, query_ids=DOCUMENTS, key_ids=DOCUMENTS, high=0, cap=1.0, shift=0.5
    ),
    "causal table": Case(3, 2, 1, 83, 83, 64, 64, high=0, table=(2, 21)),
    "table for all heads, padded": Case(2, 3, 3, 37, 131, 16, 16, lengths=[131, 50], table=(1, 7), offset=40),
    "long table, window": Case(2, 2, 2, 197, 197, 16, 32, low=-70, high=20, table=(2, 301), offset=-3),
    "table, documents, sigmoid": Case(
        2, 2, 1, 157, 157, query_ids=DOCUMENTS, key_ids=DOCUMENTS, table=(2, 65), shift=-2.0, cap=3.0
    ),
    "table beyond the keys": Case(1, 1, 1, 37, 41, table=(1, 5), offset=-90, shift=0.0),
    "bias": Case(3, 2, 1, 67, 83, 64, 64, bias=(2, 67, 83)),
    "bias for all heads, causal documents": Case(
        2, 2, 2, 157, 157, 16, 16, high=0, query_ids=DOCUMENTS, key_ids=DOCUMENTS, bias=(157, 157)
    ),
    "bias of each sequence, sigmoid": Case(2, 2, 2, 41, 37, 24, 24, lengths=[37, 9], bias=(2, 2, 41, 37), shift=0.1),
    "bias of sequences, softcap": Case(2, 2, 2, 41, 37, 128, 16, bias=(2, 1, 41, 37), cap=2.0),
    "bias of keys, size 200": Case(2, 2, 2, 41, 37, 200, 200, bias=(2, 1, 1, 37)),
    "mask of pairs": Case(2, 2, 2, 71, 67, 16, 16, dense=(71, 67), slopes=[0.2, 0.01]),
    "mask of pairs and sequences, sigmoid": Case(
        2, 2, 2, 71, 67, 16, 16, high=3, dense=(2, 1, 71, 67), bias=(71, 67), shift=0.0
    ),
}


class Extras(NamedTuple):
    """The bias and mask tensors of a case; gradients of `table` and `bias` are tested."""

    table: Tensor | None = None
    bias: Tensor | None = None
    dense: Tensor | None = None


NOTHING = Extras()


def extras(case: Case) -> Extras:
    table = None if case.table is None else torch.randn(case.table)
    bias = dense = None
    if case.bias is not None:
        bias = torch.randn(case.bias)
        bias = torch.where(torch.rand(case.bias) < 0.1, -torch.inf, bias)
        if case.bias[-2] > 1:
            bias[..., 11, :] = -3e38  # a large negative but finite bias does not mask a pair
        bias[..., 5], bias[..., -2:, :] = -torch.inf, -torch.inf  # masks key 5, and all keys of two queries
    if case.dense is not None:
        dense = torch.rand(case.dense) < 0.7
        dense[..., 3], dense[..., 7, :] = False, False
    return Extras(table, bias, dense)


def explicit(query: Tensor, key: Tensor, value: Tensor, case: Case, scale: float, given: Extras = NOTHING) -> Tensor:
    group = case.h // case.g
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    i, j = torch.arange(case.q)[:, None], torch.arange(case.k)[None, :]
    allowed = torch.ones(case.b, 1, case.q, case.k, dtype=torch.bool)
    if case.low is not None:
        allowed = allowed & (j - i >= case.low)
    if case.high is not None:
        allowed = allowed & (j - i <= case.high)
    if case.lengths is not None:
        allowed = allowed & (j < torch.tensor(case.lengths)[:, None, None, None])
    if case.query_ids is not None:
        allowed = allowed & (
            torch.tensor(case.query_ids)[:, None, :, None] == torch.tensor(case.key_ids)[:, None, None]
        )
    if given.dense is not None:
        allowed = allowed & given.dense
    allowed = allowed.to(query.device)
    scores = query @ key.mT * scale
    if case.cap is not None:
        scores = case.cap * torch.tanh(scores / case.cap)
    if case.slopes is not None:
        far = (i + case.offset - j).abs().to(scores)
        scores = scores - torch.tensor(case.slopes).to(scores)[:, None, None] * far
    if given.table is not None:
        reach = given.table.shape[-1] // 2
        scores = scores + given.table[:, (j - i - case.offset).clamp(-reach, reach) + reach]
    if given.bias is not None:
        allowed = allowed & (given.bias != -torch.inf)
        scores = scores + torch.where(given.bias == -torch.inf, 0, given.bias)
    if case.shift is not None:
        return torch.where(allowed, torch.sigmoid(scores + case.shift), 0.0) @ value
    filled = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, scores, torch.where(filled, -torch.inf, 0.0).double())
    return torch.where(filled, torch.softmax(scores, -1), 0.0) @ value


def strides(tensor: Tensor, name: str) -> dict[str, int]:
    """Return the strides of a tensor over (b, h, q, k), with 0 for axes along which it broadcasts."""
    wide = tensor[(None,) * (4 - tensor.ndim)]
    steps = [0 if size == 1 else step for size, step in zip(wide.shape, wide.stride(), strict=True)]
    return {f"{name}_{axis}": step for axis, step in zip("bhqk", steps, strict=True)}


def rules(case: Case, device: str, given: Extras = NOTHING) -> Any:
    from regard.kernels.triton.range_pairs import Rules
    from regard.kernels.triton.segment_bounds import segment_bounds

    made: dict[str, Any] = {"low": case.low, "high": case.high, "cap": case.cap, "shift": case.shift}
    if case.lengths is not None:
        made |= {"lengths": torch.tensor(case.lengths, device=device), "lengths_b": 1}
    if case.query_ids is not None:
        # Query ids are int64, and key ids are int32 with a transposed memory layout.
        ids = (
            torch.tensor(case.query_ids, device=device),
            torch.tensor(case.key_ids, device=device).int().T.contiguous().T,
        )
        for name, t in zip(("query", "key"), ids, strict=True):
            made |= {f"{name}_ids": t, f"{name}_b": t.stride(0), f"{name}_n": t.stride(1)}
        made |= {"row_bounds": segment_bounds(*ids), "key_bounds": segment_bounds(*reversed(ids))}
    if case.slopes is not None:
        made |= {"slopes": torch.tensor(case.slopes, device=device), "slopes_h": 1, "offset": case.offset}
    if given.table is not None:
        entries = given.table.shape[1]
        step = 0 if given.table.shape[0] == 1 else entries
        made |= {"table": given.table, "table_h": step, "reach": entries // 2, "offset": case.offset}
    if given.bias is not None:
        made |= {"bias": given.bias, **strides(given.bias, "bias")}
    if given.dense is not None:
        made |= {"mask": given.dense.to(device).view(torch.uint8), **strides(given.dense, "mask")}
    return Rules(**made)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted, id="interpreted-float32"),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda, id="cuda-bfloat16"),
        pytest.param("cuda", torch.float16, marks=pytest.mark.cuda, id="cuda-float16"),
        pytest.param("cuda", torch.float32, marks=pytest.mark.cuda, id="cuda-float32"),
    ],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients(case: Case, device: str, dtype: torch.dtype) -> None:
    from regard.kernels.triton.range_attention import range_attention

    if device == "cuda" and dtype == torch.float32 and case.d > 128:
        pytest.skip("float32 with gradients takes sizes up to 128")
    most = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.manual_seed(3)
    shapes = ((case.h, case.q, case.d), (case.g, case.k, case.d), (case.g, case.k, case.e))
    leaves = [torch.randn(case.b, *shape).to(device, dtype) for shape in shapes]
    # The tensors are stored as (b, n, h, d), the layout of a layer's projections.
    mine = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    true = [x.double().requires_grad_() for x in leaves]
    found, given, learned = extras(case), Extras(), None
    chosen = found.table if found.bias is None or case.bias is None else found.bias
    learns = chosen is not None and (case.bias is None or case.bias[-2:] == (case.q, case.k))
    if chosen is not None:
        learned = chosen.to(device, dtype).requires_grad_(learns)
        wide = chosen.to(device, dtype).double().requires_grad_(learns)
        name = "table" if case.bias is None else "bias"
        found, given = found._replace(**{name: learned}), found._replace(**{name: wide})
        mine, true = ([*mine, learned], [*true, wide]) if learns else (mine, true)
    given = given if chosen is not None else found
    given = given._replace(dense=None if found.dense is None else found.dense.cpu())
    out = range_attention(*mine[:3], rules(case, device, found), 0.3, learned if learns else None)
    real = explicit(*true[:3], case, 0.3, given)
    change = torch.randn_like(real)
    if case.bias is not None:
        change[..., 11, :] = 0  # scores near -3e38 leave no digits for the logarithm of a sum of weights in float32
    results = (out, *torch.autograd.grad(out, mine, change.to(dtype)))
    for a, t in zip(results, (real, *torch.autograd.grad(real, true, change)), strict=True):
        assert (a.double() - t).norm().item() <= most * max(t.norm().item(), 1e-6)


@pytest.mark.interpreted
def test_bounds_of_segments() -> None:
    """For each block of 32 queries, the function returns bounds [start, stop) of the keys whose id one of these queries
    has.

    In [whole start, whole stop), every key has the id of every query of the block. Each row of bounds is [start, whole
    start, whole stop, stop].
    """
    from regard.kernels.triton.segment_bounds import segment_bounds

    far = 32 * 2**24
    ids = torch.tensor([[1] * 64 + [2] * 96 + [3] * 20])
    expected = [
        [0, 0, 64, 64],
        [0, 0, 64, 64],
        [64, 64, 160, 160],
        [64, 64, 160, 160],
        [64, 64, 160, 160],
        [160, 160, 192, 192],
    ]
    assert segment_bounds(ids, ids).tolist() == [expected]
    mixed = torch.tensor([[1] * 40 + [3] * 24])
    assert segment_bounds(mixed, ids).tolist() == [[[0, 0, 64, 64], [0, far, 0, 192]]]
    assert segment_bounds(torch.tensor([[4]]), ids).tolist() == [[[far, far, 0, 0]]]
    split = torch.tensor([[1] * 32 + [2] * 32 + [1] * 32])  # the two blocks of 32 keys of segment 1 are not adjacent
    assert segment_bounds(torch.tensor([[1]]), split).tolist() == [[[0, far, 0, 96]]]


LENGTHS, PACKED = torch.tensor([131, 70]), torch.tensor([[0] * 50 + [4] * 81, [2] * 100 + [1] * 31])
ALIKE = PACKED[:1]
# Segment ids of keys, some of which no query has.
ELSEWHERE = torch.tensor([[4] * 60 + [8] * 71, [1] * 131])
MASKS = {
    "padding": (regard.padding(LENGTHS), lambda b, i, j: j < LENGTHS[b]),
    "causal padding": (regard.causal() & regard.padding(LENGTHS), lambda b, i, j: (j <= i) & (j < LENGTHS[b])),
    "segments": (regard.segments(PACKED, PACKED), lambda b, i, j: PACKED[b, i] == PACKED[b, j]),
    "padded documents": (
        regard.segments(PACKED, PACKED) & regard.causal() & regard.padding(LENGTHS),
        lambda b, i, j: (PACKED[b, i] == PACKED[b, j]) & (j <= i) & (j < LENGTHS[b]),
    ),
    "documents elsewhere": (
        regard.segments(PACKED, ELSEWHERE) & regard.window(60, 9),
        lambda b, i, j: (PACKED[b, i] == ELSEWHERE[b, j]) & (j >= i - 60) & (j <= i + 9),
    ),
    "one list for all": (regard.segments(ALIKE, ALIKE), lambda b, i, j: PACKED[b * 0, i] == PACKED[0, j]),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", MASKS)
def test_masks_by_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in fully masked keys reaches no output and no gradient, by the backend and by its function `direct`, which
    only runs the kernel."""
    from regard.core.backends import flex, ranges
    from regard.core.clauses import clauses
    from regard.core.problem import build

    # The kernel checks that its tensors are on the current device, here the CPU.
    monkeypatch.setattr(availability, "current_device", lambda: None)
    mask, may = MASKS[name]
    torch.manual_seed(5)
    query, key, value = (torch.randn(2, 2, 131, 16).half().requires_grad_() for _ in range(3))
    b, i, j = torch.arange(2)[:, None, None], torch.arange(131)[:, None], torch.arange(131)[None, :]
    allowed = may(b, i, j)[:, None]
    seen = allowed.any(-2)[..., None].expand(2, 2, 131, 1)
    broken = [torch.where(seen, t, torch.nan).detach().requires_grad_() for t in (key, value)]
    problem = build(query, *broken, regard.ScaledDot(), regard.Softmax(), mask, None, 0.0, None, None)
    assert flex.kernel(problem) == "triton ranges"
    found = clauses(problem.mask, 131, 131)
    assert found is not None
    output = ranges.attend(problem, found).output
    true = [torch.where(k, t, 0).double() for k, t in ((torch.tensor(True), query), (seen, key), (seen, value))]
    true = [t.detach().requires_grad_() for t in true]
    filled = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, true[0] @ true[1].mT / 4, torch.where(filled, -torch.inf, 0.0).double())
    real = torch.where(filled, torch.softmax(scores, -1), 0.0) @ true[2]
    change = torch.randn_like(real)
    mine = (output, *torch.autograd.grad(output, (query, *broken), change.half()))
    for a, t in zip(mine, (real, *torch.autograd.grad(real, true, change)), strict=True):
        assert (a.double() - t).norm() <= 3e-3 * t.norm()
    run = ranges.direct(problem, found)
    assert run is not None
    short = run(query, *broken, problem.score, mask, None)
    # With the mask "documents elsewhere", the function that `direct` returned gives None, because NaN in masked keys
    # has to be replaced first.
    assert (short is None) == (name == "documents elsewhere")
    assert short is None or torch.equal(short, output)


@pytest.mark.interpreted
@pytest.mark.parametrize("slopes", [[0.25, 0.03], [0.25]], ids=["one for each head", "one for all"])
@pytest.mark.parametrize("score", [regard.ScaledDot(0.3), regard.Bilinear(0.3 * torch.eye(16).half())], ids=str)
def test_alibi_without_a_problem(score: regard.Score, slopes: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients equal those of float64, by the backend and by its function `direct`, which only runs the
    kernel; also for a bilinear score."""
    from regard.core.backends import ranges
    from regard.core.clauses import clauses
    from regard.core.problem import build

    monkeypatch.setattr(availability, "current_device", lambda: None)
    case = Case(2, 2, 2, 67, 67, high=0, lengths=[67, 40], slopes=slopes)
    torch.manual_seed(8)
    leaves = [torch.randn(2, 2, 67, 16).half().requires_grad_() for _ in range(3)]
    mask, bias = regard.causal() & regard.padding(torch.tensor([67, 40])), regard.alibi(torch.tensor(slopes))
    problem = build(*leaves, score, regard.Softmax(), mask, bias, 0.0, None, None)
    found = clauses(problem.mask, 67, 67)
    assert found is not None
    true = [t.detach().double().requires_grad_() for t in leaves]
    real = explicit(*true, case, 0.3)
    change = torch.randn_like(real)
    expected = (real, *torch.autograd.grad(real, true, change))
    run = ranges.direct(problem, found)
    # `direct` returns None for bilinear scores in float16, because their keys must be rescaled before the kernel runs.
    assert (run is None) == isinstance(score, regard.Bilinear)
    outputs = [ranges.attend(problem, found).output, *([] if run is None else [run(*leaves, score, mask, bias)])]
    for output in outputs:
        assert output is not None
        mine = (output, *torch.autograd.grad(output, leaves, change.half()))
        for a, t in zip(mine, expected, strict=True):
            assert (a.double() - t).norm() <= 3e-3 * t.norm()


def _with_holes(*shape: int) -> Tensor:
    """Return a bias that masks key 5 for every query, and a tenth of the other pairs."""
    bias = torch.where(torch.rand(shape) < 0.1, -torch.inf, torch.randn(shape)).half()
    bias[..., 5] = -torch.inf
    return bias


PAIRS = torch.arange(67)[:, None] % 7 != torch.arange(67) % 5
PAIRS[:, 5] = False
DOCUMENT_IDS = torch.tensor([[0] * 30 + [4] * 37, [2] * 50 + [1] * 17])
CALLS: dict[str, dict[str, Any]] = {
    "learned table": {"bias": lambda: regard.relative(torch.randn(2, 9).half().requires_grad_(), offset=2)},
    "table for all, softcap": {
        "bias": lambda: regard.relative(torch.randn(41)),
        "score": regard.ScaledDot(softcap=2.0),
        "mask": regard.segments(DOCUMENT_IDS, DOCUMENT_IDS) & regard.causal(),
    },
    "learned bias": {"bias": lambda: _with_holes(2, 67, 67).requires_grad_(), "mask": regard.causal()},
    "bias of keys, sigmoid": {"bias": lambda: _with_holes(2, 1, 1, 67), "normalize": regard.Sigmoid(-2.0)},
    "strided bias": {"bias": lambda: _with_holes(2, 67, 67).mT.contiguous().mT, "mask": regard.causal()},
    "dense mask, ALiBi": {"mask": PAIRS, "bias": lambda: regard.alibi(torch.tensor([0.1, 0.4]))},
    "dense mask and lengths, sigmoid": {
        "mask": regard.dense(PAIRS) & regard.padding(torch.tensor([67, 40])),
        "normalize": regard.Sigmoid(),
    },
    "numbers as slopes, softcap": {"bias": lambda: regard.alibi([0.1, 0.4]), "score": regard.ScaledDot(softcap=1.0)},
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CALLS)
def test_biases_softcaps_and_sigmoid_by_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NaN in keys that no query attends, results equal the float64 reference, by the backend and by its function
    `direct`, which only runs the kernel."""
    from regard.core.backends import flex, ranges
    from regard.core.clauses import clauses
    from regard.core.problem import build

    monkeypatch.setattr(availability, "current_device", lambda: None)
    torch.manual_seed(4)
    call = {"score": regard.ScaledDot(), "normalize": regard.Softmax(), "mask": None, "bias": lambda: None} | CALLS[
        name
    ]
    score, normalize, mask, bias = call["score"], call["normalize"], call["mask"], call["bias"]()
    leaves = [torch.randn(2, 2, 67, 16).half() for _ in range(3)]
    holes = mask is PAIRS or "lengths" in name or isinstance(bias, Tensor)
    mine, true = [t.clone() for t in leaves], [t.double() for t in leaves]
    if holes:
        for t, fill in ((mine[1], torch.nan), (mine[2], torch.inf), (true[1], 0.0), (true[2], 0.0)):
            t[:, :, 5] = fill
    learned = [t for t in (bias if isinstance(bias, Tensor) else getattr(bias, "table", None),) if t is not None]
    learned = [t for t in learned if t.requires_grad]
    mine, true = [[t.requires_grad_() for t in each] for each in (mine, true)]
    problem = build(*mine, score, normalize, mask, bias, 0.0, None, None)
    assert flex.kernel(problem) == "triton ranges"
    found = clauses(problem.mask, 67, 67)
    assert found is not None
    run = ranges.direct(problem, found)
    assert run is not None
    wide = [t.detach().double().requires_grad_() for t in learned]
    again = bias if not wide else wide[0] if isinstance(bias, Tensor) else regard.relative(wide[0], bias.offset)
    again = again.double() if isinstance(again, Tensor) else again
    real = regard.attention(
        *true, score=score, normalize=normalize, mask=mask, bias=again, backend="reference"
    ).output  # fmt: skip
    change = torch.randn_like(real)
    expected = (real, *torch.autograd.grad(real, [*true, *wide], change))
    for output in (ranges.attend(problem, found).output, *(run(*mine, score, mask, bias) for _ in range(2))):
        assert output is not None
        results = (output, *torch.autograd.grad(output, [*mine, *learned], change.half()))
        for a, t in zip(results, expected, strict=True):
            assert (a.double() - t).norm() <= 4e-3 * t.norm()


@pytest.mark.interpreted
def test_other_masks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.core.backends import ranges
    from regard.core.clauses import clauses
    from regard.core.problem import build

    monkeypatch.setattr(availability, "current_device", lambda: None)
    query = key = value = torch.randn(2, 2, 131, 16).half()
    by_head = regard.padding(LENGTHS[:, None].expand(2, 2))
    dense = regard.dense(torch.ones(131, 131, dtype=torch.bool)) & regard.padding(LENGTHS)
    for mask in (by_head, dense, regard.causal() & regard.causal(), regard.padding(LENGTHS) | regard.causal()):
        problem = build(query, key, value, regard.ScaledDot(), regard.Softmax(), mask, None, 0.0, None, None)
        assert not ranges.serves(problem, clauses(problem.mask, 131, 131))
    padded = regard.padding(LENGTHS)
    for size, dtype in ((257, torch.half), (129, torch.float), (16, torch.double)):
        tensors = [t[..., :1].expand(2, 2, 131, size).to(dtype).requires_grad_() for t in (query, key, value)]
        problem = build(*tensors, regard.ScaledDot(), regard.Softmax(), padded, None, 0.0, None, None)
        assert not ranges.serves(problem, clauses(problem.mask, 131, 131))
    others: tuple[dict[str, Any], ...] = (
        {"dropout": 0.1},
        {"normalize": regard.Entmax(1.5)},
        {"bias": torch.zeros(131).half().requires_grad_()},
        {"bias": regard.alibi(torch.ones(2).requires_grad_())},
        {"bias": regard.relative(torch.ones(2, 1))},
    )
    for given in others:
        settings = {"normalize": regard.Softmax(), "bias": None, "dropout": 0.0} | given
        problem = build(
            query, key, value, regard.ScaledDot(), settings["normalize"], padded, settings["bias"],
            settings["dropout"], None, None,
        )  # fmt: skip
        assert not ranges.serves(problem, clauses(problem.mask, 131, 131))


@pytest.mark.cuda
@pytest.mark.parametrize("size", [64, 72])
def test_tensors_that_begin_between_the_steps_of_a_wide_load(size: int) -> None:
    """A query, a key or a value whose address is not a multiple of 16 bytes needs a compiled kernel of its own."""
    torch.manual_seed(7)
    mask = regard.padding(torch.tensor([90, 41], device="cuda"))
    for place in range(3):
        room = [torch.randn(2 * 3 * 90 * size + 8, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        tensors = [t[4 * (n == place) :][: 2 * 3 * 90 * size].view(2, 3, 90, size) for n, t in enumerate(room)]
        found = regard.attention(*tensors, mask=mask).output
        plain = regard.attention(*(t.double() for t in tensors), mask=mask, backend="reference").output
        assert (found.double() - plain).norm() <= 1e-2 * plain.norm()


@pytest.mark.cuda
def test_tensors_laid_out_alike_under_other_rules() -> None:
    """Calls that differ only in masks, slopes, or the dtype and address of lengths use different compiled kernels."""
    torch.manual_seed(9)
    query, key, value = (torch.randn(2, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lengths, slopes = torch.tensor([5, 100, 31], device="cuda"), torch.tensor([0.1, 0.3], device="cuda")
    ids = (torch.arange(128, device="cuda") // 50).expand(2, 128).contiguous()
    calls: list[dict[str, Any]] = [
        {"mask": regard.padding(lengths[:2].clone())},
        {"mask": regard.padding(lengths[1:])},
        {"mask": regard.padding(lengths[1:].int())},
        {"mask": regard.causal() & regard.padding(lengths[1:])},
        {"mask": regard.causal(), "bias": regard.alibi(slopes)},
        {"bias": regard.alibi(slopes)},
        {"mask": regard.padding(lengths[1:]), "bias": regard.alibi(slopes, offset=3)},
        {"mask": regard.segments(ids, ids)},
        {"mask": regard.segments(ids, ids), "bias": regard.alibi(slopes)},
    ]
    for call in calls * 2:
        found = regard.attention(query, key, value, **call).output
        plain = regard.attention(query.double(), key.double(), value.double(), **call, backend="reference").output
        assert (found.double() - plain).norm() <= 1e-2 * plain.norm()


@pytest.mark.cuda
def test_no_call_waits_for_the_device() -> None:
    """The host never waits for the GPU: with new masks, a reused mask whose ids change, and in a captured graph."""
    torch.manual_seed(6)
    query, key, value = (torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = torch.arange(300, device="cuda").expand(2, 300) // 50
    ids, lengths = ids.contiguous(), torch.tensor([300, 170], device="cuda")

    def documents() -> regard.Mask:
        return regard.segments(ids, ids) & regard.causal() & regard.padding(lengths)

    def true() -> Tensor:
        doubles = (t.double() for t in (query, key, value))
        return regard.attention(*doubles, mask=documents(), backend="reference").output

    mask = documents()
    assert regard.explain(query, key, value, mask=mask).kernel == "triton ranges"
    for _ in range(2):  # the second call runs the kernel that the first call chose and stored
        regard.attention(query, key, value, mask=documents())
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # Torch warns that the mode in which synchronisation with the GPU raises an error is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        outputs = [regard.attention(query, key, value, mask=each).output for each in (documents(), mask, mask)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for output in outputs:
        assert (output.double() - true()).norm() <= 1e-2 * true().norm()
    # The mask holds `ids`, so this changes its segments in place.
    ids += torch.arange(300, device="cuda") // 120
    assert (regard.attention(query, key, value, mask=mask).output.double() - true()).norm() <= 1e-2 * true().norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = regard.attention(query, key, value, mask=mask).output
    ids.copy_(ids.flip(-1) // 2)
    graph.replay()
    assert (captured.double() - true()).norm() <= 1e-2 * true().norm()
