"""Gradients from stored scores.

First dS, the gradient of the scores, is computed in float32, then the gradients of the operands, with one more tanh for
each pair and hidden unit.
"""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import (
    LOG2E,
    dropout_factor,
    key_range,
    power_of_two,
    product,
    query_range,
)
from regard.kernels.triton.additive.prepare import reciprocal
from regard.kernels.triton.additive.stored_scores import (
    TWO_LOG2E,
    approximate_tanh,
    element,
    finite_values,
    four_elements,
)

WEIGHT_ROWS = tl.constexpr(128)  # number of parts of the weight's gradient that `_sum_rows` loads at a time
WEIGHT_COLUMNS = tl.constexpr(32)
QUERY_COLUMNS = tl.constexpr(1024)


@triton.jit
def _weights(s, row_lse, NATIVE: tl.constexpr):
    """Return e^{score - lse}, which is 0 for masked pairs even if lse is NaN."""
    return tl.where(s == float("-inf"), 0.0, power_of_two(s - row_lse * LOG2E, NATIVE))


@triton.jit
def score_gradient(
    scores, value, v_b, v_h, v_n, v_e, grad, g_b, g_h, g_n, g_e, output, lse, change, by_weights, pairs, out,
    heads, groups, n_q, n_k, q_pad, k_pad, e_size,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Compute dS of BM queries and BN keys: P (dO Vᵀ + dP - Σ dO O - Σ P dP + dlse); 0 in the padding.

    by_weights is dP, the gradient of the weights themselves (b, h, q, k), or None.
    """
    tiles = k_pad // BN
    z, j0, i0 = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BN, tl.program_id(1) * BM
    b, h = z // heads, z % heads
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    row = z.to(tl.int64) * n_q + i
    place = (z.to(tl.int64) * q_pad + i)[:, None] * k_pad + j[None, :]
    ds = tl.zeros((BM, BN), tl.float32)
    start, stop = key_range(pairs, b, i0, n_k, BM, 1)
    if (j0 < stop) & (j0 + BN > start):
        inner = tl.arange(0, BE)
        v_at = value + b.to(tl.int64) * v_b + (h // (heads // groups)).to(tl.int64) * v_h
        v_at += j.to(tl.int64)[None, :] * v_n
        g_at = grad + b.to(tl.int64) * g_b + h.to(tl.int64) * g_h + i.to(tl.int64)[:, None] * g_n
        delta = tl.zeros((BM,), tl.float32)
        dp = tl.zeros((BM, BN), tl.float32)
        for e0 in range(0, e_size, BE):
            e = e0 + inner
            inside = (i < n_q)[:, None] & (e < e_size)[None, :]
            g = tl.load(g_at + e[None, :] * g_e, mask=inside, other=0.0)
            o = tl.load(output + row[:, None] * e_size + e[None, :], mask=inside, other=0.0)
            delta += tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
            v, _ = finite_values(v_at + e[:, None] * v_e, (e < e_size)[:, None] & (j < n_k)[None, :], 0)
            dp = product(g, v, dp, PRECISION)
        if change is not None:
            delta -= tl.load(change + row, mask=i < n_q, other=0.0)
        row_lse = tl.load(lse + row, mask=i < n_q, other=0.0)[:, None]
        s = tl.load(scores + place, mask=(i < n_q)[:, None], other=float("-inf"))
        p = _weights(s, row_lse, NATIVE)
        if pairs.keep is not None:
            dp *= dropout_factor(pairs, z, i[:, None], j[None, :])
        if by_weights is not None:
            at = by_weights + row[:, None] * n_k
            dp += tl.load(at + j[None, :], mask=(i < n_q)[:, None] & (j < n_k)[None, :], other=0.0).to(tl.float32)
            for c0 in range(0, n_k, BN):  # Σ P dP is a sum over all keys, not only those of the tile
                c = c0 + tl.arange(0, BN)
                inside = (i < n_q)[:, None] & (c < n_k)[None, :]
                line = scores + (z.to(tl.int64) * q_pad + i)[:, None] * k_pad
                all_p = _weights(tl.load(line + c[None, :], mask=inside, other=float("-inf")), row_lse, NATIVE)
                all_dp = tl.load(at + c[None, :], mask=inside, other=0.0).to(tl.float32)
                delta += tl.sum(tl.where(all_p == 0.0, 0.0, all_p * all_dp), 1)
        ds = tl.where(s == float("-inf"), 0.0, p * (dp - delta[:, None]))
    tl.store(out + place, ds, mask=(i < q_pad)[:, None])


@triton.jit
def _sum_rows(source, rows, columns, chunk, out, RB: tl.constexpr, CB: tl.constexpr):
    """Store the sums over the rows of a matrix (rows, columns) for CB of its columns."""
    r, c = tl.arange(0, RB), chunk * CB + tl.arange(0, CB)
    acc = tl.zeros((RB, CB), tl.float32)
    for r0 in range(0, rows, RB):
        inside = (r0 + r < rows)[:, None] & (c < columns)[None, :]
        acc += tl.load(source + (r0 + r).to(tl.int64)[:, None] * columns + c[None, :], mask=inside, other=0.0)
    tl.store(out + c, tl.sum(acc, 0).to(out.dtype.element_ty), mask=c < columns)


@triton.jit
def value_gradient(
    scores, grad, g_b, g_h, g_n, g_e, lse, pairs, out, work, grad_query, grad_weight,
    units, query_at, query_parts, query_size, weight_at, weight_parts, weight_size,
    heads, groups, n_q, n_k, q_pad, k_pad, e_size,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Compute dV = Pᵀ dO of BN keys and BE columns, summed over the queries of every head that shares them.

    Programs from `units` on add up the parts of the gradients of weight and query that `feature_gradients` has stored
    in `work`: weight_parts rows of the weight's gradient, query_parts rows of the query's gradient.
    """
    y = tl.program_id(0)
    if y < units:
        _value_tile(scores, grad, g_b, g_h, g_n, g_e, lse, pairs, out, heads, groups, n_q, n_k, q_pad, k_pad, e_size,
                    NATIVE, PRECISION, BM, BN, BE)  # fmt: skip
    else:
        chunk = ((y - units) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
        chunks = (weight_size + WEIGHT_COLUMNS - 1) // WEIGHT_COLUMNS
        if chunk < chunks:
            _sum_rows(work + weight_at, weight_parts, weight_size, chunk, grad_weight, WEIGHT_ROWS, WEIGHT_COLUMNS)
        else:
            if grad_query is not None:
                _sum_rows(work + query_at, query_parts, query_size, chunk - chunks, grad_query, 1, QUERY_COLUMNS)


@triton.jit
def _value_tile(
    scores, grad, g_b, g_h, g_n, g_e, lse, pairs, out, heads, groups, n_q, n_k, q_pad, k_pad, e_size,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    y, j0, e0 = tl.program_id(0), tl.program_id(1) * BN, tl.program_id(2) * BE
    repeat = heads // groups
    b, g = y // groups, y % groups
    j, e = j0 + tl.arange(0, BN), e0 + tl.arange(0, BE)
    acc = tl.zeros((BN, BE), tl.float32)
    start, stop = query_range(pairs, b, j0, n_q, n_k, BN, BM)
    for r in range(repeat):
        h = g * repeat + r
        z = b * heads + h
        g_at = grad + b.to(tl.int64) * g_b + h.to(tl.int64) * g_h + e[None, :] * g_e
        for i0 in range(start, stop, BM):
            i = i0 + tl.arange(0, BM)
            s_at = scores + (z.to(tl.int64) * q_pad + i)[None, :] * k_pad + j[:, None]
            s = tl.load(s_at, mask=(i < n_q)[None, :] & (j < n_k)[:, None], other=float("-inf"))
            row_lse = tl.load(lse + z.to(tl.int64) * n_q + i, mask=i < n_q, other=0.0)
            p = _weights(s, row_lse[None, :], NATIVE)
            if pairs.keep is not None:
                p *= dropout_factor(pairs, z, i[None, :], j[:, None])
            inside = (i < n_q)[:, None] & (e < e_size)[None, :]
            do = tl.load(g_at + i.to(tl.int64)[:, None] * g_n, mask=inside, other=0.0)
            acc = product(p.to(do.dtype), do, acc, PRECISION)
    to = out + (y.to(tl.int64) * n_k + j)[:, None] * e_size + e[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(j < n_k)[:, None] & (e < e_size)[None, :])


@triton.jit
def _finite(x):
    """Return x with NaN as 0.

    NaN in a key that no query attends must not enter a sum. For other keys, the gradient is NaN because dS is NaN.
    """
    return tl.where(x == x, x, 0.0)


@triton.jit
def _pair_gradients(q, k, ds, shape: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """Return dS tanh' summed over a thread's queries, dS tanh' summed over its keys, and dS tanh summed over both.

    With EXACT, tanh is computed from e^{-2|x|}, so that its derivative is accurate where tanh is saturated.
    """
    x = tl.broadcast_to(q, shape) + tl.broadcast_to(k, shape)
    d = tl.broadcast_to(ds, shape)
    if EXACT:
        e = power_of_two(tl.abs(x) * -TWO_LOG2E, NATIVE)
        r = reciprocal(1.0 + e, NATIVE)
        t = (1.0 - e) * r
        turned, change = d * tl.where(x < 0.0, -t, t), d * (4.0 * e * r * r)
    else:
        t = approximate_tanh(x)
        turned = d * t
        change = d - turned * t
    return tl.sum(change, 0), tl.sum(change, 1), tl.sum(tl.sum(turned, 1), 0)


@triton.jit
def feature_gradients(
    query, q_b, q_h, q_n, q_f, key, k_b, k_h, k_n, k_f, weight, w_h, pairs, work, query_at, weight_at,
    grad_query, grad_key, heads, groups, n_q, n_k, q_pad, k_pad, f_size,
    EXACT: tl.constexpr, NATIVE: tl.constexpr, QB: tl.constexpr, KQ: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of query, key and weight from dS for 4 · KQ · WARPS keys and 32 hidden units, one per lane.

    A thread holds its keys and loops over the queries. `work` holds dS in the shape of the stored scores, then the
    weight's gradient (b, tile of keys, h, f) and, if there are several tiles of keys, the query's gradient (tile of
    keys, b, h, q, f): both are summed over the tiles afterwards.
    """
    BN: tl.constexpr = 4 * KQ * WARPS
    tiles = tl.cdiv(n_k, BN)
    y, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    j0, repeat = tile * BN, heads // groups
    b, g = y // groups, y % groups
    shape: tl.constexpr = (QB, KQ, WARPS, 32)
    f1 = tl.program_id(1) * 32 + tl.arange(0, 32)
    f = tl.minimum(f1, f_size - 1)
    first = (tl.arange(0, KQ)[:, None] * WARPS + tl.arange(0, WARPS)[None, :]) * 4  # first key of each group of four
    j = (j0 + first)[:, :, None]
    k_at = key + b.to(tl.int64) * k_b + g.to(tl.int64) * k_h + f[None, None, :] * k_f
    k1 = _finite(element(k_at + tl.minimum(j, n_k - 1).to(tl.int64) * k_n, NATIVE))[None]
    k2 = _finite(element(k_at + tl.minimum(j + 1, n_k - 1).to(tl.int64) * k_n, NATIVE))[None]
    k3 = _finite(element(k_at + tl.minimum(j + 2, n_k - 1).to(tl.int64) * k_n, NATIVE))[None]
    k4 = _finite(element(k_at + tl.minimum(j + 3, n_k - 1).to(tl.int64) * k_n, NATIVE))[None]
    all1 = tl.zeros((KQ, WARPS, 32), tl.float32)
    all2, all3, all4 = all1, all1, all1
    start, stop = query_range(pairs, b, j0, n_q, n_k, BN, QB)
    for r in range(repeat):
        h = g * repeat + r
        z = b * heads + h
        q_at = query + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + f[None, None, None, :] * q_f
        s_at = work + z.to(tl.int64) * q_pad * k_pad + (j0 + first)[None, :, :, None]
        w = element(weight + h * w_h + f, NATIVE)
        sum1 = tl.zeros((KQ, WARPS, 32), tl.float32)
        sum2, sum3, sum4 = sum1, sum1, sum1
        by_weight = tl.zeros((WARPS, 32), tl.float32)
        part = (tile * tl.num_programs(0) // tiles * repeat + z).to(tl.int64) * n_q * f_size
        out = work + query_at + part if grad_query is None else grad_query + part
        for i0 in range(start, stop, QB):
            i = i0 + tl.arange(0, QB)
            row = tl.minimum(i, n_q - 1).to(tl.int64)[:, None, None, None]
            q = _finite(element(q_at + row * q_n, NATIVE))
            d1, d2, d3, d4 = four_elements(s_at + i.to(tl.int64)[:, None, None, None] * k_pad, NATIVE)
            a1, b1, c1 = _pair_gradients(q, k1, d1, shape, EXACT, NATIVE)
            a2, b2, c2 = _pair_gradients(q, k2, d2, shape, EXACT, NATIVE)
            a3, b3, c3 = _pair_gradients(q, k3, d3, shape, EXACT, NATIVE)
            a4, b4, c4 = _pair_gradients(q, k4, d4, shape, EXACT, NATIVE)
            sum1 += a1
            sum2 += a2
            sum3 += a3
            sum4 += a4
            by_weight += (c1 + c2) + (c3 + c4)
            change = tl.sum((b1 + b2) + (b3 + b4), 1) * w[None, :]
            inside = (i < n_q)[:, None] & (f1 < f_size)[None, :]
            to = out + i.to(tl.int64)[:, None] * f_size + f1[None, :]
            tl.store(to, change.to(out.dtype.element_ty), mask=inside)
        if (pairs.low is not None) or (pairs.high is not None) or (pairs.lengths is not None):
            for i0 in range(0, n_q, QB):  # the sum is 0 for queries that attend none of the program's keys
                if (i0 < start) | (i0 >= stop):
                    i = i0 + tl.arange(0, QB)
                    inside = (i < n_q)[:, None] & (f1 < f_size)[None, :]
                    to = out + i.to(tl.int64)[:, None] * f_size + f1[None, :]
                    tl.store(to, tl.zeros((QB, 32), out.dtype.element_ty), mask=inside)
        all1 += sum1 * w[None, None, :]
        all2 += sum2 * w[None, None, :]
        all3 += sum3 * w[None, None, :]
        all4 += sum4 * w[None, None, :]
        to = work + weight_at + ((b * tiles + tile) * heads + h).to(tl.int64) * f_size + f1
        tl.store(to, tl.sum(by_weight, 0), mask=f1 < f_size)
    to = grad_key + (y.to(tl.int64) * n_k + j) * f_size + f1[None, None, :]
    dtype = grad_key.dtype.element_ty
    inside = (f1 < f_size)[None, None, :]
    tl.store(to, all1.to(dtype), mask=(j < n_k) & inside)
    tl.store(to + f_size, all2.to(dtype), mask=(j + 1 < n_k) & inside)
    tl.store(to + 2 * f_size, all3.to(dtype), mask=(j + 2 < n_k) & inside)
    tl.store(to + 3 * f_size, all4.to(dtype), mask=(j + 3 < n_k) & inside)
