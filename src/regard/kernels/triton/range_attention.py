"""Scaled dot-product attention with masks that are ranges of keys: bands, lengths, segments; with ALiBi.

A program visits the tiles between the first and the last key that one of its rows may attend. Tiles in which every pair
may attend come last, in a separate loop without tests. Masked keys beyond the range are never loaded, so they cannot
leak. The backward pass forms every pair twice, once for the rows' gradients and once for the keys', so that no sum is
shared between programs and results are deterministic.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.derivatives import REFERENCE, once_only
from regard.kernels.triton.additive.pairs import LOG2E, power_of_two
from regard.kernels.triton.additive.plan import Block, launch, trait
from regard.kernels.triton.segment_bounds import SPAN

REACH = 2**31 - 1  # the kernels address the heads and rows of a batch row with 32-bit offsets


class Rules(NamedTuple):
    """Conditions on a pair (query i, key j), and the bias of its score; None disables a part."""

    low: Any = None  # low <= j - i
    high: Any = None  # j - i <= high
    lengths: Any = None  # (b,): j < lengths[b]
    lengths_b: Any = None  # strides
    query_ids: Any = None  # (b, q)
    query_b: Any = None
    query_n: Any = None
    key_ids: Any = None  # (b, k): equal ids
    key_b: Any = None
    key_n: Any = None
    row_bounds: Any = None  # (b, q / SPAN, 4): range of keys of a span of queries, from `segment_bounds`
    key_bounds: Any = None  # (b, k / SPAN, 4): range of queries of a span of keys
    slopes: Any = None  # (h,): -slope * |i + offset - j|
    slopes_h: Any = None
    offset: Any = None


@triton.jit
def _by_segments(bounds, b, at, n, start, whole_start, whole_stop, stop, COUNT: tl.constexpr):
    """Return the range, narrowed to the bounds of COUNT spans from a position on."""
    spans = (n + SPAN - 1) // SPAN
    index = tl.minimum(at // SPAN + tl.arange(0, COUNT), spans - 1)
    place = bounds + (b * spans + index) * 4
    start = tl.maximum(start, tl.min(tl.load(place), 0))
    whole_start = tl.maximum(whole_start, tl.max(tl.load(place + 1), 0))
    whole_stop = tl.minimum(whole_stop, tl.min(tl.load(place + 2), 0))
    stop = tl.minimum(stop, tl.max(tl.load(place + 3), 0))
    return start, whole_start, whole_stop, stop


@triton.jit
def _in_tiles(start, whole_start, whole_stop, stop, STEP: tl.constexpr):
    """Return a range in tiles: start, number of tiles before the unmasked ones, their start and stop, number to test.

    Tile t of those to test begins at start + t · STEP, or after the unmasked tiles if it is not before them.
    """
    start = tl.maximum(start, 0) // STEP * STEP
    stop = tl.maximum(stop, start)
    whole_start = (tl.maximum(whole_start, 0) + STEP - 1) // STEP * STEP
    whole_stop = tl.maximum(whole_stop, 0) // STEP * STEP
    none = whole_start >= whole_stop
    whole_start = tl.where(none, stop, whole_start)
    whole_stop = tl.where(none, stop, whole_stop)
    before = (whole_start - start + STEP - 1) // STEP
    return start, before, whole_start, whole_stop, before + (stop - whole_stop + STEP - 1) // STEP


@triton.jit
def _limits(rules, b, n_q, n_k):
    """Return first and limit: no query attends a key outside first <= j < limit."""
    first = 0
    limit = n_k
    if rules.lengths is not None:
        limit = tl.minimum(tl.load(rules.lengths + b * rules.lengths_b), n_k).to(tl.int32)
    if rules.low is not None:
        first = rules.low
    if rules.high is not None:
        limit = tl.minimum(limit, n_q + rules.high)
    return first, limit


@triton.jit
def _keys_of(rules, b, i0, n_q, limit, BM: tl.constexpr, BN: tl.constexpr):
    """Return the range of keys of rows i0 .. i0 + BM, in tiles of BN."""
    last = tl.minimum(i0 + BM, n_q) - 1
    start = i0 * 0
    whole_start = i0 * 0
    stop = i0 * 0 + limit
    whole_stop = stop
    if rules.low is not None:
        start = tl.maximum(start, i0 + rules.low)
        whole_start = tl.maximum(whole_start, last + rules.low)
    if rules.high is not None:
        stop = tl.minimum(stop, last + rules.high + 1)
        whole_stop = tl.minimum(whole_stop, i0 + rules.high + 1)
    if rules.row_bounds is not None:
        start, whole_start, whole_stop, stop = _by_segments(
            rules.row_bounds, b, i0, n_q, start, whole_start, whole_stop, stop, BM // SPAN
        )
    return _in_tiles(start, whole_start, whole_stop, stop, BN)


@triton.jit
def _queries_of(rules, b, j0, n_q, n_k, limit, BM: tl.constexpr, BN: tl.constexpr):
    """Return the range of queries of keys j0 .. j0 + BN, in tiles of BM."""
    start = j0 * 0
    whole_start = j0 * 0
    stop = tl.where(j0 < limit, n_q, 0)
    whole_stop = tl.where(j0 + BN <= limit, n_q, 0)
    if rules.high is not None:
        start = tl.maximum(start, j0 - rules.high)
        whole_start = tl.maximum(whole_start, j0 + BN - 1 - rules.high)
    if rules.low is not None:
        stop = tl.minimum(stop, tl.minimum(j0 + BN, limit) - rules.low)
        whole_stop = tl.minimum(whole_stop, j0 - rules.low + 1)
    if rules.key_bounds is not None:
        start, whole_start, whole_stop, stop = _by_segments(
            rules.key_bounds, b, j0, n_k, start, whole_start, whole_stop, stop, BN // SPAN
        )
    return _in_tiles(start, whole_start, whole_stop, stop, BM)


@triton.jit
def _rows(x, row, first, limit, step, SIZE: tl.constexpr, TESTED: tl.constexpr):
    """Load rows of a matrix; if TESTED, those outside first <= row < limit are 0 and are not loaded."""
    at = x + (row * step)[:, None] + tl.arange(0, SIZE)[None, :]
    if TESTED:
        return tl.load(at, mask=((row >= first) & (row < limit))[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _ids(ids, b, row, n, step_b, step_n):
    return tl.load(ids + b * step_b + row.to(tl.int64) * step_n, mask=row < n, other=0)


@triton.jit
def _scores(s, i, j, own_id, rules, b, h, n_q, n_k, first, limit, factor, TESTED: tl.constexpr, KEYS_OWN: tl.constexpr):
    """Return scores in base 2 from products, -inf where a pair must not attend.

    i and j broadcast to the tile in either order; `own_id` are the ids of the program's keys or queries.
    """
    s = s * factor
    if rules.slopes is not None:
        slope = tl.load(rules.slopes + h * rules.slopes_h).to(tl.float32) * LOG2E
        s -= slope * tl.abs(i + rules.offset - j).to(tl.float32)
    if TESTED:
        allowed = (j >= first) & (j < limit) & (i < n_q)
        if rules.low is not None:
            allowed = allowed & (j - i >= rules.low)
        if rules.high is not None:
            allowed = allowed & (j - i <= rules.high)
        if rules.query_ids is not None:
            if KEYS_OWN:
                allowed = allowed & (own_id == _ids(rules.query_ids, b, i, n_q, rules.query_b, rules.query_n))
            else:
                allowed = allowed & (own_id == _ids(rules.key_ids, b, j, n_k, rules.key_b, rules.key_n))
        s = tl.where(allowed, s, float("-inf"))
    return s


@triton.jit
def _forward_tile(
    q, key, value, i, j0, query_id, rules, b, h, n_q, n_k, first, limit, factor, k_n, v_n, most, total, acc,
    TESTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    j = j0 + tl.arange(0, BN)
    s = tl.dot(q, _rows(key, j, first, limit, k_n, D, TESTED).T)
    s = _scores(s, i[:, None], j[None, :], query_id, rules, b, h, n_q, n_k, first, limit, factor, TESTED, False)
    new_most = tl.maximum(most, tl.max(s, 1))
    pivot = new_most
    if TESTED:
        pivot = tl.where(new_most == float("-inf"), 0.0, new_most)
    p = power_of_two(s - pivot[:, None], NATIVE)
    fade = tl.exp2(most - pivot)
    total = total * fade + tl.sum(p, 1)
    v = _rows(value, j, first, limit, v_n, E, TESTED)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return new_most, total, acc


@triton.jit
def range_forward(
    query, key, value, output, lse, rules, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads, group, n_q, n_k, scale,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    # long rows of a causal mask start first, so that the launch does not end with a few long programs
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i = i0 + tl.arange(0, BM)
    q = _rows(query + b * q_b + h * q_h, i, 0, n_q, q_n, D, True)
    key += b * k_b + (h // group) * k_h
    value += b * v_b + (h // group) * v_h
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, E), tl.float32)
    factor = scale * LOG2E
    first, limit = _limits(rules, b, n_q, n_k)
    start, before, whole_start, whole_stop, tested = _keys_of(rules, b, i0, n_q, limit, BM, BN)
    query_id = i[:, None]
    if rules.query_ids is not None:
        query_id = _ids(rules.query_ids, b, i, n_q, rules.query_b, rules.query_n)[:, None]
    for t in tl.range(0, tested):
        j0 = tl.where(t < before, start + t * BN, whole_stop + (t - before) * BN)
        most, total, acc = _forward_tile(
            q, key, value, i, j0, query_id, rules, b, h, n_q, n_k, first, limit, factor, k_n, v_n, most, total, acc,
            True, D, E, BN, NATIVE,
        )  # fmt: skip
    for j0 in tl.range(whole_start, whole_stop, BN):
        most, total, acc = _forward_tile(
            q, key, value, i, j0, query_id, rules, b, h, n_q, n_k, first, limit, factor, k_n, v_n, most, total, acc,
            False, D, E, BN, NATIVE,
        )  # fmt: skip
    empty = total == 0.0
    acc /= tl.where(empty, 1.0, total)[:, None]
    at = output + b * o_b + h * o_h + (i * o_n)[:, None] + tl.arange(0, E)[None, :]
    tl.store(at, acc.to(output.dtype.element_ty), mask=(i < n_q)[:, None])
    # base 2, and inf for an empty row, whose weights are then 0
    row = tl.where(empty, float("inf"), most + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + z.to(tl.int64) * n_q + i, row, mask=i < n_q)


@triton.jit
def _row_tile(
    q, do, key, value, i, j0, query_id, row_lse, row_delta, rules, b, h, n_q, n_k, first, limit, factor, k_n, v_n, acc,
    TESTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    j = j0 + tl.arange(0, BN)
    k = _rows(key, j, first, limit, k_n, D, TESTED)
    s = _scores(
        tl.dot(q, k.T), i[:, None], j[None, :], query_id, rules, b, h, n_q, n_k, first, limit, factor, TESTED, False
    )
    p = power_of_two(s - row_lse[:, None], NATIVE)
    dp = tl.dot(do, _rows(value, j, first, limit, v_n, E, TESTED).T)
    ds = p * (dp - row_delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc)


@triton.jit
def range_rows(
    query, key, value, output, change, lse, delta, grad, rules, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    o_b, o_h, o_n, c_b, c_h, c_n, g_b, g_h, g_n, heads, group, n_q, n_k, scale,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of query rows, and Σ dO O of each for the keys' pass."""
    z = tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i = i0 + tl.arange(0, BM)
    q = _rows(query + b * q_b + h * q_h, i, 0, n_q, q_n, D, True)
    do = _rows(change + b * c_b + h * c_h, i, 0, n_q, c_n, E, True)
    o = _rows(output + b * o_b + h * o_h, i, 0, n_q, o_n, E, True)
    row_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    row = z.to(tl.int64) * n_q + i
    tl.store(delta + row, row_delta, mask=i < n_q)
    row_lse = tl.load(lse + row, mask=i < n_q, other=float("inf"))
    key += b * k_b + (h // group) * k_h
    value += b * v_b + (h // group) * v_h
    acc = tl.zeros((BM, D), tl.float32)
    factor = scale * LOG2E
    first, limit = _limits(rules, b, n_q, n_k)
    start, before, whole_start, whole_stop, tested = _keys_of(rules, b, i0, n_q, limit, BM, BN)
    query_id = i[:, None]
    if rules.query_ids is not None:
        query_id = _ids(rules.query_ids, b, i, n_q, rules.query_b, rules.query_n)[:, None]
    for t in tl.range(0, tested):
        j0 = tl.where(t < before, start + t * BN, whole_stop + (t - before) * BN)
        acc = _row_tile(
            q, do, key, value, i, j0, query_id, row_lse, row_delta, rules, b, h, n_q, n_k, first, limit, factor,
            k_n, v_n, acc, True, D, E, BN, NATIVE,
        )  # fmt: skip
    for j0 in tl.range(whole_start, whole_stop, BN):
        acc = _row_tile(
            q, do, key, value, i, j0, query_id, row_lse, row_delta, rules, b, h, n_q, n_k, first, limit, factor,
            k_n, v_n, acc, False, D, E, BN, NATIVE,
        )  # fmt: skip
    at = grad + b * g_b + h * g_h + (i * g_n)[:, None] + tl.arange(0, D)[None, :]
    tl.store(at, (acc * scale).to(grad.dtype.element_ty), mask=(i < n_q)[:, None])


@triton.jit
def _key_tile(
    k, v, query, change, lse, delta, i0, j, key_id, rules, b, h, n_q, n_k, first, limit, factor, q_n, c_n,
    grad_k, grad_v,
    TESTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return the transposed tile, (keys, queries), as both products need it."""
    i = i0 + tl.arange(0, BM)
    q = _rows(query, i, 0, n_q, q_n, D, TESTED)
    s = _scores(
        tl.dot(k, q.T), i[None, :], j[:, None], key_id, rules, b, h, n_q, n_k, first, limit, factor, TESTED, True
    )
    p = power_of_two(s - tl.load(lse + i, mask=i < n_q, other=float("inf"))[None, :], NATIVE)
    do = _rows(change, i, 0, n_q, c_n, E, TESTED)
    grad_v = tl.dot(p.to(do.dtype), do, grad_v)
    dp = tl.dot(v, do.T)
    ds = p * (dp - tl.load(delta + i, mask=i < n_q, other=0.0)[None, :])
    return tl.dot(ds.to(q.dtype), q, grad_k), grad_v


@triton.jit
def range_keys(
    query, key, value, change, lse, delta, key_grad, value_grad, rules, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    c_b, c_h, c_n, gk_b, gk_h, gk_n, gv_b, gv_h, gv_n, heads, group, n_q, n_k, scale,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values, over all query heads that share them."""
    y = tl.program_id(1)
    groups = heads // group
    b, g = (y // groups).to(tl.int64), y % groups
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    first, limit = _limits(rules, b, n_q, n_k)
    k = _rows(key + b * k_b + g * k_h, j, first, limit, k_n, D, True)
    v = _rows(value + b * v_b + g * v_h, j, first, limit, v_n, E, True)
    grad_k = tl.zeros((BN, D), tl.float32)
    grad_v = tl.zeros((BN, E), tl.float32)
    factor = scale * LOG2E
    start, before, whole_start, whole_stop, tested = _queries_of(rules, b, j0, n_q, n_k, limit, BM, BN)
    key_id = j[:, None]
    if rules.query_ids is not None:
        key_id = _ids(rules.key_ids, b, j, n_k, rules.key_b, rules.key_n)[:, None]
    for r in range(group):
        h = g * group + r
        rows = (b * heads + h) * n_q
        own, change_at = query + b * q_b + h * q_h, change + b * c_b + h * c_h
        for t in tl.range(0, tested):
            i0 = tl.where(t < before, start + t * BM, whole_stop + (t - before) * BM)
            grad_k, grad_v = _key_tile(
                k, v, own, change_at, lse + rows, delta + rows, i0, j, key_id, rules, b, h, n_q, n_k, first, limit,
                factor, q_n, c_n, grad_k, grad_v, True, D, E, BM, NATIVE,
            )  # fmt: skip
        for i0 in tl.range(whole_start, whole_stop, BM):
            grad_k, grad_v = _key_tile(
                k, v, own, change_at, lse + rows, delta + rows, i0, j, key_id, rules, b, h, n_q, n_k, first, limit,
                factor, q_n, c_n, grad_k, grad_v, False, D, E, BM, NATIVE,
            )  # fmt: skip
    at = key_grad + b * gk_b + g * gk_h + (j * gk_n)[:, None] + tl.arange(0, D)[None, :]
    tl.store(at, (grad_k * scale).to(key_grad.dtype.element_ty), mask=(j < n_k)[:, None])
    at = value_grad + b * gv_b + g * gv_h + (j * gv_n)[:, None] + tl.arange(0, E)[None, :]
    tl.store(at, grad_v.to(value_grad.dtype.element_ty), mask=(j < n_k)[:, None])


class Tuning(NamedTuple):
    """The tile sizes of the three kernels."""

    forward: Block
    rows: Block
    keys: Block


SMALL = Tuning(Block(128, 64, warps=4), Block(128, 64, warps=8), Block(64, 128, warps=8))  # sizes up to 64
LARGE = Tuning(Block(128, 64, warps=8), Block(64, 64, warps=4, stages=2), Block(64, 64, warps=4, stages=2))


def _steps(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride()[:3]


def _like(tensor: Tensor) -> Tensor:
    """Allocate a tensor with the memory order of the given one, which saves the next layer a copy."""
    found = torch.empty_like(tensor)
    return found if found.stride(-1) == 1 else torch.empty(tensor.shape, device=tensor.device, dtype=tensor.dtype)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Return output, log-sum-exps, and the key of the compiled kernels for these tensors."""
    (b, h, q, d), (_, g, k, e) = query.shape, value.shape
    output = _like(query) if d == e else query.new_empty(b, h, q, e)
    lse = torch.empty(b, h, q, device=query.device, dtype=torch.float32)
    block = (SMALL if max(d, e) <= 64 else LARGE).forward
    # The strides of new tensors follow from these, and the allocator aligns them.
    aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
    strides = query.stride(), key.stride(), value.stride()
    known = query.shape, key.shape, value.shape, *strides, query.dtype, aligned, trait(rules)
    launch(
        range_forward, (-(-q // block.rows), b * h, 1), query, key, value, output, lse, rules,
        *strides[0][:3], *strides[1][:3], *strides[2][:3], *_steps(output), h, h // g, q, k, scale,
        D=d, E=e, BM=block.rows, BN=block.columns, NATIVE=query.is_cuda, block=block, known=known,
    )  # fmt: skip
    return output, lse, known


class _Ranges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rules: Rules, scale: float) -> Tensor:
        output, lse, known = _forward(query, key, value, rules, scale)
        # The tensors of the rules are saved too, so that a change in place before the backward pass raises.
        ctx.save_for_backward(query, key, value, output, lse, *(t for t in rules if isinstance(t, Tensor)))
        ctx.settings = rules, scale, known
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        once_only("backend 'flex'", REFERENCE)
        (change,) = upstream
        query, key, value, output, lse, *_ = ctx.saved_tensors
        rules, scale, known = ctx.settings
        (b, h, q, d), (_, g, k, e) = query.shape, value.shape
        if change.stride(-1) != 1 or h * change.stride(1) > REACH or q * change.stride(2) > REACH:
            change = change.contiguous()
        to_query, to_key, to_value = _like(query), _like(key), _like(value)
        delta, tuning = torch.empty_like(lse), SMALL if max(d, e) <= 64 else LARGE
        steps = *_steps(query), *_steps(key), *_steps(value)
        numbers = h, h // g, q, k, scale
        known = known, change.stride(), change.data_ptr() & 15
        block = tuning.rows
        launch(
            range_rows, (-(-q // block.rows), b * h, 1), query, key, value, output, change, lse, delta, to_query,
            rules, *steps, *_steps(output), *_steps(change), *_steps(to_query), *numbers,
            D=d, E=e, BM=block.rows, BN=block.columns, NATIVE=query.is_cuda, block=block, known=known,
        )  # fmt: skip
        block = tuning.keys
        launch(
            range_keys, (-(-k // block.columns), b * g, 1), query, key, value, change, lse, delta, to_key, to_value,
            rules, *steps, *_steps(change), *_steps(to_key), *_steps(to_value), *numbers,
            D=d, E=e, BM=block.rows, BN=block.columns, NATIVE=query.is_cuda, block=block, known=known,
        )  # fmt: skip
        return to_query, to_key, to_value, None, None


def range_attention(query: Tensor, key: Tensor, value: Tensor, rules: Rules, scale: float) -> Tensor:
    """Compute softmax of scale · ⟨query, key⟩ with ALiBi over the pairs that the rules allow, times the values.

    query (b, h, q, d), key (b, g, k, d), value (b, g, k, e); sizes are powers of two from 16 to 128, and all heads and
    rows of a batch row fit into `REACH` numbers. Reference implementation: `regard.core.backends.reference`.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    scale = float(scale)  # Triton would specialise the kernel on an integer
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Ranges.apply(query, key, value, rules, scale)
    return _forward(query, key, value, rules, scale)[0]
