"""Forward kernels of linear attention: sums over chunks of positions, and the outputs.

An output is computed from the sum of the chunks before the query and from the keys of its own chunk. For a matrix
product over the keys of a chunk, the exponent of a pair, l(q_i) + l(k_j) with l = log2 φ, is split into l(q_i) + u and
l(k_j) − u, with u the largest logarithm of the feature up to the end of the chunk. If the features of a chunk's keys
span a factor of more than 2^SPAN, this split could underflow; if a key or value is not finite, a later key could change
an earlier row. In both cases the chunk is computed pair by pair (`far_apart`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import product
from regard.kernels.triton.linear.log_features import (
    directions,
    finite,
    get_state,
    half_squares,
    kept,
    key_logs,
    put_state,
    query_logs,
    row_of,
    rows_of,
    with_sums,
)

SPAN = tl.constexpr(90.0)  # largest span of features in powers of two; float32 has 126 powers of two below 1


class Places(NamedTuple):
    """Strides of the operands, the numbers of heads, positions and chunks, and scales, as kernel arguments."""

    q_b: Any
    q_h: Any
    q_n: Any
    k_b: Any
    k_h: Any
    k_n: Any
    v_b: Any
    v_h: Any
    v_n: Any
    m_b: Any
    m_h: Any
    heads: Any
    group: Any
    n_q: Any
    n_k: Any
    chunk: Any
    chunks: Any  # number of chunks of keys
    slots: Any  # number of sums stored for each key head: one for each chunk, and one of all chunks
    plane: Any  # offset in `rows` from totals to shifts, and from shifts to logarithms of each chunk's first key
    scale: Any  # factor by which Performer's random directions are multiplied
    half: Any  # factor by which the squared norms of keys are multiplied


@triton.jit
def chunk_sums(
    x, y, keep, projection, output, peaks, sums, rows, p, x_b, x_h, x_n, y_b, y_h, y_n, n, chunks, slots, plane,
    QUERIES: tl.constexpr, CAUSAL: tl.constexpr, KEEP: tl.constexpr, PERFORMER: tl.constexpr, PROJECT: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, D: tl.constexpr,
    EB: tl.constexpr, MB: tl.constexpr, NF: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute S and z of each chunk of keys, or T and t of each chunk of queries, for a block of features.

    The module `operator` defines S, z, T and t. With a causal mask, the sums of chunks of queries are stored in reverse
    order, so that a running sum starts from the last chunk.
    """
    f0, c, yy = tl.program_id(0) % NF * MB, tl.program_id(0) // NF, tl.program_id(1)
    groups = p.heads // p.group
    b, g = (yy // groups).to(tl.int64), yy % groups
    keep += b * p.m_b + g * p.m_h
    w = directions(projection, f0, p.scale, PERFORMER, M, SIZE, D, MB)
    state = tl.zeros((MB, EB), tl.float32)
    total = tl.zeros((MB,), tl.float32)
    shift = tl.full((MB,), float("-inf"), tl.float32)
    first = tl.full((MB,), float("-inf"), tl.float32)
    bad = 0
    count = 1
    if QUERIES:
        count = p.group
    for r in range(count):
        h = g * count + r
        own, other = x + b * x_b + h * x_h, y + b * y_b + h * y_h
        for i0 in range(c * p.chunk, tl.minimum(c * p.chunk + p.chunk, n), BN):
            i = i0 + tl.arange(0, BN)
            inside = kept(keep, i, n, KEEP)
            a = rows_of(own, i, inside, x_n, SIZE, D)
            v = rows_of(other, i, inside, y_n, E, EB)
            if QUERIES:
                row = (b * p.heads + h) * n + i
                d = tl.load(peaks + tl.num_programs(1).to(tl.int64) * count * n + row, mask=inside, other=0.0)
                peak = tl.load(peaks + row, mask=inside, other=0.0)
                logs = query_logs(a, w, f0, PERFORMER, PROJECT, M, MB, BN)
                logs = (logs - peak[:, None]) - tl.log2(tl.where(d == 0.0, 1.0, d))[:, None]
                logs = tl.where((d == 0.0)[:, None], float("-inf"), logs)
            else:
                logs = key_logs(a, half_squares(a, p.half), inside, w, f0, PERFORMER, PROJECT, M, MB, BN)
                if CAUSAL:
                    first = tl.where(i0 == c * p.chunk, row_of(logs, 0, BN), first)
                    wild = tl.max(tl.where(tl.abs(a.to(tl.float32)) < float("inf"), 0, 1), 1)
                    wild = tl.maximum(wild, tl.max(tl.where(tl.abs(v.to(tl.float32)) < float("inf"), 0, 1), 1))
                    bad = tl.maximum(bad, tl.max(wild, 0))
            most = tl.maximum(shift, tl.max(logs, 0))
            fade = tl.exp2(shift - finite(most))
            mapped = tl.exp2(logs - finite(most)[None, :])
            if QUERIES:
                o = rows_of(output, row, inside, E, E, EB)
                delta = tl.sum(v.to(tl.float32) * o.to(tl.float32), 1)
                total = total * fade - tl.sum(mapped * delta[:, None], 0)
            else:
                total = total * fade + tl.sum(mapped, 0)
            state = product(tl.trans(mapped.to(DOT)), v.to(DOT), state * fade[:, None], PRECISION)
            shift = most
    m = f0 + tl.arange(0, MB)
    slot = yy * slots + c
    if QUERIES and CAUSAL:
        slot = yy * slots + chunks - 1 - c
    put_state(sums, rows, plane, slot, m, state, total, shift, M, M, E, EB)
    if CAUSAL and not QUERIES:
        first = tl.where(bad > 0, float("nan"), first)
        tl.store(rows + 2 * plane + slot.to(tl.int64) * M + m, first, mask=m < M)


@triton.jit
def far_apart(rows, plane, slot, M: tl.constexpr, MP: tl.constexpr):
    """Return whether the pairs of a chunk must be computed one by one.

    This is necessary if the features of its keys span more than 2^SPAN, or if a key or value is not finite.
    """
    m = tl.arange(0, MP)
    at = rows + slot.to(tl.int64) * M + m
    before = tl.load(at + plane, mask=m < M, other=0.0)
    after = tl.load(at + plane + M, mask=m < M, other=0.0)
    first = tl.load(at + 2 * plane, mask=m < M, other=0.0)
    gap = tl.where(after == float("-inf"), 0.0, finite(after) - tl.maximum(before, first))
    return tl.max(tl.where((first == first) & (gap < SPAN), 0, 1), 0) > 0


@triton.jit
def _met(x, peak, acc, d, v, seen):
    """Return the largest exponent, output sum and divisor of each row, with one more key added.

    x holds log2 φ(q_i) + log2 φ(k) for each row and feature, v is the key's value, and `seen` marks the rows that
    attend to the key.
    """
    most = tl.maximum(peak, tl.where(seen, tl.max(x, 1), float("-inf")))
    fade = tl.exp2(peak - finite(most))
    a = tl.sum(tl.exp2(tl.minimum(x - finite(most)[:, None], 0.0)), 1)
    acc = acc * fade[:, None]
    d = d * fade
    return most, tl.where(seen[:, None], acc + a[:, None] * v[None, :], acc), tl.where(seen, d + a, d)


@triton.jit
def read(
    query, key, value, keep, projection, sums, rows, output, peaks, p,
    CAUSAL: tl.constexpr, KEEP: tl.constexpr, PERFORMER: tl.constexpr, PROJECT: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr,
    D: tl.constexpr, EB: tl.constexpr, MB: tl.constexpr, NF: tl.constexpr, MP: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute for each row the output, its largest exponent, and its divisor d_i divided by 2^exponent.

    A causal chunk has BC positions, which are one or several tiles of queries; each tile is paired with all keys of its
    chunk.
    """
    i0, z = tl.program_id(0) * BM, tl.program_id(1)
    b, h = (z // p.heads).to(tl.int64), z % p.heads
    yy = z // p.heads * (p.heads // p.group) + h // p.group
    i = i0 + tl.arange(0, BM)
    q = rows_of(query + b * p.q_b + h * p.q_h, i, i < p.n_q, p.q_n, SIZE, D)
    acc = tl.zeros((BM, EB), tl.float32)
    d = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
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
        a = tl.zeros((BM, BC), tl.float32)
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
        x = logs + split[None, :]
        most = tl.maximum(peak, tl.max(x, 1))
        fade = tl.exp2(peak - finite(most))
        mapped = tl.exp2(x - finite(most)[:, None])
        peak = most
        state *= tl.exp2(shift - finite(split))[:, None]
        total *= tl.exp2(shift - finite(split))
        acc = with_sums(mapped, state, acc * fade[:, None], WHOLE, DOT, PRECISION)
        d = d * fade + tl.sum(mapped * total[None, :], 1)
        if CAUSAL:
            if far:
                for t in range(BC):
                    x = logs + row_of(own, t, BC)[None, :]
                    peak, acc, d = _met(x, peak, acc, d, row_of(v.to(tl.float32), t, BC), i >= c * BC + t)
            else:
                keys = tl.exp2(own - finite(split)[None, :])
                a = product(mapped.to(DOT), tl.trans(keys.to(DOT)), a * fade[:, None], PRECISION)
    if CAUSAL and not far:
        a = tl.where(j[None, :] <= i[:, None], a, 0.0)
        d += tl.sum(a, 1)
        acc = product(a.to(DOT), v.to(DOT), acc, PRECISION)
    acc = tl.where((d == 0.0)[:, None], 0.0, acc / tl.where(d == 0.0, 1.0, d)[:, None])
    e = tl.arange(0, EB)
    row = z.to(tl.int64) * p.n_q + i
    tl.store(
        output + row[:, None] * E + e[None, :], acc.to(output.dtype.element_ty),
        mask=(i < p.n_q)[:, None] & (e < E)[None, :],
    )  # fmt: skip
    tl.store(peaks + row, finite(peak), mask=i < p.n_q)
    tl.store(peaks + tl.num_programs(1).to(tl.int64) * p.n_q + row, d, mask=i < p.n_q)
