"""Backward kernels of linear attention: gradients of queries, keys and values; the features are recomputed."""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import product
from regard.kernels.triton.linear.forward import far_apart
from regard.kernels.triton.linear.log_features import (
    directions,
    elu_slope,
    finite,
    get_state,
    half_squares,
    kept,
    key_logs,
    number_of,
    query_logs,
    row_of,
    rows_of,
    with_sums,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _upstream(change, output, peaks, at, row, inside, c_n, plane, E: tl.constexpr, EB: tl.constexpr):
    """Return the output's gradient do_i, δ_i = do_i · output_i, the largest exponent and 1 / d_i of each row i.

    d_i is the divisor of the row; 1 / d_i is returned as 0 for a row whose keys are all masked.
    """
    do = rows_of(change, at, inside, c_n, E, EB)
    o = rows_of(output, row, inside, E, E, EB)
    d = tl.load(peaks + plane + row, mask=inside, other=0.0)
    inverse = tl.where(d == 0.0, 0.0, 1.0 / tl.where(d == 0.0, 1.0, d))
    return do, tl.sum(do.to(tl.float32) * o.to(tl.float32), 1), tl.load(peaks + row, mask=inside, other=0.0), inverse


@triton.jit
def query_gradients(
    query, key, value, keep, projection, change, output, peaks, sums, rows, grad, p, c_b, c_h, c_n,
    CAUSAL: tl.constexpr, KEEP: tl.constexpr, PERFORMER: tl.constexpr, PROJECT: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr,
    D: tl.constexpr, EB: tl.constexpr, MB: tl.constexpr, NF: tl.constexpr, MP: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries.

    With the symbols of the module `operator`, the gradient of ln φ_m(q_i), for feature m, is
    φ_m(q_i) / d_i (do_i·S_m − δ_i z_m).
    """
    i0, z = tl.program_id(0) * BM, tl.program_id(1)
    b, h = (z // p.heads).to(tl.int64), z % p.heads
    yy = z // p.heads * (p.heads // p.group) + h // p.group
    i = i0 + tl.arange(0, BM)
    row = z.to(tl.int64) * p.n_q + i
    plane = tl.num_programs(1).to(tl.int64) * p.n_q
    q = rows_of(query + b * p.q_b + h * p.q_h, i, i < p.n_q, p.q_n, SIZE, D)
    do, delta, peak, inverse = _upstream(
        change + b * c_b + h * c_h, output, peaks, i, row, i < p.n_q, c_n, plane, E, EB
    )
    acc = tl.zeros((BM, D), tl.float32)
    slot = yy * p.slots + p.chunks
    far = False
    paired = False
    if CAUSAL:
        c = i0 // BC
        paired = c < p.chunks
        slot = yy * p.slots + tl.minimum(c, p.chunks)
        far = paired & far_apart(rows, p.plane, tl.where(paired, slot, yy * p.slots), M, MP)
        j = c * BC + tl.arange(0, BC)
        inside = kept(keep + b * p.m_b + h // p.group * p.m_h, j, p.n_k, KEEP)
        k = rows_of(key + b * p.k_b + h // p.group * p.k_h, j, inside, p.k_n, SIZE, D)
        v = rows_of(value + b * p.v_b + h // p.group * p.v_h, j, inside, p.v_n, E, EB)
        half = half_squares(k, p.half)
        seen = (j[None, :] <= i[:, None]) & inside[None, :]
        da = product(do.to(DOT), tl.trans(v.to(DOT)), tl.zeros((BM, BC), tl.float32), PRECISION) - delta[:, None]
        da = tl.where(seen, da, 0.0)
    for f in range(NF):
        m = f * MB + tl.arange(0, MB)
        w = directions(projection, f * MB, p.scale, PERFORMER, M, SIZE, D, MB)
        logs = query_logs(q, w, f * MB, PERFORMER, PROJECT, M, MB, BM)
        state, total, shift = get_state(sums, rows, p.plane, slot, m, M, M, E, EB)
        split = shift
        if CAUSAL:
            own = key_logs(k, half, inside, w, f * MB, PERFORMER, PROJECT, M, MB, BC)
            if paired & (not far):
                at = rows + p.plane + (slot + 1).to(tl.int64) * M + m
                split = tl.load(at, mask=m < M, other=float("-inf"))
        state *= tl.exp2(shift - finite(split))[:, None]
        total *= tl.exp2(shift - finite(split))
        dl = with_sums(do, tl.trans(state), tl.zeros((BM, MB), tl.float32), WHOLE, DOT, PRECISION)
        dl -= delta[:, None] * total[None, :]
        if CAUSAL and not far:
            keys = tl.exp2(own - finite(split)[None, :])
            dl = product(da.to(DOT), keys.to(DOT), dl, PRECISION)
        dl *= tl.exp2(tl.minimum((logs + split[None, :]) - peak[:, None], 0.0)) * inverse[:, None]
        if CAUSAL and far:
            for t in range(BC):
                x = (logs + row_of(own, t, BC)[None, :]) - peak[:, None]
                by = row_of(tl.trans(da), t, BC) * inverse
                reached = i >= c * BC + t
                dl += tl.where(reached[:, None], tl.exp2(tl.minimum(x, 0.0)) * by[:, None], 0.0)
        if PERFORMER:
            acc = product(dl.to(DOT), w.to(DOT), acc, PRECISION)
        else:
            acc += dl
    if PERFORMER:
        acc *= LN2
    else:
        acc *= elu_slope(q)
    c = tl.arange(0, D)
    at = grad + row[:, None] * SIZE + c[None, :]
    tl.store(at, acc.to(grad.dtype.element_ty), mask=(i < p.n_q)[:, None] & (c < SIZE)[None, :])


@triton.jit
def key_gradients(
    query, key, value, keep, projection, change, output, peaks, sums, rows, later, later_rows, key_grad, value_grad, p,
    c_b, c_h, c_n, later_chunks, later_slots, later_plane,
    CAUSAL: tl.constexpr, KEEP: tl.constexpr, PERFORMER: tl.constexpr, PROJECT: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr,
    D: tl.constexpr, EB: tl.constexpr, MB: tl.constexpr, NF: tl.constexpr, MP: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values.

    With the symbols of the module `operator`, the gradient of ln φ_m(k_j), for feature m, is φ_m(k_j) (v_j·T_m + t_m).
    """
    j0, yy = tl.program_id(0) * BM, tl.program_id(1)
    groups = p.heads // p.group
    b, g = (yy // groups).to(tl.int64), yy % groups
    j = j0 + tl.arange(0, BM)
    inside = kept(keep + b * p.m_b + g * p.m_h, j, p.n_k, KEEP)
    k = rows_of(key + b * p.k_b + g * p.k_h, j, inside, p.k_n, SIZE, D)
    v = rows_of(value + b * p.v_b + g * p.v_h, j, inside, p.v_n, E, EB)
    half = half_squares(k, p.half)
    acc = tl.zeros((BM, D), tl.float32)
    grad_v = tl.zeros((BM, EB), tl.float32)
    whole = tl.zeros((BM,), tl.float32)  # sum of dl over the features: the gradient of −|k|²/2
    slot = yy * later_slots + later_chunks
    far = False
    count = 1
    c = 0
    if CAUSAL:
        c = j0 // BC
        slot = yy * later_slots + later_chunks - 1 - c
        far = far_apart(rows, p.plane, yy * p.slots + c, M, MP)
        count = p.group
    i = c * BC + tl.arange(0, BC)  # the queries of the chunk that contains the keys
    plane = tl.num_programs(1).to(tl.int64) * p.group * p.n_q
    for r in range(count):
        h = g * p.group + r
        if CAUSAL:
            row = (b * p.heads + h) * p.n_q + i
            q = rows_of(query + b * p.q_b + h * p.q_h, i, i < p.n_q, p.q_n, SIZE, D)
            do, delta, peak, inverse = _upstream(
                change + b * c_b + h * c_h, output, peaks, i, row, i < p.n_q, c_n, plane, E, EB
            )
            seen = (j[:, None] <= i[None, :]) & inside[:, None]
            da = product(v.to(DOT), tl.trans(do.to(DOT)), tl.zeros((BM, BC), tl.float32), PRECISION) - delta[None, :]
            da = tl.where(seen, da, 0.0)
            a = tl.zeros((BM, BC), tl.float32)
        for f in range(NF):
            m = f * MB + tl.arange(0, MB)
            w = directions(projection, f * MB, p.scale, PERFORMER, M, SIZE, D, MB)
            logs = key_logs(k, half, inside, w, f * MB, PERFORMER, PROJECT, M, MB, BM)
            dl = tl.zeros((BM, MB), tl.float32)
            if r == 0:
                state, total, shift = get_state(later, later_rows, later_plane, slot, m, M, M, E, EB)
                mapped = tl.exp2(tl.minimum(logs + shift[None, :], 0.0))
                dl = with_sums(v, tl.trans(state), dl, WHOLE, DOT, PRECISION)
                dl = (dl + total[None, :]) * mapped
                grad_v = with_sums(mapped, state, grad_v, WHOLE, DOT, PRECISION)
            if CAUSAL:
                own = query_logs(q, w, f * MB, PERFORMER, PROJECT, M, MB, BC)
                if far:
                    for t in range(BC):
                        x = (logs + row_of(own, t, BC)[None, :]) - number_of(peak, t, BC)
                        one = tl.exp2(tl.minimum(x, 0.0)) * number_of(inverse, t, BC)
                        reached = (j <= c * BC + t) & inside
                        one = tl.where(reached[:, None], one, 0.0)
                        dl += tl.where(reached, row_of(tl.trans(da), t, BC), 0.0)[:, None] * one
                        grad_v += tl.sum(one, 1)[:, None] * row_of(do.to(tl.float32), t, BC)[None, :]
                else:
                    at = rows + p.plane + (yy * p.slots + c + 1).to(tl.int64) * M + m
                    split = tl.load(at, mask=m < M, other=float("-inf"))
                    keys = tl.exp2(logs - finite(split)[None, :])
                    queries = tl.exp2(tl.minimum((own + split[None, :]) - peak[:, None], 0.0)) * inverse[:, None]
                    dl += keys * product(da.to(DOT), queries.to(DOT), tl.zeros((BM, MB), tl.float32), PRECISION)
                    a = product(keys.to(DOT), tl.trans(queries.to(DOT)), a, PRECISION)
            if PERFORMER:
                acc = product(dl.to(DOT), w.to(DOT), acc, PRECISION)
                whole += tl.sum(dl, 1)
            else:
                acc += dl
        if CAUSAL and not far:
            grad_v = product(tl.where(seen, a, 0.0).to(DOT), do.to(DOT), grad_v, PRECISION)
    if PERFORMER:  # p.half converts |k|² to |k|²/2 in base 2, and LN2 the gradient to base e
        acc = acc * LN2 - (whole * (2.0 * p.half * LN2))[:, None] * k.to(tl.float32)
    else:
        acc *= elu_slope(k)
    c, e = tl.arange(0, D), tl.arange(0, EB)
    row = yy.to(tl.int64) * p.n_k + j
    acc = tl.where(inside[:, None], acc, 0.0)
    grad_v = tl.where(inside[:, None], grad_v, 0.0)
    there = (j < p.n_k)[:, None]
    tl.store(
        key_grad + row[:, None] * SIZE + c[None, :], acc.to(key_grad.dtype.element_ty), mask=there & (c < SIZE)[None, :]
    )
    tl.store(
        value_grad + row[:, None] * E + e[None, :], grad_v.to(value_grad.dtype.element_ty),
        mask=there & (e < E)[None, :],
    )  # fmt: skip
