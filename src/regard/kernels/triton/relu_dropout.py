"""relu and dropout in one kernel, with four random numbers per Philox call, of which torch's compiler uses one.

The output shows which entries were dropped, so no mask is stored.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


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


@torch.library.custom_op("regard::relu_dropout", mutates_args=())
def relu_dropout(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """Return `torch.dropout(torch.relu(x), dropout, True)`, with its own random numbers."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _relu_dropout[(triton.cdiv(x.numel(), _BLOCK),)](x, out, seed, x.numel(), dropout, BLOCK=_BLOCK, num_warps=4)
    return out


@relu_dropout.register_fake
def _(x: Tensor, seed: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_output(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dropout = inputs[2]


def _where_positive(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (out,) = ctx.saved_tensors
    return torch.where(out > 0, grad * (1.0 / (1.0 - ctx.dropout)), 0.0), None, None


relu_dropout.register_autograd(_where_positive, setup_context=_keep_output)
