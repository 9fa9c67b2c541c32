"""Kernels that compute additive scores pair by pair, store them in float32, and multiply the values by their softmax.

They are used for small and middle sizes: two launches compute output and log-sum-exp, without a pass over the ranges of
query and key and without features in memory. A thread holds a few pairs in registers while it loops over its share of
the hidden units.
"""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import (
    LOG2E,
    add_bias,
    dropout_factor,
    key_range,
    power_of_two,
    product,
    tile_allowed,
)
from regard.kernels.triton.additive.prepare import reciprocal

TWO_LOG2E = tl.constexpr(2.8853900817779268)


@triton.jit
def approximate_tanh(x):
    """Return tanh by the GPU's approximate instruction, whose 11 accurate bits suffice for half precision."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def element(at, NATIVE: tl.constexpr):
    """Load the number at each address and convert it to float32.

    With inline assembly, every thread loads the numbers that it needs. For tl.load, the compiler would distribute the
    numbers over the threads and exchange them afterwards.
    """
    if not NATIVE:
        return tl.load(at).to(tl.float32)
    elif at.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        bits = tl.inline_asm_elementwise(
            "ld.global.nc.u16 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
        if at.dtype.element_ty == tl.bfloat16:
            return (bits << 16).to(tl.float32, bitcast=True)
        else:
            return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def four_elements(at, NATIVE: tl.constexpr):
    """Load four adjacent numbers, aligned to their total size, into four float32 tensors."""
    if not NATIVE:
        return (
            tl.load(at).to(tl.float32),
            tl.load(at + 1).to(tl.float32),
            tl.load(at + 2).to(tl.float32),
            tl.load(at + 3).to(tl.float32),
        )
    elif at.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [at.to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    elif at.dtype.element_ty == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d; ld.global.nc.v2.b32 {a, c}, [$4];
            and.b32 b, a, 0xffff0000; shl.b32 a, a, 16; and.b32 d, c, 0xffff0000; shl.b32 c, c, 16;
            mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; }""",
            "=f,=f,=f,=f,l", [at.to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 a, b, c, d; ld.global.nc.v4.b16 {a, b, c, d}, [$4];
            cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }""",
            "=f,=f,=f,=f,l", [at.to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _features(at, step, f, f_size, NATIVE: tl.constexpr, VECTOR: tl.constexpr):
    """Load features f to f + 3 of rows; features past the last are loaded from other valid addresses."""
    if VECTOR:
        return four_elements(at + tl.minimum(f, f_size - 4), NATIVE)
    else:
        last = f_size - 1
        return (
            element(at + tl.minimum(f, last) * step, NATIVE),
            element(at + tl.minimum(f + 1, last) * step, NATIVE),
            element(at + tl.minimum(f + 2, last) * step, NATIVE),
            element(at + tl.minimum(f + 3, last) * step, NATIVE),
        )


@triton.jit
def _denominator(q, k, shape: tl.constexpr, NATIVE: tl.constexpr):
    """Return D = 1 + e^{2(q + k)}, limited so that a product of four fits float32.

    At the limit, tanh = 1 - 2 / D is already 1.
    """
    x = (tl.broadcast_to(q, shape) + tl.broadcast_to(k, shape)) * TWO_LOG2E
    return 1.0 + power_of_two(tl.minimum(x, 30.0, propagate_nan=tl.PropagateNan.ALL), NATIVE)


@triton.jit
def _four_terms(total, q, k, w, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """Return total + Σ w tanh(q + k) of four features or, with EXACT, total + Σ w / D by a single reciprocal."""
    q1, q2, q3, q4 = q
    k1, k2, k3, k4 = k
    w1, w2, w3, w4 = w
    shape: tl.constexpr = total.shape
    if EXACT:
        d1, d2 = _denominator(q1, k1, shape, NATIVE), _denominator(q2, k2, shape, NATIVE)
        d3, d4 = _denominator(q3, k3, shape, NATIVE), _denominator(q4, k4, shape, NATIVE)
        first, second = d1 * d2, d3 * d4
        terms = (w1 * d2 + w2 * d1) * second + (w3 * d4 + w4 * d3) * first
        return total + terms * reciprocal(first * second, NATIVE)
    else:
        total += tl.broadcast_to(w1, shape) * approximate_tanh(tl.broadcast_to(q1, shape) + tl.broadcast_to(k1, shape))
        total += tl.broadcast_to(w2, shape) * approximate_tanh(tl.broadcast_to(q2, shape) + tl.broadcast_to(k2, shape))
        total += tl.broadcast_to(w3, shape) * approximate_tanh(tl.broadcast_to(q3, shape) + tl.broadcast_to(k3, shape))
        total += tl.broadcast_to(w4, shape) * approximate_tanh(tl.broadcast_to(q4, shape) + tl.broadcast_to(k4, shape))
        return total


@triton.jit
def _four_weights(weight_at, f, f_size, NATIVE: tl.constexpr, VECTOR: tl.constexpr):
    """Load four weights, 0 past the last feature."""
    w1, w2, w3, w4 = _features(weight_at, 1, f, f_size, NATIVE, VECTOR)
    return (
        tl.where(f < f_size, w1, 0.0),
        tl.where(f + 1 < f_size, w2, 0.0),
        tl.where(f + 2 < f_size, w3, 0.0),
        tl.where(f + 3 < f_size, w4, 0.0),
    )


@triton.jit
def pair_scores(
    query, q_b, q_h, q_n, q_f, key, k_b, k_h, k_n, k_f, weight, w_h, pairs, scores,
    heads, groups, n_q, n_k, q_pad, k_pad, f_size,
    EXACT: tl.constexpr, NATIVE: tl.constexpr, VECTOR: tl.constexpr,
    QI: tl.constexpr, KJ: tl.constexpr, LF: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute the scores of QI queries and KJ · WARPS · 32 / LF keys in base 2, -inf for masked pairs.

    LF lanes of a warp share the hidden units of a pair, four at a time, and their sums are added at the end.
    """
    LK: tl.constexpr = 32 // LF
    BN: tl.constexpr = KJ * WARPS * LK
    tiles = k_pad // BN
    z = tl.program_id(0) // tiles
    j0 = tl.program_id(0) % tiles * BN
    i0 = tl.program_id(1) * QI
    b, h = z // heads, z % heads
    i2, j2 = (i0 + tl.arange(0, QI))[:, None], (j0 + tl.arange(0, BN))[None, :]
    to = scores + (z.to(tl.int64) * q_pad + i2) * k_pad + j2
    start, stop = key_range(pairs, b, i0, n_k, QI, 1)
    if (j0 < stop) & (j0 + BN > start):
        total = tl.zeros((QI, KJ, WARPS, LK, LF), tl.float32)
        i = tl.minimum(i0 + tl.arange(0, QI), n_q - 1)[:, None, None, None, None]
        keys = tl.arange(0, KJ)[None, :, None, None, None] * WARPS + tl.arange(0, WARPS)[None, None, :, None, None]
        j = tl.minimum(j0 + keys * LK + tl.arange(0, LK)[None, None, None, :, None], n_k - 1)
        own = tl.arange(0, LF)[None, None, None, None, :] * 4
        q_at = query + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + i.to(tl.int64) * q_n
        k_at = key + b.to(tl.int64) * k_b + (h // (heads // groups)).to(tl.int64) * k_h + j.to(tl.int64) * k_n
        weight_sum = tl.zeros((1, 1, 1, 1, LF), tl.float32)
        f0 = 0
        # This is a while loop, because the compiler would move the layout of the following code into a for loop.
        while f0 < f_size:
            f = f0 + own
            w = _four_weights(weight + h * w_h, f, f_size, NATIVE, VECTOR)
            q = _features(q_at, q_f, f, f_size, NATIVE, VECTOR)
            k = _features(k_at, k_f, f, f_size, NATIVE, VECTOR)
            total = _four_terms(total, q, k, w, EXACT, NATIVE)
            weight_sum += (w[0] + w[1]) + (w[2] + w[3])
            f0 += 4 * LF
        if EXACT:
            total = weight_sum - 2.0 * total
        s = tl.reshape(tl.sum(total, 4), (QI, BN)) * LOG2E
        s = add_bias(s, pairs, b, h, i2, j2, n_q, n_k, LOG2E)
        tl.store(to, tl.where(tile_allowed(pairs, b, h, i2, j2, n_q, n_k), s, float("-inf")))
    else:
        tl.store(to, tl.full((QI, BN), float("-inf"), tl.float32))


@triton.jit
def finite_values(at, inside, AXIS: tl.constexpr):
    """Return values with NaN and Inf as 0, and flags of the positions of NaN and Inf, reduced along AXIS."""
    v = tl.load(at, mask=inside, other=0.0)
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    return tl.where(finite, v, 0.0), tl.max((~finite).to(tl.int32), AXIS)


@triton.jit
def weighted_values(
    scores, value, v_b, v_h, v_n, v_e, pairs, output, lse, weights, heads, groups, n_q, n_k, q_pad, k_pad, e_size,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Compute the softmax of BM rows of scores times BE columns of the values, and the rows' log-sum-exp.

    The softmax itself is stored in `weights` (b, h, q, k), unless it is None.
    """
    z, i0, e0 = tl.program_id(0), tl.program_id(1) * BM, tl.program_id(2) * BE
    b, h = z // heads, z % heads
    i, e = i0 + tl.arange(0, BM), e0 + tl.arange(0, BE)
    v_at = value + b.to(tl.int64) * v_b + (h // (heads // groups)).to(tl.int64) * v_h + e[None, :] * v_e
    s_at = scores + (z.to(tl.int64) * q_pad + i)[:, None] * k_pad
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    poison = tl.zeros((BM,), tl.int32)
    acc = tl.zeros((BM, BE), tl.float32)
    start, stop = key_range(pairs, b, i0, n_k, BM, BN)
    for j0 in range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        s = tl.load(s_at + j[None, :], mask=(i < n_q)[:, None] & (j < n_k)[None, :], other=float("-inf"))
        new_most = tl.maximum(most, tl.max(s, 1))
        pivot = tl.where(new_most == float("-inf"), 0.0, new_most)
        p = power_of_two(s - pivot[:, None], NATIVE)
        fade = tl.exp2(most - pivot)
        most = new_most
        total = total * fade + tl.sum(p, 1)
        v, bad = finite_values(v_at + j.to(tl.int64)[:, None] * v_n, (j < n_k)[:, None] & (e < e_size)[None, :], 1)
        poison = tl.maximum(poison, tl.max(tl.where(s > float("-inf"), bad[None, :], 0), 1))
        if pairs.keep is not None:
            p *= dropout_factor(pairs, z, i[:, None], j[None, :])
        acc = product(p.to(v.dtype), v, acc * fade[:, None], PRECISION)
    empty = total == 0.0
    acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    acc = tl.where((poison > 0)[:, None], float("nan"), acc)
    at = output + (z.to(tl.int64) * n_q + i)[:, None] * e_size + e[None, :]
    tl.store(at, acc.to(output.dtype.element_ty), mask=(i < n_q)[:, None] & (e < e_size)[None, :])
    if e0 == 0:
        row_lse = tl.where(empty, float("-inf"), (most + tl.log2(tl.where(empty, 1.0, total))) / LOG2E)
        tl.store(lse + z.to(tl.int64) * n_q + i, row_lse, mask=i < n_q)
        if weights is not None:
            for j0 in range(0, n_k, BN):
                j = j0 + tl.arange(0, BN)
                inside = (i < n_q)[:, None] & (j < n_k)[None, :]
                s = tl.load(s_at + j[None, :], mask=inside, other=float("-inf"))
                p = power_of_two(s - tl.where(most == float("-inf"), 0.0, most)[:, None], NATIVE)
                # If the total of a row is NaN, all its weights are NaN, also those of masked pairs.
                p = p / tl.where(empty, 1.0, total)[:, None]
                to = weights + (z.to(tl.int64) * n_q + i)[:, None] * n_k + j[None, :]
                tl.store(to, p.to(weights.dtype.element_ty), mask=inside)
