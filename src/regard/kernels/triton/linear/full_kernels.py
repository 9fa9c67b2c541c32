"""Kernels of linear attention with elu features in half precision, where every query attends to all keys.

With the features φ(x) = elu(x) + 1, and S = Σ φ(k_j) v_jᵀ and z = Σ φ(k_j) over the keys,

    output_i = φ(q_i) S / φ(q_i)·z

In the backward pass, with the output's gradient do_i, d_i = φ(q_i)·z and δ_i = do_i · output_i, the queries enter as
T = Σ φ(q_i)/d_i do_iᵀ and t = −Σ φ(q_i)/d_i δ_i:

    dφ(q_i) = (S do_i − δ_i z) / d_i    dφ(k_j) = T v_j + t    dv_j = φ(k_j) T

Sums are in float32. A pass over queries or keys multiplies S or T in half precision, which would be inexact in three
cases. Therefore each program changes S or T before its loop, which adds no operation to the loop:

- Values far from 0: the gradient S do_i − δ_i z is then a small difference of large numbers. A centre, the mean of the
  values over all features, is subtracted from the rows of S / z, and added to the output.
- Numbers outside the range of float16: feature m of a query is multiplied by 2^shift_m ≈ z_m and divided by d_i, that
  of a key is divided by 2^shift_m, and S and T are scaled to at most 1.
- Features that are very small for all keys: in float16, `key_sums` multiplies them by a power of two.
"""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import LOG2E, power_of_two, product

# Features of n keys divided by 2^shift are at most 1, and about 1 / n on average: times 2^LIFT they suit float16.
LIFT, LOWER = tl.constexpr(14.0), tl.constexpr(2.0**-14)
SMALL = tl.constexpr(0.0002)  # if the mean of a key feature is smaller, its sum in float16 is computed again, scaled up


@triton.jit
def _rows(base, row, inside, step, last, SIZE: tl.constexpr, B: tl.constexpr):
    """Return rows of a matrix with SIZE columns as a tile of B columns; rows that are not `inside` are 0."""
    c = tl.arange(0, B)
    at = base + row[:, None] * step + c[None, :] * last
    return tl.load(at, mask=inside[:, None] & (c < SIZE)[None, :], other=0.0)


@triton.jit
def _kept(keep, j, n, step, KEEP: tl.constexpr):
    """Return for each key whether it lies below n and, with KEEP, is not masked."""
    inside = j < n
    if KEEP:
        inside = inside & (tl.load(keep + j * step, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _put(base, row, inside, step, x, SIZE: tl.constexpr, B: tl.constexpr):
    c = tl.arange(0, B)
    at = base + row[:, None] * step + c[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=inside[:, None] & (c < SIZE)[None, :])


@triton.jit
def _features(x, factor, shift, NATIVE: tl.constexpr):
    """Return the features of float32 rows x, feature m times 2^shift_m; factor is 2^shift."""
    return tl.where(x > 0.0, x * factor[None, :] + factor[None, :], power_of_two(x * LOG2E + shift[None, :], NATIVE))


@triton.jit
def _reading(x, total, factor, shift, NATIVE: tl.constexpr):
    """Return φ(q_i)_m 2^shift_m of the rows x of queries, and 1 / d_i in the same scale, or 0 where d_i is 0."""
    phi = _features(x, factor, shift, NATIVE)
    d = tl.sum(phi * total[None, :], 1)
    return phi, tl.where(d == 0.0, 0.0, 1.0 / tl.where(d == 0.0, 1.0, d))


@triton.jit
def _scale(matrix):
    """Return a power of two by which the largest finite entry of a matrix becomes at most 1."""
    size = tl.abs(matrix)
    most = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0)
    return tl.where(most > 0.0, tl.exp2(tl.minimum(tl.maximum(-tl.ceil(tl.log2(most)), -100.0), 100.0)), 1.0)


@triton.jit
def _put_state(sums, slot, matrix, total, D: tl.constexpr, EB: tl.constexpr):
    m, e = tl.arange(0, D), tl.arange(0, EB)
    sums += slot.to(tl.int64) * (D * EB + D)
    tl.store(sums + m[:, None] * EB + e[None, :], matrix)
    tl.store(sums + D * EB + m, total)


@triton.jit
def _get_state(sums, slot, count, D: tl.constexpr, EB: tl.constexpr):
    """Return the sum of `count` stored states (matrix and totals), of which the first has the number slot · count."""
    m, e = tl.arange(0, D), tl.arange(0, EB)
    sums += slot.to(tl.int64) * count * (D * EB + D)
    matrix = tl.zeros((D, EB), tl.float32)
    total = tl.zeros((D,), tl.float32)
    for _ in range(count):
        matrix += tl.load(sums + m[:, None] * EB + e[None, :])
        total += tl.load(sums + D * EB + m)
        sums += D * EB + D
    return matrix, total


@triton.jit
def _shifts(total):
    """Return shift and 2^−shift of each feature: 2^shift is near z_m; if z_m is 0, they are −inf and 0."""
    shift = tl.minimum(tl.maximum(tl.ceil(tl.log2(total)), -100.0), 100.0)
    return tl.where(total == 0.0, float("-inf"), shift), tl.where(total == 0.0, 0.0, tl.exp2(-shift))


@triton.jit
def _centre(matrix, total):
    """Return the mean of the values over all features, or 0 for a column that is not finite."""
    mean = tl.sum(matrix, 0) / tl.sum(total, 0)
    return tl.where(tl.abs(mean) < float("inf"), mean, 0.0)


@triton.jit
def _memory(sums, slot, count, DOT: tl.constexpr, D: tl.constexpr, EB: tl.constexpr):
    """Return S less its centre, scaled for a matrix product; 1 / scale, z / 2^shift, the centre and the shifts."""
    matrix, total = _get_state(sums, slot, count, D, EB)
    centre = _centre(matrix, total)
    shift, inverse = _shifts(total)
    matrix = (matrix - total[:, None] * centre[None, :]) * inverse[:, None]
    scale = _scale(matrix)
    # A common factor of all features cancels. With this one, no sum over the features of a query overflows.
    shift -= tl.maximum(tl.max(shift, 0), -100.0) + 8.0
    return (matrix * scale).to(DOT), 1.0 / scale, total * inverse, centre, shift


@triton.jit
def _sums_of_keys(key, value, keep, n, k_n, k_d, v_n, v_d, m_n, shift, KEEP: tl.constexpr,
                  SIZE: tl.constexpr, E: tl.constexpr, D: tl.constexpr, EB: tl.constexpr, BN: tl.constexpr,
                  DOT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return S and z, feature m times 2^shift_m, of n keys, and the number of keys that are not masked."""
    matrix = tl.zeros((D, EB), tl.float32)
    totals = tl.zeros((BN, D), tl.float32)
    count = tl.zeros((BN,), tl.float32)
    factor = tl.exp2(shift)
    for start in tl.range(0, n, BN):
        j = start + tl.arange(0, BN)
        inside = _kept(keep, j, n, m_n, KEEP)
        k = _rows(key, j, inside, k_n, k_d, SIZE, D)
        v = _rows(value, j, inside, v_n, v_d, E, EB)
        real = inside.to(tl.float32)
        phi = _features(k.to(tl.float32), factor, shift, PRECISION != "interpreted")
        phi = (phi * real[:, None]).to(DOT)
        totals += phi.to(tl.float32)
        count += real
        matrix = product(tl.trans(phi), v, matrix, PRECISION)
    return matrix, tl.sum(totals, 0), tl.sum(count, 0)


@triton.jit
def _shifts_of_keys(key, keep, n, k_n, k_d, m_n, KEEP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                    BN: tl.constexpr):  # fmt: skip
    """Return exponents, at least 0, that bring the largest feature of each column of n keys near 1."""
    largest = tl.full((BN, D), float("-inf"), tl.float32)
    for start in tl.range(0, n, BN):
        j = start + tl.arange(0, BN)
        inside = _kept(keep, j, n, m_n, KEEP)
        k = _rows(key, j, inside, k_n, k_d, SIZE, D).to(tl.float32)
        largest = tl.maximum(largest, tl.where(inside[:, None], k, float("-inf")))
    return tl.minimum(tl.maximum(tl.floor(tl.max(largest, 0) * -LOG2E), 0.0), 100.0)


@triton.jit
def key_sums(
    key, value, keep, sums, k_b, k_h, k_n, v_b, v_h, v_n, k_d, v_d, m_b, m_h, m_n, heads, n, chunk,
    KEEP: tl.constexpr, NARROW: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, D: tl.constexpr, EB: tl.constexpr,
    BN: tl.constexpr, UNIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store S and z of each chunk of keys. NARROW means that DOT is float16."""
    c, y = tl.program_id(0), tl.program_id(1)
    b, h, j0 = (y // heads).to(tl.int64), y % heads, (c * chunk).to(tl.int64)
    n = tl.minimum(n - c * chunk, chunk)
    k_n, v_n = k_n * UNIT, v_n * UNIT
    key += (b * k_b + h * k_h) * UNIT + j0 * k_n
    value += (b * v_b + h * v_h) * UNIT + j0 * v_n
    keep += b * m_b + h * m_h + j0 * m_n
    shift = tl.zeros((D,), tl.float32)
    matrix = tl.zeros((D, EB), tl.float32)
    total = shift
    tries = 0
    while tries < 2:
        matrix, total, count = _sums_of_keys(
            key, value, keep, n, k_n, k_d, v_n, v_d, m_n, shift, KEEP, SIZE, E, D, EB, BN, DOT, PRECISION
        )
        tries += 2
        if NARROW and (tries == 2) & (tl.min(total, 0) < count * SMALL):
            shift = _shifts_of_keys(key, keep, n, k_n, k_d, m_n, KEEP, SIZE, D, BN)
            tries = 1
    back = tl.exp2(-shift)
    matrix, total = matrix * back[:, None], total * back
    m = tl.arange(0, D)
    matrix, total = tl.where((m < SIZE)[:, None], matrix, 0.0), tl.where(m < SIZE, total, 0.0)
    _put_state(sums, y * tl.num_programs(0) + c, matrix, total, D, EB)


@triton.jit
def join(sums, joined, count, LENGTH: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr):
    """Store the sums of `count` vectors of LENGTH numbers each."""
    i, y = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(1).to(tl.int64)
    total = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, count, STEP):
        c = first + tl.arange(0, STEP)
        at = sums + (y * count + c)[:, None] * LENGTH + i[None, :]
        total += tl.sum(tl.load(at, mask=(c < count)[:, None] & (i < LENGTH)[None, :], other=0.0), 0)
    tl.store(joined + y * LENGTH + i, total, mask=i < LENGTH)


@triton.jit
def read(
    query, sums, output, q_b, q_h, q_n, o_b, o_h, o_n, q_d, heads, group, n, chunk, count,
    SIZE: tl.constexpr, E: tl.constexpr, D: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr, UNIT: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the outputs of a chunk of queries."""
    c, y = tl.program_id(0), tl.program_id(1)
    b, h, i0 = (y // heads).to(tl.int64), y % heads, (c * chunk).to(tl.int64)
    n = tl.minimum(n - c * chunk, chunk)
    q_n, o_n = q_n * UNIT, o_n * UNIT
    query += (b * q_b + h * q_h) * UNIT + i0 * q_n
    output += (b * o_b + h * o_h) * UNIT + i0 * o_n
    matrix, back, total, centre, shift = _memory(sums, y // group, count, DOT, D, EB)
    factor, attended = tl.exp2(shift), n * tl.max(tl.where(total == 0.0, 0, 1), 0)  # no rows if all keys are masked
    for start in tl.range(0, n, BM):
        i = start + tl.arange(0, BM)
        x = _rows(query, i, i < attended, q_n, q_d, SIZE, D).to(tl.float32)
        phi, inverse = _reading(x, total, factor, shift, PRECISION != "interpreted")
        weight = (phi * inverse[:, None]).to(DOT)
        acc = product(weight, matrix, tl.zeros((BM, EB), tl.float32), PRECISION)
        acc = tl.where((inverse == 0.0)[:, None], 0.0, acc * back + centre[None, :])
        _put(output, i, i < n, o_n, acc, E, EB)


@triton.jit
def query_gradients(
    query, change, sums, grad, later, q_b, q_h, q_n, c_b, c_h, c_n, g_b, g_h, g_n, q_d, c_d,
    heads, group, n, chunk, count,
    SIZE: tl.constexpr, E: tl.constexpr, D: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr, UNIT: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a chunk of queries, and T and t of the chunk.

    Outputs are computed again, without their centre: then do_i·(output_i − centre) is stored in t, and the centre times
    T is added by `key_gradients`.
    """
    c, y = tl.program_id(0), tl.program_id(1)
    b, h, i0 = (y // heads).to(tl.int64), y % heads, (c * chunk).to(tl.int64)
    n = tl.minimum(n - c * chunk, chunk)
    q_n, c_n, g_n = q_n * UNIT, c_n * UNIT, g_n * UNIT
    query += (b * q_b + h * q_h) * UNIT + i0 * q_n
    change += (b * c_b + h * c_h) * UNIT + i0 * c_n
    grad += (b * g_b + h * g_h) * UNIT + i0 * g_n
    matrix, back, total, _, shift = _memory(sums, y // group, count, DOT, D, EB)
    factor, attended = tl.exp2(shift), n * tl.max(tl.where(total == 0.0, 0, 1), 0)  # no rows if all keys are masked
    later_matrix = tl.zeros((D, EB), tl.float32)
    later_totals = tl.zeros((BM, D), tl.float32)
    for start in tl.range(0, n, BM):
        i = start + tl.arange(0, BM)
        x = _rows(query, i, i < attended, q_n, q_d, SIZE, D).to(tl.float32)
        do = _rows(change, i, i < attended, c_n, c_d, E, EB)
        phi, inverse = _reading(x, total, factor, shift, PRECISION != "interpreted")
        weight = (phi * inverse[:, None]).to(DOT)
        acc = product(weight, matrix, tl.zeros((BM, EB), tl.float32), PRECISION)
        delta = tl.sum(do.to(tl.float32) * acc, 1)
        df = product(do, tl.trans(matrix), tl.zeros((BM, D), tl.float32), PRECISION)
        later_matrix = product(tl.trans(weight), do, later_matrix, PRECISION)
        later_totals += phi * (inverse * delta)[:, None]
        df = (df - delta[:, None] * total[None, :]) * tl.where(x > 0.0, factor[None, :], phi)
        _put(grad, i, i < n, g_n, df * (inverse * back)[:, None], SIZE, D)
    slot = y * tl.num_programs(0) + c
    _put_state(later, slot, later_matrix, -back * tl.sum(later_totals, 0), D, EB)


@triton.jit
def key_gradients(
    key, value, keep, sums, later, key_grad, value_grad, k_b, k_h, k_n, v_b, v_h, v_n, gk_b, gk_h, gk_n,
    gv_b, gv_h, gv_n, k_d, v_d, m_b, m_h, m_n, heads, n, chunk, count, later_count,
    KEEP: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, D: tl.constexpr, EB: tl.constexpr, BN: tl.constexpr,
    UNIT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a chunk of keys and values."""
    c, y = tl.program_id(0), tl.program_id(1)
    b, h, j0 = (y // heads).to(tl.int64), y % heads, (c * chunk).to(tl.int64)
    n = tl.minimum(n - c * chunk, chunk)
    k_n, v_n, gk_n, gv_n = k_n * UNIT, v_n * UNIT, gk_n * UNIT, gv_n * UNIT
    key += (b * k_b + h * k_h) * UNIT + j0 * k_n
    value += (b * v_b + h * v_h) * UNIT + j0 * v_n
    key_grad += (b * gk_b + h * gk_h) * UNIT + j0 * gk_n
    value_grad += (b * gv_b + h * gv_h) * UNIT + j0 * gv_n
    keep += b * m_b + h * m_h + j0 * m_n
    matrix, total = _get_state(sums, y, count, D, EB)
    centre = _centre(matrix, total)
    shift, small = _shifts(total)
    matrix, total = _get_state(later, y, later_count, D, EB)
    scale = _scale(matrix)
    later_matrix = (matrix * scale).to(DOT)
    back = 1.0 / scale
    total -= tl.sum(later_matrix.to(tl.float32) * centre[None, :], 1) * back
    shift = tl.where(small == 0.0, float("-inf"), LIFT - shift)
    factor = tl.exp2(shift)
    for start in tl.range(0, n, BN):
        j = start + tl.arange(0, BN)
        inside = _kept(keep, j, n, m_n, KEEP)
        x = _rows(key, j, inside, k_n, k_d, SIZE, D).to(tl.float32)
        v = _rows(value, j, inside, v_n, v_d, E, EB)
        phi = _features(x, factor, shift, PRECISION != "interpreted")
        grad_v = product(phi.to(DOT), later_matrix, tl.zeros((BN, EB), tl.float32), PRECISION)
        df = product(v, tl.trans(later_matrix), tl.zeros((BN, D), tl.float32), PRECISION)
        df = (df * back + total[None, :]) * (tl.where(x > 0.0, factor[None, :], phi) * LOWER)
        _put(key_grad, j, j < n, gk_n, tl.where(inside[:, None], df, 0.0), SIZE, D)
        grad_v = tl.where(inside[:, None], grad_v * (back * LOWER), 0.0)
        _put(value_grad, j, j < n, gv_n, grad_v, E, EB)
