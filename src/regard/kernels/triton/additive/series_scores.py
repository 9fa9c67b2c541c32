"""Additive attention on tensor cores: scores are dot products of the sine-series features.

With R harmonics, a row has 2R feature columns per hidden unit (1,024 columns for R = 8 and 64 units), which is too many
for registers or shared memory. A score tile is therefore summed over chunks of columns, like a matrix product, and then
processed as in flash attention. Query features are multiplied by the weight and log2(e), so scores are in base 2.
"""

import triton
import triton.language as tl

from regard.kernels.triton.additive.exact import calm_ceiling, weight_facts
from regard.kernels.triton.additive.pairs import (
    LOG2E,
    SPAN,
    add_bias,
    any_bad,
    dropout_factor,
    key_range,
    next_pivot,
    power_of_two,
    product,
    query_range,
    tile_allowed,
    tile_state,
)


@triton.jit
def _tile_scores(query_at, key_at, q_row, k_row, columns, shift, PRECISION: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    s = tl.zeros((BM, BN), tl.float32)
    if shift is not None:  # the sum starts from `shift`, because adding `shift` at the end would need more registers
        s += shift[None, :]
    for c in tl.range(0, columns, BK):
        q = query_at.load([q_row, c])
        k = key_at.load([k_row, c])
        s = product(q, k.T, s, PRECISION)
    return s


@triton.jit
def _attend(state, s, value_at, calm, ceiling, pairs, bad, spoilt, b, h, z, y, i, j0, n_q, n_k, k_pad, every,
            PRECISION: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Add a score tile (queries, keys) to the running softmax and the running output."""
    most, total, poison, acc = state
    v = value_at.load([y * k_pad + j0, 0])
    j = j0 + tl.arange(0, BN)
    s = add_bias(s, pairs, b, h, i[:, None], j[None, :], n_q, n_k, LOG2E)
    if not every:
        s = tl.where(tile_allowed(pairs, b, h, i[:, None], j[None, :], n_q, n_k), s, float("-inf"))
    pivot, fade, most = next_pivot(s, most, calm, ceiling, 1)
    p = power_of_two(s - pivot[:, None], PRECISION != "interpreted")
    total = total * fade + tl.sum(p, 1)
    if spoilt:
        here = tl.load(bad + y * k_pad + j, mask=j < k_pad, other=0).to(tl.int32)
        poison = tl.maximum(poison, tl.max(tl.where(s > float("-inf"), here[None, :], 0), 1))
    if pairs.keep is not None:
        p *= dropout_factor(pairs, z, i[:, None], j[None, :])
    acc = product(p.to(v.dtype), v, acc * fade[:, None], PRECISION)
    return most, total, poison, acc


@triton.jit
def series_forward(
    query_at, key_at, value_at, query_shift, key_shift, bad, bad_span, query_bad, weight, w_h, table, plan, pairs,
    output, lse, heads, groups, n_q, n_k, q_pad, k_pad, f_size, f_pad, e_size, o_b, o_h, o_n, o_e,
    WIDTH: tl.constexpr, BOUNDED: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FB: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    # With a causal mask, the last rows attend to the most keys: their programs start first, so that the launch does not
    # end with a few long programs.
    block, z = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b, h = z // heads, z % heads
    y = b * groups + h // (heads // groups)
    row = tl.load(plan + y)
    if row >= 0:
        columns = tl.load(table + row * WIDTH + 1).to(tl.int32) * 2 * f_pad
        i0 = block * BM
        i = i0 + tl.arange(0, BM)
        e = tl.arange(0, EB)
        _, weight_sum, reach = weight_facts(weight + h * w_h, f_size, FB)
        calm, ceiling = calm_ceiling(reach, BOUNDED, output.dtype.element_ty == tl.float16, pairs.keep is not None)
        if query_shift is not None:  # the shift is added to the log-sum-exp instead of to the scores of each tile
            row_shift = tl.load(query_shift + z * q_pad + i, mask=i < n_q, other=0.0)
            ceiling -= row_shift * LOG2E
        most = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        poison = tl.load(query_bad + z * q_pad + i, mask=i < n_q, other=0).to(tl.int32)
        acc = tl.zeros((BM, EB), tl.float32)
        start, stop = key_range(pairs, b, i0, n_k, BM, BN)
        spoilt = any_bad(bad_span + y * (k_pad // SPAN), k_pad)
        for j0 in range(start, stop, BN):
            some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
            if some:
                shift = None
                if key_shift is not None:
                    j = j0 + tl.arange(0, BN)
                    shift = tl.load(key_shift + z * k_pad + j, mask=j < k_pad, other=0.0)
                s = _tile_scores(query_at, key_at, z * q_pad + i0, y * k_pad + j0, columns, shift, PRECISION,
                                 BM, BN, BK)  # fmt: skip
                state = (most, total, poison, acc)
                if PIECES == 1:
                    state = _attend(state, s, value_at, calm, ceiling, pairs, bad, spoilt, b, h, z, y, i, j0,
                                    n_q, n_k, k_pad, every, PRECISION, BN)  # fmt: skip
                else:  # the two halves of a tile are processed one after the other, to use fewer registers
                    half: tl.constexpr = BN // 2
                    s1, s2 = tl.split(tl.permute(tl.reshape(s, (BM, 2, half)), (0, 2, 1)))
                    state = _attend(state, s1, value_at, calm, ceiling, pairs, bad, spoilt, b, h, z, y, i, j0,
                                    n_q, n_k, k_pad, every, PRECISION, half)  # fmt: skip
                    state = _attend(state, s2, value_at, calm, ceiling, pairs, bad, spoilt, b, h, z, y, i,
                                    j0 + half, n_q, n_k, k_pad, every, PRECISION, half)  # fmt: skip
                most, total, poison, acc = state
        empty = total == 0.0
        acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
        acc = tl.where(((poison > 0) & ~empty)[:, None], float("nan"), acc)
        inside = (i < n_q)[:, None] & (e < e_size)[None, :]
        at = output + b.to(tl.int64) * o_b + h * o_h + i.to(tl.int64)[:, None] * o_n + e[None, :] * o_e
        tl.store(at, acc.to(output.dtype.element_ty), mask=inside)
        row_lse = (most + tl.log2(tl.where(empty, 1.0, total))) / LOG2E
        if query_shift is not None:
            row_lse += row_shift
        else:
            row_lse += weight_sum * tl.load(table + row * WIDTH + 4)
        tl.store(lse + z.to(tl.int64) * n_q + i, tl.where(empty, float("-inf"), row_lse), mask=i < n_q)


@triton.jit
def series_score(
    query_at, key_at, value_at, weight, w_h, table, plan, pairs, grad_output, g_b, g_h, g_n, g_e, lse, delta, boost,
    slab_at, value_grad, first_feature, first_unit, first_query, last_query, first_key, slab_q, slab_k,
    heads, groups, n_q, n_k, q_pad, k_pad, f_size, f_pad, e_size, segments,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, FB: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """Compute dS of a slab of pairs, and dV summed over one segment of the slab's queries.

    The feature buffers begin with key head `first_feature`.
    """
    j0 = first_key + tl.program_id(0) * BN
    segment, y = tl.program_id(1), first_unit + tl.program_id(2)
    repeat = heads // groups
    b, g = y // groups, y % groups
    table_row = tl.load(plan + y)
    if table_row >= 0:
        columns = tl.load(table + table_row * WIDTH + 1).to(tl.int32) * 2 * f_pad
        constant = tl.load(table + table_row * WIDTH + 4)
        j = j0 + tl.arange(0, BN)
        e = tl.arange(0, EB)
        grad_v = tl.zeros((BN, EB), tl.float32)
        start, stop = query_range(pairs, b, j0, n_q, n_k, BN, BM)
        start, stop = tl.maximum(start, first_query), tl.minimum(stop, last_query)
        share = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), BM), segments) * BM
        start = start + segment * share
        stop = tl.minimum(stop, start + share)
        for r in range(repeat):
            h = g * repeat + r
            z = b * heads + h
            _, weight_sum, _ = weight_facts(weight + h * w_h, f_size, FB)
            shift = weight_sum * constant
            for i0 in range(start, stop, BM):
                some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
                if some:
                    i = i0 + tl.arange(0, BM)
                    q_row, k_row = (z - first_feature * repeat) * q_pad + i0, (y - first_feature) * k_pad + j0
                    s = _tile_scores(query_at, key_at, q_row, k_row, columns, None, PRECISION, BM, BN, BK)
                    s = add_bias(s, pairs, b, h, i[:, None], j[None, :], n_q, n_k, LOG2E)
                    row = z.to(tl.int64) * n_q + i
                    row_lse = tl.load(lse + row, mask=i < n_q, other=float("inf")) - shift
                    # a row whose keys are all masked has lse = -inf: replacing it by 0 keeps the exponent finite
                    row_lse = tl.where(row_lse == float("-inf"), 0.0, row_lse) * LOG2E
                    if not every:
                        s = tl.where(tile_allowed(pairs, b, h, i[:, None], j[None, :], n_q, n_k), s, float("-inf"))
                    p = power_of_two(s - row_lse[:, None], PRECISION != "interpreted")
                    inside = (i < n_q)[:, None] & (e < e_size)[None, :]
                    at = grad_output + b.to(tl.int64) * g_b + h * g_h + i.to(tl.int64)[:, None] * g_n
                    v = value_at.load([y * k_pad + j0, 0])
                    do = tl.load(at + e[None, :] * g_e, mask=inside, other=0.0).to(v.dtype)
                    dp = product(do, v.T, tl.zeros((BM, BN), tl.float32), PRECISION)
                    kept = p
                    if pairs.keep is not None:
                        factor = dropout_factor(pairs, z, i[:, None], j[None, :])
                        dp *= factor
                        kept = p * factor
                    grad_v = product(tl.trans(kept.to(v.dtype)), do, grad_v, PRECISION)
                    ds = p * (dp - tl.load(delta + row, mask=i < n_q, other=0.0)[:, None])
                    # a query whose scores are NaN must not change the gradients of keys that it may not attend
                    ds = tl.where(p == 0.0, 0.0, ds)
                    if boost is not None:
                        ds *= tl.load(boost)
                    slab_row = ((y - first_unit) * repeat + r) * slab_q + (i0 - first_query)
                    slab_at.store([slab_row, j0 - first_key], ds.to(v.dtype))
        part = segment * tl.num_programs(2) + tl.program_id(2)
        to = value_grad + (part.to(tl.int64) * slab_k + (j - first_key))[:, None] * e_size + e[None, :]
        tl.store(to, grad_v, mask=(e < e_size)[None, :])
