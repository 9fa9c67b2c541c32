"""relu and dropout in one kernel.

A call of the random generator (Philox) returns four numbers: this kernel uses all four, code from torch.compile only
one. No mask is stored, because the backward pass needs only the output: where it is 0, the input's gradient is 0.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.plan import Block, launch

_BLOCK = 1024
_LAUNCH = Block(1, _BLOCK, warps=4)


@triton.jit
def _relu_dropout(x, out, seed, numbers, dropout, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    a, b, c, d = tl.rand4x(tl.load(seed), block * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
    drawn = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (BLOCK,))
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    kept = (drawn >= dropout) & (value > 0.0)
    tl.store(out + place, tl.where(kept, value / (1.0 - dropout), 0.0).to(out.dtype.element_ty), mask=inside)


def relu_dropout(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """Return `torch.dropout(torch.relu(x), dropout, True)`, but with random numbers that depend only on `seed`."""
    if torch.compiler.is_compiling():
        return _operator(x, seed, float(dropout))
    return _ReluDropout.apply(x, seed, float(dropout))


def _dropped(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    x = x.contiguous()
    out, numbers = torch.empty_like(x), x.numel()
    known = numbers, x.dtype, seed.dtype, x.data_ptr() & 15, out.data_ptr() & 15, seed.data_ptr() & 15
    grid = (-(-numbers // _BLOCK), 1, 1)
    launch(_relu_dropout, grid, x, out, seed, numbers, dropout, BLOCK=_BLOCK, block=_LAUNCH, known=known)
    return out


def _where_positive(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (out,) = ctx.saved_tensors
    return torch.ops.aten.threshold_backward(grad, out, 0.0) * (1.0 / (1.0 - ctx.dropout)), None, None


class _ReluDropout(torch.autograd.Function):
    """relu and dropout for eager calls, which avoid the custom operator: calling it takes a tenth of a millisecond."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, dropout: float) -> Tensor:
        out = _dropped(x, seed, dropout)
        ctx.save_for_backward(out)
        ctx.dropout = dropout
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        return _where_positive(ctx, upstream[0])


_operator = torch.library.custom_op("regard::relu_dropout", _dropped, mutates_args=())


@_operator.register_fake
def _(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dropout = inputs[2]


_operator.register_autograd(_where_positive, setup_context=_keep_output)
