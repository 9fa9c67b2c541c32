"""Rows divided by their norm: one kernel forward and one backward, where PyTorch operations launch about ten."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.derivatives import REFERENCE, once_only
from regard.kernels.triton.additive.plan import Block, launch

_NUMBERS = 4096  # number of entries of x that one program computes


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
def _forward(x, out, xb, xh, xn, ob, oh, on, heads, rows, size, BLOCK: tl.constexpr, D: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    place, inside = _rows(x, b, h, i, xb, xh, xn, rows, size, D)
    unit, _ = _unit(tl.load(place, mask=inside, other=0.0).to(tl.float32))
    place, inside = _rows(out, b, h, i, ob, oh, on, rows, size, D)
    tl.store(place, unit.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x, grad, out, xb, xh, xn, gb, gh, gn, ob, oh, on, heads, rows, size, BLOCK: tl.constexpr, D: tl.constexpr
):
    """Compute the gradient of x, (g − u ⟨u, g⟩) / |x| with u = x / |x| and the output's gradient g."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    place, inside = _rows(x, b, h, i, xb, xh, xn, rows, size, D)
    unit, inverse = _unit(tl.load(place, mask=inside, other=0.0).to(tl.float32))
    place, inside = _rows(grad, b, h, i, gb, gh, gn, rows, size, D)
    change = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    change = (change - unit * tl.sum(unit * change, 1)[:, None]) * inverse
    place, inside = _rows(out, b, h, i, ob, oh, on, rows, size, D)
    tl.store(place, change.to(out.dtype.element_ty), mask=inside)


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _launched(_forward, x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        once_only("Cosine", REFERENCE)
        (x,) = ctx.saved_tensors
        change = upstream[0]
        return _launched(_backward, x, change if change.stride(-1) == 1 else change.contiguous())


def unit_rows(x: Tensor) -> Tensor:
    """Return x / |x| for each row of x (b, h, n, d), computed in float32.

    A row of zeros stays zero, and its gradient is 0. b · h is at most 65,535, and d is at most 4096.
    Reference implementation: `regard.core.scores.unit`.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _Unit.apply(x) if x.requires_grad and torch.is_grad_enabled() else _launched(_forward, x)


def _launched(kernel: Any, x: Tensor, *others: Tensor) -> Tensor:
    out = torch.empty_like(x)
    b, h, n, d = x.shape
    block, tiles = _tiles(d)
    tensors = (x, *others, out)
    launch(
        kernel, (-(-n // block.rows), b * h, 1), *tensors, *(step for t in tensors for step in t.stride()[:3]),
        h, n, d, **tiles, block=block,
        known=tuple((t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors),
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=256)
def _tiles(size: int) -> tuple[Block, dict[str, int]]:
    columns = max(16, triton.next_power_of_2(size))
    rows = max(1, _NUMBERS // columns)
    return Block(rows, columns, warps=4), {"BLOCK": rows, "D": columns}
