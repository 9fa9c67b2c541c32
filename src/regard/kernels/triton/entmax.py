"""Sparsemax and entmax of whole rows of scores: threshold, weights, and gradient of the scores, one program per row.

The threshold τ is the root of Σ [m - τ]₊^p - 1 with margins m = (α - 1)(s - max s) <= 0 and p = 1 / (α - 1) >= 1. This
function is convex and decreasing, and the sum is at least 1 for τ = -1: Newton's steps from there increase towards the
root and exceed it by a rounding error at most, so no sorting is needed. The row stays in registers, so it is loaded
once.

Scores are stored in chunks of C keys, (chunks, slices, rows, C); see `regard.kernels.entmax_rows`. A plain matrix of
scores is one chunk.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.plan import Block, launch

_ROUNDS = 60  # largest number of Newton steps; six to ten are usual


@triton.jit
def _slope(z, weights, POWER: tl.constexpr):
    """Return weight^(2 - α) where the weight is positive, else 0; with weight = z^POWER, that is z^(POWER - 1)."""
    if POWER == 1.0:
        return tl.where(z > 0.0, 1.0, 0.0)
    elif POWER == 2.0:
        return z
    else:
        return tl.where(z > 0.0, weights / tl.where(z > 0.0, z, 1.0), 0.0)


@triton.jit
def _weight(z, POWER: tl.constexpr):
    if POWER == 1.0:
        return z
    elif POWER == 2.0:
        return z * z
    else:
        return tl.where(z > 0.0, tl.exp2(tl.log2(tl.where(z > 0.0, z, 1.0)) * POWER), 0.0)


@triton.jit
def _row(
    scores, lengths, slices, rows, width, i0, j0, n, count, low, high,
    C: tl.constexpr, BLOCK: tl.constexpr, BAND: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return the offsets of the program's row, the mask for stores, and its scores, -inf where masked."""
    z, r = tl.program_id(0) // rows, tl.program_id(0) % rows
    t = tl.arange(0, BLOCK)
    at = (((t // C).to(tl.int64) * slices + z) * rows + r) * width + t % C
    j = j0 + t
    allowed = (t < count) & (j < n)
    if BAND:
        distance = j - (i0 + r)
        allowed = allowed & (distance >= low) & (distance <= high)
    if PADDED:
        allowed = allowed & (j < tl.load(lengths + z))
    return at, t < count, tl.load(scores + at, mask=allowed, other=float("-inf"))


# Arguments for which Triton must not compile another kernel when they are 1 or a multiple of 16.
_FREE = ["slices", "rows", "i0", "j0", "n", "count", "low", "high", "rounds"]


@triton.jit(do_not_specialize=_FREE)
def rows_forward(
    scores, found, f_slice, lengths, slices, rows, width, i0, j0, n, count, low, high, rounds,
    POWER: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    BAND: tl.constexpr, PADDED: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Compute the largest score and the threshold τ of each row; with WEIGHTS, replace the scores by weights.

    τ is inf for a row whose keys are all masked, and NaN for a row with a score of NaN or +inf.
    """
    at, there, s = _row(scores, lengths, slices, rows, width, i0, j0, n, count, low, high, C, BLOCK, BAND, PADDED)
    best = tl.max(tl.where(s == s, s, float("-inf")), 0)
    spoilt = (tl.max((s != s).to(tl.int32), 0) > 0) | (best == float("inf"))
    empty = best == float("-inf")
    best = tl.where(empty, 0.0, best)
    margin = tl.where(s > float("-inf"), (s - best) / POWER, float("-inf"))
    tau = -1.0
    left = tl.where(empty | spoilt, 0, rounds)
    while left > 0:
        z = tl.maximum(margin - tau, 0.0)
        weights = _weight(z, POWER)
        slope = tl.sum(_slope(z, weights, POWER), 0) * POWER
        step = (tl.sum(weights, 0) - 1.0) / tl.maximum(slope, 1e-30)
        # If τ does not increase, rounding has carried the previous step to or past the root: this step is the last.
        left = tl.where(tau + step > tau, left - 1, 0)
        tau += step
    tau = tl.where(empty, float("inf"), tau)
    tau = tl.where(spoilt, float("nan"), tau)
    place = found + (tl.program_id(0) // rows).to(tl.int64) * f_slice + (i0 + tl.program_id(0) % rows) * 2
    tl.store(place, best)
    tl.store(place + 1, tau)
    if WEIGHTS:
        weights = _weight(tl.where(margin > tau, margin - tau, 0.0), POWER)
        tl.store(scores + at, tl.where(spoilt, float("nan"), weights), mask=there)


@triton.jit(do_not_specialize=_FREE[:-1])
def rows_backward(
    scores, change, found, f_slice, lengths, slices, rows, width, i0, j0, n, count, low, high,
    POWER: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BAND: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Replace the scores by weights, and the gradient of the weights, `change`, by that of the scores."""
    at, there, s = _row(scores, lengths, slices, rows, width, i0, j0, n, count, low, high, C, BLOCK, BAND, PADDED)
    place = found + (tl.program_id(0) // rows).to(tl.int64) * f_slice + (i0 + tl.program_id(0) % rows) * 2
    best, tau = tl.load(place), tl.load(place + 1)
    margin = tl.where(s == float("-inf"), float("-inf"), (s - best) / POWER)
    z = tl.where(margin > tau, margin - tau, 0.0)
    weights = _weight(z, POWER)
    slope = _slope(z, weights, POWER)
    dw = tl.load(change + at, mask=there & (slope != 0.0), other=0.0)
    total = tl.sum(slope, 0)
    mean = tl.sum(slope * dw, 0) / tl.where(total == 0.0, 1.0, total)
    spoilt = tau != tau
    tl.store(scores + at, tl.where(spoilt, float("nan"), weights), mask=there)
    tl.store(change + at, tl.where(spoilt, float("nan"), slope * (dw - mean)), mask=there)


def _tiles(chunks: int, size: int) -> dict[str, Any]:
    numbers = max(128, triton.next_power_of_2(chunks * size))
    # A single chunk may have any size: C is then the block size, so that several sizes share one compiled kernel.
    whole = {"C": size if chunks > 1 else numbers, "BLOCK": numbers}
    return {**whole, "block": Block(1, numbers, warps=min(32, max(1, numbers // 1024)))}


def _limits(low: int | None, high: int | None, lengths: Tensor | None) -> tuple[tuple[int, int], dict[str, bool]]:
    far = 2**30
    band = -far if low is None else low, far if high is None else high
    return band, {"BAND": low is not None or high is not None, "PADDED": lengths is not None}


def weigh(
    scores: Tensor, found: Tensor, alpha: float, *, i0: int, j0: int, n: int,
    low: int | None = None, high: int | None = None, lengths: Tensor | None = None, weights: bool = True,
) -> None:  # fmt: skip
    """Write largest score and threshold of each row into `found` (slices, queries, 2), and replace scores by weights.

    `scores` (chunks, slices, rows, C) are those of the queries from `i0` on and the keys from `j0` on; n is the number
    of keys. Without `weights`, the scores are not changed. Reference implementations:
    `regard.core.normalizers.entmax_threshold` and `entmax_weights`.
    """
    chunks, slices, rows, size = scores.shape
    band, limits = _limits(low, high, lengths)
    launch(
        rows_forward, (slices * rows, 1, 1),
        scores, found, found.stride(0), found if lengths is None else lengths, slices, rows, size, i0, j0, n,
        chunks * size, *band, _ROUNDS, POWER=1.0 / (alpha - 1.0), WEIGHTS=weights, **limits, **_tiles(chunks, size),
    )  # fmt: skip


def weigh_back(
    scores: Tensor, change: Tensor, found: Tensor, alpha: float, *, i0: int, j0: int, n: int,
    low: int | None = None, high: int | None = None, lengths: Tensor | None = None,
) -> None:  # fmt: skip
    """Replace the scores by weights, and `change`, the gradient of the weights, by that of the scores.

    Reference implementation: the gradient of `regard.core.normalizers.Entmax`.
    """
    chunks, slices, rows, size = scores.shape
    band, limits = _limits(low, high, lengths)
    launch(
        rows_backward, (slices * rows, 1, 1),
        scores, change, found, found.stride(0), found if lengths is None else lengths, slices, rows, size, i0, j0, n,
        chunks * size, *band, POWER=1.0 / (alpha - 1.0), **limits, **_tiles(chunks, size),
    )  # fmt: skip


def entmax_threshold(scores: Tensor, alpha: float) -> Tensor:
    """Return largest score and threshold of each row, (…, 2).

    Reference implementation: `regard.core.normalizers.entmax_threshold`.
    """
    n = scores.shape[-1]
    flat: Any = scores.reshape(1, 1, -1, n).contiguous()
    found = torch.empty(1, flat.shape[2], 2, dtype=scores.dtype, device=scores.device)
    weigh(flat, found, alpha, i0=0, j0=0, n=n, weights=False)
    return found.view(*scores.shape[:-1], 2)


def entmax(scores: Tensor, alpha: float) -> Tensor:
    """Return the weights of each row. Reference implementation: `regard.core.normalizers.Entmax`."""
    n = scores.shape[-1]
    weights: Any = scores.clone(memory_format=torch.contiguous_format)
    flat = weights.view(1, 1, -1, n)
    weigh(flat, torch.empty(1, flat.shape[2], 2, dtype=scores.dtype, device=scores.device), alpha, i0=0, j0=0, n=n)
    return weights
