"""Kernels that causal linear attention with elu features runs between matrix products: sums and pairs of chunks."""

import triton
import triton.language as tl

from regard.kernels.triton.linear.elu_rows import elu_plus_one
from regard.kernels.triton.linear.log_features import kept, rows_of


@triton.jit
def key_chunks(key, value, keep, mapped, finite, stats, heads, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h, n, chunks,
               KEEP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, EB: tl.constexpr,
               C: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Store φ(k) and the values as (b · h, chunks, C, …), with 0 for masked keys and for values of NaN or Inf.

    `stats` (b · h, chunks, size + value size) receives z = Σ φ(k) of each chunk, and the sum of its values of NaN or
    Inf. Values of NaN or Inf are left out of the matrix product, in which the value of a later position is multiplied
    by an earlier query's weight of 0: 0 · NaN is NaN.
    """
    chunk, z = tl.program_id(0), tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    c, e = tl.arange(0, D), tl.arange(0, EB)
    total = tl.zeros((D,), tl.float32)
    rest = tl.zeros((EB,), tl.float32)
    for r in range(0, C, R):
        j = chunk * C + r + tl.arange(0, R)
        row = z.to(tl.int64) * chunks * C + j
        inside = kept(keep + b * m_b + h * m_h, j, n, KEEP)
        phi = elu_plus_one(rows_of(key + b * k_b + h * k_h, j, inside, k_n, SIZE, D))
        phi = tl.where(inside[:, None], phi, 0.0)
        v = rows_of(value + b * v_b + h * v_h, j, inside, v_n, E, EB)
        fine = tl.abs(v.to(tl.float32)) < float("inf")
        rest += tl.sum(tl.where(fine, 0.0, v.to(tl.float32)), 0)
        total += tl.sum(phi, 0)
        phi = phi.to(mapped.dtype.element_ty)
        tl.store(mapped + row[:, None] * SIZE + c[None, :], phi, mask=(c < SIZE)[None, :] & (j >= 0)[:, None])
        at = finite + row[:, None] * E + e[None, :]
        tl.store(at, tl.where(fine, v, 0.0).to(finite.dtype.element_ty), mask=(e < E)[None, :] & (j >= 0)[:, None])
    at = stats + (z.to(tl.int64) * chunks + chunk) * (SIZE + E)
    tl.store(at + c, total, mask=c < SIZE)
    tl.store(at + SIZE + e, rest, mask=e < E)


@triton.jit
def sums_before(added, before, chunks, width, REVERSE: tl.constexpr, W: tl.constexpr):
    """Store for each chunk the sum of all chunks before it or, with REVERSE, after it: (b · h, chunks, width).

    The sums are computed in float32. Four chunks are loaded at a time, because single loads would each wait for memory.
    """
    w, z = tl.program_id(0) * W + tl.arange(0, W), tl.program_id(1).to(tl.int64)
    first = z * chunks * width + w
    sums = tl.zeros((W,), tl.float32)
    inside = w < width
    for c in range(0, chunks, 4):
        left = z * 0 + chunks - c  # `left` is int64, like z
        at = first + (chunks - left) * width
        step = width
        if REVERSE:
            at = first + (left - 1) * width
            step = -width
        a = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(added + at + step, mask=w < tl.where(left > 1, width, 0), other=0.0).to(tl.float32)
        d = tl.load(added + at + 2 * step, mask=w < tl.where(left > 2, width, 0), other=0.0).to(tl.float32)
        e = tl.load(added + at + 3 * step, mask=w < tl.where(left > 3, width, 0), other=0.0).to(tl.float32)
        kind = before.dtype.element_ty
        tl.store(before + at, sums.to(kind), mask=inside)
        sums += a
        tl.store(before + at + step, sums.to(kind), mask=w < tl.where(left > 1, width, 0))
        sums += b
        tl.store(before + at + 2 * step, sums.to(kind), mask=w < tl.where(left > 2, width, 0))
        sums += d
        tl.store(before + at + 3 * step, sums.to(kind), mask=w < tl.where(left > 3, width, 0))
        sums += e


@triton.jit
def causal_pairs(pairs, queries, before, divisor, delta, FORWARD: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                 E: tl.constexpr, C: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Set the entries of `pairs` (chunks of all sequences, C, C) whose key comes after their query to 0.

    In the forward pass, store the divisor of each query: the sum of its row of `pairs` plus φ(q)·z, with the sum z of
    earlier chunks. In the backward pass, first subtract δ_i from the row of query i.
    """
    TILES: tl.constexpr = C // R
    i, chunk = tl.program_id(0) % TILES * R + tl.arange(0, R), (tl.program_id(0) // TILES).to(tl.int64)
    j, row = tl.arange(0, C), chunk * C + i
    at = pairs + row[:, None] * C + j[None, :]
    a = tl.load(at).to(tl.float32)
    if not FORWARD:
        a -= tl.load(delta + row)[:, None]
    a = tl.where(j[None, :] <= i[:, None], a, 0.0)
    tl.store(at, a.to(pairs.dtype.element_ty))
    if FORWARD:
        c = tl.arange(0, D)
        phi = rows_of(queries, row, i < C, SIZE, SIZE, D).to(tl.float32)
        total = tl.load(before + chunk * (SIZE + E) + c, mask=c < SIZE, other=0.0)
        tl.store(divisor + row, tl.sum(a, 1) + tl.sum(phi * total[None, :], 1))


@triton.jit
def causal_quotients(sums, divisor, stats, before, value, keep, output, heads, v_b, v_h, v_n, m_b, m_h, n_q, n_k,
                     chunks, KEEP: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, EB: tl.constexpr,
                     C: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Store the outputs sums_i / d_i, 0 where d_i is 0, plus all values of NaN or Inf at positions up to i."""
    i0, z = tl.program_id(0) * R, tl.program_id(1)
    i, e = i0 + tl.arange(0, R), tl.arange(0, EB)
    b, h = (z // heads).to(tl.int64), z % heads
    padded = z.to(tl.int64) * chunks * C + i
    d = tl.load(divisor + padded)
    o = rows_of(sums, padded, i >= 0, E, E, EB).to(tl.float32)
    at = (z.to(tl.int64) * chunks + i0 // C) * (SIZE + E) + SIZE + e
    earlier = tl.load(before + at, mask=e < E, other=0.0)
    own = tl.load(stats + at, mask=e < E, other=0.0)
    o = tl.where((d == 0.0)[:, None], 0.0, o / tl.where(d == 0.0, 1.0, d)[:, None])
    o += earlier[None, :]
    if tl.max(tl.where(own == 0.0, 0, 1), 0) > 0:
        for t in range(i0 // C * C, tl.minimum(i0 + R, n_k)):
            here = e < E
            if KEEP:
                here = here & (tl.load(keep + b * m_b + h * m_h + t) != 0)
            v = tl.load(value + b * v_b + h * v_h + (b * 0 + t) * v_n + e, mask=here, other=0.0)
            v = v.to(tl.float32)
            v = tl.where(tl.abs(v) < float("inf"), 0.0, v)
            o = tl.where((i >= t)[:, None], o + v[None, :], o)
    row = z.to(tl.int64) * n_q + i
    there = (i < n_q)[:, None] & (e < E)[None, :]
    tl.store(output + row[:, None] * E + e[None, :], o.to(output.dtype.element_ty), mask=there)
