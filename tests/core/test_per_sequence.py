"""Padding and documents on the CPU, split into sequences: against float64 softmax over a dense mask."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard.core.backends import per_sequence, sdpa
from regard.core.backends.per_sequence import Packed, Piece
from regard.core.clauses import clauses
from regard.core.problem import Problem, build
from regard.core.spans import Stretch

QUERIES, KEYS = 53, 61
LENGTHS = torch.tensor([61, 17, 0])
OWN = torch.tensor([[3] * 20 + [1] * 33, [7] * 53, [0] * 52 + [2]])
OTHER = torch.tensor([[1] * 9 + [3] * 30 + [5] * 22, [7] * 61, [4] * 40 + [0] * 21])
TOGETHER = torch.tensor([[2] * 25 + [0] * 36, [1] * 61, [1, 2, 3] + [4] * 58])
Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
# A mask, its rule as a function of batch, query and key, and the number of queries.
CASES: dict[str, tuple[regard.Mask, Rule, int]] = {
    "padding": (regard.padding(LENGTHS), lambda b, i, j: j < LENGTHS[b], QUERIES),
    "causal padding": (
        regard.causal() & regard.padding(LENGTHS), lambda b, i, j: (j <= i) & (j < LENGTHS[b]), QUERIES
    ),
    "segments": (regard.segments(OWN, OTHER), lambda b, i, j: OWN[b, i] == OTHER[b, j], QUERIES),
    "padded segments": (
        regard.segments(OWN, OTHER) & regard.padding(LENGTHS),
        lambda b, i, j: (OWN[b, i] == OTHER[b, j]) & (j < LENGTHS[b]),
        QUERIES,
    ),
    "documents": (
        regard.segments(TOGETHER, TOGETHER) & regard.causal(),
        lambda b, i, j: (TOGETHER[b, i] == TOGETHER[b, j]) & (j <= i),
        KEYS,
    ),
    "one list for all": (
        regard.segments(TOGETHER[0], TOGETHER[0]), lambda b, i, j: TOGETHER[b * 0, i] == TOGETHER[0, j], KEYS
    ),
}  # fmt: skip


def problem_of(mask: regard.Mask, queries: int, heads: int = 4) -> Problem:
    torch.manual_seed(2)
    shapes = ((3, heads, queries, 8), (3, 2, KEYS, 8), (3, 2, KEYS, 5))
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return build(*tensors, regard.ScaledDot(), regard.Softmax(), mask, None, 0.0, None, None)


def cut_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_sequence, "_CALL", 0)
    monkeypatch.setattr(per_sequence, "_TILE", 0)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in_any_case(monkeypatch)
    mask, rule, queries = CASES[name]
    problem = problem_of(mask, queries)
    assert per_sequence.packed(clauses(problem.mask, queries, KEYS), problem.shape) is not None
    output = sdpa.attend(problem).output
    true = [t.detach().double().requires_grad_() for t in (problem.query, problem.key, problem.value)]
    key, value = (t.repeat_interleave(2, 1) for t in true[1:])
    b, i, j = torch.arange(3)[:, None, None], torch.arange(queries)[:, None], torch.arange(KEYS)[None, :]
    allowed = rule(b, i, j)[:, None]
    filled = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, true[0] @ key.mT / 8**0.5, torch.where(filled, -torch.inf, 0.0).double())
    real = torch.where(filled, torch.softmax(scores, -1), 0.0) @ value
    torch.testing.assert_close(output, real.float(), atol=1e-5, rtol=1e-5)
    change = torch.randn_like(real)
    mine = torch.autograd.grad(output, (problem.query, problem.key, problem.value), change.float())
    for a, t in zip(mine, torch.autograd.grad(real, true, change), strict=True):
        torch.testing.assert_close(a, t.float(), atol=1e-5, rtol=1e-5)


def test_pieces_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and the third sequence of the batch have equal lengths, so they are computed by one call."""
    cut_in_any_case(monkeypatch)
    ids = torch.tensor([[8, 8, 8, 2, 2], [6, 6, 6, 6, 6], [6, 6, 6, 6, 6]])
    mask = (regard.segments(ids, ids) & regard.causal() & regard.padding(torch.tensor([4, 5, 5]))).aligned((3, 1, 5, 5))
    first, second, whole = Stretch(0, 3), Stretch(3, 5), Stretch(0, 5)
    assert per_sequence.packed(clauses(mask, 5, 5), (3, 1, 5, 5)) == [
        Packed(1, [Piece(first, first, 3, True), Piece(second, second, 1, False)]),
        Packed(2, [Piece(whole, whole, 5, True)]),
    ]


@pytest.mark.parametrize(
    "mask",
    [
        regard.causal(),
        regard.window(3, 0) & regard.padding(LENGTHS),
        regard.causal(2) & regard.padding(LENGTHS),
        regard.segments(OWN, torch.arange(KEYS) % 2),
        regard.padding(LENGTHS) & regard.dense(torch.ones(QUERIES, KEYS, dtype=torch.bool)),
        regard.padding(LENGTHS[:, None].expand(3, 4)),
    ],
    ids=["no list", "window", "offset", "scattered", "dense", "by head"],
)
def test_other_masks_are_left_alone(mask: regard.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in_any_case(monkeypatch)
    shape = (3, 4, QUERIES, KEYS)
    assert per_sequence.packed(clauses(mask.aligned(shape), QUERIES, KEYS), shape) is None


def test_many_small_sequences_stay_together() -> None:
    """Sequences are not split if an additional kernel call takes longer than the pairs that it saves."""
    ids = torch.arange(64) // 2
    mask = regard.segments(ids, ids).aligned((2, 1, 64, 64))
    assert per_sequence.packed(clauses(mask, 64, 64), (2, 1, 64, 64)) is None
    long = torch.arange(1024) // 256
    mask = regard.segments(long, long).aligned((2, 1, 1024, 1024))
    assert per_sequence.packed(clauses(mask, 1024, 1024), (2, 1, 1024, 1024)) is not None


@pytest.mark.parametrize(
    "mask", [regard.padding([20, 7]), regard.window(3, 2), regard.causal(-2)], ids=["padding", "window", "shifted"]
)
def test_a_repeated_call_gives_the_same(mask: regard.Mask) -> None:
    """The second call of a signature reuses the first call's choice of a kernel, also if values and keys differ in
    size."""
    torch.manual_seed(4)
    query, key = torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    i, j = torch.arange(20)[:, None], torch.arange(20)[None, :]
    bands = {regard.window(3, 2): (j >= i - 3) & (j <= i + 2), regard.causal(-2): j <= i - 2}
    allowed = bands.get(mask, j < torch.tensor([20, 7])[:, None, None, None]).expand(2, 1, 20, 20)
    filled = allowed.any(-1, keepdim=True)
    closed = torch.where(filled, -torch.inf, 0.0).double()
    for size in (8, 5):
        value = torch.randn(2, 2, 20, size)
        scores = torch.where(allowed, query.double() @ key.double().mT / 8**0.5, closed)
        true = torch.where(filled, torch.softmax(scores, -1), 0.0) @ value.double()
        for _ in range(3):
            output = regard.attention(query, key, value, mask=mask).output
            torch.testing.assert_close(output, true.float(), atol=1e-5, rtol=1e-5)


SHORT = 13
SHORT_LENGTHS, SHORT_IDS = torch.tensor([13, 4, 1]), torch.tensor([[2] * 5 + [0] * 8, [1] * 13, [1, 2, 3] + [4] * 10])
SHORT_MASKS: dict[str, tuple[Callable[[], regard.Mask], Rule]] = {
    "padding": (lambda: regard.padding(SHORT_LENGTHS), lambda b, i, j: j < SHORT_LENGTHS[b]),
    "an empty sequence": (lambda: regard.padding(SHORT_LENGTHS - 1), lambda b, i, j: j < SHORT_LENGTHS[b] - 1),
    "causal padding": (
        lambda: regard.causal() & regard.padding(SHORT_LENGTHS), lambda b, i, j: (j <= i) & (j < SHORT_LENGTHS[b])
    ),
    "shifted": (
        lambda: regard.padding(SHORT_LENGTHS) & regard.causal(-2),
        lambda b, i, j: (j <= i - 2) & (j < SHORT_LENGTHS[b]),
    ),
    "segments": (
        lambda: regard.segments(SHORT_IDS, SHORT_IDS), lambda b, i, j: SHORT_IDS[b, i] == SHORT_IDS[b, j]
    ),
    "documents": (
        lambda: regard.segments(SHORT_IDS, SHORT_IDS) & regard.causal(),
        lambda b, i, j: (SHORT_IDS[b, i] == SHORT_IDS[b, j]) & (j <= i),
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [8, 5], ids=["equal sizes", "values of another size"])
@pytest.mark.parametrize("learning", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", SHORT_MASKS)
def test_short_sequences_with_new_masks(name: str, learning: bool, size: int) -> None:
    """NaN and Inf at a key that no query attends have no effect, at the first call and at later ones."""
    make, rule = SHORT_MASKS[name]
    torch.manual_seed(6)
    tensors = [torch.randn(3, 7, SHORT, d) for d in (8, 8, size)]
    b, i, j = torch.arange(3)[:, None, None], torch.arange(SHORT)[:, None], torch.arange(SHORT)[None, :]
    allowed = rule(b, i, j)[:, None]
    filled, masked = allowed.any(-1, keepdim=True), ~allowed.any(-2).unsqueeze(-1)
    true = [t.double().requires_grad_() for t in tensors]
    scores = true[0] @ true[1].mT / 8**0.5
    scores = torch.where(allowed, scores, torch.where(filled, -torch.inf, 0.0).double())
    real = torch.where(filled, torch.softmax(scores, -1), 0.0) @ true[2]
    grads = torch.autograd.grad(real.square().sum(), true)
    for bad in (None, torch.nan, torch.inf, 1e38):
        given = [t.clone() for t in tensors]
        if bad is not None:
            given[1].masked_fill_(masked, bad)
            given[2].masked_fill_(masked, bad)
        for _ in range(2):
            leaves = [t.clone().requires_grad_(learning) for t in given]
            output = regard.attention(*leaves, mask=make()).output
            torch.testing.assert_close(output, real.float(), atol=1e-5, rtol=1e-5)
            if learning:
                found = torch.autograd.grad(output.square().sum(), leaves)
                for grad, exact in zip(found, grads, strict=True):
                    torch.testing.assert_close(grad, exact.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["query", "key"])
def test_an_attended_infinite_number_is_seen(name: str) -> None:
    """All scores of a query or key with an infinite entry may be −inf, which a kernel would treat as masked."""
    tensors = {each: torch.ones(2, 8, 20, 8) for each in ("query", "key", "value")}
    tensors[name][0, 0, 0, 0] = -torch.inf
    mask = regard.padding(torch.tensor([20, 18]))
    expected = regard.attention(**tensors, mask=mask, backend="reference").output
    for _ in range(2):
        output = regard.attention(**tensors, mask=mask).output
        torch.testing.assert_close(output, expected, equal_nan=True)
    assert output[0, 0, 0].isnan().all()
