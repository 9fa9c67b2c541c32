"""Local attention: softmax over the keys within `reach` of each query's centre, times a Gaussian around the centre.

A program visits the tiles between the first and the last key in the windows of its queries. Centres may be anywhere: if
the queries are sorted by centre, the rows of a program have neighbouring windows. Values of NaN or Inf are replaced
by 0 in matrix products, and their effect is added afterwards to the rows whose window contains them. The backward pass
computes the scores of every pair twice, once for the gradients of queries and centres and once for those of keys and
values, so that no two programs add to the same sum and results are deterministic.
"""

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import LOG2E, power_of_two, product
from regard.kernels.triton.range_pairs import put_rows, rows_of

_SCAN = tl.constexpr(1024)  # number of centres that `local_keys` loads at a time to find the queries of its keys


@triton.jit
def _windows(centre, order, i, n_q, limit, n_k, c_n, reach):
    """Return for each query: its row, centre, first position of its window, and range of keys lo <= j <= hi.

    i are positions in `order`, or rows if `order` is None. Positions beyond the last query have row n_q and no keys.
    Queries whose centre is NaN or far away from all keys have no keys either.
    """
    inside = i < n_q
    row = tl.where(inside, i, n_q)
    if order is not None:
        row = tl.load(order + i, mask=inside, other=n_q).to(tl.int32)
    c = tl.load(centre + row * c_n, mask=inside, other=0.0)
    least = -reach - 2.0
    near = tl.where(c == c, c, least)
    near = tl.minimum(tl.maximum(near, least), n_k + reach + 1.0)
    first = tl.ceil(near - reach).to(tl.int32)
    lo = tl.maximum(first, 0)
    hi = tl.minimum(tl.floor(near + reach).to(tl.int32), limit - 1)
    empty = (lo > hi) | (i >= n_q)
    return row, c, first, tl.where(empty, n_k, lo), tl.where(empty, -1, hi)


@triton.jit
def _limit(lengths, b, n_k):
    """Return the number of keys of batch row b that are not padding."""
    limit = n_k
    if lengths is not None:
        limit = tl.minimum(tl.load(lengths + b), n_k).to(tl.int32)
    return limit


@triton.jit
def _finite(x):
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _bell(distance, reach, GAUSSIAN: tl.constexpr):
    if GAUSSIAN:
        return tl.exp2(distance * distance * (-2.0 * LOG2E / (reach * reach)))
    else:
        return tl.full(distance.shape, 1.0, tl.float32)


@triton.jit
def _spoilt(spoilt, x):
    """Return `spoilt` with 1 for each row of x that holds NaN or Inf."""
    return tl.maximum(spoilt, tl.max(tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1), 1))


@triton.jit
def _marked(acc, seen, x):
    """Return the sums `acc` with the effect of NaN and Inf in x added, for the pairs that `seen` marks as unmasked."""
    x = x.to(tl.float32)
    seen = seen.to(tl.float32)
    above = tl.dot(seen, tl.where(x < float("inf"), 0.0, 1.0), input_precision="tf32")  # TF32 is exact for 0 and 1
    below = tl.dot(seen, tl.where(x > float("-inf"), 0.0, 1.0), input_precision="tf32")
    return acc + tl.where(above > 0, float("inf"), 0.0) + tl.where(below > 0, float("-inf"), 0.0)


@triton.jit
def _load(x, row, n, step, SIZE: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr):
    """Return rows of a matrix in two tiles: the first B1 columns and, if B2 > 0, the next B2; rows beyond n are 0."""
    first = rows_of(x, row, 0, n, step, SIZE, B1, True)
    second = first
    if B2 > 0:
        second = rows_of(x + B1, row, 0, n, step, SIZE - B1, B2, True)
    return first, second


@triton.jit
def _store(x, row, n, step, first, second, SIZE: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr):
    """Store rows whose columns are in two tiles, as `_load` returns them."""
    put_rows(x, row, n, step, first, SIZE, B1)
    if B2 > 0:
        put_rows(x + B1, row, n, step, second, SIZE - B1, B2)


@triton.jit
def _dots(a1, a2, b1, b2, B2: tl.constexpr, PRECISION: tl.constexpr):
    """Return the dot products of the rows of a with the rows of b; the columns of both are in two tiles."""
    s = product(a1, b1.T, tl.zeros((a1.shape[0], b1.shape[0]), tl.float32), PRECISION)
    if B2 > 0:
        s = product(a2, b2.T, s, PRECISION)
    return s


@triton.jit
def local_forward(
    query, key, value, centre, lengths, order, output, weights, lse, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    c_b, c_h, c_n, o_b, o_h, o_n, heads, n_q, n_k, window, scale, reach,
    D: tl.constexpr, E: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, UNIT: tl.constexpr, GAUSSIAN: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute output, weights and log-sum-exp.

    Weights in float32 hold the scores until the log-sum-exp is known. In half precision scores would lose too many
    digits, so they are computed twice.
    """
    z = tl.program_id(1).to(tl.int64)
    b, h = z // heads, z % heads
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    limit = _limit(lengths, b, n_k)
    if order is not None:
        order += z * n_q
    row, c, first, lo, hi = _windows(centre + b * c_b + h * c_h, order, i, n_q, limit, n_k, c_n, reach)
    q1, q2 = _load(query + (b * q_b + h * q_h) * UNIT, row, n_q, q_n * UNIT, D, D1, D2)
    key += (b * k_b + h * k_h) * UNIT
    value += (b * v_b + h * v_h) * UNIT
    k_n *= UNIT
    v_n *= UNIT
    # A row of the weights starts at the first position of its window, which may lie before the first key.
    weights += z * n_q * window
    own = row * window
    factor = scale * LOG2E
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc1 = tl.zeros((BM, E1), tl.float32)
    acc2 = acc1
    if E2 > 0:
        acc2 = tl.zeros((BM, E2), tl.float32)
    spoilt = tl.zeros((BN,), tl.int32)
    start = tl.min(lo, 0)
    stop = tl.max(hi, 0) + 1
    for j0 in tl.range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        k1, k2 = _load(key, j, limit, k_n, D, D1, D2)
        s = _dots(q1, q2, k1, k2, D2, PRECISION) * factor
        seen = (j[None, :] >= lo[:, None]) & (j[None, :] <= hi[:, None])
        if weights.dtype.element_ty == tl.float32:
            tl.store(weights + ((own - first)[:, None] + j[None, :]), s, mask=seen)
        s = tl.where(seen, s, float("-inf"))
        new_most = tl.maximum(most, tl.max(s, 1))
        pivot = tl.where(new_most == float("-inf"), 0.0, new_most)
        p = power_of_two(s - pivot[:, None], NATIVE)
        fade = tl.exp2(most - pivot)
        total = total * fade + tl.sum(p, 1)
        p *= _bell(j.to(tl.float32)[None, :] - c[:, None], reach, GAUSSIAN)
        v1, v2 = _load(value, j, limit, v_n, E, E1, E2)
        spoilt = _spoilt(spoilt, v1)
        p = p.to(v1.dtype)
        acc1 = product(p, _finite(v1), acc1 * fade[:, None], PRECISION)
        if E2 > 0:
            spoilt = _spoilt(spoilt, v2)
            acc2 = product(p, _finite(v2), acc2 * fade[:, None], PRECISION)
        most = new_most
    if tl.max(spoilt, 0) > 0:
        for j0 in tl.range(start, stop, BN):
            j = j0 + tl.arange(0, BN)
            seen = (j[None, :] >= lo[:, None]) & (j[None, :] <= hi[:, None])
            v1, v2 = _load(value, j, limit, v_n, E, E1, E2)
            acc1 = _marked(acc1, seen, v1)
            if E2 > 0:
                acc2 = _marked(acc2, seen, v2)
    filled = lo <= hi
    # A row with keys whose scores are all -inf is NaN. With a Gaussian, a row whose centre is NaN is NaN too.
    total = tl.where(filled & (total == 0.0), float("nan"), total)
    if GAUSSIAN:
        total = tl.where(c == c, total, float("nan"))
        filled = filled | (c != c)
    total = tl.where(filled, total, 1.0)
    acc1 /= total[:, None]
    if E2 > 0:
        acc2 /= total[:, None]
    _store(output + (b * o_b + h * o_h) * UNIT, row, n_q, o_n * UNIT, acc1, acc2, E, E1, E2)
    row_lse = tl.where(filled, most + tl.log2(total), float("inf"))
    # The log-sum-exp is in base 2. It is inf for a row without keys, which makes its weights in the backward pass 0.
    if lse is not None:
        tl.store(lse + z * n_q + row, row_lse, mask=i < n_q)
    if weights.dtype.element_ty == tl.float32:
        tl.debug_barrier()  # other threads stored the scores
        for w0 in tl.range(0, window, BW):
            place = (w0 + tl.arange(0, BW))[None, :]
            seen = (place >= (lo - first)[:, None]) & (place <= (hi - first)[:, None])
            at = weights + (own[:, None] + place)
            p = power_of_two(tl.load(at, mask=seen, other=0.0) - row_lse[:, None], NATIVE)
            distance = place.to(tl.float32) + (first - c)[:, None]
            p = tl.where(seen, p * _bell(distance, reach, GAUSSIAN), 0.0)
            if GAUSSIAN:
                p = tl.where(distance == distance, p, float("nan"))
            tl.store(at, p, mask=(place < window) & (row < n_q)[:, None])
    else:
        start = tl.min(tl.where(i < n_q, first, n_k + window), 0)
        stop = tl.max(tl.where(i < n_q, first, -window), 0) + window
        for j0 in tl.range(start, stop, BN):
            j = j0 + tl.arange(0, BN)
            k1, k2 = _load(key, j, limit, k_n, D, D1, D2)
            s = _dots(q1, q2, k1, k2, D2, PRECISION) * factor
            p = power_of_two(s - row_lse[:, None], NATIVE)
            p *= _bell(j.to(tl.float32)[None, :] - c[:, None], reach, GAUSSIAN)
            p = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] <= hi[:, None]), p, 0.0)
            if GAUSSIAN:
                p = tl.where((c == c)[:, None], p, float("nan"))
            place = j[None, :] - first[:, None]
            inside = (place >= 0) & (place < window) & (i < n_q)[:, None]
            tl.store(weights + (own[:, None] + place), p.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _row_pairs(
    q1, q2, do1, do2, k1, k2, v1, v2, j, lo, hi, c, row_lse, factor, reach, D2: tl.constexpr, E2: tl.constexpr,
    GAUSSIAN: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return for each pair of a tile: its softmax, its weight times the weight's gradient, and key − centre.

    All three numbers are 0 for keys outside the query's window.
    """
    seen = (j[None, :] >= lo[:, None]) & (j[None, :] <= hi[:, None])
    distance = j.to(tl.float32)[None, :] - c[:, None]
    p = power_of_two(_dots(q1, q2, k1, k2, D2, PRECISION) * factor - row_lse[:, None], NATIVE)
    p = tl.where(seen, p, 0.0)
    part = _dots(do1, do2, v1, v2, E2, PRECISION) * p * _bell(distance, reach, GAUSSIAN)
    return p, tl.where(seen, part, 0.0), tl.where(seen, distance, 0.0)


@triton.jit
def local_rows(
    query, key, value, centre, lengths, order, output, change, lse, delta, grad, slopes,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, c_b, c_h, c_n, o_b, o_h, o_n, u_b, u_h, u_n, g_b, g_h, g_n,
    heads, n_q, n_k, window, scale, reach,
    D: tl.constexpr, E: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, GAUSSIAN: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries and centres, and Σ dO · O of each query for `local_keys`.

    Without `output` (in half precision), Σ dO · O is first computed from the pairs: computed from the rounded O, it
    would add an error to rows with few keys, whose gradients are otherwise nearly exact.
    """
    z = tl.program_id(1).to(tl.int64)
    b, h = z // heads, z % heads
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    limit = _limit(lengths, b, n_k)
    if order is not None:
        order += z * n_q
    row, c, _, lo, hi = _windows(centre + b * c_b + h * c_h, order, i, n_q, limit, n_k, c_n, reach)
    do1, do2 = _load(change + (b * u_b + h * u_h) * UNIT, row, n_q, u_n * UNIT, E, E1, E2)
    row_delta = tl.zeros((BM,), tl.float32)
    if output is not None:
        o1, o2 = _load(output + (b * o_b + h * o_h) * UNIT, row, n_q, o_n * UNIT, E, E1, E2)
        row_delta = tl.sum(do1.to(tl.float32) * o1.to(tl.float32), 1)
        if E2 > 0:
            row_delta += tl.sum(do2.to(tl.float32) * o2.to(tl.float32), 1)
    q1, q2 = _load(query + (b * q_b + h * q_h) * UNIT, row, n_q, q_n * UNIT, D, D1, D2)
    row_lse = tl.load(lse + z * n_q + row, mask=i < n_q, other=float("inf"))
    key += (b * k_b + h * k_h) * UNIT
    value += (b * v_b + h * v_h) * UNIT
    k_n *= UNIT
    v_n *= UNIT
    factor = scale * LOG2E
    start = tl.min(lo, 0)
    stop = tl.max(hi, 0) + 1
    if output is None:
        for j0 in tl.range(start, stop, BN):
            j = j0 + tl.arange(0, BN)
            k1, k2 = _load(key, j, limit, k_n, D, D1, D2)
            v1, v2 = _load(value, j, limit, v_n, E, E1, E2)
            p, part, distance = _row_pairs(
                q1, q2, do1, do2, k1, k2, v1, v2, j, lo, hi, c, row_lse, factor, reach, D2, E2,
                GAUSSIAN, NATIVE, PRECISION,
            )  # fmt: skip
            row_delta += tl.sum(part, 1)
    tl.store(delta + z * n_q + row, row_delta, mask=i < n_q)
    slope = tl.zeros((BM,), tl.float32)
    acc1 = tl.zeros((BM, D1), tl.float32)
    acc2 = acc1
    if D2 > 0:
        acc2 = tl.zeros((BM, D2), tl.float32)
    for j0 in tl.range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        k1, k2 = _load(key, j, limit, k_n, D, D1, D2)
        v1, v2 = _load(value, j, limit, v_n, E, E1, E2)
        p, part, distance = _row_pairs(
            q1, q2, do1, do2, k1, k2, v1, v2, j, lo, hi, c, row_lse, factor, reach, D2, E2,
            GAUSSIAN, NATIVE, PRECISION,
        )  # fmt: skip
        slope += tl.sum(part * distance, 1)
        ds = tl.where(p == 0.0, part, part - p * row_delta[:, None]).to(k1.dtype)
        acc1 = product(ds, _finite(k1), acc1, PRECISION)
        if D2 > 0:
            acc2 = product(ds, _finite(k2), acc2, PRECISION)
    _store(grad + (b * g_b + h * g_h) * UNIT, row, n_q, g_n * UNIT, acc1 * scale, acc2 * scale, D, D1, D2)
    if slopes is not None:
        tl.store(slopes + z * n_q + row, slope * 4.0 / (reach * reach), mask=i < n_q)


@triton.jit
def local_keys(
    query, key, value, centre, lengths, order, change, lse, delta, key_grad, value_grad,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, c_b, c_h, c_n, u_b, u_h, u_n, gk_b, gk_h, gk_n, gv_b, gv_h, gv_n,
    heads, n_q, n_k, window, scale, reach,
    D: tl.constexpr, E: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, GAUSSIAN: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values.

    Only the queries between the first and the last whose window contains one of the program's keys are visited.
    """
    z = tl.program_id(1).to(tl.int64)
    b, h = z // heads, z % heads
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    limit = _limit(lengths, b, n_k)
    if order is not None:
        order += z * n_q
    centre += b * c_b + h * c_h
    start = j0 * 0 + n_q
    stop = j0 * 0
    for i0 in tl.range(0, n_q, _SCAN):
        i = i0 + tl.arange(0, _SCAN)
        row, c, _, lo, hi = _windows(centre, order, i, n_q, limit, n_k, c_n, reach)
        hit = (lo < j0 + BN) & (hi >= j0)
        start = tl.minimum(start, tl.min(tl.where(hit, i, n_q), 0))
        stop = tl.maximum(stop, tl.max(tl.where(hit, i + 1, 0), 0))
    k1, k2 = _load(key + (b * k_b + h * k_h) * UNIT, j, limit, k_n * UNIT, D, D1, D2)
    v1, v2 = _load(value + (b * v_b + h * v_h) * UNIT, j, limit, v_n * UNIT, E, E1, E2)
    query += (b * q_b + h * q_h) * UNIT
    change += (b * u_b + h * u_h) * UNIT
    q_n *= UNIT
    u_n *= UNIT
    lse += z * n_q
    delta += z * n_q
    factor = scale * LOG2E
    grad_k1 = tl.zeros((BN, D1), tl.float32)
    grad_v1 = tl.zeros((BN, E1), tl.float32)
    grad_k2 = grad_k1
    grad_v2 = grad_v1
    if D2 > 0:
        grad_k2 = tl.zeros((BN, D2), tl.float32)
    if E2 > 0:
        grad_v2 = tl.zeros((BN, E2), tl.float32)
    spoilt = tl.zeros((BM,), tl.int32)
    for i0 in tl.range(start, stop, BM):
        i = i0 + tl.arange(0, BM)
        row, c, _, lo, hi = _windows(centre, order, i, n_q, limit, n_k, c_n, reach)
        seen = (j[:, None] >= lo[None, :]) & (j[:, None] <= hi[None, :])
        q1, q2 = _load(query, row, n_q, q_n, D, D1, D2)
        s = _dots(k1, k2, q1, q2, D2, PRECISION) * factor
        p = power_of_two(s - tl.load(lse + row, mask=i < n_q, other=float("inf"))[None, :], NATIVE)
        p = tl.where(seen, p, 0.0)
        w = p * _bell(j.to(tl.float32)[:, None] - c[None, :], reach, GAUSSIAN)
        w = tl.where(seen, w, 0.0)
        do1, do2 = _load(change, row, n_q, u_n, E, E1, E2)
        spoilt = _spoilt(spoilt, do1)
        grad_v1 = product(w.to(do1.dtype), _finite(do1), grad_v1, PRECISION)
        if E2 > 0:
            spoilt = _spoilt(spoilt, do2)
            grad_v2 = product(w.to(do2.dtype), _finite(do2), grad_v2, PRECISION)
        dp = _dots(v1, v2, do1, do2, E2, PRECISION)
        ds = w * dp - p * tl.load(delta + row, mask=i < n_q, other=0.0)[None, :]
        ds = tl.where(seen, ds, 0.0).to(q1.dtype)
        grad_k1 = product(ds, _finite(q1), grad_k1, PRECISION)
        if D2 > 0:
            grad_k2 = product(ds, _finite(q2), grad_k2, PRECISION)
    if tl.max(spoilt, 0) > 0:
        for i0 in tl.range(start, stop, BM):
            i = i0 + tl.arange(0, BM)
            row, c, _, lo, hi = _windows(centre, order, i, n_q, limit, n_k, c_n, reach)
            seen = (j[:, None] >= lo[None, :]) & (j[:, None] <= hi[None, :])
            do1, do2 = _load(change, row, n_q, u_n, E, E1, E2)
            grad_v1 = _marked(grad_v1, seen, do1)
            if E2 > 0:
                grad_v2 = _marked(grad_v2, seen, do2)
    _store(key_grad + (b * gk_b + h * gk_h) * UNIT, j, n_k, gk_n * UNIT, grad_k1 * scale, grad_k2 * scale, D, D1, D2)
    _store(value_grad + (b * gv_b + h * gv_h) * UNIT, j, n_k, gv_n * UNIT, grad_v1, grad_v2, E, E1, E2)
