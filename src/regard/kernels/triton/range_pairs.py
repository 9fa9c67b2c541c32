"""Masks that are ranges of keys, as kernel arguments, and device functions that apply them.

The functions compute the tiles that a program visits, the rows of a tile, and the scores and weights of its pairs.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import LOG2E, power_of_two
from regard.kernels.triton.segment_bounds import SPAN


class Rules(NamedTuple):
    """Conditions under which query i may attend to key j, and biases of their score; a field that is None has no
    effect.

    Fields with the suffixes _b, _h, _q, _n and _k are the strides of the tensor before them.
    """

    low: Any = None  # query i may attend to key j only if j - i >= low
    high: Any = None  # query i may attend to key j only if j - i <= high
    lengths: Any = None  # (b,): key j may be attended if j < lengths[b]
    lengths_b: Any = None
    query_ids: Any = None  # (b, q): segment ids of the queries; a query attends only to keys with the same id
    query_b: Any = None
    query_n: Any = None
    key_ids: Any = None  # (b, k): segment ids of the keys
    key_b: Any = None
    key_n: Any = None
    row_bounds: Any = None  # (b, q / SPAN, 4): `segment_bounds` of the keys for each span of queries
    key_bounds: Any = None  # (b, k / SPAN, 4): `segment_bounds` of the queries for each span of keys
    slopes: Any = None  # (h,): adds -slope * |i + offset - j| to the score (ALiBi)
    slopes_h: Any = None
    offset: Any = None
    table: Any = None  # (h, 2 * reach + 1): adds table[clip(j - i - offset, -reach, reach) + reach] to the score
    table_h: Any = None
    reach: Any = None
    bias: Any = None  # bias of the score, (b, h, q, k) with strides of 0 where it broadcasts; -inf masks a pair
    bias_b: Any = None
    bias_h: Any = None
    bias_q: Any = None
    bias_k: Any = None
    mask: Any = None  # bytes, (b, h, q, k) with strides of 0 where the mask broadcasts; a byte of 0 masks a pair
    mask_b: Any = None
    mask_h: Any = None
    mask_q: Any = None
    mask_k: Any = None
    cap: Any = None  # softcap: the score becomes cap * tanh(score / cap), before bias and mask
    shift: Any = None  # if given, a pair's weight is sigmoid(score + shift) instead of its softmax


@triton.jit
def _by_segments(bounds, b, at, n, start, whole_start, whole_stop, stop, COUNT: tl.constexpr):
    """Return a range of positions, narrowed to the segment bounds of the COUNT spans that begin at position `at`."""
    spans = (n + SPAN - 1) // SPAN
    index = tl.minimum(at // SPAN + tl.arange(0, COUNT), spans - 1)
    place = bounds + (b * spans + index) * 4
    start = tl.maximum(start, tl.min(tl.load(place), 0))
    whole_start = tl.maximum(whole_start, tl.max(tl.load(place + 1), 0))
    whole_stop = tl.minimum(whole_stop, tl.min(tl.load(place + 2), 0))
    stop = tl.minimum(stop, tl.max(tl.load(place + 3), 0))
    return start, whole_start, whole_stop, stop


@triton.jit
def _in_tiles(start, whole_start, whole_stop, stop, STEP: tl.constexpr):
    """Return (start, before, whole_start, whole_stop, tested): a range divided into tiles of STEP positions.

    The tiles of [whole_start, whole_stop) need no mask. `tested` tiles need one: the first `before` of them begin at
    `start`, the others at whole_stop.
    """
    start = tl.maximum(start, 0) // STEP * STEP
    stop = tl.maximum(stop, start)
    whole_start = (tl.maximum(whole_start, 0) + STEP - 1) // STEP * STEP
    whole_stop = tl.maximum(whole_stop, 0) // STEP * STEP
    none = whole_start >= whole_stop
    whole_start = tl.where(none, stop, whole_start)
    whole_stop = tl.where(none, stop, whole_stop)
    before = (whole_start - start + STEP - 1) // STEP
    return start, before, whole_start, whole_stop, before + (stop - whole_stop + STEP - 1) // STEP


@triton.jit
def limits(rules, b, n_q, n_k):
    """Return (first, limit): no query attends to a key j outside first <= j < limit."""
    first = 0
    limit = n_k
    if rules.lengths is not None:
        limit = tl.minimum(tl.load(rules.lengths + b * rules.lengths_b), n_k).to(tl.int32)
    if rules.low is not None:
        first = rules.low
    if rules.high is not None:
        limit = tl.minimum(limit, n_q + rules.high)
    return first, limit


@triton.jit
def keys_of(rules, b, i0, n_q, limit, BM: tl.constexpr, BN: tl.constexpr):
    """Return the range of keys that rows i0 .. i0 + BM may attend, in tiles of BN keys as `_in_tiles` returns it."""
    last = tl.minimum(i0 + BM, n_q) - 1
    start = i0 * 0
    whole_start = i0 * 0
    stop = i0 * 0 + limit
    whole_stop = stop
    if rules.low is not None:
        start = tl.maximum(start, i0 + rules.low)
        whole_start = tl.maximum(whole_start, last + rules.low)
    if rules.high is not None:
        stop = tl.minimum(stop, last + rules.high + 1)
        whole_stop = tl.minimum(whole_stop, i0 + rules.high + 1)
    if rules.row_bounds is not None:
        start, whole_start, whole_stop, stop = _by_segments(
            rules.row_bounds, b, i0, n_q, start, whole_start, whole_stop, stop, BM // SPAN
        )
    return _in_tiles(start, whole_start, whole_stop, stop, BN)


@triton.jit
def queries_of(rules, b, j0, n_q, n_k, limit, BM: tl.constexpr, BN: tl.constexpr):
    """Return the range of queries that may attend to keys j0 .. j0 + BN, in tiles of BM queries, as `_in_tiles`
    returns it."""
    start = j0 * 0
    whole_start = j0 * 0
    stop = tl.where(j0 < limit, n_q, 0)
    whole_stop = tl.where(j0 + BN <= limit, n_q, 0)
    if rules.high is not None:
        start = tl.maximum(start, j0 - rules.high)
        whole_start = tl.maximum(whole_start, j0 + BN - 1 - rules.high)
    if rules.low is not None:
        stop = tl.minimum(stop, tl.minimum(j0 + BN, limit) - rules.low)
        whole_stop = tl.minimum(whole_stop, j0 - rules.low + 1)
    if rules.key_bounds is not None:
        start, whole_start, whole_stop, stop = _by_segments(
            rules.key_bounds, b, j0, n_k, start, whole_start, whole_stop, stop, BN // SPAN
        )
    return _in_tiles(start, whole_start, whole_stop, stop, BM)


@triton.jit
def rows_of(x, row, first, limit, step, SIZE: tl.constexpr, BLOCK: tl.constexpr, TESTED: tl.constexpr):
    """Return rows of a matrix with SIZE columns, padded with zeros to BLOCK columns.

    If TESTED, rows outside first <= row < limit are not loaded and are 0.
    """
    column = tl.arange(0, BLOCK)[None, :]
    at = x + (row * step)[:, None] + column
    if TESTED:
        inside = ((row >= first) & (row < limit))[:, None]
        if SIZE < BLOCK:
            inside = inside & (column < SIZE)
        return tl.load(at, mask=inside, other=0.0)
    elif SIZE < BLOCK:
        return tl.load(at, mask=column < SIZE, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def put_rows(x, row, limit, step, values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the rows of a matrix whose index is below the limit."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < limit)[:, None]
    if SIZE < BLOCK:
        inside = inside & (column < SIZE)
    tl.store(x + (row * step)[:, None] + column, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def ids_of(ids, b, row, n, step_b, step_n):
    return tl.load(ids + b * step_b + row.to(tl.int64) * step_n, mask=row < n, other=0)


@triton.jit
def tanh(x):
    """Return tanh(x) in float32: a polynomial for |x| < 0.625 (Moshier, Cephes), 1 - 2 / (1 + e^2x) elsewhere."""
    z = x * x
    p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = x + x * z * (p - 3.33332819422e-1)
    return tl.where(tl.abs(x) < 0.625, near, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E))))


@triton.jit
def _at_pairs(x, b, h, i, j, step_b, step_h, step_q, step_k):
    return (x + (b * step_b + h.to(tl.int64) * step_h) + i.to(tl.int64) * step_q) + j * step_k


@triton.jit
def exponential(x, HOLES: tl.constexpr, NATIVE: tl.constexpr):
    """Return e to the power of a difference of scores.

    Without table, bias and mask (HOLES = 0), scores are already multiplied by log2(e), so that 2^x needs no
    multiplication for each pair. With one of them (HOLES > 0), scores are not multiplied: a bias equal to the smallest
    number of its dtype times log2(e) would overflow to -inf, which masks a pair.
    """
    return power_of_two(x * LOG2E, NATIVE) if HOLES > 0 else power_of_two(x, NATIVE)


@triton.jit
def logistic(s, shift, HOLES: tl.constexpr, NATIVE: tl.constexpr):
    """Return sigmoid(s + shift), which is 0 where the score s is -inf."""
    unit = 1.0 if HOLES > 0 else LOG2E
    return 1.0 / (1.0 + exponential(-(s + shift * unit), HOLES, NATIVE))


@triton.jit
def attended_rows(x, s):
    """Return the keys or values x of a tile, with zeros in the rows that are masked for every query of the tile."""
    seen = tl.max((s != float("-inf")).to(tl.int32), 0) > 0
    return tl.where(seen[:, None], x, 0.0).to(x.dtype)


@triton.jit
def masked_scores(
    s, i, j, own_id, rules, b, h, n_q, n_k, first, limit, scale,
    TESTED: tl.constexpr, KEYS_OWN: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile, -inf where a pair is masked, and the derivative of the softcap if there is one.

    s are the dot products of queries i and keys j, which broadcast to the tile in either order. `own_id` are the
    segment ids of the tile's keys if KEYS_OWN, else of its queries. Scores are multiplied by log2(e) if HOLES is 0.
    """
    bend = s
    unit = 1.0 if HOLES > 0 else LOG2E
    if rules.cap is not None:
        t = tanh(s * (scale / rules.cap))
        bend = 1.0 - t * t
        s = t * (rules.cap * unit)
    else:
        s = s * (scale * unit)
    if rules.slopes is not None:
        slope = tl.load(rules.slopes + h * rules.slopes_h).to(tl.float32) * unit
        s -= slope * tl.abs(i + rules.offset - j).to(tl.float32)
    if rules.table is not None:
        place = tl.minimum(tl.maximum(j - i - rules.offset, -rules.reach), rules.reach) + rules.reach
        added = tl.load(rules.table + h * rules.table_h + place).to(tl.float32)
        s = tl.where(added == float("-inf"), added, s + added)
    if rules.bias is not None:
        at = _at_pairs(rules.bias, b, h, i, j, rules.bias_b, rules.bias_h, rules.bias_q, rules.bias_k)
        # Pairs beyond the last query are masked too: otherwise `attended_rows` would count their keys as attended.
        added = tl.load(at, mask=(i < n_q) & (j < n_k), other=float("-inf")).to(tl.float32)
        s = tl.where(added == float("-inf"), added, s + added)
    if rules.mask is not None:
        at = _at_pairs(rules.mask, b, h, i, j, rules.mask_b, rules.mask_h, rules.mask_q, rules.mask_k)
        s = tl.where(tl.load(at, mask=(i < n_q) & (j < n_k), other=0) != 0, s, float("-inf"))
    if TESTED:
        allowed = (j >= first) & (j < limit) & (i < n_q)
        if rules.low is not None:
            allowed = allowed & (j - i >= rules.low)
        if rules.high is not None:
            allowed = allowed & (j - i <= rules.high)
        if rules.query_ids is not None:
            if KEYS_OWN:
                allowed = allowed & (own_id == ids_of(rules.query_ids, b, i, n_q, rules.query_b, rules.query_n))
            else:
                allowed = allowed & (own_id == ids_of(rules.key_ids, b, j, n_k, rules.key_b, rules.key_n))
        s = tl.where(allowed, s, float("-inf"))
    return s, bend


@triton.jit
def weights_of(s, row_lse, rules, HOLES: tl.constexpr, NATIVE: tl.constexpr):
    """Return the attention weights of a tile of scores: their sigmoid, or their softmax by the rows' log-sum-exp."""
    if rules.shift is not None:  # noqa: SIM108 - for the reader
        p = logistic(s, rules.shift, HOLES, NATIVE)
    else:
        p = exponential(s - row_lse, HOLES, NATIVE)
    return p


@triton.jit
def slopes_of(p, dp, row_delta, s, rules, HOLES: tl.constexpr):
    """Return the gradient of the scores s, given the gradient `dp` of the weights p; it is 0 for masked pairs."""
    ds = p * (1.0 - p) * dp if rules.shift is not None else p * (dp - row_delta)
    if HOLES > 0:  # dp may be NaN where a pair is masked, because masked keys and values may be NaN
        ds = tl.where(s != float("-inf"), ds, 0.0)
    return ds
