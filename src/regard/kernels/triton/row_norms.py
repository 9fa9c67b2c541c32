"""Rows of two tensors divided by their norm, in one kernel forward and one backward; torch operations launch twenty."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.derivatives import REFERENCE, once_only
from regard.kernels.memory_order import dense_strides
from regard.kernels.triton.additive.plan import Block, Prepared

_NUMBERS = 4096  # number of entries, with padding, of the rows that one program computes


@triton.jit
def _unit(x):
    """Return x / |x| and 1 / |x| of each row.

    The row is first divided by its largest entry, so that its squares neither overflow nor underflow.
    """
    largest = tl.max(tl.abs(x), 1)[:, None]
    inverse = tl.where(largest > 0.0, 1.0 / largest, 0.0)
    x = tl.where(largest > 0.0, x / largest, x)
    square = tl.sum(x * x, 1)[:, None]
    root = tl.where(square > 0.0, 1.0 / tl.sqrt(square), 0.0)
    return x * root, inverse * root


@triton.jit
def _rows(x, b, h, i, x_b, x_h, x_n, rows, size, D: tl.constexpr):
    """Return the pointers of a block of rows, and the mask of those inside the tensor."""
    c = tl.arange(0, D)
    place = x + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + i.to(tl.int64)[:, None] * x_n + c[None, :]
    return place, (i < rows)[:, None] & (c < size)[None, :]


@triton.jit
def _unit_block(x, out, t, z, xb, xh, xn, ob, oh, on, heads, rows, size, BLOCK: tl.constexpr, D: tl.constexpr):
    i = t * BLOCK + tl.arange(0, BLOCK)
    b, h = z // heads, z % heads
    place, inside = _rows(x, b, h, i, xb, xh, xn, rows, size, D)
    unit, _ = _unit(tl.load(place, mask=inside, other=0.0).to(tl.float32))
    place, inside = _rows(out, b, h, i, ob, oh, on, rows, size, D)
    tl.store(place, unit.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_block(
    x, grad, out, t, z, xb, xh, xn, gb, gh, gn, ob, oh, on, heads, rows, size, BLOCK: tl.constexpr, D: tl.constexpr
):
    """Compute the gradient of x, (g − u ⟨u, g⟩) / |x| with u = x / |x| and the output's gradient g."""
    i = t * BLOCK + tl.arange(0, BLOCK)
    b, h = z // heads, z % heads
    place, inside = _rows(x, b, h, i, xb, xh, xn, rows, size, D)
    unit, inverse = _unit(tl.load(place, mask=inside, other=0.0).to(tl.float32))
    place, inside = _rows(grad, b, h, i, gb, gh, gn, rows, size, D)
    change = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    change = (change - unit * tl.sum(unit * change, 1)[:, None]) * inverse
    place, inside = _rows(out, b, h, i, ob, oh, on, rows, size, D)
    tl.store(place, change.to(out.dtype.element_ty), mask=inside)


# Both kernels compute the rows of two tensors x and y, such as queries and keys: the first `tiles` programs of a slice
# (a batch row and a head) compute rows of x, the others rows of y; x and y may have different numbers of slices.
@triton.jit
def _forward(
    x, y, x_out, y_out, xb, xh, xn, yb, yh, yn, uxb, uxh, uxn, uyb, uyh, uyn,
    tiles, x_heads, y_heads, x_rows, y_rows, x_slices, y_slices, size, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    t, z = tl.program_id(0), tl.program_id(1)
    if t < tiles:
        if z < x_slices:
            _unit_block(x, x_out, t, z, xb, xh, xn, uxb, uxh, uxn, x_heads, x_rows, size, BLOCK, D)
    else:
        if z < y_slices:
            _unit_block(y, y_out, t - tiles, z, yb, yh, yn, uyb, uyh, uyn, y_heads, y_rows, size, BLOCK, D)


@triton.jit
def _backward(
    x, y, x_grad, y_grad, x_out, y_out, xb, xh, xn, yb, yh, yn, gxb, gxh, gxn, gyb, gyh, gyn,
    oxb, oxh, oxn, oyb, oyh, oyn,
    tiles, x_heads, y_heads, x_rows, y_rows, x_slices, y_slices, size, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    t, z = tl.program_id(0), tl.program_id(1)
    if t < tiles:
        if z < x_slices:
            _gradient_block(
                x, x_grad, x_out, t, z, xb, xh, xn, gxb, gxh, gxn, oxb, oxh, oxn, x_heads, x_rows, size, BLOCK, D
            )
    else:
        if z < y_slices:
            _gradient_block(
                y, y_grad, y_out, t - tiles, z, yb, yh, yn, gyb, gyh, gyn, oyb, oyh, oyn, y_heads, y_rows, size,
                BLOCK, D,
            )  # fmt: skip


class _Units(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return _launched(_forward, x, y)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        once_only("Cosine", REFERENCE)
        x, y = ctx.saved_tensors
        return _launched(_backward, x, y, *(g if g.stride(-1) == 1 else g.contiguous() for g in upstream))


def unit_rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / |x| for each row of x (b, h, n, d), and the same of y (b, g, m, d), computed in float32.

    A row of zeros stays zero, and its gradient is 0. b · h and b · g are at most 65,535, and d is at most 4096; both
    tensors have one dtype. Reference implementation: `regard.core.scores.unit`.
    """
    x, y = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, y))
    learning = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    return _Units.apply(x, y) if learning else _launched(_forward, x, y)


def _launched(kernel: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    x, y = tensors[:2]
    outputs = _empty(x), _empty(y)
    tensors = (*tensors, *outputs)
    aligned = tuple([tensor.data_ptr() & 15 for tensor in tensors])
    run = _prepared(kernel, x.shape, y.shape, x.dtype, tuple([tensor.stride() for tensor in tensors]))
    run(*tensors, known=aligned)
    return outputs


def _empty(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, _strides(x.shape, x.stride()), dtype=x.dtype, device=x.device)


_strides = functools.lru_cache(maxsize=1024)(dense_strides)


@functools.lru_cache(maxsize=1024)
def _prepared(
    kernel: Any, x: torch.Size, y: torch.Size, dtype: torch.dtype, strides: tuple[tuple[int, ...], ...]
) -> Prepared:
    """Return the launch of a kernel for tensors of these shapes, strides and dtype."""
    columns = max(16, triton.next_power_of_2(x[-1]))
    rows = max(1, _NUMBERS // columns)
    tiles, slices = [-(-shape[2] // rows) for shape in (x, y)], [shape[0] * shape[1] for shape in (x, y)]
    numbers = tiles[0], x[1], y[1], x[2], y[2], *slices, x[-1]
    return Prepared(
        kernel, (sum(tiles), max(slices), 1), (*(step for stride in strides for step in stride[:3]), *numbers),
        {"BLOCK": rows, "D": columns}, Block(rows, columns, warps=4),
    )  # fmt: skip
