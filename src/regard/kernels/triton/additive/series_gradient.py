"""Gradients of query, key and weight from dS with the sine series: matrix products, then the chain rule.

The product G = dS K' of dS and the key features K' holds, for each hidden unit and harmonic ω, the sums Σ dS cos ωb and
Σ dS sin ωb over the keys b. The columns of one unit are adjacent, so the chain rule through sin ωa and cos ωa of a
query a is applied to the sums in registers, and G is never stored.
"""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import LOG2E, key_range, product, query_range
from regard.kernels.triton.additive.series_features import sine_cosine

GROUP = tl.constexpr(2)  # number of adjacent harmonics in the feature columns, equal to series.GROUPS["backward"]


@triton.jit
def _chain(g, x, fit, group, QUERY: tl.constexpr, ODD: tl.constexpr, NATIVE: tl.constexpr, BM: tl.constexpr,
           UNITS: tl.constexpr):  # fmt: skip
    """Return what a group of harmonics adds to the gradient of x (rows, units / 4, 4) and, with QUERY, of the weight.

    g (rows, units * 2 GROUP) are the sums of the module's docstring. The caller multiplies the gradient of x by the
    weight with QUERY, and divides it by log2(e) without QUERY.
    """
    which = tl.arange(0, GROUP) + group * GROUP
    harmonic = (2 * which + 1).to(tl.float32) * tl.load(fit + 2)
    first, second = tl.split(tl.reshape(g, (BM, UNITS // 4, GROUP, 4, 2)))
    s, c = sine_cosine(x[:, :, None, :] * harmonic[None, None, :, None], NATIVE)
    omega = harmonic * 6.283185307179586
    if QUERY:
        # A harmonic of the series is sine · sin ω(a+b) + cosine · cos ω(a+b). `first` are sums with cos ωb, `second`
        # sums with sin ωb.
        sine = tl.load(fit + 8 + which)
        along, across = first * s + second * c, first * c - second * s
        slope = (omega * sine)[None, None, :, None] * across
        terms = sine[None, None, :, None] * along
        if not ODD:
            cosine = tl.load(fit + 24 + which)
            slope -= (omega * cosine)[None, None, :, None] * along
            terms += cosine[None, None, :, None] * across
        return tl.sum(slope, 2), tl.sum(terms, 2)
    else:
        slope = tl.sum(omega[None, None, :, None] * (second * c - first * s), 2)
        return slope, slope


@triton.jit
def series_feature(
    slab_at, other_at, own, x_b, x_h, x_n, x_f, weight, w_h, table, plan, pairs, boost, out, o_b, o_h, o_n, o_f,
    weight_part, row_change, first_feature, first_unit, first_query, last_query, first_key, last_key, slab_q,
    heads, groups, n_q, n_k, q_pad, k_pad, f_size, f_pad, parts,
    QUERY: tl.constexpr, ADD: tl.constexpr, ODD: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, BM: tl.constexpr, UNITS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of UNITS hidden units of a slab's queries (QUERY) or keys; with QUERY, also of the weight.

    The feature buffers begin with key head `first_feature`.
    """
    f0 = tl.program_id(0) * UNITS
    repeat = heads // groups
    head = tl.program_id(2)  # index of the query head (QUERY) or key head among the heads of the slab
    y = first_unit + (head // repeat if QUERY else head)
    b, g = y // groups, y % groups
    row = tl.load(plan + y)
    if row >= 0:
        fit = table + row * WIDTH
        gain = 1.0
        if boost is not None:
            gain = 1.0 / tl.load(boost)
        h = g * repeat + (head % repeat if QUERY else 0)
        row0 = tl.program_id(1) * BM + (first_query if QUERY else first_key)
        rows = row0 + tl.arange(0, BM)
        if QUERY:
            row_in = rows < tl.minimum(n_q, last_query)
            start, stop = key_range(pairs, b, row0, n_k, BM, BK)
            start, stop = tl.maximum(start, first_key), tl.minimum(stop, last_key)
            place = h
            turns = 1
        else:
            row_in = rows < n_k
            start, stop = query_range(pairs, b, row0, n_q, n_k, BM, BK)
            start, stop = tl.maximum(start, first_query), tl.minimum(stop, last_query)
            place = g
            turns = repeat
        # hidden units as (UNITS / 4, 4), in the order of the feature columns
        f = f0 + 4 * tl.arange(0, UNITS // 4)[:, None] + tl.arange(0, 4)[None, :]
        inside = row_in[:, None, None] & (f < f_size)[None, :, :]
        line = b.to(tl.int64) * x_b + place * x_h + rows.to(tl.int64)[:, None, None] * x_n
        x = tl.load(own + line + f[None, :, :] * x_f, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # padded keys may hold any value
        grad = tl.zeros((BM, UNITS // 4, 4), tl.float32)
        weight_sum = tl.zeros((BM, UNITS // 4, 4), tl.float32)
        for group in range(tl.load(fit + 1).to(tl.int32) // GROUP):
            column = (group * f_pad + f0) * (2 * GROUP)
            acc = tl.zeros((BM, UNITS * 2 * GROUP), tl.float32)
            for r in range(turns):
                slab_row = (head * turns + r) * slab_q
                for o in tl.range(start, stop, BK):
                    if QUERY:
                        ds = slab_at.load([slab_row + row0 - first_query, o - first_key])
                        other = other_at.load([(y - first_feature) * k_pad + o, column])
                    else:
                        ds = slab_at.load([slab_row + o - first_query, row0 - first_key]).T
                        other = other_at.load([((y - first_feature) * repeat + r) * q_pad + o, column])
                    acc = product(ds, other, acc, PRECISION)
            slope, terms = _chain(acc, x, fit, group, QUERY, ODD, NATIVE, BM, UNITS)
            grad += slope
            if QUERY:
                weight_sum += terms
        if QUERY:
            w = tl.load(weight + h * w_h + f, mask=f < f_size, other=0.0).to(tl.float32)
            grad *= gain * w[None, :, :]
        else:
            grad *= gain / LOG2E
        line = b.to(tl.int64) * o_b + place * o_h + rows.to(tl.int64)[:, None, None] * o_n
        to = out + line + f[None, :, :] * o_f
        if ADD:
            grad += tl.load(to, mask=inside, other=0.0)
        tl.store(to, grad.to(out.dtype.element_ty), mask=inside)
        if QUERY:
            part = tl.sum(tl.where(row_in[:, None, None], weight_sum, 0.0), 0) * gain
            if row_change is not None:
                # the gradient of the series' constant term is Σ_j dS, which equals the gradient of the log-sum-exp
                change = tl.load(row_change + (b * heads + h).to(tl.int64) * n_q + rows, mask=row_in, other=0.0)
                part += tl.load(fit + 4) * tl.sum(change, 0)
            to = weight_part + ((b * heads + h).to(tl.int64) * parts + row0 // BM) * f_size
            tl.store(to + f, part, mask=f < f_size)
