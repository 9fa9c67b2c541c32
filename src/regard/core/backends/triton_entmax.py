"""Sparsemax and entmax of whole rows of scores on CUDA, a row to a program: threshold, weights, gradient of scores.

The threshold is the root of Σ [m - τ]₊^p - 1 with margins m = (α - 1)(s - best) <= 0 and p = 1 / (α - 1) >= 1, convex
and falling: Newton's steps from τ = -1, where the sum is at least 1, climb to it without ever passing it, and no score
is sorted.  The row stays in registers meanwhile, so it is read once.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _slope(z, weights, POWER: tl.constexpr):
    """weight^{2 - α} on the support: with weight = z^p that is z^{p - 1}."""
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
def thresholds(scores, s_row, found, n, rounds, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """(best, τ) of each row; τ is inf for a row with nothing in it, NaN for one with a NaN."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    s = tl.load(scores + row * s_row + j, mask=j < n, other=float("-inf"))
    best = tl.max(tl.where(s == s, s, float("-inf")), 0)
    spoilt = tl.max((s != s).to(tl.int32), 0) > 0
    empty = best == float("-inf")
    margin = tl.where(s > float("-inf"), (s - tl.where(empty, 0.0, best)) / POWER, float("-inf"))
    tau = -1.0
    left = tl.where(empty | spoilt, 0, rounds)
    while left > 0:
        z = tl.maximum(margin - tau, 0.0)
        weights = _weight(z, POWER)
        slope = tl.sum(_slope(z, weights, POWER), 0) * POWER
        next_tau = tau + (tl.sum(weights, 0) - 1.0) / slope
        left = tl.where(next_tau > tau, left - 1, 0)
        tau = tl.maximum(next_tau, tau)
    tau = tl.where(empty, float("inf"), tau)
    tau = tl.where(spoilt, float("nan"), tau)
    tl.store(found + row * 2, tl.where(empty, 0.0, best))
    tl.store(found + row * 2 + 1, tau)


@triton.jit
def _row_weights(scores, found, row, s_row, j, n, POWER: tl.constexpr):
    s = tl.load(scores + row * s_row + j, mask=j < n, other=float("-inf"))
    best, tau = tl.load(found + row * 2), tl.load(found + row * 2 + 1)
    margin = tl.where(s == float("-inf"), float("-inf"), (s - best) / POWER)
    z = tl.where(margin > tau, margin - tau, 0.0)
    weights = _weight(z, POWER)
    slope = _slope(z, weights, POWER)
    return tl.where(tau == tau, weights, float("nan")), tl.where(tau == tau, slope, float("nan"))


@triton.jit
def weigh(scores, s_row, found, out, slopes, totals, n, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of a row, their slopes, and the slopes' sum."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    weights, slope = _row_weights(scores, found, row, s_row, j, n, POWER)
    tl.store(out + row * n + j, weights, mask=j < n)
    tl.store(slopes + row * n + j, slope, mask=j < n)
    tl.store(totals + row, tl.sum(slope, 0))


@triton.jit
def gradient(scores, s_row, found, out, change, mean, n, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of a row, and in the place of their gradient that of the scores."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    weights, slope = _row_weights(scores, found, row, s_row, j, n, POWER)
    at = change + row * n + j
    dw = tl.load(at, mask=j < n, other=0.0)
    tl.store(at, tl.where(slope == 0.0, 0.0, slope * (dw - tl.load(mean + row))), mask=j < n)
    tl.store(out + row * n + j, weights, mask=j < n)


def _launch(n: int) -> dict[str, int]:
    block = max(32, triton.next_power_of_2(n))
    return {"BLOCK": block, "num_warps": min(32, max(1, block // 1024))}


def entmax_threshold(scores: Tensor, alpha: float) -> Tensor:
    """Best score and threshold of each row, (…, 2), as `regard.core.normalizers.entmax_threshold` gives them."""
    n = scores.shape[-1]
    flat = scores.reshape(-1, n)
    found = scores.new_empty(*scores.shape[:-1], 2)
    thresholds[(flat.shape[0],)](flat, flat.stride(0), found, n, 60, POWER=1.0 / (alpha - 1.0), **_launch(n))
    return found


def entmax_weights(scores: Tensor, threshold: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, their slopes, and the slopes' sum (…, 1)."""
    n = scores.shape[-1]
    flat = scores.reshape(-1, n)
    weights, slopes = scores.new_empty(scores.shape), scores.new_empty(scores.shape)
    totals = scores.new_empty(*scores.shape[:-1], 1)
    weigh[(flat.shape[0],)](
        flat, flat.stride(0), threshold.contiguous(), weights, slopes, totals, n,
        POWER=1.0 / (alpha - 1.0), **_launch(n),
    )  # fmt: skip
    return weights, slopes, totals


def entmax_gradient(
    scores: Tensor, threshold: Tensor, change: Tensor, mean: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """Gradient of the scores, in the place of `change`, that of the weights; and the weights themselves."""
    n = scores.shape[-1]
    flat, change = scores.reshape(-1, n), change.contiguous()
    weights = scores.new_empty(scores.shape)
    gradient[(flat.shape[0],)](
        flat, flat.stride(0), threshold.contiguous(), weights, change, mean.contiguous(), n,
        POWER=1.0 / (alpha - 1.0), **_launch(n),
    )  # fmt: skip
    return change, weights
