"""`F.scaled_dot_product_attention` with the incoming gradient copied to the layout of the output.

On CUDA torch caches cuDNN's backward graphs under the layout of query, key and value; the layout of the incoming
gradient is built into the graph but is not part of the cache key (torch 2.11). A second backward pass over inputs laid
out alike, with a gradient laid out otherwise, such as that of a mean over the queries, or of a compiled function beside
a plain one, is read as if it were laid out like the first: the gradients are wrong, silently. The output's layout
follows the query's, so a gradient laid out like the output always fits. Under vmap the layout cannot be controlled, so
the other kernels are used.

They are also used for gradients of head sizes other than 64 and 128: torch 2.11's cuDNN gave NaN gradients in
bfloat16 for 64 keys of size 96 where weights are nearly 0 or 1 (docs/experiments.md).

Small calls run the flash kernel directly: there the host takes longer than the device, cuDNN's set-up on the host takes
longer than that of the flash kernel, and its gradients need a hook in Python.
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
_CUDNN_SIZES = (64, 128)  # head sizes whose gradients cuDNN computes correctly
_SMALL = 2**29  # pairs times head size: up to here the host takes longer than the kernels
# torch's own name is faster to call than the operator's.
_FLASH: Any = getattr(torch, "_scaled_dot_product_flash_attention", torch.ops.aten._scaled_dot_product_flash_attention)
_KERNELS = {1: "flash", 2: "efficient", 3: "cudnn"}  # values of torch.nn.attention.SDPBackend


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute torch's fused attention by the kernel that torch picks."""
    scale = options.get("scale")
    if scale is not None and scale <= 0:  # some kernels mask with −inf before scaling, which then gives +inf or NaN
        query, options["scale"] = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    if query.is_cuda and options.get("attn_mask") is None and scale is not None:
        causal, dropout = options.get("is_causal", False), options.get("dropout_p", 0.0)
        if small(query, key, value, causal) and flash_takes(query, key, value):
            return flash(query, key, value, dropout, causal, options["scale"])
    if query.is_cuda and _without_cudnn(query, key, value):
        with sdpa_kernel(_others()):
            return F.scaled_dot_product_attention(query, key, value, **options)
    output = F.scaled_dot_product_attention(query, key, value, **options)
    # The output's dtype decides, because autocast may have narrowed float32 inputs.
    by_cudnn = output.is_cuda and output.dtype in _BY_CUDNN
    return returning_alike(output) if by_cudnn and output.requires_grad else output


def small(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Return whether this is a small call on CUDA that the flash kernel computes."""
    if query.dtype not in _BY_CUDNN or query.ndim != 4 or not query.is_cuda:
        return False
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    if key.shape[:2] != query.shape[:2] or size % 8 or size > 256 or value.shape != key.shape or size != key.shape[3]:
        return False
    if not 0 < batch * heads * queries * keys * size <= _SMALL or (causal and queries != keys):
        return False
    # The kernel loads eight numbers at a time.
    if any(t.stride(3) != 1 or any(step % 8 for step in t.stride()[:3]) for t in (query, key, value)):
        return False
    if torch.compiler.is_compiling() or transformed():
        return False
    return has_flash(query.device)


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Return whether torch has its flash kernel for this GPU."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def flash_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the flash kernel is enabled, and the tensors of a `small` call are aligned in memory."""
    aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15 == 0
    return aligned and torch.backends.cuda.flash_sdp_enabled()


def flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float) -> Tensor:
    """Compute a call that is `small` by torch's flash kernel."""
    return _FLASH(query, key, value, dropout, causal, False, scale=scale)[0]


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> list[Tensor] | None:
    """Return output and log-sum-exp (b, h, q) by the kernel that torch picks on CUDA; None if it has no log-sum-exp.

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
    """Return the name of the kernel that torch would pick for these tensors, without computing any values."""
    if query.device.type not in ("cpu", "cuda"):
        return "math"
    grouped = query.shape[-3] != key.shape[-3]
    if mask is None and small(query, key, value, causal) and flash_takes(query, key, value):
        return "flash"
    others = query.is_cuda and _without_cudnn(query, key, value)
    with sdpa_kernel(_others()) if others else nullcontext():
        picked = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=grouped)
    return _KERNELS.get(picked, "math")


def _without_cudnn(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether cuDNN must be excluded: for gradients whose layout cannot be changed, or of other head sizes."""
    if transformed() and (mapped() or torch.compiler.is_compiling()):
        return True
    learning = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    sized = query.shape[-1] in _CUDNN_SIZES and value.shape[-1] in _CUDNN_SIZES
    return learning and not sized and (query.dtype in _BY_CUDNN or torch.is_autocast_enabled("cuda"))


def _others() -> list[SDPBackend]:
    """Return the enabled kernels other than cuDNN's."""
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    if not mapped():  # the backward pass of this kernel raises under vmap
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
    """Return the same tensor; the gradient that arrives at it gets the tensor's strides."""
    if torch.compiler.is_compiling():
        return _ReturningAlike.apply(output)
    output.register_hook(functools.partial(_alike, output.stride()))
    return output


def _alike(strides: tuple[int, ...], grad: Tensor) -> Tensor:
    if grad.stride() == strides:
        return grad
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


class _ReturningAlike(torch.autograd.Function):
    """The version for the compiler, which cannot trace a hook: the gradient is always copied."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return torch.empty_like(output).copy_(grads[0])
