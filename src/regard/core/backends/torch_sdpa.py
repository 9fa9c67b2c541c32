"""`F.scaled_dot_product_attention`, whose gradients come back in the layout of its output.

On CUDA torch keeps cuDNN's backward graphs by the layout of query, key and value; the layout of the gradient that
comes in is built into the graph and is no part of the key (seen in torch 2.11). A second backward pass over inputs laid
out alike, with a gradient laid out otherwise, such as that of a mean over the queries, or of a compiled function beside
a plain one, is read as if it were laid out like the first: the gradients are wrong, silently. The output's layout
follows the query's, so a gradient laid out like the output always fits. In vmap, where that cannot be seen to, the
other kernels serve.

They also serve where gradients of head sizes other than 64 and 128 are wanted: torch 2.11's cuDNN gave NaN gradients in
bfloat16 for 64 keys of size 96 where weights are nearly 0 or 1 (docs/experiments.md).
"""

import functools
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.core.transforms import mapped, transformed

_BY_CUDNN = (torch.bfloat16, torch.float16)
_CUDNN_SIZES = (64, 128)  # of heads, whose gradients are left to cuDNN
_KERNELS = {1: "flash", 2: "efficient", 3: "cudnn"}  # of torch.nn.attention.SDPBackend


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """torch's fused attention, by the kernel it picks."""
    scale = options.get("scale")
    if scale is not None and scale <= 0:  # masked pairs are −inf before some kernels scale, and +inf or NaN after
        query, options["scale"] = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    if query.is_cuda and _without_cudnn(query, key, value):
        with sdpa_kernel(_others()):
            return F.scaled_dot_product_attention(query, key, value, **options)
    output = F.scaled_dot_product_attention(query, key, value, **options)
    # Of the output, for autocast narrows float32 on the way.
    by_cudnn = output.is_cuda and output.dtype in _BY_CUDNN
    return returning_alike(output) if by_cudnn and output.requires_grad else output


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> list[Tensor] | None:
    """Output and log-sum-exp (b, h, q) by the kernel that torch picks on CUDA; None where that one gives only output.

    The log-sum-exp has no gradient of its own.
    """
    if scale <= 0 or query.shape[-1] % 8 or query.shape[-3] != key.shape[-3] or query.dtype not in _BY_CUDNN:
        return None
    with sdpa_kernel(_others()) if _without_cudnn(query, key, value) else nullcontext():
        choice = torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale)
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        output, lse, *_ = cudnn(query, key, value, None, True, 0.0, causal, False, scale=scale)
    elif choice == SDPBackend.FLASH_ATTENTION.value:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
    else:
        return None
    output = returning_alike(output) if output.requires_grad else output
    return [output, lse.detach().reshape(*query.shape[:2], -1)[..., : query.shape[-2]]]


def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> str:
    """The name of the kernel that torch would pick for such tensors; no number is computed."""
    if query.device.type not in ("cpu", "cuda"):
        return "math"
    grouped = query.shape[-3] != key.shape[-3]
    others = query.is_cuda and _without_cudnn(query, key, value)
    with sdpa_kernel(_others()) if others else nullcontext():
        picked = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=grouped)
    return _KERNELS.get(picked, "math")


def _without_cudnn(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Must cuDNN not compute this? Not where its gradient could not be laid out anew, nor gradients of other sizes."""
    if transformed() and (mapped() or torch.compiler.is_compiling()):
        return True
    learning = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    sized = query.shape[-1] in _CUDNN_SIZES and value.shape[-1] in _CUDNN_SIZES
    return learning and not sized and (query.dtype in _BY_CUDNN or torch.is_autocast_enabled("cuda"))


def _others() -> list[SDPBackend]:
    """The kernels beside cuDNN's, of those that are switched on."""
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    if not mapped():  # under vmap its backward pass ends in an error
        kinds.insert(1, SDPBackend.EFFICIENT_ATTENTION)
    if torch.compiler.is_compiling():
        return kinds
    on = torch.backends.cuda
    enabled = {
        SDPBackend.FLASH_ATTENTION: on.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: on.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: on.math_sdp_enabled(),
    }
    return [kind for kind in kinds if enabled[kind]] or [SDPBackend.MATH]


def returning_alike(output: Tensor) -> Tensor:
    """The same numbers; the gradient that comes back to them has their strides."""
    if torch.compiler.is_compiling():
        return _ReturningAlike.apply(output)
    output.register_hook(functools.partial(_alike, output.stride()))
    return output


def _alike(strides: tuple[int, ...], grad: Tensor) -> Tensor:
    if grad.stride() == strides:
        return grad
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


class _ReturningAlike(torch.autograd.Function):
    """A hook cannot be compiled; here the strides of the gradient are only known later, so it is copied in any case."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return torch.empty_like(output).copy_(grads[0])
