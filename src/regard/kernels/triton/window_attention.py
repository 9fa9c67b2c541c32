"""Scaled dot-product attention in a window, forward and backward, with one program for each block of rows.

The backward pass computes the scores of every pair twice, once for the gradient of the queries and once for those of
keys and values, so that no two programs add to the same sum and results are deterministic.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.derivatives import REFERENCE, once_only
from regard.kernels.triton.additive.pairs import power_of_two
from regard.kernels.triton.additive.plan import Block, launch, trait

LOG2E = tl.constexpr(1.4426950408889634)
REACH = 2**31 - 1  # largest offset within a batch row: the kernels address its heads with 32 bits


@triton.jit
def _tile(x, row, n, x_n, SIZE: tl.constexpr):
    """Return rows of a matrix (n, SIZE); rows outside the matrix are 0."""
    e = tl.arange(0, SIZE)
    return tl.load(x + row.to(tl.int64)[:, None] * x_n + e[None, :], mask=(row < n)[:, None], other=0.0)


@triton.jit
def _weights(q, k, i, j, n_q, n_k, low, high, scale, row_lse, NATIVE: tl.constexpr):
    """Return the softmax weights of a tile, exp(score - lse), which are 0 outside the window."""
    s = tl.dot(q, k.T) * (scale * LOG2E)
    distance = j[None, :] - i[:, None]
    allowed = (distance >= low) & (distance <= high) & (j < n_k)[None, :] & (i < n_q)[:, None]
    return tl.where(allowed, power_of_two(s - row_lse[:, None], NATIVE), 0.0)


@triton.jit
def window_forward(
    query, key, value, output, lse, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads, group, n_q, n_k, low, high, scale,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    i0 = tl.program_id(0) * BM
    i = i0 + tl.arange(0, BM)
    q = _tile(query + b * q_b + h * q_h, i, n_q, q_n, D)
    key += b * k_b + (h // group) * k_h
    value += b * v_b + (h // group) * v_h
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, E), tl.float32)
    start = tl.maximum(i0 + low, 0) // BN * BN
    stop = tl.minimum(n_k, i0 + BM + high)
    for j0 in tl.range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        s = tl.dot(q, _tile(key, j, n_k, k_n, D).T) * (scale * LOG2E)
        distance = j[None, :] - i[:, None]
        allowed = (distance >= low) & (distance <= high) & (j < n_k)[None, :]
        s = tl.where(allowed, s, float("-inf"))
        new_most = tl.maximum(most, tl.max(s, 1))
        pivot = tl.where(new_most == float("-inf"), 0.0, new_most)
        p = power_of_two(s - pivot[:, None], NATIVE)
        fade = tl.exp2(most - pivot)
        total = total * fade + tl.sum(p, 1)
        v = _tile(value, j, n_k, v_n, E)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        most = new_most
    empty = total == 0.0
    acc /= tl.where(empty, 1.0, total)[:, None]
    e = tl.arange(0, E)
    at = output + b * o_b + h * o_h + i.to(tl.int64)[:, None] * o_n + e[None, :]
    tl.store(at, acc.to(output.dtype.element_ty), mask=(i < n_q)[:, None])
    # The log-sum-exp is in base 2. It is inf for a row without keys, which makes its weights in the backward pass 0.
    row = tl.where(empty, float("inf"), most + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + z.to(tl.int64) * n_q + i, row, mask=i < n_q)


@triton.jit
def window_rows(
    query, key, value, output, change, lse, delta, grad, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    c_b, c_h, c_n, g_b, g_h, g_n, heads, group, n_q, n_k, low, high, scale,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and Σ dO · O of each row, which `window_keys` reads."""
    z = tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    i0 = tl.program_id(0) * BM
    i = i0 + tl.arange(0, BM)
    q = _tile(query + b * q_b + h * q_h, i, n_q, q_n, D)
    do = _tile(change + b * c_b + h * c_h, i, n_q, c_n, E)
    o = _tile(output + b * o_b + h * o_h, i, n_q, o_n, E)
    row_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    row = z.to(tl.int64) * n_q + i
    tl.store(delta + row, row_delta, mask=i < n_q)
    row_lse = tl.load(lse + row, mask=i < n_q, other=float("inf"))
    key += b * k_b + (h // group) * k_h
    value += b * v_b + (h // group) * v_h
    acc = tl.zeros((BM, D), tl.float32)
    start = tl.maximum(i0 + low, 0) // BN * BN
    stop = tl.minimum(n_k, i0 + BM + high)
    for j0 in tl.range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        k = _tile(key, j, n_k, k_n, D)
        p = _weights(q, k, i, j, n_q, n_k, low, high, scale, row_lse, NATIVE)
        dp = tl.dot(do, _tile(value, j, n_k, v_n, E).T)
        ds = p * (dp - row_delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc)
    d = tl.arange(0, D)
    at = grad + b * g_b + h * g_h + i.to(tl.int64)[:, None] * g_n + d[None, :]
    tl.store(at, (acc * scale).to(grad.dtype.element_ty), mask=(i < n_q)[:, None])


@triton.jit
def window_keys(
    query, key, value, change, lse, delta, key_grad, value_grad, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    c_b, c_h, c_n, gk_b, gk_h, gk_n, gv_b, gv_h, gv_n, heads, group, n_q, n_k, low, high, scale,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values, summed over all query heads that share them."""
    y = tl.program_id(1)
    groups = heads // group
    b, g = (y // groups).to(tl.int64), y % groups
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    k = _tile(key + b * k_b + g * k_h, j, n_k, k_n, D)
    v = _tile(value + b * v_b + g * v_h, j, n_k, v_n, E)
    grad_k = tl.zeros((BN, D), tl.float32)
    grad_v = tl.zeros((BN, E), tl.float32)
    start = tl.maximum(j0 - high, 0) // BM * BM
    stop = tl.minimum(n_q, j0 + BN - low)
    for r in range(group):
        h = g * group + r
        rows = (b * heads + h) * n_q
        own, change_at = query + b * q_b + h * q_h, change + b * c_b + h * c_h
        for i0 in tl.range(start, stop, BM):
            i = i0 + tl.arange(0, BM)
            q = _tile(own, i, n_q, q_n, D)
            row_lse = tl.load(lse + rows + i, mask=i < n_q, other=float("inf"))
            # The scores are computed transposed, (keys, queries), as the matrix products for the gradients of keys and
            # values need them.
            s = tl.dot(k, q.T) * (scale * LOG2E)
            distance = j[:, None] - i[None, :]
            allowed = (distance >= low) & (distance <= high) & (j < n_k)[:, None] & (i < n_q)[None, :]
            p = tl.where(allowed, power_of_two(s - row_lse[None, :], NATIVE), 0.0)
            do = _tile(change_at, i, n_q, c_n, E)
            grad_v = tl.dot(p.to(do.dtype), do, grad_v)
            dp = tl.dot(v, do.T)
            ds = p * (dp - tl.load(delta + rows + i, mask=i < n_q, other=0.0)[None, :])
            grad_k = tl.dot(ds.to(q.dtype), q, grad_k)
    d, e = tl.arange(0, D), tl.arange(0, E)
    at = key_grad + b * gk_b + g * gk_h + j.to(tl.int64)[:, None] * gk_n + d[None, :]
    tl.store(at, (grad_k * scale).to(key_grad.dtype.element_ty), mask=(j < n_k)[:, None])
    at = value_grad + b * gv_b + g * gv_h + j.to(tl.int64)[:, None] * gv_n + e[None, :]
    tl.store(at, grad_v.to(value_grad.dtype.element_ty), mask=(j < n_k)[:, None])


class Tuning(NamedTuple):
    """The tile sizes of the forward kernel and of the two backward kernels."""

    forward: Block
    rows: Block
    keys: Block


# SMALL is for queries, keys and values of at most 64 columns, LARGE for all others.
SMALL = Tuning(Block(128, 64, warps=4), Block(128, 64, warps=8), Block(64, 128, warps=8))
LARGE = Tuning(Block(64, 64, warps=4), Block(64, 64, warps=4, stages=2), Block(64, 64, warps=4, stages=2))


def _place(*tensors: Tensor) -> list[int]:
    return [step for t in tensors for step in t.stride()[:3]]


def _traits(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple((t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors)


def _attended(query: Tensor, key: Tensor, value: Tensor, low: int, high: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output (b, h, q, e) and the log-sum-exps (b, h, q)."""
    (b, h, q, d), (_, g, k, e) = query.shape, value.shape
    output = torch.empty(b, h, q, e, device=query.device, dtype=query.dtype)
    lse = torch.empty(b, h, q, device=query.device, dtype=torch.float32)
    block = (SMALL if max(d, e) <= 64 else LARGE).forward
    launch(
        window_forward, (-(-q // block.rows), b * h, 1),
        query, key, value, output, lse, *_place(query, key, value, output), h, h // g, q, k, low, high, scale,
        D=d, E=e, BM=block.rows, BN=block.columns, NATIVE=query.is_cuda, block=block,
        known=(_traits(query, key, value), trait(low), trait(high)),
    )  # fmt: skip
    return output, lse


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, low: int, high: int, scale: float) -> Tensor:
        output, lse = _attended(query, key, value, low, high, scale)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.settings = (low, high, scale)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        once_only("backend 'flex'", REFERENCE)
        (change,) = upstream
        query, key, value, output, lse = ctx.saved_tensors
        (b, h, q, d), (_, g, k, e) = query.shape, value.shape
        if change.stride(-1) != 1 or h * change.stride(1) > REACH:
            change = change.contiguous()
        grads = [torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (query, key, value)]
        delta, tuning = torch.empty_like(lse), SMALL if max(d, e) <= 64 else LARGE
        numbers = (h, h // g, q, k, *ctx.settings)
        known = _traits(query, key, value, change), *map(trait, ctx.settings[:2])
        block = tuning.rows
        launch(
            window_rows, (-(-q // block.rows), b * h, 1), query, key, value, output, change, lse, delta, grads[0],
            *_place(query, key, value, output, change, grads[0]), *numbers,
            D=d, E=e, BM=block.rows, BN=block.columns, NATIVE=query.is_cuda, block=block, known=known,
        )  # fmt: skip
        block = tuning.keys
        launch(
            window_keys, (-(-k // block.columns), b * g, 1), query, key, value, change, lse, delta, grads[1], grads[2],
            *_place(query, key, value, change, grads[1], grads[2]), *numbers,
            D=d, E=e, BM=block.rows, BN=block.columns, NATIVE=query.is_cuda, block=block, known=known,
        )  # fmt: skip
        return *grads, None, None, None


def window_attention(query: Tensor, key: Tensor, value: Tensor, low: int, high: int, scale: float) -> Tensor:
    """Return attention in a window: the softmax of scale · ⟨query, key⟩ over low <= j - i <= high, times the values.

    query (b, h, q, d), key (b, g, k, d), value (b, g, k, e); d and e are powers of two from 16 to 128, and the heads of
    a batch row span at most `REACH` numbers. Reference implementation: `regard.core.backends.reference` with
    `regard.window`.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    scale = float(scale)  # a float, because Triton would compile other kernels for an integer
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Window.apply(query, key, value, low, high, scale)
    return _attended(query, key, value, low, high, scale)[0]
