"""The largest softmax weights of each row and their keys, in one pass over the pairs.

The results must equal those that `TopWeights.of` computes from the full weights (`regard.core.requests`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.pairs import LOG2E, add_bias, key_range, tile_allowed, tile_state
from regard.kernels.triton.additive.plan import Block
from regard.kernels.triton.score_tiles import Scored, known_sums, over_rows, tile_rows, tile_scores

USED = tl.constexpr(-3.0e38)  # stored in place of a score that has been selected; smaller than all other finite scores
FEW = tl.constexpr(8)  # largest number of weights for which `_streamed` or `_ranked` is used
MISSING = tl.constexpr(-(2**31))  # rank of an empty slot, in which no score was stored
TAKEN = tl.constexpr(1 - 2**31)  # stored in place of a rank that has been selected
_BITS = 10  # largest number of bits of a rank that may hold the number of its tile
_LARGEST = Block(32, 128, warps=8, stages=3), Block(32, 64, warps=4, stages=2)
_RANKED = Block(64, 64, warps=4, stages=3), Block(64, 64, warps=4, stages=2)


@triton.jit
def _streamed(q, key, pairs, b, h, i0, start, stop, n_q, n_k, k_n, scale, COUNT: tl.constexpr,
              WIDTH: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
              BN: tl.constexpr):  # fmt: skip
    """Return the COUNT largest scores of each row in order, their keys, and whether one of them may be missing.

    A tile has BN columns. For each row and column, the three largest scores over all tiles are stored, and the COUNT
    largest are selected from these. If all three of one column are selected, a fourth score of that column may have
    been larger than the next one selected: then one of the COUNT largest may be missing.
    """
    columns = tl.arange(0, BN)[None, :]
    first = tl.full((BM, BN), float("-inf"), tl.float32)
    second = tl.full((BM, BN), float("-inf"), tl.float32)
    third = tl.full((BM, BN), float("-inf"), tl.float32)
    first_at = tl.zeros((BM, BN), tl.int32)
    second_at = tl.zeros((BM, BN), tl.int32)
    third_at = tl.zeros((BM, BN), tl.int32)
    for j0 in range(start, stop, BN):
        some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
        if some:
            s = tile_scores(q, key, pairs, b, h, i0, j0, n_q, n_k, k_n, scale, every, SIZE, PRECISION, D, BM, BN)
            over_first, over_second, over_third = s > first, s > second, s > third
            third_at = tl.where(over_second, second_at, tl.where(over_third, j0, third_at))
            third = tl.where(over_second, second, tl.where(over_third, s, third))
            second_at = tl.where(over_first, first_at, tl.where(over_second, j0, second_at))
            second = tl.where(over_first, first, tl.where(over_second, s, second))
            first_at = tl.where(over_first, j0, first_at)
            first = tl.where(over_first, s, first)
    best = tl.full((BM, WIDTH), float("-inf"), tl.float32)
    which = tl.zeros((BM, WIDTH), tl.int32) - 1
    for c in range(COUNT):
        top = tl.max(first, 1)
        column = tl.min(tl.where(first == top[:, None], columns, BN), 1)
        hit = columns == column[:, None]
        here = (tl.arange(0, WIDTH) == c)[None, :]
        best = tl.where(here, top[:, None], best)
        which = tl.where(here, (tl.sum(tl.where(hit, first_at, 0), 1) + column)[:, None], which)
        first = tl.where(hit, second, first)
        first_at = tl.where(hit, second_at, first_at)
        second = tl.where(hit, third, second)
        second_at = tl.where(hit, third_at, second_at)
        third = tl.where(hit, USED, third)
    return best, which, tl.max(tl.max(tl.where(first == USED, 1, 0), 1), 0) > 0


@triton.jit
def _ranks(s, number, BITS: tl.constexpr):
    """Return integers in the order of the scores, in which the BITS lowest bits hold the number of the tile."""
    bits = s.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -(1 << BITS)) | number


@triton.jit
def _ranked(q, key, pairs, b, h, i0, start, stop, n_q, n_k, k_n, scale, COUNT: tl.constexpr, WIDTH: tl.constexpr,
            BITS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """Return what `_streamed` returns, for queries and keys in half precision.

    For each row and column of a tile, the four largest scores are stored as ranks, which need one register each instead
    of two. A rank keeps 23 − BITS bits of the mantissa: this exchanges only scores that differ by less than the error
    of half-precision inputs. Tiles are numbered backwards, so that the first of equal scores has the largest rank. The
    scores of the selected keys are then computed again.
    """
    i = i0 + tl.arange(0, BM)
    columns = tl.arange(0, BN)[None, :]
    last: tl.constexpr = (1 << BITS) - 1
    first = tl.full((BM, BN), MISSING, tl.int32)
    second = tl.full((BM, BN), MISSING, tl.int32)
    third = tl.full((BM, BN), MISSING, tl.int32)
    fourth = tl.full((BM, BN), MISSING, tl.int32)
    for j0 in range(start, stop, BN):
        some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
        if some:
            j = j0 + tl.arange(0, BN)
            s = tile_scores(q, key, pairs, b, h, i0, j0, n_q, n_k, k_n, scale, True, SIZE, PRECISION, D, BM, BN)
            rank = _ranks(s, last - j0 // BN, BITS)
            if not every:
                rank = tl.where(tile_allowed(pairs, b, h, i[:, None], j[None, :], n_q, n_k), rank, MISSING)
            below = tl.minimum(first, rank)
            first = tl.maximum(first, rank)
            rank = tl.minimum(second, below)
            second = tl.maximum(second, below)
            below = tl.minimum(third, rank)
            third = tl.maximum(third, rank)
            fourth = tl.maximum(fourth, below)
    which = tl.zeros((BM, WIDTH), tl.int32) - 1
    for c in range(COUNT):
        top = tl.max(first, 1)
        column = tl.min(tl.where(first == top[:, None], columns, BN), 1)
        hit = columns == column[:, None]
        chosen = tl.where(top > TAKEN, (last - (top & last)) * BN + column, -1)
        which = tl.where((tl.arange(0, WIDTH) == c)[None, :], chosen[:, None], which)
        first = tl.where(hit, second, first)
        second = tl.where(hit, third, second)
        third = tl.where(hit, fourth, third)
        fourth = tl.where(hit & (fourth > MISSING), TAKEN, fourth)
    best = tl.full((BM, WIDTH), float("-inf"), tl.float32)
    feature = tl.arange(0, D)[None, :]
    for c in range(COUNT):
        here = (tl.arange(0, WIDTH) == c)[None, :]
        at = tl.sum(tl.where(here, which, 0), 1)
        present = at >= 0
        inside = present[:, None] & (feature < SIZE)
        k = tl.load(key + at.to(tl.int64)[:, None] * k_n + feature, mask=inside, other=0.0)
        s = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * (scale * LOG2E)
        s = add_bias(s, pairs, b, h, i, tl.where(present, at, 0), n_q, n_k, LOG2E)
        best = tl.where(here, tl.where(present & (s == s), s, float("-inf"))[:, None], best)
    return best, which, tl.max(tl.max(tl.where(first == TAKEN, 1, 0), 1), 0) > 0


@triton.jit
def largest(
    query, key, pairs, lse, values, indices, q_b, q_h, q_n, k_b, k_h, k_n, heads, group, n_q, n_k, scale,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the COUNT largest weights of each row in order, and their keys; the key of a weight of 0 is −1.

    The weights of a row with NaN are NaN, because its log-sum-exp is. With BITS > 0, for half precision, `_ranked`
    computes them; otherwise, if COUNT is small, `_streamed`. If one of the largest may be missing, or COUNT is larger,
    a slower loop computes them: it inserts the maximum of each tile as long as it exceeds the smallest stored score in
    some row, which is rare after a few tiles.
    """
    i0, z = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM, tl.program_id(1)
    b, h = z // heads, z % heads
    i = i0 + tl.arange(0, BM)
    query += b.to(tl.int64) * q_b + h * q_h
    q = tile_rows(query, i, n_q, q_n, SIZE, D)
    key += b.to(tl.int64) * k_b + (h // group) * k_h
    place = tl.arange(0, WIDTH)[None, :]
    start, stop = key_range(pairs, b, i0, n_k, BM, BN)
    best = tl.full((BM, WIDTH), float("-inf"), tl.float32)
    which = tl.zeros((BM, WIDTH), tl.int32) - 1
    again = True
    if BITS > 0:
        best, which, again = _ranked(q, key, pairs, b, h, i0, start, stop, n_q, n_k, k_n, scale, COUNT, WIDTH, BITS,
                                     SIZE, PRECISION, D, BM, BN)  # fmt: skip
    elif COUNT <= FEW:
        best, which, again = _streamed(q, key, pairs, b, h, i0, start, stop, n_q, n_k, k_n, scale, COUNT, WIDTH,
                                       SIZE, PRECISION, D, BM, BN)  # fmt: skip
    if again:
        # Slots beyond COUNT hold +inf: they are never the smallest, so nothing is inserted there.
        best = tl.where(place < COUNT, float("-inf"), float("inf")) + tl.zeros((BM, WIDTH), tl.float32)
        which = tl.zeros((BM, WIDTH), tl.int32) - 1
        least = tl.full((BM,), float("-inf"), tl.float32)
        for j0 in range(start, stop, BN):
            some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
            if some:
                j = j0 + tl.arange(0, BN)
                s = tile_scores(q, key, pairs, b, h, i0, j0, n_q, n_k, k_n, scale, every, SIZE, PRECISION, D, BM, BN)
                s = tl.where(s == s, s, float("-inf"))  # argmax is undefined for a row with NaN
                top = tl.max(s, 1)
                while tl.max((top > least).to(tl.int32), 0) > 0:
                    better = (top > least)[:, None]
                    column = tl.argmax(s, 1)
                    here = (place == tl.argmin(best, 1)[:, None]) & better
                    best = tl.where(here, top[:, None], best)
                    which = tl.where(here, (j0 + column)[:, None], which)
                    s = tl.where(((j - j0)[None, :] == column[:, None]) & better, float("-inf"), s)
                    least = tl.min(best, 1)
                    top = tl.max(s, 1)
        best = tl.where(place < COUNT, best, float("-inf"))
    row = known_sums(lse, z.to(tl.int64) * n_q + i, i < n_q)
    at = (z.to(tl.int64) * n_q + i) * COUNT
    for c in range(COUNT):
        slot = tl.argmax(best, 1)
        here = place == slot[:, None]
        weight = tl.exp2(tl.max(best, 1) - row)
        chosen = tl.sum(tl.where(here, which, 0), 1)
        tl.store(values + at + c, weight, mask=i < n_q)
        chosen = tl.where(row == row, chosen, c)  # a row with NaN has weights of NaN, and its keys are arbitrary
        tl.store(indices + at + c, tl.where(weight == 0.0, -1, chosen).to(tl.int64), mask=i < n_q)
        best = tl.where(here, float("-inf"), best)


def top(scored: Scored, lse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest weights of each row, largest first, and their keys; the key of a weight of 0 is −1."""
    (b, h, q, _), ranked = scored.query.shape, scored.block(*_RANKED)
    bits = max(1, (-(-scored.key.shape[2] // ranked.columns) - 1).bit_length())
    if scored.query.dtype == torch.float32 or count > FEW.value or bits > _BITS:
        bits, ranked = 0, scored.block(*_LARGEST)
    values = torch.empty(b, h, q, count, device=lse.device, dtype=torch.float32)
    keys = torch.empty(b, h, q, count, device=lse.device, dtype=torch.int64)
    constants = {"COUNT": count, "WIDTH": max(2, 1 << (count - 1).bit_length()), "BITS": bits}
    scored.run(largest, over_rows(scored, ranked), ranked, lse, values, keys, **constants)
    return values, keys
