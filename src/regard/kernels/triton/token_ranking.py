"""Log-probabilities of the best tokens of each row of logits.

The logits are loaded once, and no tensor of their size is stored. A program computes the best tokens and the sum of
exponentials of a part of a row; a second kernel merges the parts of a row. Of tokens with equal logits, the lower one
ranks first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART = 2048  # number of logits that one program loads


@triton.jit
def _parts(
    logits, never, time, values, tokens, highs, sums, vocabulary, stride, barred, stop, minimum, parts,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    place = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + place, mask=place < vocabulary, other=-float("inf")).to(tl.float32)
    high = tl.max(x, 0)
    base = tl.where(high == -float("inf"), 0.0, high)
    tl.store(highs + row * parts + part, high)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(x - base), 0))
    for each in range(barred):
        x = tl.where(place == tl.load(never + each), -float("inf"), x)
    soon = tl.load(time) < minimum
    x = tl.where(soon & (place == stop), -float("inf"), x)
    cells = (row * parts + part) * COUNT
    for rank in tl.static_range(COUNT):
        most = tl.max(x, 0)
        # If all logits are NaN, no logit equals the maximum, and the last token of the vocabulary is chosen.
        where = tl.min(tl.where(x == most, place, vocabulary - 1), 0)
        tl.store(values + cells + rank, most)
        tl.store(tokens + cells + rank, where)
        x = tl.where(place == where, -float("inf"), x)


@triton.jit
def _whole(
    logits, values, tokens, highs, sums, best, chosen, at_stop, stride, stop, parts,
    COUNT: tl.constexpr, PARTS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    highest = tl.load(highs + row * parts + p, mask=p < parts, other=-float("inf"))
    summed = tl.load(sums + row * parts + p, mask=p < parts, other=0.0)
    top = tl.max(highest, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = top + tl.log(tl.sum(summed * tl.exp(highest - base), 0))
    cell = tl.arange(0, CELLS)
    real = cell < parts * COUNT
    x = tl.load(values + row * parts * COUNT + cell, mask=real, other=-float("inf"))
    token = tl.load(tokens + row * parts * COUNT + cell, mask=real, other=0)
    for rank in tl.static_range(COUNT):
        most = tl.max(x, 0)
        where = tl.min(tl.where(x == most, cell, CELLS - 1), 0)
        tl.store(best + row * COUNT + rank, most - total)
        tl.store(chosen + row * COUNT + rank, tl.sum(tl.where(cell == where, token, 0), 0).to(tl.int64))
        x = tl.where(cell == where, -float("inf"), x)
    mine = tl.load(logits + row * stride + stop).to(tl.float32) - total
    # A row whose log-sum-exp is infinite is invalid, like a row with NaN.
    finite = (total == total) & (total < float("inf")) & (total > -float("inf"))
    tl.store(at_stop + row, tl.where(finite, mine, float("nan")))


def rank(
    logits: Tensor, never: Tensor | None, time: Tensor, *, stop: int, minimum: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` best tokens of logits (n, v): log-probabilities, tokens, and the stop token's log-probability.

    The first two are (n, count), the third is (n,), and NaN for invalid rows. Tokens in `never` are excluded, and so is
    the stop token while `time` is below `minimum`. Reference implementation: `regard.decode.ranking.best` of
    `regard.decode.records.Bounds.distribution`.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, _PART)
    values = torch.empty(rows, parts, count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, count, dtype=torch.int32, device=logits.device)
    highs, sums = (torch.empty(rows, parts, dtype=torch.float32, device=logits.device) for _ in range(2))
    best = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, count, dtype=torch.long, device=logits.device)
    at_stop = torch.empty(rows, dtype=torch.float32, device=logits.device)
    barred = 0 if never is None else never.shape[0]
    _parts[(rows, parts)](
        *(logits, time if never is None else never, time, values, tokens, highs, sums),
        *(vocabulary, logits.stride(0), barred, stop, minimum, parts),
        COUNT=count, BLOCK=_PART, num_warps=4,
    )  # fmt: skip
    _whole[(rows,)](
        *(logits, values, tokens, highs, sums, best, chosen, at_stop, logits.stride(0), stop, parts),
        COUNT=count, PARTS=triton.next_power_of_2(parts), CELLS=triton.next_power_of_2(parts * count), num_warps=4,
    )  # fmt: skip
    return best, chosen, at_stop
