"""Additive attention with scores computed pair by pair in float32: tanh by shared reciprocals of exponentials.

tanh(a+b) = 1 - 2 / (1 + e^{2a} e^{2b}). With u = 1/w, A' = u e^{2a} and B = e^{2b}, a term w / (1 + AB) is 1 / D' with
D' = u + A' B. Two terms share one reciprocal, 1/D1' + 1/D2' = (D1' + D2') / (D1' D2'), which takes five multiply-adds
and one special function for two features of a pair. Four terms that share one reciprocal take twelve multiply-adds and
one special function. Weights are divided by the largest one, so |D'| >= 1.

Each tile uses the cheapest formula that its range of sums allows: four or two terms per reciprocal, two terms with D'
clamped, or, if a factor alone would overflow float32, the exponential of the sum.
"""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import (
    LOG2E,
    SPAN,
    add_bias,
    coarse,
    dropout_factor,
    fenced_exp2,
    fenced_scale,
    key_range,
    next_pivot,
    product,
    product_parts,
    query_range,
    remainder,
    tile_allowed,
    tile_state,
)
from regard.kernels.triton.additive.prepare import LIMIT, reciprocal, span_place

# D' = u D is the denominator D = 1 + e^{2x} of a tanh times a reciprocal weight u of at most 1e8; x is the largest sum
# query + key of a tile.
QUIET = tl.constexpr(11.0)  # largest x + ln(u) / 2 for which a product of four u (1 + e^{2x}) fits float32
# Up to this x + ln(u) / 2, a product of two u (1 + e^{2x}) fits float32 without clamping. Beyond it, the gradient
# kernel uses a formula in which the derivative of a saturated tanh is 0, not a rounding error.
CALM = tl.constexpr(12.0)
CAP = tl.constexpr(1e18)  # limit of |D'|: a product of two denominators within this limit does not overflow
TWO_LOG2E = tl.constexpr(2.8853900817779268)
CALM_REACH = tl.constexpr(34.0)  # for a smaller Σ|w|, exponentials of scores lie within a factor of 2^100
CALM_FLOAT16 = tl.constexpr(8.3)  # for a smaller Σ|w|, exponentials of scores lie within a factor of 2^24
WARPS = tl.constexpr(4)  # warps of a program; a warp computes a part of a tile's keys, a thread one query of each span
SATURATED = tl.constexpr(34.6)  # log2(e^24): for larger exponents, 1 - tanh is below float32 rounding


@triton.jit
def tile_form(tops, sizes, z_q, z_k, i0, j0, q_pad, k_pad, BM: tl.constexpr, BN: tl.constexpr):
    """Return the number of the formula that the range of a tile allows.

    The number is -1 for four features per reciprocal, 0 for two, 1 for two with clamped denominators, and 2 for the
    exponential of the sum.
    """
    query_top, key_top = tops
    query_size, key_size = sizes
    q_at = z_q * (q_pad // SPAN) + i0 // SPAN + tl.arange(0, BM // SPAN)
    k_at = z_k * (k_pad // SPAN) + j0 // SPAN + tl.arange(0, BN // SPAN)
    top = tl.max(tl.load(query_top + q_at), 0) + tl.max(tl.load(key_top + k_at), 0)
    size = tl.maximum(tl.max(tl.load(query_size + q_at), 0), tl.max(tl.load(key_size + k_at), 0))
    free = tl.where(top <= QUIET, -1, tl.where(top <= CALM, 0, 1))
    return tl.where(size <= LIMIT, free, 2)


@triton.jit
def clamp(d):
    return tl.minimum(tl.maximum(d, -CAP), CAP)


@triton.jit
def _four_terms(a, b, u, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """Return the sum of 1 / D' over four features, with the denominators D' of the module's docstring."""
    a1, a2, a3, a4 = a
    b1, b2, b3, b4 = b
    u1, u2, u3, u4 = u
    if FORM == 2:
        d1 = tl.exp2(tl.minimum((a1 + b1) * TWO_LOG2E, SATURATED)) * u1 + u1
        d2 = tl.exp2(tl.minimum((a2 + b2) * TWO_LOG2E, SATURATED)) * u2 + u2
        d3 = tl.exp2(tl.minimum((a3 + b3) * TWO_LOG2E, SATURATED)) * u3 + u3
        d4 = tl.exp2(tl.minimum((a4 + b4) * TWO_LOG2E, SATURATED)) * u4 + u4
    else:
        d1, d2 = a1 * b1 + u1, a2 * b2 + u2
        d3, d4 = a3 * b3 + u3, a4 * b4 + u4
        if FORM == 1:
            d1, d2, d3, d4 = clamp(d1), clamp(d2), clamp(d3), clamp(d4)
    first, second = d1 * d2, d3 * d4
    if FORM == -1:
        return ((d1 + d2) * second + (d3 + d4) * first) * reciprocal(first * second, NATIVE)
    else:
        return (d1 + d2) * reciprocal(first, NATIVE) + (d3 + d4) * reciprocal(second, NATIVE)


@triton.jit
def _four(at, NATIVE: tl.constexpr):
    """Load four adjacent numbers into four tensors.

    With inline assembly, every thread loads the numbers that it needs. For tl.load, the compiler would distribute the
    numbers over the threads and exchange them afterwards.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [at.to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _spread(at, NATIVE: tl.constexpr, like):
    x1, x2, x3, x4 = _four(at, NATIVE)
    shape: tl.constexpr = like.shape
    return (
        tl.broadcast_to(x1, shape),
        tl.broadcast_to(x2, shape),
        tl.broadcast_to(x3, shape),
        tl.broadcast_to(x4, shape),
    )


@triton.jit
def _factored_sum(a_at, b_at, u_at, f_pad, FORM: tl.constexpr, NATIVE: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Return Σ_f 1 / D'_f for each pair of a tile (keys, queries).

    a_at and b_at point to feature 0 of the tile's first query and first key.
    """
    rows: tl.constexpr = BM // 32
    keys: tl.constexpr = BN // WARPS
    total = tl.zeros((rows, keys, WARPS, 32), tl.float32)
    a_at += tl.arange(0, rows)[:, None, None, None] * (f_pad * SPAN) + tl.arange(0, 32)[None, None, None, :] * 4
    key = tl.arange(0, WARPS)[None, None, :, None] * keys + tl.arange(0, keys)[None, :, None, None]
    b_at += span_place(key, 0, f_pad)
    # This is a while loop, because the compiler would move the layout of the following matrix product into a for loop,
    # and every warp would then compute the whole tile. The next features are loaded while the current ones are summed.
    # Features have the shape of the tile, so that they keep its layout in the loop.
    a, b, u = _spread(a_at, NATIVE, total), _spread(b_at, NATIVE, total), _spread(u_at + key * 0, NATIVE, total)
    f = 0
    while f < f_pad:
        for _ in tl.static_range(0, DEPTH, 4):
            f += 4
            to = tl.minimum(f, f_pad - 4)
            c, d = _spread(a_at + to * SPAN, NATIVE, total), _spread(b_at + to * SPAN, NATIVE, total)
            v = _spread(u_at + to + key * 0, NATIVE, total)
            total += _four_terms(a, b, u, FORM, NATIVE)
            a, b, u = c, d, v
    return tl.reshape(tl.permute(total, (2, 1, 0, 3)), (BN, BM))


@triton.jit
def even_part(x, ACT: tl.constexpr, NATIVE: tl.constexpr):
    """Return the activation of x = query + key without its part that is linear in x.

    `regard.kernels.additive.fused` adds the linear part as separate terms of query and key.
    """
    if ACT == "tanh":
        if NATIVE:
            return tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            return 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(x * TWO_LOG2E, SATURATED)))
    elif ACT == "gelu":
        return 0.5 * x * tl.erf(x * 0.7071067811865476)
    else:
        return tl.abs(x)


@triton.jit
def _plain_sum(a_at, b_at, w_at, f_size, ACT: tl.constexpr, NATIVE: tl.constexpr,
               BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    total = tl.zeros((BN, BM), tl.float32)
    f = 0
    while f < f_size:
        step = f // 4 * (4 * SPAN) + f % 4
        x = tl.load(a_at + step)[None, :] + tl.load(b_at + step)[:, None]
        total += tl.load(w_at + f).to(tl.float32) * even_part(x, ACT, NATIVE)
        f += 1
    return total


@triton.jit
def tile_scores(raw, powers, tops, sizes, weight_at, scale, z_q, z_k, i0, j0, q_pad, k_pad, f_size, f_pad,
                ACT: tl.constexpr, FACTORED: tl.constexpr, NATIVE: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Return scores of a tile (keys, queries) in base 2; FACTORED omits the term Σw, which cancels in a softmax."""
    q_at = (z_q.to(tl.int64) * q_pad + i0) * f_pad  # a tile begins with the first row of a span
    k_at = (z_k.to(tl.int64) * k_pad + j0) * f_pad
    if FACTORED:
        form = tile_form(tops, sizes, z_q, z_k, i0, j0, q_pad, k_pad, BM, BN)
        u_at = powers[2] + z_q * f_pad
        if form < 2:
            a_at, b_at = powers[0] + q_at, powers[1] + k_at
            if form == -1:
                total = _factored_sum(a_at, b_at, u_at, f_pad, -1, NATIVE, BM, BN, DEPTH)
            elif form == 0:
                total = _factored_sum(a_at, b_at, u_at, f_pad, 0, NATIVE, BM, BN, DEPTH)
            else:
                total = _factored_sum(a_at, b_at, u_at, f_pad, 1, NATIVE, BM, BN, DEPTH)
        else:
            total = _factored_sum(raw[0] + q_at, raw[1] + k_at, u_at, f_pad, 2, NATIVE, BM, BN, DEPTH)
        return fenced_scale(total, scale * -2.0 * LOG2E, tl.minimum(f_size, 1))
    else:
        q_at += span_place(tl.arange(0, BM), 0, f_pad)
        k_at += span_place(tl.arange(0, BN), 0, f_pad)
        return _plain_sum(raw[0] + q_at, raw[1] + k_at, weight_at, f_size, ACT, NATIVE, BM, BN) * LOG2E


@triton.jit
def weight_facts(weight_at, f_size, FB: tl.constexpr):
    """Return the largest |w|, Σ w and Σ |w| over the features."""
    largest = 0.0
    total = 0.0
    reach = 0.0
    for f0 in range(0, f_size, FB):
        f = f0 + tl.arange(0, FB)
        w = tl.load(weight_at + f, mask=f < f_size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(w), 0))
        total += tl.sum(w, 0)
        reach += tl.sum(tl.abs(w), 0)
    return largest, total, reach


@triton.jit
def calm_ceiling(reach, BOUNDED: tl.constexpr, FLOAT16: tl.constexpr, DROPOUT: tl.constexpr):
    """Return whether scores within ±Σ|w| need no running maximum, and the constant to subtract instead, in base 2.

    Attention weights are rounded to the dtype of the values. The smallest normal number of float16 is 2^-14, so for
    float16 the constant is chosen such that the weights lie between 2^-12 and 2^12. With dropout, which scales weights
    up, the maximum is used.
    """
    if FLOAT16:
        calm = BOUNDED & (reach < CALM_FLOAT16) & (not DROPOUT)
        ceiling = reach * LOG2E - 12.0
    else:
        calm = BOUNDED & (reach < CALM_REACH)
        ceiling = reach * LOG2E
    return calm, ceiling


@triton.jit
def _attend(state, s, value, v_n, v_e, low_step, calm, ceiling, pairs, bad, bad_span, b, h, z, y, i, j0, n_q, n_k,
            k_pad, every, PRECISION: tl.constexpr, BN: tl.constexpr, EB: tl.constexpr):  # fmt: skip
    """Add a score tile (keys, queries) to the running softmax and the running output."""
    most, total, poison, acc = state
    j, e = j0 + tl.arange(0, BN), tl.arange(0, EB)
    s = add_bias(s, pairs, b, h, i[None, :], j[:, None], n_q, n_k, LOG2E)
    if not every:
        s = tl.where(tile_allowed(pairs, b, h, i[None, :], j[:, None], n_q, n_k), s, float("-inf"))
    pivot, fade, most = next_pivot(s, most, calm, ceiling, 0)
    p = fenced_exp2(s - pivot[None, :], tl.minimum(n_q, 1), PRECISION != "interpreted")
    total = total * fade + tl.sum(p, 0)
    spans = tl.load(bad_span + y * (k_pad // SPAN) + j0 // SPAN + tl.arange(0, BN // SPAN))
    if tl.max(spans, 0) > 0:
        here = tl.load(bad + y * k_pad + j).to(tl.int32)
        poison = tl.maximum(poison, tl.max(tl.where(s > float("-inf"), here[:, None], 0), 0))
    if pairs.keep is not None:
        p *= dropout_factor(pairs, z, i[None, :], j[:, None])
    v_at = value + y.to(tl.int64) * k_pad * EB + e[:, None] * v_e + j[None, :] * v_n
    v = tl.load(v_at)
    v_low = v
    if PRECISION == "three":
        v_low = tl.load(v_at + low_step)
    acc = product_parts(p.to(v.dtype), v, v_low, acc * fade[None, :], PRECISION, True)
    return most, total, poison, acc


@triton.jit
def exact_forward(
    raw, powers, tops, sizes, v_n, v_e, value, query_bad, bad, bad_span, weight, w_h, plan, pairs, output, lse,
    heads, groups, n_q, n_k, q_pad, k_pad, f_size, f_pad, e_size, low_step, o_b, o_h, o_n, o_e,
    ACT: tl.constexpr, BOUNDED: tl.constexpr, FACTORED: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr, FB: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    # With a causal mask, the last rows attend to the most keys: their programs start first, so that the launch does not
    # end with a few long programs.
    block, z = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b, h = z // heads, z % heads
    y = b * groups + h // (heads // groups)
    turn = True
    if plan is not None:
        turn = tl.load(plan + y) < 0
    if turn:
        i0 = block * BM
        i = i0 + tl.arange(0, BM)
        e = tl.arange(0, EB)
        weight_at = weight + h * w_h
        scale, weight_sum, reach = weight_facts(weight_at, f_size, FB)
        calm, ceiling = calm_ceiling(reach, BOUNDED, output.dtype.element_ty == tl.float16, pairs.keep is not None)
        if FACTORED:
            ceiling -= weight_sum * LOG2E
        most = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        poison = tl.load(query_bad + z * q_pad + i, mask=i < q_pad, other=0).to(tl.int32)
        acc = tl.zeros((EB, BM), tl.float32)
        start, stop = key_range(pairs, b, i0, n_k, BM, BN)
        for j0 in range(start, stop, BN):
            some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
            if some:
                s = tile_scores(raw, powers, tops, sizes, weight_at, scale, z, y, i0, j0, q_pad, k_pad,
                                f_size, f_pad,
                                ACT, FACTORED, NATIVE, BM, BN, DEPTH)  # fmt: skip
                most, total, poison, acc = _attend((most, total, poison, acc), s, value, v_n, v_e, low_step, calm,
                                                   ceiling, pairs, bad, bad_span, b, h, z, y, i, j0, n_q, n_k, k_pad,
                                                   every, PRECISION, BN, EB)  # fmt: skip
        empty = total == 0.0
        acc = tl.where(empty[None, :], 0.0, acc / tl.where(empty, 1.0, total)[None, :])
        acc = tl.where(((poison > 0) & ~empty)[None, :], float("nan"), acc)
        inside = (i < n_q)[None, :] & (e < e_size)[:, None]
        at = output + b.to(tl.int64) * o_b + h * o_h + i.to(tl.int64)[None, :] * o_n + e[:, None] * o_e
        tl.store(at, acc.to(output.dtype.element_ty), mask=inside)
        row_lse = tl.where(empty, float("-inf"), (most + tl.log2(tl.where(empty, 1.0, total))) / LOG2E)
        if FACTORED:
            row_lse += weight_sum
        tl.store(lse + z.to(tl.int64) * n_q + i, row_lse, mask=i < n_q)


@triton.jit
def exact_score(
    raw, powers, tops, sizes, v_n, v_e, value, weight, w_h, plan, pairs, grad_by_row, grad_by_column, lse, delta, boost,
    slab, value_grad, first_unit, first_query, last_query, first_key, slab_q, slab_k,
    heads, groups, n_q, n_k, q_pad, k_pad, f_size, f_pad, e_size, v_low_step, g_low_step, segments,
    ACT: tl.constexpr, FACTORED: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr, FB: tl.constexpr, EB: tl.constexpr,
):  # fmt: skip
    """Compute dS of a slab of pairs, and dV summed over one segment of the slab's queries."""
    j0 = first_key + tl.program_id(0) * BN
    segment, y = tl.program_id(1), first_unit + tl.program_id(2)
    repeat = heads // groups
    b, g = y // groups, y % groups
    turn = True
    if plan is not None:
        turn = tl.load(plan + y) < 0
    if turn:
        j = j0 + tl.arange(0, BN)
        e = tl.arange(0, EB)
        v_at = value + y.to(tl.int64) * k_pad * EB + e[:, None] * v_e + j[None, :] * v_n
        v = tl.load(v_at, mask=(j < k_pad)[None, :], other=0.0)
        v_low = v
        if PRECISION == "three":
            v_low = tl.load(v_at + v_low_step, mask=(j < k_pad)[None, :], other=0.0)
        grad_v = tl.zeros((EB, BN), tl.float32)
        start, stop = query_range(pairs, b, j0, n_q, n_k, BN, BM)
        start, stop = tl.maximum(start, first_query), tl.minimum(stop, last_query)
        share = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), BM), segments) * BM
        start = start + segment * share
        stop = tl.minimum(stop, start + share)
        for r in range(repeat):
            h = g * repeat + r
            z = b * heads + h
            weight_at = weight + h * w_h
            scale, weight_sum, _ = weight_facts(weight_at, f_size, FB)
            for i0 in range(start, stop, BM):
                some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
                if some:
                    i = i0 + tl.arange(0, BM)
                    s = tile_scores(raw, powers, tops, sizes, weight_at, scale, z, y, i0, j0, q_pad, k_pad,
                                    f_size, f_pad, ACT, FACTORED, NATIVE, BM, BN, DEPTH)  # fmt: skip
                    s = add_bias(s, pairs, b, h, i[None, :], j[:, None], n_q, n_k, LOG2E)
                    row = z.to(tl.int64) * n_q + i
                    row_lse = tl.load(lse + row, mask=i < n_q, other=float("inf"))
                    if FACTORED:
                        row_lse -= weight_sum
                    # a row whose keys are all masked has lse = -inf: replacing it by 0 keeps the exponent finite
                    row_lse = tl.where(row_lse == float("-inf"), 0.0, row_lse) * LOG2E
                    if not every:
                        s = tl.where(tile_allowed(pairs, b, h, i[None, :], j[:, None], n_q, n_k), s, float("-inf"))
                    p = fenced_exp2(s - row_lse[None, :], tl.minimum(n_q, 1), NATIVE)
                    rows_at = grad_by_row + (z.to(tl.int64) * q_pad + i)[:, None] * EB + e[None, :]
                    dp = tl.zeros((BM, BN), tl.float32)
                    if PRECISION == "three":
                        # The products low · high, high · low and high · high of the split operands are summed in a
                        # loop, so that shared memory holds one pair of operands at a time.
                        for step in tl.range(0, 3, num_stages=1):
                            do = tl.load(rows_at + tl.where(step == 0, g_low_step, 0))
                            dp = tl.dot(do, tl.where(step == 1, v_low, v), dp, input_precision="tf32")
                    else:
                        dp = product(tl.load(rows_at), v, dp, PRECISION)
                    dp = tl.trans(dp)
                    kept = p
                    if pairs.keep is not None:
                        factor = dropout_factor(pairs, z, i[None, :], j[:, None])
                        dp *= factor
                        kept = p * factor
                    ds = p * (dp - tl.load(delta + row, mask=i < n_q, other=0.0)[None, :])
                    # a query whose scores are NaN must not change the gradients of keys that it may not attend
                    ds = tl.where(p == 0.0, 0.0, ds)
                    if boost is not None:
                        ds *= tl.load(boost)
                    columns_at = grad_by_column + (z * EB + e).to(tl.int64)[:, None] * q_pad + i[None, :]
                    kept = tl.trans(kept)
                    if PRECISION == "three":
                        high = coarse(kept)
                        low = remainder(kept, high)
                        # As in `product_parts`, the sum starts from 0, because tensor cores truncate their sums.
                        fresh = tl.zeros((EB, BN), tl.float32)
                        for step in tl.range(0, 3, num_stages=1):
                            do = tl.load(columns_at + tl.where(step == 1, g_low_step, 0))
                            fresh = tl.dot(do, tl.where(step == 0, low, high), fresh, input_precision="tf32")
                        grad_v += fresh
                    else:
                        grad_v = product(tl.load(columns_at), kept.to(v.dtype), grad_v, PRECISION)
                    slab_row = ((y - first_unit) * repeat + r) * slab_q + (i - first_query)
                    to = slab + slab_row.to(tl.int64)[None, :] * slab_k + (j - first_key)[:, None]
                    tl.store(to, ds.to(slab.dtype.element_ty))
        part = segment * tl.num_programs(2) + tl.program_id(2)
        to = value_grad + (part.to(tl.int64) * slab_k + (j - first_key))[None, :] * e_size + e[:, None]
        tl.store(to, grad_v, mask=(e < e_size)[:, None])
