"""The cases of attention over process groups, and their references in simple torch operations.

Only the arguments of a call (scores, masks, biases) are the library's. The references for positions, masks, scores and
bytes sent do not use the library.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard

BATCH, HEADS, GROUPS, LENGTH, SIZE, VALUE_SIZE = 2, 4, 2, 40, 7, 5  # a length of 40 is 8 chunks of 5 for 4 processes
LENGTHS, SEGMENTS = [29, 13], [[11, 4, 25], [17, 23, 0]]

# Maps query positions (q, 1) and key positions (k,) to a mask (b, 1, q, k).
Allowed = Callable[[Tensor, Tensor], Tensor]


def ids() -> Tensor:
    """Return segment ids of the whole sequence, (b, n)."""
    return torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(counts)) for counts in SEGMENTS])


def causal(i: Tensor, j: Tensor) -> Tensor:
    return (j <= i)[None, None]


def window(before: int, after: int) -> Allowed:
    return lambda i, j: ((j >= i - before) & (j <= i + after))[None, None]


def padding(i: Tensor, j: Tensor) -> Tensor:
    return (j + 0 * i < torch.tensor(LENGTHS)[:, None, None])[:, None]


def segments(i: Tensor, j: Tensor) -> Tensor:
    return (ids()[:, i.squeeze(-1), None] == ids()[:, None, j])[:, None]


def everything(i: Tensor, j: Tensor) -> Tensor:
    return (i == i).expand(-1, len(j))[None, None]


def both(left: Allowed, right: Allowed) -> Allowed:
    return lambda i, j: left(i, j) & right(i, j)


class Score(NamedTuple):
    record: Callable[..., Any]
    plain: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = ()


def _scaled(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT / math.sqrt(SIZE)


def _additive(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    weight = weight if weight.ndim == 1 else weight[:, None, None]
    return (torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) * weight).sum(-1)


def _cosine(query: Tensor, key: Tensor) -> Tensor:
    return 3 * torch.nn.functional.normalize(query, dim=-1) @ torch.nn.functional.normalize(key, dim=-1).mT


SCORES = {
    "scaled": Score(lambda: regard.ScaledDot(), _scaled),
    "dot": Score(lambda: regard.Dot(), lambda query, key: query @ key.mT),
    "softcap": Score(lambda: regard.ScaledDot(softcap=2.0), lambda query, key: 2 * torch.tanh(_scaled(query, key) / 2)),
    "cosine": Score(lambda: regard.Cosine(scale=3.0), _cosine),
    "additive": Score(lambda weight: regard.Additive(weight), _additive, ((SIZE,),)),
    "additive-heads": Score(lambda weight: regard.Additive(weight), _additive, ((HEADS, SIZE),)),
    "function": Score(  # a user-defined score function with a learned parameter
        lambda w: lambda query, key: -torch.cdist(query * w, key), lambda query, key, w: -torch.cdist(query * w, key),
        ((SIZE,),),
    ),
    "bilinear": Score(lambda w: regard.Bilinear(w), lambda query, key, w: query @ w @ key.mT, ((SIZE, SIZE),)),
}  # fmt: skip

# For each case: a function from a process's part of the segment ids to the library's mask, and a function that computes
# the dense mask of all pairs.
MASKS: dict[str, tuple[Callable[[Tensor], Any], Allowed]] = {
    "none": (lambda part: None, everything),
    "causal": (lambda part: regard.causal(), causal),
    "window": (lambda part: regard.window(3, 0), window(3, 0)),
    "wide window": (lambda part: regard.window(12, 7), window(12, 7)),
    "padding": (lambda part: regard.padding(torch.tensor(LENGTHS, device=part.device)), padding),
    "segments": (lambda part: regard.segments(part, part), segments),
    "causal and padding": (lambda part: regard.causal() & regard.padding(LENGTHS), both(causal, padding)),
    "causal and segments": (lambda part: regard.causal() & regard.segments(part, part), both(causal, segments)),
    "window and segments": (
        lambda part: regard.window(6, 2) & regard.segments(part, part.clone()), both(window(6, 2), segments),
    ),
    "causal or segments": (
        lambda part: regard.causal() | regard.segments(part, part), lambda i, j: causal(i, j) | segments(i, j),
    ),
    "not window": (lambda part: ~regard.window(5, 5), lambda i, j: ~window(5, 5)(i, j)),
    "empty rows": (  # the first 10 queries of each sequence, and all queries of the second sequence, attend to no key
        lambda part: regard.causal(-10) & regard.padding([40, 0]),
        lambda i, j: (j <= i - 10)[None] & torch.tensor([True, False])[:, None, None, None],
    ),
}  # fmt: skip

BIASES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "alibi": (
        lambda slopes: regard.alibi(slopes), lambda slopes, i, j: -slopes[:, None, None] * (i - j).abs(), (HEADS,),
    ),
    "relative": (
        lambda table: regard.relative(table), lambda table, i, j: table[:, (j - i).clamp(-4, 4) + 4], (HEADS, 9),
    ),
}  # fmt: skip


class Case(NamedTuple):
    score: str = "scaled"
    mask: str = "none"
    balanced: bool = True
    dtype: str = "float64"
    bias: str = ""
    queries: int = LENGTH
    total: bool = False
    """Whether the log-sum-exp is requested, with a gradient."""

    @property
    def name(self) -> str:
        parts = [self.score, self.mask, "balanced" if self.balanced else "in order", self.dtype, self.bias]
        parts += ["cross"] * (self.queries != LENGTH) + ["logsumexp"] * self.total
        return ", ".join(part for part in parts if part)


MAIN = ("none", "causal", "window", "padding", "segments")
CASES = [
    *(Case("scaled", mask, balanced) for mask in MASKS for balanced in (True, False)),
    *(Case("additive", mask) for mask in MASKS),
    *(Case("additive", mask, balanced=False) for mask in MAIN),
    *(Case(score, "causal and segments") for score in SCORES if score not in ("scaled", "additive")),
    *(Case(score, mask, dtype="float32") for score in ("scaled", "additive") for mask in MAIN),
    *(Case(score, "causal", dtype="bfloat16") for score in ("scaled", "additive")),
    *(Case(score, "causal", bias=bias) for score, bias in (("scaled", "alibi"), ("additive", "relative"))),
    *(Case(score, "wide window", queries=24) for score in ("scaled", "additive")),
    *(Case(score, "empty rows", total=True) for score in ("scaled", "additive")),
]


def positions(rank: int, size: int, length: int, balanced: bool) -> Tensor:
    """Return the sequence positions that a process holds; if balanced, a chunk from each end of the sequence
    (zigzag)."""
    if not balanced:
        return torch.arange(rank * length // size, (rank + 1) * length // size)
    chunk = length // (2 * size)
    first, last = rank * chunk, (2 * size - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(last, last + chunk)])


def inputs(case: Case) -> list[Tensor]:
    """Return query, key, value, the gradients of output and log-sum-exp, then learned tensors; all in float64."""
    generator = torch.Generator().manual_seed(7)
    shapes = [
        (BATCH, HEADS, case.queries, SIZE), (BATCH, GROUPS, LENGTH, SIZE), (BATCH, GROUPS, LENGTH, VALUE_SIZE),
        (BATCH, HEADS, case.queries, VALUE_SIZE), (BATCH, HEADS, case.queries),
        *SCORES[case.score].shapes, *([BIASES[case.bias][2]] if case.bias else []),
    ]  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


class Expected(NamedTuple):
    output: Tensor
    total: Tensor
    gradients: list[Tensor]  # gradients of query, key, value and learned tensors


def expected(case: Case, dtype: torch.dtype = torch.float64) -> Expected:
    """Return output, log-sum-exp and gradients for whole sequences on one process, from a matrix of all pairs."""
    query, key, value, slopes, total_slopes, *learned = (t.to(dtype) for t in inputs(case))
    leaves = [t.requires_grad_() for t in (query, key, value, *learned)]
    repeated = [t.repeat_interleave(HEADS // GROUPS, 1) for t in (key, value)]
    i, j = torch.arange(case.queries).unsqueeze(-1), torch.arange(LENGTH)
    own = learned[: len(SCORES[case.score].shapes)]
    scores = SCORES[case.score].plain(query, repeated[0], *own)
    if case.bias:
        scores = scores + BIASES[case.bias][1](learned[-1], i, j)
    allowed = MASKS[case.mask][1](i, j).expand(scores.shape)
    filled = allowed.any(-1, keepdim=True)
    scores = torch.where(filled, torch.where(allowed, scores, -math.inf), 0)
    output = torch.where(filled, torch.softmax(scores, -1), 0) @ repeated[1]
    total = torch.where(filled.squeeze(-1), scores.logsumexp(-1), -math.inf)
    loss = (output * slopes).sum()
    if case.total:
        loss = loss + (torch.where(filled.squeeze(-1), total, 0) * total_slopes).sum()
    return Expected(output.detach(), total.detach(), list(torch.autograd.grad(loss, leaves)))


# Formulas for the bytes that a process sends. `unit` is the bytes of one position: a key and a value of every head.


def unit(case: Case) -> int:
    return BATCH * GROUPS * (SIZE + VALUE_SIZE) * {"float64": 8, "float32": 4, "bfloat16": 2}[case.dtype]


def keys_sent(case: Case, rank: int, size: int) -> int | None:
    """Return the number of positions whose keys a process sends in the forward pass; None without a simple formula."""
    part, chunk = LENGTH // size, LENGTH // (2 * size)
    match case.mask:
        case "none":
            return (size - 1) * part
        # Each process holds two chunks. It sends one of them to every later rank, and both to every earlier rank.
        case "causal" if case.balanced:
            return (size - 1 - rank) * chunk + rank * 2 * chunk
        case "causal":
            return (size - 1 - rank) * part
        # The last 3 keys of a chunk are sent to the process that holds the next chunk.
        case "window" if case.balanced:
            return 3 * ((rank < size - 1) + (rank > 0))
        case "window":
            return 3 * (rank < size - 1)
        case "padding":
            held = positions(rank, size, LENGTH, case.balanced)
            return (size - 1) * int((held < max(LENGTHS)).sum())
    return None


def keys_received(case: Case, rank: int, size: int) -> int | None:
    """Return the number of positions whose keys a process receives, and whose gradients it sends backward."""
    part, chunk = LENGTH // size, LENGTH // (2 * size)
    match case.mask:
        case "causal" if case.balanced:
            return rank * chunk + (size - 1 - rank) * 2 * chunk
        case "causal":
            return rank * part
        case "window" if case.balanced:
            return 3 * ((rank > 0) + (rank < size - 1))
        case "window":
            return 3 * (rank > 0)
        case "padding":
            held = positions(rank, size, LENGTH, case.balanced)
            return max(LENGTHS) - int((held < max(LENGTHS)).sum())
        case "none":
            return (size - 1) * part
    return None
