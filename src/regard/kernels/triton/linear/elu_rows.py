"""Kernels that linear attention runs between matrix products: elu features, quotients and their gradients, by rows."""

import triton
import triton.language as tl

from regard.kernels.triton.linear.log_features import kept, rows_of


@triton.jit
def elu_plus_one(x):
    """Return elu(x) + 1 in float32, without cancellation where elu(x) is near −1; NaN stays NaN."""
    x = x.to(tl.float32)
    return tl.where(x > 0.0, x + 1.0, tl.exp(x))


@triton.jit
def _largest(mapped, SIZE: tl.constexpr, D: tl.constexpr):
    """Return the largest feature of each row, or 1 if all features of the row are 0."""
    c = tl.arange(0, D)
    largest = tl.max(tl.where((c < SIZE)[None, :], mapped, 0.0), 1)
    return tl.where(largest > 0.0, largest, 1.0)


@triton.jit
def elu_features(x, keep, mapped, heads, x_b, x_h, x_n, m_b, m_h, n, padded,
                 QUERIES: tl.constexpr, KEEP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                 R: tl.constexpr):  # fmt: skip
    """Store the features φ(x) as (b · h, padded, size).

    Features of queries are divided by the largest of their row; features of masked keys are 0.
    """
    i, z = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    inside = kept(keep + b * m_b + h * m_h, i, n, KEEP)
    phi = elu_plus_one(rows_of(x + b * x_b + h * x_h, i, inside, x_n, SIZE, D))
    if QUERIES:
        phi = phi / _largest(phi, SIZE, D)[:, None]
    phi = tl.where(inside[:, None], phi, 0.0)
    c = tl.arange(0, D)
    at = mapped + (z.to(tl.int64) * padded + i)[:, None] * SIZE + c[None, :]
    tl.store(at, phi.to(mapped.dtype.element_ty), mask=(i < padded)[:, None] & (c < SIZE)[None, :])


@triton.jit
def quotients(sums, queries, total, divisor, output, n, E: tl.constexpr, EB: tl.constexpr, SIZE: tl.constexpr,
              D: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Store the divisors d_i = φ(q_i) · total and the outputs sums_i / d_i; an output is 0 where d_i is 0."""
    i, z = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    row = z.to(tl.int64) * n + i
    inside = i < n
    c, e = tl.arange(0, D), tl.arange(0, EB)
    phi = rows_of(queries, row, inside, SIZE, SIZE, D).to(tl.float32)
    ones = tl.load(total + z.to(tl.int64) * SIZE + c, mask=c < SIZE, other=0.0)
    d = tl.sum(phi * ones[None, :], 1)
    o = rows_of(sums, row, inside, E, E, EB).to(tl.float32)
    o = tl.where((d == 0.0)[:, None], 0.0, o / tl.where(d == 0.0, 1.0, d)[:, None])
    there = inside[:, None] & (e < E)[None, :]
    tl.store(output + row[:, None] * E + e[None, :], o.to(output.dtype.element_ty), mask=there)
    tl.store(divisor + row, d, mask=inside)


@triton.jit
def upstream(change, output, divisor, above, delta, heads, c_b, c_h, c_n, n, padded, E: tl.constexpr,
             EB: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Store g_i = do_i / d_i and δ_i = g_i · output_i, with the output's gradient do; both are 0 where d_i is 0.

    The sequences of g and δ are padded with zeros to the length `padded`.
    """
    i, z = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    row = z.to(tl.int64) * n + i
    to = z.to(tl.int64) * padded + i
    inside = i < n
    e = tl.arange(0, EB)
    d = tl.load(divisor + to, mask=inside, other=0.0)
    g = rows_of(change + b * c_b + h * c_h, i, inside, c_n, E, EB).to(tl.float32)
    g = tl.where((d == 0.0)[:, None], 0.0, g / tl.where(d == 0.0, 1.0, d)[:, None])
    o = rows_of(output, row, inside, E, E, EB).to(tl.float32)
    there = (i < padded)[:, None] & (e < E)[None, :]
    tl.store(above + to[:, None] * E + e[None, :], g.to(above.dtype.element_ty), mask=there)
    tl.store(delta + to, tl.sum(g * o, 1), mask=i < padded)


@triton.jit
def elu_gradients(x, keep, change, delta, total, grad, heads, x_b, x_h, x_n, m_b, m_h, n, padded, group, chunk, width,
                  QUERIES: tl.constexpr, KEEP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
                  R: tl.constexpr):  # fmt: skip
    """Store the gradient of queries, (df_i − δ_i z) φ'(q_i) / largest_i, or of keys, (df_j − t) φ'(k_j).

    df is `change`, the gradient of the features, and largest_i is the largest feature of query i, by which
    `elu_features` divides. The vectors z or t are rows of `total`, `width` entries apart: one row for each `chunk`
    positions of the `group` heads that share it.
    """
    i, z = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    row = z.to(tl.int64) * padded + i
    to = z.to(tl.int64) * n + i
    c = tl.arange(0, D)
    inside = kept(keep + b * m_b + h * m_h, i, n, KEEP)
    raw = rows_of(x + b * x_b + h * x_h, i, inside, x_n, SIZE, D).to(tl.float32)
    df = rows_of(change, row, inside, SIZE, SIZE, D).to(tl.float32)
    part = (z // group).to(tl.int64) * (padded // chunk) + tl.program_id(0) * R // chunk
    ones = tl.load(total + part * width + c, mask=c < SIZE, other=0.0).to(tl.float32)
    slope = tl.where(raw > 0.0, 1.0, tl.exp(raw))
    if QUERIES:
        by = tl.load(delta + row, mask=inside, other=0.0).to(tl.float32)
        df = (df - by[:, None] * ones[None, :]) / _largest(elu_plus_one(raw), SIZE, D)[:, None]
    else:
        df = df - ones[None, :]
    df = tl.where(inside[:, None], df * slope, 0.0)
    there = (i < n)[:, None] & (c < SIZE)[None, :]
    tl.store(grad + to[:, None] * SIZE + c[None, :], df.to(grad.dtype.element_ty), mask=there)
