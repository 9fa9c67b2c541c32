"""Device functions of linear attention: logarithms of features, sums over chunks of positions, and running sums.

Features are computed as logarithms in base 2: l(x) = log2 φ(x). The sum over the positions of a chunk is stored as a
matrix Σ φ(x) yᵀ (y is a key's value or, for queries, the output's gradient), a total Σ φ(x) for each feature, and a
shift for each feature: the largest l(x) of these positions.
Features are divided by 2^shift before they are summed, so that no factor exceeds 1, whatever the size of the inputs.
"""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import LOG2E, product

LARGEST = tl.constexpr(4.0e37)  # limit of `half_squares`, which could overflow to +inf


@triton.jit
def rows_of(base, row, inside, step, SIZE: tl.constexpr, D: tl.constexpr):
    """Return rows of a matrix with SIZE columns as a tile of D columns; rows that are not `inside` are 0."""
    c = tl.arange(0, D)
    at = base + row.to(tl.int64)[:, None] * step + c[None, :]
    return tl.load(at, mask=inside[:, None] & (c < SIZE)[None, :], other=0.0)


@triton.jit
def kept(keep, row, n, KEEP: tl.constexpr):
    """Return for each position whether it lies below n and, with KEEP, is not masked."""
    inside = row < n
    if KEEP:
        inside = inside & (tl.load(keep + row, mask=inside, other=0) != 0)
    return inside


@triton.jit
def directions(projection, f0, scale, PERFORMER: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
               MB: tl.constexpr):  # fmt: skip
    """Return Performer's random directions f0, f0 + 1, … times `scale`; zeros for elu features, which have none."""
    w = tl.zeros((MB, D), tl.float32)
    if PERFORMER:
        m = f0 + tl.arange(0, MB)
        w = rows_of(projection, m, m < M, SIZE, SIZE, D).to(tl.float32) * scale
    return w


@triton.jit
def _projected(x, w, PROJECT: tl.constexpr, ROWS: tl.constexpr, MB: tl.constexpr):
    """Return x wᵀ. With "split", w is written as the sum of two half-precision numbers, with about 16 accurate bits."""
    zero = tl.zeros((ROWS, MB), tl.float32)
    if PROJECT == "split":
        high = w.to(x.dtype)
        low = (w - high.to(tl.float32)).to(x.dtype)
        return tl.dot(x, tl.trans(high), tl.dot(x, tl.trans(low), zero))
    else:
        return product(x, tl.trans(w.to(x.dtype)), zero, PROJECT)


@triton.jit
def query_logs(x, w, f0, PERFORMER: tl.constexpr, PROJECT: tl.constexpr, M: tl.constexpr, MB: tl.constexpr,
               ROWS: tl.constexpr):  # fmt: skip
    """Return the logarithms of the features f0, f0 + 1, … of queries.

    The logarithms of Performer's features omit the term −|x|²/2, which cancels in the quotient of a row.
    """
    if PERFORMER:
        logs = _projected(x, w, PROJECT, ROWS, MB)
    else:
        x = x.to(tl.float32)
        logs = tl.where(x > 0.0, tl.log2(1.0 + tl.maximum(x, 0.0)), x * LOG2E)
    m = f0 + tl.arange(0, MB)
    return tl.where((m < M)[None, :], logs, float("-inf"))


@triton.jit
def half_squares(x, scale):
    """Return scale · |x|² of keys, at most LARGEST; the scale of the kernels gives |x|²/2 in base 2."""
    x = x.to(tl.float32)
    return tl.minimum(tl.sum(x * x, 1) * scale, LARGEST)


@triton.jit
def key_logs(x, half, inside, w, f0, PERFORMER: tl.constexpr, PROJECT: tl.constexpr, M: tl.constexpr,
             MB: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Return the logarithms of the features f0, f0 + 1, … of keys; −inf for keys that are not `inside`."""
    logs = query_logs(x, w, f0, PERFORMER, PROJECT, M, MB, ROWS)
    if PERFORMER:
        logs = logs - half[:, None]
    return tl.where(inside[:, None], logs, float("-inf"))


@triton.jit
def elu_slope(x):
    """Return the derivative of ln(elu(x) + 1)."""
    x = x.to(tl.float32)
    return tl.where(x > 0.0, 1.0 / (1.0 + tl.maximum(x, 0.0)), 1.0)


@triton.jit
def with_sums(a, sums, acc, WHOLE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Return acc + a @ sums in float32 with the precision WHOLE; "dot" means the dtype DOT and PRECISION."""
    if WHOLE == "dot":
        return product(a.to(DOT), sums.to(DOT), acc, PRECISION)
    else:
        return product(a.to(tl.float32), sums, acc, WHOLE)


@triton.jit
def finite(x):
    """Return x, the maximum that is subtracted from exponents, or 0 where x is −inf: −inf − (−inf) would be NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def row_of(x, index, ROWS: tl.constexpr):
    """Return row `index` of a tile in registers."""
    return tl.sum(tl.where((tl.arange(0, ROWS) == index)[:, None], x, 0.0), 0)


@triton.jit
def number_of(x, index, ROWS: tl.constexpr):
    """Return entry `index` of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == index, x, 0.0), 0)


@triton.jit
def put_state(sums, rows, plane, slot, m, state, total, shift, live, M: tl.constexpr, E: tl.constexpr,
              EB: tl.constexpr):  # fmt: skip
    """Store the sum of a chunk (matrix, totals and shifts) for the features m below `live`."""
    e = tl.arange(0, EB)
    inside = m < live
    at = slot.to(tl.int64) * M + m
    tl.store(sums + at[:, None] * E + e[None, :], state, mask=inside[:, None] & (e < E)[None, :])
    tl.store(rows + at, total, mask=inside)
    tl.store(rows + plane + at, shift, mask=inside)


@triton.jit
def get_state(sums, rows, plane, slot, m, live, M: tl.constexpr, E: tl.constexpr, EB: tl.constexpr):
    """Return the sum of a chunk (matrix, totals and shifts).

    The result for features m from `live` on is an empty sum: zeros with shifts of −inf.
    """
    e = tl.arange(0, EB)
    inside = m < live
    at = slot.to(tl.int64) * M + m
    state = tl.load(sums + at[:, None] * E + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
    total = tl.load(rows + at, mask=inside, other=0.0)
    return state, total, tl.load(rows + plane + at, mask=inside, other=float("-inf"))


@triton.jit
def _passed(state, total, shift, sums, rows, plane, first, c, chunks, m, new_state, new_total, new_shift,
            ALL: tl.constexpr, M: tl.constexpr, E: tl.constexpr, EB: tl.constexpr):  # fmt: skip
    """Return the running sum with chunk c added; with ALL, first overwrite the stored sum of chunk c with the running
    sum.
    """
    if ALL:
        put_state(sums, rows, plane, first + c, m, state, total, shift, tl.where(c < chunks, M, 0), M, E, EB)
    both = tl.maximum(shift, new_shift)
    old, new = tl.exp2(shift - finite(both)), tl.exp2(new_shift - finite(both))
    return state * old[:, None] + new_state * new[:, None], total * old + new_total * new, both


@triton.jit
def running_sums(
    sums, rows, plane, chunks, slots, ALL: tl.constexpr, M: tl.constexpr, E: tl.constexpr, EB: tl.constexpr,
    RB: tl.constexpr,
):  # fmt: skip
    """Replace the sum of each chunk by the sum of all chunks before it; store the sum of all chunks after the last one.

    Without ALL, only the sum of all chunks is stored. Four chunks are loaded at a time, because single loads would each
    wait for memory.
    """
    m = tl.program_id(0) * RB + tl.arange(0, RB)
    first = tl.program_id(1) * slots
    state = tl.zeros((RB, EB), tl.float32)
    total = tl.zeros((RB,), tl.float32)
    shift = tl.full((RB,), float("-inf"), tl.float32)
    for c in range(0, chunks, 4):
        s0, t0, u0 = get_state(sums, rows, plane, first + c, m, tl.where(c < chunks, M, 0), M, E, EB)
        s1, t1, u1 = get_state(sums, rows, plane, first + c + 1, m, tl.where(c + 1 < chunks, M, 0), M, E, EB)
        s2, t2, u2 = get_state(sums, rows, plane, first + c + 2, m, tl.where(c + 2 < chunks, M, 0), M, E, EB)
        s3, t3, u3 = get_state(sums, rows, plane, first + c + 3, m, tl.where(c + 3 < chunks, M, 0), M, E, EB)
        state, total, shift = _passed(
            state, total, shift, sums, rows, plane, first, c, chunks, m, s0, t0, u0, ALL, M, E, EB
        )
        state, total, shift = _passed(
            state, total, shift, sums, rows, plane, first, c + 1, chunks, m, s1, t1, u1, ALL, M, E, EB
        )
        state, total, shift = _passed(
            state, total, shift, sums, rows, plane, first, c + 2, chunks, m, s2, t2, u2, ALL, M, E, EB
        )
        state, total, shift = _passed(
            state, total, shift, sums, rows, plane, first, c + 3, chunks, m, s3, t3, u3, ALL, M, E, EB
        )
    put_state(sums, rows, plane, first + chunks, m, state, total, shift, M, M, E, EB)
