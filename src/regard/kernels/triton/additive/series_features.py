"""Sine-series features of query and key rows, computed on the device once per pass."""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import LOG2E
from regard.kernels.triton.additive.prepare import copy_values, nan_rows, span_place, unit_range

HEAVY = tl.constexpr(4096.0)  # with a larger |weight|, query features could overflow float16
# A hidden unit's squared error is assumed to grow with its range r as exp(STEEP r), an upper bound for most fits.
STEEP = tl.constexpr(2.0)
WHOLE = tl.constexpr(65536.0)  # errors are summed as integers in units of 1 / WHOLE, so that their order has no effect


@triton.jit
def sine_cosine(turns, NATIVE: tl.constexpr):
    """Return sin 2πt and cos 2πt for t = `turns`.

    t is first reduced to |t| <= 1/2, where the GPU's approximate sine and cosine are accurate enough.
    """
    shift = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to an integer
    t = (turns - ((turns + shift) - shift)) * 6.283185307179586
    if NATIVE:
        s = tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1)
        c = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1)
        return s, c
    else:
        return tl.sin(t), tl.cos(t)


@triton.jit
def _tops(spans, unit, batch_heads, f, f_size, repeat, PARTS: tl.constexpr, MANY: tl.constexpr):
    """Return the largest |query + key| of each feature f of a key head."""
    lows, highs = spans
    q_low, q_high, k_low, k_high = unit_range(lows, highs, unit, batch_heads, f, f_size, repeat, PARTS, MANY)
    top = tl.maximum(tl.abs(q_low + k_low), tl.abs(q_high + k_high))
    return tl.where((k_low <= k_high) & (f < f_size), top, 0.0)


@triton.jit
def table_row(spans, weight, w_h, table, unit, groups, batch_heads, f_size, repeat, TABLE_ROWS: tl.constexpr,
              STEP: tl.constexpr, PARTS: tl.constexpr, MANY: tl.constexpr, FB: tl.constexpr):  # fmt: skip
    """Return the index of the first table row that covers all sums query + key of a key head.

    The index is -1 if no row of the table covers the sums, or if a query feature would be too large. Also return the
    largest |query + key| of each of the last FB features.
    """
    reach = 0.0
    tops = tl.zeros((FB,), tl.float32)
    for f0 in range(0, f_size, FB):
        f = f0 + tl.arange(0, FB)
        tops = _tops(spans, unit, batch_heads, f, f_size, repeat, PARTS, MANY)
        top = tops
        for r in range(repeat):
            w = tl.load(weight + ((unit % groups) * repeat + r) * w_h + f, mask=f < f_size, other=0.0).to(tl.float32)
            top = tl.where(tl.abs(w) > HEAVY, float("inf"), top)
        reach = tl.maximum(reach, tl.max(tl.where(f < f_size, top, 0.0), 0))
    error = _error(tops, tl.arange(0, FB) + (f_size - 1) // FB * FB, f_size, reach)
    if MANY:
        for f0 in range(0, (f_size - 1) // FB * FB, FB):
            f = f0 + tl.arange(0, FB)
            error += _error(_tops(spans, unit, batch_heads, f, f_size, repeat, PARTS, MANY), f, f_size, reach)
    row = tl.arange(0, TABLE_ROWS)
    most = tl.exp(tl.minimum((tl.load(table + row * STEP + 6) - reach) * STEEP, 1.0)) * WHOLE * f_size
    short = (most < error.to(tl.float32)) | (tl.load(table + row * STEP) < reach)
    short = tl.sum(short.to(tl.int32), 0)
    return tl.where(short < TABLE_ROWS, short, -1), tops


@triton.jit
def _error(tops, f, f_size, reach):
    """Return the summed squared errors of the features f, relative to that of a feature with range `reach`.

    The result is an integer in units of 1 / WHOLE.
    """
    share = tl.exp(tl.minimum((tops - reach) * STEEP, 0.0)) * WHOLE
    return tl.sum(tl.where(f < f_size, share + 0.5, 0.0).to(tl.int32), 0)


@triton.jit
def choose(
    weight, w_h, lows, highs, table, plan, fits, heads, groups, batch_heads, f_size, f_pad,
    TABLE_ROWS: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr, PARTS: tl.constexpr, MANY: tl.constexpr,
    FB: tl.constexpr,
):  # fmt: skip
    """Choose the row of the series table for each key head, and the fit within this row for each hidden unit.

    The fits of a row have decreasing ranges; a hidden unit uses the last fit that covers its own range.
    """
    unit, repeat = tl.program_id(0), heads // groups
    spans = (lows, highs)
    row, tops = table_row(spans, weight, w_h, table, unit, groups, batch_heads, f_size, repeat,
                          TABLE_ROWS, WIDTH * FITS, PARTS, MANY, FB)  # fmt: skip
    tl.store(plan + unit, row)
    if fits is not None:
        row_at = table + tl.maximum(row, 0) * (WIDTH * FITS)
        for f0 in range(0, f_pad, FB):
            f = f0 + tl.arange(0, FB)
            if MANY:
                tops = _tops(spans, unit, batch_heads, f, f_size, repeat, PARTS, MANY)
            number = tl.zeros((FB,), tl.int32)
            for n in tl.static_range(1, FITS):
                number += (tl.load(row_at + n * WIDTH) >= tops).to(tl.int32)
            tl.store(fits + unit * f_pad + f, number * WIDTH, mask=f < f_pad)


@triton.jit
def _shifts(x, x_n, x_f, stop, i0, f_size, weight, row_at, fits_at, QUERY: tl.constexpr, ROWS: tl.constexpr,
            FB: tl.constexpr):  # fmt: skip
    """Return Σ_f w_f slope_f x_f of rows i0 .. i0 + ROWS, with NaN as 0; for a query, also add the fits' constants."""
    i = i0 + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for f0 in range(0, f_size, FB):
        f = f0 + tl.arange(0, FB)
        fit = row_at + tl.load(fits_at + f, mask=f < f_size, other=0)
        inside = (i < stop)[:, None] & (f < f_size)[None, :]
        t = tl.load(x + i.to(tl.int64)[:, None] * x_n + f[None, :] * x_f, mask=inside, other=0.0).to(tl.float32)
        t = tl.where(t == t, t, 0.0) * tl.load(fit + 3)[None, :]
        if QUERY:
            t += tl.load(fit + 4)[None, :]
        w = tl.load(weight + f, mask=f < f_size, other=0.0).to(tl.float32)
        total += tl.sum(t * w[None, :], 1)
    return total


@triton.jit
def _write_raw(x, x_n, x_f, stop, i0, f_size, f_pad, out_at, ROWS: tl.constexpr, FB: tl.constexpr):
    """Write a float32 copy of rows for the exact kernels; NaN and rows from `stop` on are written as 0."""
    i = i0 + tl.arange(0, ROWS)
    for f0 in range(0, f_pad, FB):
        f = f0 + tl.arange(0, FB)
        inside = (i < stop)[:, None] & (f < f_size)[None, :]
        t = tl.load(x + i.to(tl.int64)[:, None] * x_n + f[None, :] * x_f, mask=inside, other=0.0).to(tl.float32)
        t = tl.where(t == t, t, 0.0)
        tl.store(out_at + span_place(i[:, None], f[None, :], f_pad), t, mask=(f < f_pad)[None, :])


@triton.jit
def _write_features(x, x_n, x_f, n, i0, f_size, f_pad, weight, row_at, fits_at, out_at,
                    GROUP: tl.constexpr, QUERY: tl.constexpr, ODD: tl.constexpr, ROWS: tl.constexpr, FB: tl.constexpr,
                    NATIVE: tl.constexpr):  # fmt: skip
    """Compute the feature columns of rows i0 .. i0 + ROWS; rows from n on are 0.

    The feature columns are ordered as (group of harmonics, feature / 4, GROUP harmonics, feature % 4, 2). With groups
    of two, in the result of a matrix product, a thread holds all harmonics of its features, which the gradient kernel
    sums.
    """
    i = i0 + tl.arange(0, ROWS)
    member = tl.arange(0, GROUP)
    groups = tl.load(row_at + 1).to(tl.int32) // GROUP
    for f0 in range(0, f_pad, FB):
        f = f0 + tl.arange(0, FB)
        fit = row_at + tl.zeros((FB,), tl.int32)
        if fits_at is not None:
            fit += tl.load(fits_at + f, mask=f < f_pad, other=0)
        base, lowest = tl.load(fit + 2), tl.reshape(tl.load(fit + 5), (1, FB // 4, 1, 4))
        waves = tl.reshape(fit + 8, (1, FB // 4, 1, 4)) + member[None, None, :, None]
        inside = (i < n)[:, None] & (f < f_size)[None, :]
        t = tl.load(x + i.to(tl.int64)[:, None] * x_n + f[None, :] * x_f, mask=inside, other=0.0).to(tl.float32)
        turns = tl.reshape(tl.where(t == t, t, 0.0) * base[None, :], (ROWS, FB // 4, 1, 4))
        # From one group of harmonics to the next, the angle grows by 2 GROUP times the base angle, so sine and cosine
        # are rotated instead of computed again.
        s, c = sine_cosine(turns * (lowest + (2 * member).to(tl.float32)[None, None, :, None]), NATIVE)
        turn_s, turn_c = sine_cosine(turns * (2.0 * GROUP), NATIVE)
        scale = inside.to(tl.float32)  # sine and cosine are scaled before the rotation; padding becomes 0
        if QUERY:
            scale *= tl.load(weight + f, mask=f < f_size, other=0.0).to(tl.float32)[None, :] * LOG2E
        scale = tl.reshape(scale, (ROWS, FB // 4, 1, 4))
        s, c = s * scale, c * scale
        for group in range(groups):
            if QUERY:
                p = tl.load(waves + group * GROUP)
                if ODD:
                    first, second = p * s, p * c
                else:
                    q = tl.load(waves + 16 + group * GROUP)
                    first, second = p * s + q * c, p * c - q * s
            else:
                first, second = c, s
            if GROUP == 1:  # two separate stores need no exchange between threads
                spot = out_at + i[:, None].to(tl.int64) * (f_pad * 32) + (2 * group * f_pad + f)[None, :]
                first = tl.reshape(first, (ROWS, FB)).to(out_at.dtype.element_ty)
                second = tl.reshape(second, (ROWS, FB)).to(out_at.dtype.element_ty)
                tl.store(spot, first, mask=(f < f_pad)[None, :])
                tl.store(spot + f_pad, second, mask=(f < f_pad)[None, :])
            else:
                both = tl.join(first, second)
                both = tl.reshape(both, (ROWS, FB * 2 * GROUP)).to(out_at.dtype.element_ty)
                column = (group * f_pad + f0) * (2 * GROUP) + tl.arange(0, FB * 2 * GROUP)
                room = (f0 * 2 * GROUP + tl.arange(0, FB * 2 * GROUP)) < f_pad * 2 * GROUP
                tl.store(out_at + i[:, None].to(tl.int64) * (f_pad * 32) + column[None, :], both, mask=room[None, :])
            s, c = s * turn_c + c * turn_s, c * turn_c - s * turn_s


@triton.jit
def features(
    query, q_b, q_h, q_n, q_f, key, k_b, k_h, k_n, k_f, value, v_b, v_h, v_n, v_e, weight, w_h, lengths,
    table, plan, fits, query_out, key_out, query_raw, key_raw, query_shift, key_shift,
    value_out, query_bad, bad, bad_span,
    heads, groups, n_q, n_k, q_pad, k_pad, f_size, f_pad, e_size, first, units,
    STEP: tl.constexpr, GROUP: tl.constexpr, ODD: tl.constexpr, ROWS: tl.constexpr, FB: tl.constexpr,
    RB: tl.constexpr, EB: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write features of query and key if a row of the series table covers them, else copies for the exact kernels.

    The kernel also writes what the slopes and constants of the fits add to a query's log-sum-exp, and what the slopes
    add to a key's base-2 scores for each of its query heads. Only `units` key heads from `first` on, and the query
    heads that share them, are processed.
    """
    i0, place = tl.program_id(0) * ROWS, tl.program_id(1)
    i = i0 + tl.arange(0, ROWS)
    repeat = heads // groups
    if place < units * repeat:
        if i0 < q_pad:
            z = first * repeat + place
            x = query + (z // heads).to(tl.int64) * q_b + (z % heads).to(tl.int64) * q_h
            row = tl.load(plan + z // repeat)
            row_at, own = table + row * STEP, weight + (z % heads) * w_h
            fits_at = None
            if fits is not None:
                fits_at = fits + z // repeat * f_pad
            out = query_out + place.to(tl.int64) * q_pad * (f_pad * 32)
            raw = query_raw + z.to(tl.int64) * q_pad * f_pad
            nans = nan_rows(x, q_n, q_f, n_q, i0, f_size, ROWS, RB)
            tl.store(query_bad + z * q_pad + i, nans.to(tl.int8))
            if row >= 0:
                _write_features(x, q_n, q_f, n_q, i0, f_size, f_pad, own, row_at, fits_at, out, GROUP, True, ODD,
                                ROWS, FB, NATIVE)  # fmt: skip
                if query_shift is not None:
                    shift = _shifts(x, q_n, q_f, n_q, i0, f_size, own, row_at, fits_at, True, ROWS, RB)
                    tl.store(query_shift + z * q_pad + i, shift)
            else:
                _write_raw(x, q_n, q_f, n_q, i0, f_size, f_pad, raw, ROWS, RB)
    elif i0 < k_pad:
        place -= units * repeat
        y = first + place
        b = y // groups
        stop = n_k
        if lengths is not None:
            stop = tl.minimum(stop, tl.load(lengths + b))
        row = tl.load(plan + y)
        x = key + b.to(tl.int64) * k_b + (y % groups).to(tl.int64) * k_h
        row_at = table + row * STEP
        fits_at = None
        if fits is not None:
            fits_at = fits + y * f_pad
        out = key_out + place.to(tl.int64) * k_pad * (f_pad * 32)
        raw = key_raw + y.to(tl.int64) * k_pad * f_pad
        copied = value + b.to(tl.int64) * v_b + (y % groups).to(tl.int64) * v_h
        if row >= 0:
            _write_features(x, k_n, k_f, stop, i0, f_size, f_pad, weight, row_at, fits_at, out, GROUP, False, ODD,
                            ROWS, FB, NATIVE)  # fmt: skip
            if key_shift is not None:
                for r in range(repeat):
                    h = (y % groups) * repeat + r
                    own = weight + h * w_h
                    shift = _shifts(x, k_n, k_f, stop, i0, f_size, own, row_at, fits_at, False, ROWS, RB)
                    tl.store(key_shift + (b * heads + h) * k_pad + i, shift * LOG2E)
        else:
            _write_raw(x, k_n, k_f, stop, i0, f_size, f_pad, raw, ROWS, RB)
        nans = nan_rows(x, k_n, k_f, stop, i0, f_size, ROWS, RB)
        copy_values(copied, v_n, v_e, stop, i0, e_size, nans,
                    value_out + y.to(tl.int64) * k_pad * EB, EB, 1, 0, bad + y * k_pad,
                    bad_span + y * (k_pad // ROWS), False, ROWS, EB)  # fmt: skip
