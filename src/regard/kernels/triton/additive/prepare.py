"""Kernels that preprocess query, key and value for the main kernels: ranges, exponentials, values without NaN."""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import LOG2E, SPAN, coarse, remainder

LIMIT = tl.constexpr(34.0)  # for |x| up to this, e^{2x} divided by the smallest weight fits float32
LEAST = tl.constexpr(1e-8)  # weights smaller than this, relative to the largest weight, are raised to it
FAR = tl.constexpr(1e9)  # reciprocal weight of padding features, so large that their terms vanish in rounding


@triton.jit
def reciprocal(x, NATIVE: tl.constexpr):
    if NATIVE:  # the compiler's division adds range checks that are unnecessary here
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _span_of(x, x_n, x_f, first, last, f_size, low_at, high_at, ROWS: tl.constexpr, FB: tl.constexpr):
    f = tl.program_id(2) * FB + tl.arange(0, FB)
    # Minima and maxima are accumulated for each element of a tile, so that threads exchange them only once, at the end.
    low = tl.full((ROWS, FB), float("inf"), tl.float32)
    high = tl.full((ROWS, FB), float("-inf"), tl.float32)
    for r in range(first, last, ROWS):
        i = r + tl.arange(0, ROWS)
        inside = (i < last)[:, None] & (f < f_size)[None, :]
        spot = x + i.to(tl.int64)[:, None] * x_n + f[None, :] * x_f
        t = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
        good = inside & (t == t)
        low = tl.minimum(low, tl.where(good, t, float("inf")))
        high = tl.maximum(high, tl.where(good, t, float("-inf")))
    tl.store(low_at + f, tl.min(low, 0), mask=f < f_size)
    tl.store(high_at + f, tl.max(high, 0), mask=f < f_size)


@triton.jit
def ranges(
    query, q_b, q_h, q_n, q_f, key, k_b, k_h, k_n, k_f, lengths, lows, highs,
    heads, groups, n_q, n_k, f_size, batch_heads,
    PARTS: tl.constexpr, ROWS: tl.constexpr, FB: tl.constexpr,
):  # fmt: skip
    """Compute the minimum and maximum of FB features over one of PARTS groups of rows, without NaN and padded keys."""
    part, z = tl.program_id(0), tl.program_id(1)
    at = (z * PARTS + part) * f_size
    if z < batch_heads:
        share = tl.cdiv(n_q, PARTS)
        x = query + (z // heads).to(tl.int64) * q_b + (z % heads).to(tl.int64) * q_h
        first = part * share
        _span_of(x, q_n, q_f, first, tl.minimum(first + share, n_q), f_size, lows + at, highs + at, ROWS, FB)
    else:
        y = z - batch_heads
        b = y // groups
        stop = n_k
        if lengths is not None:
            stop = tl.minimum(stop, tl.load(lengths + b))
        share = tl.cdiv(n_k, PARTS)
        x = key + b.to(tl.int64) * k_b + (y % groups).to(tl.int64) * k_h
        first = part * share
        _span_of(x, k_n, k_f, first, tl.minimum(first + share, stop), f_size, lows + at, highs + at, ROWS, FB)


@triton.jit
def _with_part(low, high, lows, highs, at, good):
    low = tl.minimum(low, tl.load(lows + at, mask=good, other=0.0))
    return low, tl.maximum(high, tl.load(highs + at, mask=good, other=0.0))


@triton.jit
def unit_range(lows, highs, unit, batch_heads, f, f_size, repeat, PARTS: tl.constexpr, ROLLED: tl.constexpr = False):
    """Return minima and maxima of the query and key features f, over all query heads that share the key head `unit`.

    With ROLLED, loops are not unrolled, for kernels that inline this function several times: the code is shorter, but
    slower.
    """
    good = f < f_size
    at = (batch_heads + unit) * PARTS * f_size + f
    k_low = tl.load(lows + at, mask=good, other=0.0)
    k_high = tl.load(highs + at, mask=good, other=0.0)
    if ROLLED:
        for part in range(1, PARTS):
            k_low, k_high = _with_part(k_low, k_high, lows, highs, at + part * f_size, good)
    else:
        for part in tl.static_range(1, PARTS):
            k_low, k_high = _with_part(k_low, k_high, lows, highs, at + part * f_size, good)
    q_low = k_low * 0.0 + float("inf")
    q_high = k_low * 0.0 - float("inf")
    for r in range(repeat):
        at = (unit * repeat + r) * PARTS * f_size + f
        if ROLLED:
            for part in range(PARTS):
                q_low, q_high = _with_part(q_low, q_high, lows, highs, at + part * f_size, good)
        else:
            for part in tl.static_range(PARTS):
                q_low, q_high = _with_part(q_low, q_high, lows, highs, at + part * f_size, good)
    return q_low, q_high, k_low, k_high


@triton.jit
def nan_rows(x, x_n, x_f, stop, i0, f_size, ROWS: tl.constexpr, FB: tl.constexpr):
    """Return 1 for rows that hold NaN: sums treat NaN as 0, and outputs that depend on it are set to NaN at the end."""
    i = i0 + tl.arange(0, ROWS)
    bad = tl.zeros((ROWS,), tl.int32)
    for f0 in range(0, f_size, FB):
        f = f0 + tl.arange(0, FB)
        inside = (i < stop)[:, None] & (f < f_size)[None, :]
        t = tl.load(x + i.to(tl.int64)[:, None] * x_n + f[None, :] * x_f, mask=inside, other=0.0)
        bad = tl.maximum(bad, tl.max((t != t).to(tl.int32), 1))
    return bad


@triton.jit
def copy_values(value, v_n, v_e, stop, i0, e_size, bad, copy_at, c_n, c_e, low_step, bad_at, bad_span_at,
                SPLIT: tl.constexpr, ROWS: tl.constexpr, EB: tl.constexpr):  # fmt: skip
    """Write a padded copy of value rows in which NaN and Inf are 0, and flags of the rows that held NaN or Inf.

    With SPLIT, each number is written as the sum of two TF32 numbers.
    """
    i = i0 + tl.arange(0, ROWS)
    e = tl.arange(0, EB)
    inside = (i < stop)[:, None] & (e < e_size)[None, :]
    t = tl.load(value + i.to(tl.int64)[:, None] * v_n + e[None, :] * v_e, mask=inside, other=0.0)
    finite = tl.abs(t.to(tl.float32)) < float("inf")
    bad = tl.maximum(bad, tl.max((~finite).to(tl.int32), 1))
    t = tl.where(finite, t, 0.0)
    to = copy_at + i[:, None] * c_n + e[None, :] * c_e
    if SPLIT:
        high = coarse(t)
        tl.store(to, high)
        tl.store(to + low_step, remainder(t, high))
    else:
        tl.store(to, t)
    tl.store(bad_at + i, bad.to(tl.int8))
    tl.store(bad_span_at + i0 // ROWS, tl.max(bad, 0))


@triton.jit
def span_place(i, f, f_pad):
    """Return the offset of feature f of row i in a copy whose rows are grouped in spans.

    A span of SPAN rows is stored as (feature / 4, row, feature % 4).
    """
    return (i // SPAN * f_pad + f // 4 * 4).to(tl.int64) * SPAN + i % SPAN * 4 + f % 4


@triton.jit
def _exp(x):
    """Return e^x accurate to float32 rounding: the rounding error of the argument is carried separately."""
    high = x * LOG2E
    whole = tl.floor(high + 0.5)
    # the remainder x * log2(e) - whole, in which log2(e) is the sum of two float32 numbers
    part = tl.fma(x, 1.44269502162933349609, -whole) + x * 1.92596299112661746887e-8
    return tl.exp2(whole) * tl.exp2(part)


@triton.jit
def factors(
    query, q_b, q_h, q_n, q_f, key, k_b, k_h, k_n, k_f, value, v_b, v_h, v_n, v_e, weight, w_h, lengths,
    lows, highs, plan, query_raw, key_raw, query_exp, key_exp, inverse, query_top, query_size, key_top, key_size,
    value_out, query_bad, bad, bad_span,
    heads, groups, n_q, n_k, q_pad, k_pad, f_size, f_pad, e_size, batch_heads, low_step,
    PARTS: tl.constexpr, ROW_MAJOR: tl.constexpr, FACTORED: tl.constexpr, COPY: tl.constexpr, SPLIT: tl.constexpr,
    FB: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """Write float32 copies of query a and key b and, for tanh, e^{2(a+c)} / w and e^{2(b-c)}, feature- or row-major.

    The constant c of each feature centres the ranges of query and key: it cancels in tanh(a + b) but limits the
    exponentials.
    """
    span, z = tl.program_id(0), tl.program_id(1)
    i = span * SPAN + tl.arange(0, SPAN)
    repeat = heads // groups
    is_query = z < batch_heads
    y = z - batch_heads
    unit = tl.where(is_query, z // repeat, y)
    b = tl.where(is_query, z // heads, y // groups)
    turn = True
    if plan is not None:
        turn = tl.load(plan + unit) < 0
    rows = tl.where(is_query, n_q, n_k)
    pad = tl.where(is_query, q_pad, k_pad)
    if lengths is not None:
        rows = tl.where(is_query, rows, tl.minimum(rows, tl.load(lengths + b)))
    if turn & (span * SPAN < pad):
        largest = 0.0
        size = 0.0
        if FACTORED:
            w_top = 0.0
            for f0 in range(0, f_size, FB):
                f = f0 + tl.arange(0, FB)
                w = tl.load(weight + (z % heads) * w_h + f, mask=f < f_size, other=0.0)
                w_top = tl.maximum(w_top, tl.max(tl.abs(w.to(tl.float32)), 0))
            w_top = tl.where(w_top > 0.0, w_top, 1.0)
            largest = -float("inf")
        for f0 in range(0, f_pad, FB):
            f = f0 + tl.arange(0, FB)
            inside = (i < rows)[:, None] & (f < f_size)[None, :]
            if is_query:
                spot = (z // heads).to(tl.int64) * q_b + (z % heads).to(tl.int64) * q_h + i.to(tl.int64)[:, None] * q_n
                t = tl.load(query + spot + f[None, :] * q_f, mask=inside, other=0.0).to(tl.float32)
            else:
                spot = b.to(tl.int64) * k_b + (y % groups).to(tl.int64) * k_h + i.to(tl.int64)[:, None] * k_n
                t = tl.load(key + spot + f[None, :] * k_f, mask=inside, other=0.0).to(tl.float32)
            t = tl.where(t == t, t, 0.0)
            if ROW_MAJOR:
                out = i[:, None].to(tl.int64) * f_pad + f[None, :]
            else:
                out = span_place(i[:, None], f[None, :], f_pad)
            room = (f < f_pad)[None, :]
            if is_query:
                tl.store(query_raw + z.to(tl.int64) * f_pad * pad + out, t, mask=room)
            else:
                tl.store(key_raw + y.to(tl.int64) * f_pad * pad + out, t, mask=room)
            if FACTORED:
                q_low, q_high, k_low, k_high = unit_range(lows, highs, unit, batch_heads, f, f_size, repeat, PARTS)
                middle = ((k_low + k_high) - (q_low + q_high)) * 0.25
                middle = tl.where(tl.abs(middle) < float("inf"), middle, 0.0)
                t = tl.where(is_query, t + middle[None, :], t - middle[None, :])
                t = tl.where(inside, t, 0.0)
                w = tl.load(weight + (z % heads) * w_h + f, mask=f < f_size, other=0.0).to(tl.float32) / w_top
                w = tl.where(tl.abs(w) < LEAST, tl.where(w < 0, -LEAST, LEAST), w)
                u = tl.where(f < f_size, 1.0 / w, FAR)
                lift = tl.where(is_query, 0.5 * tl.log(tl.abs(u)), 0.0)
                high = tl.where(inside, t + lift[None, :], -float("inf"))
                largest = tl.maximum(largest, tl.max(tl.max(high, 1), 0))
                size = tl.maximum(size, tl.max(tl.max(tl.abs(t), 1), 0))
                power = _exp(2.0 * t)
                if is_query:
                    tl.store(inverse + z.to(tl.int64) * f_pad + f, u, mask=f < f_pad)
                    power = tl.where((f < f_size)[None, :], power * u[None, :], 0.0)
                    tl.store(query_exp + z.to(tl.int64) * f_pad * pad + out, power, mask=room)
                else:
                    tl.store(key_exp + y.to(tl.int64) * f_pad * pad + out, power, mask=room)
        if FACTORED:
            if is_query:
                tl.store(query_top + z * (q_pad // SPAN) + span, largest)
                tl.store(query_size + z * (q_pad // SPAN) + span, size)
            else:
                tl.store(key_top + y * (k_pad // SPAN) + span, largest)
                tl.store(key_size + y * (k_pad // SPAN) + span, size)
    if COPY:
        if is_query:
            if span * SPAN < q_pad:
                x = query + b.to(tl.int64) * q_b + (z % heads).to(tl.int64) * q_h
                nans = nan_rows(x, q_n, q_f, n_q, span * SPAN, f_size, SPAN, FB)
                tl.store(query_bad + z * q_pad + i, nans.to(tl.int8))
        elif span * SPAN < k_pad:
            x = key + b.to(tl.int64) * k_b + (y % groups).to(tl.int64) * k_h
            nans = nan_rows(x, k_n, k_f, rows, span * SPAN, f_size, SPAN, FB)
            copied = value + b.to(tl.int64) * v_b + (y % groups).to(tl.int64) * v_h
            copy_values(copied, v_n, v_e, rows, span * SPAN, e_size, nans,
                        value_out + y.to(tl.int64) * k_pad * EB, 1, k_pad, low_step, bad + y * k_pad,
                        bad_span + y * (k_pad // SPAN), SPLIT, SPAN, EB)  # fmt: skip


@triton.jit
def output_gradient(
    output, o_b, o_h, o_n, o_e, grad, g_b, g_h, g_n, g_e, change, delta, plan, by_row, by_column,
    heads, groups, n_q, q_pad, e_size, low_step, COPY: tl.constexpr, SPLIT: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """Compute delta = Σ dO O - dlse of each row and, for the exact kernels, padded copies of dO by row and column."""
    z = tl.program_id(1)
    b, h = z // heads, z % heads
    i = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    e = tl.arange(0, EB)
    inside = (i < n_q)[:, None] & (e < e_size)[None, :]
    at = b.to(tl.int64) * o_b + h * o_h + i.to(tl.int64)[:, None] * o_n + e[None, :] * o_e
    o = tl.load(output + at, mask=inside, other=0.0).to(tl.float32)
    at = b.to(tl.int64) * g_b + h * g_h + i.to(tl.int64)[:, None] * g_n + e[None, :] * g_e
    g = tl.load(grad + at, mask=inside, other=0.0)
    row = z.to(tl.int64) * n_q + i
    total = tl.sum(o * g.to(tl.float32), 1)
    if change is not None:
        total -= tl.load(change + row, mask=i < n_q, other=0.0)
    tl.store(delta + row, total, mask=i < n_q)
    turn = True
    if plan is not None:
        turn = tl.load(plan + b * groups + h // (heads // groups)) < 0
    if COPY:  # noqa: SIM102 - known when compiled, unlike the other
        if turn:
            row_to = by_row + (z.to(tl.int64) * q_pad + i)[:, None] * EB + e[None, :]
            column_to = by_column + (z * EB + e).to(tl.int64)[None, :] * q_pad + i[:, None]
            if SPLIT:
                high = coarse(g)
                low = remainder(g, high)
                tl.store(row_to, high)
                tl.store(row_to + low_step, low)
                tl.store(column_to, high)
                tl.store(column_to + low_step, low)
            else:
                tl.store(row_to, g)
                tl.store(column_to, g)
