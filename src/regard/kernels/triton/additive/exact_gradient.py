"""Gradients of query, key and weight, computed from the gradient dS of the scores with the formulas of `exact`.

A program holds (rows, features) of queries (or keys) in registers and loops over the keys (or queries), so nothing is
summed across threads. With x = query + key, u = 1/w, r = 1 / (1 + e^{2x}), ρ = 1/D' = w r and tanh' = 4 r (1 - r), the
gradients are dq = 4 w u Σ dS ρ (1 - u ρ) and dw = Σ dS - 2 u Σ dS ρ.
"""

import triton
import triton.language as tl

from regard.kernels.triton.additive.exact import (
    SATURATED,
    TWO_LOG2E,
    clamp,
    even_part,
    tile_form,
)
from regard.kernels.triton.additive.pairs import SPAN, key_range, query_range
from regard.kernels.triton.additive.prepare import FAR, reciprocal


@triton.jit
def _factored_walk(state, mine, other_at, u1, u2, slab_at, slab_step, first, last, f_pad, p, half,
                   QUERY: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Add the terms of rows first .. last of the other operand to the sums Σ dS ρ, Σ dS ρ (1 - u ρ) and Σ dS."""
    sum1, sum2, slope1, slope2, change = state
    mine1, mine2 = mine
    for o in tl.range(first, last, loop_unroll_factor=DEPTH):
        at = other_at + o * f_pad + p
        other1 = tl.load(at, mask=p < f_pad, other=0.0)[None, :]
        other2 = tl.load(at + half, mask=p + half < f_pad, other=0.0)[None, :]
        ds = tl.load(slab_at + o * slab_step).to(tl.float32)[:, None]
        if FORM == 0:
            d1, d2 = mine1 * other1 + u1, mine2 * other2 + u2
        else:
            if FORM == 1:
                e1, e2 = clamp(mine1 * other1), clamp(mine2 * other2)
            else:
                e1 = tl.exp2(tl.minimum((mine1 + other1) * TWO_LOG2E, SATURATED)) * u1
                e2 = tl.exp2(tl.minimum((mine2 + other2) * TWO_LOG2E, SATURATED)) * u2
            d1, d2 = e1 + u1, e2 + u2
        shared = reciprocal(d1 * d2, NATIVE)
        rho1, rho2 = shared * d2, shared * d1
        t1, t2 = ds * rho1, ds * rho2
        if QUERY:
            sum1 += t1
            sum2 += t2
            change += ds
        if FORM == 0:
            slope1 += t1 * (1.0 - u1 * rho1)
            slope2 += t2 * (1.0 - u2 * rho2)
        else:  # for wide ranges, tanh of most pairs is saturated: its derivative must be 0, not a rounding error
            slope1 += t1 * (e1 * rho1)
            slope2 += t2 * (e2 * rho2)
    return sum1, sum2, slope1, slope2, change


@triton.jit
def _slope(x, ACT: tl.constexpr, NATIVE: tl.constexpr):
    """Return the derivative of `even_part`."""
    if ACT == "tanh":
        t = even_part(x, ACT, NATIVE)
        return 1.0 - t * t
    elif ACT == "gelu":
        bell = tl.exp2(x * x * -0.7213475204444817) * 0.3989422804014327
        return 0.5 * tl.erf(x * 0.7071067811865476) + x * bell
    else:
        return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def _plain_walk(state, mine, other_at, slab_at, slab_step, first, last, f_pad, f,
                ACT: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    slope_sum, value_sum = state
    for o in range(first, last):
        other = tl.load(other_at + o * f_pad + f, mask=f < f_pad, other=0.0)[None, :]
        ds = tl.load(slab_at + o * slab_step).to(tl.float32)[:, None]
        x = mine + other
        slope_sum += ds * _slope(x, ACT, NATIVE)
        value_sum += ds * even_part(x, ACT, NATIVE)
    return slope_sum, value_sum


@triton.jit
def _add_gradient(out_at, o_f, f, f_size, rows, row_in, grad, ADD: tl.constexpr):
    to = out_at + f[None, :] * o_f
    room = row_in[:, None] & (f < f_size)[None, :]
    if ADD:
        grad += tl.load(to, mask=room, other=0.0)
    tl.store(to, grad.to(out_at.dtype.element_ty), mask=room)


@triton.jit
def exact_feature(
    raw, powers, tops, sizes, weight, w_h, plan, pairs, slab, boost, out, o_b, o_h, o_n, o_f, weight_part,
    first_unit, first_query, last_query, first_key, last_key, slab_q, slab_k,
    heads, groups, n_q, n_k, q_pad, k_pad, f_size, f_pad, parts,
    QUERY: tl.constexpr, ADD: tl.constexpr, ACT: tl.constexpr, FACTORED: tl.constexpr, NATIVE: tl.constexpr,
    BM: tl.constexpr, FB: tl.constexpr, DEPTH: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of FB features of a slab's queries (QUERY) or keys; with QUERY, also of the weight.

    `raw` and `powers` are row-major: (head, row, feature). With several SEGMENTS, each program loops over one part of
    the other operand (keys or queries), and `out` is (segment, head of the slab, row of the slab, feature).
    """
    f0 = tl.program_id(1) // SEGMENTS * FB
    segment = tl.program_id(1) % SEGMENTS
    half: tl.constexpr = FB // 2
    repeat = heads // groups
    if QUERY:
        slab_head = tl.program_id(2)
        y = first_unit + slab_head // repeat
        g = y % groups
        b = y // groups
        row0 = first_query + tl.program_id(0) * BM
        h = g * repeat + slab_head % repeat
        z = b * heads + h
        turn_rows = 1
    else:
        y = first_unit + tl.program_id(2)
        g = y % groups
        b = y // groups
        row0 = first_key + tl.program_id(0) * BM
        h = g * repeat
        z = b * heads + h
        turn_rows = repeat
    turn = row0 < (tl.minimum(n_q, last_query) if QUERY else tl.minimum(n_k, last_key))
    if plan is not None:
        turn = turn & (tl.load(plan + y) < 0)
    if turn:
        rows = row0 + tl.arange(0, BM)
        p = f0 + tl.arange(0, half)
        f = f0 + tl.arange(0, FB)
        gain = 1.0
        if boost is not None:
            gain = 1.0 / tl.load(boost)
        if QUERY:
            row_in = rows < tl.minimum(n_q, last_query)
            start, stop = key_range(pairs, b, row0, n_k, BM, SPAN)
            start, stop = tl.maximum(start, first_key), tl.minimum(stop, last_key)
            mine_row = (z.to(tl.int64) * q_pad + rows) * f_pad
            out_at = out + b.to(tl.int64) * o_b + h * o_h + rows.to(tl.int64)[:, None] * o_n
        else:
            row_in = rows < n_k
            start, stop = query_range(pairs, b, row0, n_q, n_k, BM, SPAN)
            start, stop = tl.maximum(start, first_query), tl.minimum(stop, last_query)
            mine_row = (y.to(tl.int64) * k_pad + rows) * f_pad
            out_at = out + b.to(tl.int64) * o_b + g * o_h + rows.to(tl.int64)[:, None] * o_n
        if SEGMENTS > 1:
            origin = first_query if QUERY else first_key
            place = segment.to(tl.int64) * o_b + tl.program_id(2).to(tl.int64) * o_h
            out_at = out + place + (rows - origin)[:, None] * o_n
            share = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), SPAN), SEGMENTS) * SPAN
            start = start + segment * share
            stop = tl.minimum(stop, start + share)
        safe = rows < (q_pad if QUERY else k_pad)
        grad1 = tl.zeros((BM, half), tl.float32)
        grad2 = tl.zeros((BM, half), tl.float32)
        grad = tl.zeros((BM, FB), tl.float32)
        for r in range(turn_rows):
            head = h + r
            zz = z + r
            if QUERY:
                line = (slab_head * slab_q + rows - first_query).to(tl.int64) * slab_k
                slab_at = slab + line - first_key
                slab_step = 1
                other_row = y.to(tl.int64) * k_pad * f_pad
            else:
                line = (((y - first_unit) * repeat + r) * slab_q - first_query).to(tl.int64) * slab_k
                slab_at = slab + line + (rows - first_key)
                slab_step = slab_k
                other_row = zz.to(tl.int64) * q_pad * f_pad
            if FACTORED:
                u_at = powers[2] + zz * f_pad
                u1 = tl.load(u_at + p, mask=p < f_pad, other=FAR)[None, :]
                u2 = tl.load(u_at + p + half, mask=p + half < f_pad, other=FAR)[None, :]
                zero = tl.zeros((BM, half), tl.float32)
                state = (zero, zero, zero, zero, tl.zeros((BM, 1), tl.float32))
                for o0 in range(start, stop, SPAN):
                    last = tl.minimum(o0 + SPAN, stop)
                    if QUERY:
                        form = tile_form(tops, sizes, zz, y, row0, o0, q_pad, k_pad, BM, SPAN)
                    else:
                        form = tile_form(tops, sizes, zz, y, o0, row0, q_pad, k_pad, SPAN, BM)
                    own_power, own_raw = (powers[0], raw[0]) if QUERY else (powers[1], raw[1])
                    far_power, far_raw = (powers[1], raw[1]) if QUERY else (powers[0], raw[0])
                    in1 = safe[:, None] & (p < f_pad)[None, :]
                    in2 = safe[:, None] & (p + half < f_pad)[None, :]
                    at = mine_row[:, None] + p[None, :]
                    if form < 2:
                        mine = (tl.load(own_power + at, mask=in1, other=0.0),
                                tl.load(own_power + at + half, mask=in2, other=0.0))  # fmt: skip
                        if form <= 0:
                            state = _factored_walk(state, mine, far_power + other_row, u1, u2, slab_at, slab_step,
                                                   o0, last, f_pad, p, half, QUERY, 0, NATIVE, DEPTH)  # fmt: skip
                        else:
                            state = _factored_walk(state, mine, far_power + other_row, u1, u2, slab_at, slab_step,
                                                   o0, last, f_pad, p, half, QUERY, 1, NATIVE, DEPTH)  # fmt: skip
                    else:
                        mine = (tl.load(own_raw + at, mask=in1, other=0.0),
                                tl.load(own_raw + at + half, mask=in2, other=0.0))  # fmt: skip
                        state = _factored_walk(state, mine, far_raw + other_row, u1, u2, slab_at, slab_step,
                                               o0, last, f_pad, p, half, QUERY, 2, NATIVE, DEPTH)  # fmt: skip
                w1 = tl.load(weight + head * w_h + p, mask=p < f_size, other=0.0).to(tl.float32)[None, :]
                w2 = tl.load(weight + head * w_h + p + half, mask=p + half < f_size, other=0.0).to(tl.float32)[None, :]
                sum1, sum2, slope1, slope2, change = state
                grad1 += 4.0 * gain * w1 * u1 * slope1
                grad2 += 4.0 * gain * w2 * u2 * slope2
                if QUERY:
                    # Σ dS is the sum computed in this kernel, so that its rounding error cancels against that of Σ dS ρ
                    to = weight_part + (zz.to(tl.int64) * parts + row0 // BM * SEGMENTS + segment) * f_size
                    part1 = tl.sum(tl.where(row_in[:, None], change - 2.0 * u1 * sum1, 0.0), 0)
                    part2 = tl.sum(tl.where(row_in[:, None], change - 2.0 * u2 * sum2, 0.0), 0)
                    tl.store(to + p, gain * part1, mask=p < f_size)
                    tl.store(to + p + half, gain * part2, mask=p + half < f_size)
            else:
                own = raw[0] if QUERY else raw[1]
                far = raw[1] if QUERY else raw[0]
                mine = tl.load(own + mine_row[:, None] + f[None, :], mask=safe[:, None] & (f < f_pad)[None, :], other=0)
                zero = tl.zeros((BM, FB), tl.float32)
                slope_sum, value_sum = _plain_walk((zero, zero), mine, far + other_row, slab_at, slab_step,
                                                   start, stop, f_pad, f, ACT, NATIVE)  # fmt: skip
                w = tl.load(weight + head * w_h + f, mask=f < f_size, other=0.0).to(tl.float32)[None, :]
                grad += gain * w * slope_sum
                if QUERY:
                    to = weight_part + (zz.to(tl.int64) * parts + row0 // BM * SEGMENTS + segment) * f_size
                    tl.store(to + f, gain * tl.sum(tl.where(row_in[:, None], value_sum, 0.0), 0), mask=f < f_size)
        if FACTORED:
            _add_gradient(out_at, o_f, p, f_size, rows, row_in, grad1, ADD)
            _add_gradient(out_at, o_f, p + half, f_size, rows, row_in, grad2, ADD)
        else:
            _add_gradient(out_at, o_f, f, f_size, rows, row_in, grad, ADD)
