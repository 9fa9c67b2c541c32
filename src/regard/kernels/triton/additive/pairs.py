"""Device functions shared by many kernels: masks, biases and dropout of pairs, powers of two, split products."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

SPAN = tl.constexpr(32)  # number of positions that share one precomputed smallest and largest segment id
LOG2E = tl.constexpr(1.4426950408889634)


class Pairs(NamedTuple):
    """Conditions under which query i may attend to key j, biases of their score, and dropout of their weight.

    A condition, bias or dropout whose field is None is omitted at compile time. Fields with the suffixes _b, _h, _q and
    _k are strides.
    """

    low: Any = None  # query i may attend to key j only if j - i >= low
    high: Any = None  # query i may attend to key j only if j - i <= high
    lengths: Any = None  # (b,), integers: key j may be attended if j < lengths[b]
    query_ids: Any = None  # (b, q): segment ids of the queries; a query attends only to keys with the same id
    key_ids: Any = None  # (b, k): segment ids of the keys, integers of the same width as query_ids
    query_least: Any = None  # (b, q / SPAN) or None: smallest segment id of each span of SPAN queries
    query_most: Any = None  # (b, q / SPAN) or None: largest segment id of each span of SPAN queries
    key_least: Any = None
    key_most: Any = None
    mask: Any = None  # bytes, (b, h, q, k) with strides of 0 where the mask broadcasts; a byte of 0 masks a pair
    mask_b: Any = None
    mask_h: Any = None
    mask_q: Any = None
    mask_k: Any = None
    bias: Any = None  # bias of the score, indexed (b, h, q, k) by strides
    bias_b: Any = None
    bias_h: Any = None
    bias_q: Any = None
    bias_k: Any = None
    table: Any = None  # (h, 2 * radius + 1): adds table[clip(j - i, -radius, radius) + radius] to the score
    radius: Any = None
    keep: Any = None  # probability that a weight survives dropout
    seed: Any = None


EVERY = Pairs()  # without conditions, biases and dropout: every query attends to every key


@triton.jit
def key_limit(pairs, b, n_k):
    """Return the number of keys of batch row b that are not padding."""
    limit = n_k
    if pairs.lengths is not None:
        limit = tl.minimum(limit, tl.load(pairs.lengths + b)).to(tl.int32)  # lengths may be int64
    return limit


@triton.jit
def key_range(pairs, b, i0, n_k, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Return the range of keys that queries i0 .. i0 + ROWS may attend; it begins at a multiple of STEP."""
    start = 0
    stop = key_limit(pairs, b, n_k)
    if pairs.low is not None:
        start = tl.maximum(i0 + pairs.low, 0) // STEP * STEP
    if pairs.high is not None:
        stop = tl.minimum(stop, i0 + ROWS + pairs.high)
    return start, stop


@triton.jit
def query_range(pairs, b, j0, n_q, n_k, COLS: tl.constexpr, STEP: tl.constexpr):
    """Return the range of queries that may attend to keys j0 .. j0 + COLS; it begins at a multiple of STEP."""
    start = 0
    stop = n_q
    if pairs.high is not None:
        start = tl.maximum(j0 - pairs.high, 0) // STEP * STEP
    if pairs.low is not None:
        stop = tl.minimum(stop, j0 + COLS - pairs.low)
    stop = tl.where(j0 < key_limit(pairs, b, n_k), stop, 0)
    return start, stop


@triton.jit
def _span_least(ptr, b, at, n, COUNT: tl.constexpr):
    spans = (n + SPAN - 1) // SPAN
    index = tl.minimum(at // SPAN + tl.arange(0, COUNT), spans - 1)  # the minimum prevents loads beyond the last span
    return tl.min(tl.load(ptr + b * spans + index), 0)


@triton.jit
def _span_most(ptr, b, at, n, COUNT: tl.constexpr):
    spans = (n + SPAN - 1) // SPAN
    index = tl.minimum(at // SPAN + tl.arange(0, COUNT), spans - 1)  # the minimum prevents loads beyond the last span
    return tl.max(tl.load(ptr + b * spans + index), 0)


@triton.jit
def tile_state(pairs, b, i0, j0, n_q, n_k, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return two flags of a tile: whether some pair may be unmasked, and whether all pairs certainly are."""
    some = True
    every = j0 + COLS <= key_limit(pairs, b, n_k)
    if pairs.low is not None:
        every = every & (j0 - (i0 + ROWS - 1) >= pairs.low)
    if pairs.high is not None:
        every = every & (j0 + COLS - 1 - i0 <= pairs.high)
    if pairs.query_ids is not None:
        if pairs.query_least is None:
            every = False
        else:
            q_least = _span_least(pairs.query_least, b, i0, n_q, ROWS // SPAN)
            q_most = _span_most(pairs.query_most, b, i0, n_q, ROWS // SPAN)
            k_least = _span_least(pairs.key_least, b, j0, n_k, COLS // SPAN)
            k_most = _span_most(pairs.key_most, b, j0, n_k, COLS // SPAN)
            some = (q_least <= k_most) & (k_least <= q_most)
            every = every & (q_least == k_most) & (k_least == q_most) & (q_least == q_most)
    if pairs.mask is not None:
        every = False
    return some, every


@triton.jit
def tile_allowed(pairs, b, h, i, j, n_q, n_k):
    """Return a boolean tile: whether query i may attend to key j; i and j broadcast to the tile in either order."""
    allowed = (i < n_q) & (j < key_limit(pairs, b, n_k))
    if pairs.low is not None:
        allowed = allowed & (j - i >= pairs.low)
    if pairs.high is not None:
        allowed = allowed & (j - i <= pairs.high)
    if pairs.query_ids is not None:
        q_id = tl.load(pairs.query_ids + b * n_q + i, mask=i < n_q, other=0)
        k_id = tl.load(pairs.key_ids + b * n_k + j, mask=j < n_k, other=0)
        allowed = allowed & (q_id == k_id)
    if pairs.mask is not None:
        at = b.to(tl.int64) * pairs.mask_b + h * pairs.mask_h
        spot = i.to(tl.int64) * pairs.mask_q + j.to(tl.int64) * pairs.mask_k
        inside = (i < n_q) & (j < n_k)
        allowed = allowed & (tl.load(pairs.mask + at + spot, mask=inside, other=0) != 0)
    return allowed


@triton.jit
def any_bad(bad_span, k_pad):
    """Return whether any key or value of a head holds NaN or Inf.

    Such values are rare, so one test of the head usually makes the tests of its tiles unnecessary.
    """
    found = 0
    for first in range(0, k_pad // SPAN, 256):
        span = first + tl.arange(0, 256)
        found = tl.maximum(found, tl.max(tl.load(bad_span + span, mask=span < k_pad // SPAN, other=0), 0))
    return found > 0


@triton.jit
def add_bias(scores, pairs, b, h, i, j, n_q, n_k, SCALE: tl.constexpr):
    """Return scores + SCALE * bias, where the bias is the dense bias plus the entry of the table for the pair's
    distance.

    Where a bias is -inf, the result is -inf even if the score is NaN.
    """
    if pairs.bias is not None:
        at = b.to(tl.int64) * pairs.bias_b + h * pairs.bias_h
        spot = i.to(tl.int64) * pairs.bias_q + j.to(tl.int64) * pairs.bias_k
        inside = (i < n_q) & (j < n_k)
        added = SCALE * tl.load(pairs.bias + at + spot, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(added == float("-inf"), float("-inf"), scores + added)
    if pairs.table is not None:
        distance = tl.minimum(tl.maximum(j - i, -pairs.radius), pairs.radius)
        row = pairs.table + h * (2 * pairs.radius + 1) + pairs.radius
        added = SCALE * tl.load(row + distance).to(tl.float32)
        scores = tl.where(added == float("-inf"), float("-inf"), scores + added)
    return scores


@triton.jit
def dropout_factor(pairs, z, i, j):
    """Return 1 / keep where pair (i, j) of head z survives dropout, else 0; it depends only on seed, z, i and j."""
    zero = (i + j) * 0
    bits, _, _, _ = tl.philox(pairs.seed, zero + j, zero + i, zero + z, zero)
    chance = (bits >> 8).to(tl.float32) * (1.0 / 16777216.0)
    return tl.where(chance < pairs.keep, 1.0 / pairs.keep, 0.0)


@triton.jit
def power_of_two(x, NATIVE: tl.constexpr):
    """Return 2^x; on a GPU, subnormal results become 0, which saves three instructions."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def fenced_exp2(x, one, NATIVE: tl.constexpr):
    """Return 2^x, computed in one register layout only; `one` is a 1 that the compiler does not see as a constant.

    A matrix product needs its operand in a register layout of its own, and the compiler would compute 2^x again in that
    layout instead of converting the result. A while loop, which runs once, prevents this.
    """
    while one > 0:
        x = power_of_two(x, NATIVE)
        one -= 1
    return x


@triton.jit
def fenced_scale(x, by, one):
    """Return x · by, computed in one register layout only, by the same while loop as `fenced_exp2`."""
    while one > 0:
        x = x * by
        one -= 1
    return x


@triton.jit
def next_pivot(scores, most, calm, ceiling, AXIS: tl.constexpr):
    """Return the pivot to subtract from base-2 scores, the factor for sums of earlier tiles, and the new maximum.

    `most` is the maximum of earlier tiles. If `calm`, all scores lie at most a hundred powers of two below `ceiling` (a
    sum of tanh is bounded by its weights): then the ceiling is the pivot of all rows and tiles, and no maximum is
    computed.
    """
    if calm:  # noqa: SIM108 - a kernel has no conditional expression on a run-time value
        new_most = tl.zeros_like(most) + ceiling
    else:
        new_most = tl.maximum(most, tl.max(scores, AXIS))
    # If all keys so far are masked, new_most is -inf: then a pivot of 0 avoids -inf - (-inf), which is NaN.
    pivot = tl.where(new_most == float("-inf"), 0.0, new_most)
    return pivot, tl.exp2(most - pivot), new_most


@triton.jit
def coarse(x):
    """Return x rounded to the ten mantissa bits of TF32.

    A NaN that a GPU computes (0x7FFFFFFF) overflows to −0 here; `remainder` returns it as NaN, so that the sum of both
    is NaN.
    """
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def remainder(x, high):
    """Return x − high, with high = coarse(x), rounded to ten bits too; NaN if x is NaN, and 0 if x is infinite."""
    return tl.where(x == x, coarse(x - high), x)


@triton.jit
def _leading(x):
    """Return x with the first eight bits of its significand: a bfloat16 number, as float32."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def bfloat_parts(x):
    """Return three bfloat16 numbers whose sum is x."""
    high = _leading(x)
    rest = x - high
    middle = _leading(rest)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def product_parts(a, b_high, b_low, acc, PRECISION: tl.constexpr, FLIP: tl.constexpr):
    """Return acc + a b, or acc + b a with FLIP; b is b_high + b_low if PRECISION is "three", else b_high."""
    if PRECISION == "three":
        a_high = coarse(a)
        a_low = remainder(a, a_high)
        # The sum starts from zero, with the small terms first: tensor cores truncate their sums instead of rounding
        # them, and a sum over all keys would accumulate that error.
        part = tl.zeros_like(acc)
        if FLIP:
            part = tl.dot(b_high, a_low, part, input_precision="tf32")
            part = tl.dot(b_low, a_high, part, input_precision="tf32")
            return acc + tl.dot(b_high, a_high, part, input_precision="tf32")
        else:
            part = tl.dot(a_low, b_high, part, input_precision="tf32")
            part = tl.dot(a_high, b_low, part, input_precision="tf32")
            return acc + tl.dot(a_high, b_high, part, input_precision="tf32")
    elif FLIP:
        return product(b_high, a, acc, PRECISION)
    else:
        return product(a, b_high, acc, PRECISION)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a b; PRECISION is the mode for float32 operands.

    With "three", each operand is split into a high and a low part, and three of the four products of parts are added.
    Triton's own "tf32x3" is not used, because it computes the parts in a register layout that repeats them in many
    threads. With "six", each operand is the sum of three bfloat16 numbers, and six of the nine products are added, the
    smallest first. On Hopper this is about twice as fast as "three", because products of bfloat16 are twice as fast as
    those of TF32 and take half the shared memory.
    """
    if PRECISION == "interpreted":  # Triton's interpreter treats bfloat16 operands of tl.dot as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif PRECISION == "six":
        a_high, a_middle, a_low = bfloat_parts(a)
        b_high, b_middle, b_low = bfloat_parts(b)
        part = tl.dot(a_high, b_low, tl.dot(a_low, b_high))
        part = tl.dot(a_middle, b_middle, part)
        part = tl.dot(a_high, b_middle, tl.dot(a_middle, b_high, part))
        return acc + tl.dot(a_high, b_high, part)
    elif PRECISION == "three":
        b_high = coarse(b)
        return product_parts(a, b_high, remainder(b, b_high), acc, PRECISION, False)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)
