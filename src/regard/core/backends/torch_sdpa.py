"""`F.scaled_dot_product_attention` with the incoming gradient copied to the layout of the output.

On CUDA torch caches cuDNN's backward graphs under the layout of query, key and value; the layout of the incoming
gradient is built into the graph but is not part of the cache key (torch 2.11). A second backward pass over inputs laid
out alike, with a gradient laid out otherwise, such as that of a mean over the queries, or of a compiled function beside
a plain one, is read as if it were laid out like the first: the gradients are wrong, silently. The output's layout
follows the query's, so a gradient laid out like the output always fits. Under vmap the layout cannot be controlled, so
the other kernels are used.

They are also used for gradients of head sizes other than 64 and 128: torch 2.11's cuDNN gave NaN gradients in
bfloat16 for 64 keys of size 96 where weights are nearly 0 or 1 (docs/experiments.md).

Small calls exclude cuDNN too: there the host takes longer than the device, cuDNN's set-up on the host takes longer than
that of the flash kernel, and its gradients need a hook in Python.

torch's kernels have no grouped heads in float32, nor beside a mask without cuDNN: torch would form the whole matrix.
Keys and values are repeated there instead, as a view if there is one key head.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.core.backends.result import Direct
from regard.core.transforms import mapped, transformed

R = TypeVar("R")
_BY_CUDNN = (torch.bfloat16, torch.float16)
_CUDNN_SIZES = (64, 128)  # head sizes whose gradients cuDNN computes correctly
_SMALL = 2**29  # pairs times head size: up to here the host takes longer than the kernels
_FEW = 4  # number of queries up to which two matrix products are faster than torch's kernels in float32
_KERNELS = {1: "flash", 2: "efficient", 3: "cudnn"}  # values of torch.nn.attention.SDPBackend


def sizes(query: Tensor, value: Tensor, masked: bool) -> tuple[int, int, int]:
    """Return the sizes of queries, keys and values for which torch has a kernel and does not form the whole matrix.

    On the CPU they must be equal. On CUDA they are multiples of 16 bytes; the flash kernel, which takes no mask, pads
    equal sizes itself.
    """
    size, value_size = query.shape[-1], value.shape[-1]
    if not query.is_cuda or mapped():
        return (max(size, value_size),) * 3
    if query.dtype == torch.float64 or (size == value_size and query.dtype in _BY_CUDNN and not masked):
        return size, size, value_size
    step = 16 // query.element_size()
    size = -(-size // step) * step
    return size, size, -(-value_size // step) * step


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether a call without a mask needs no padding."""
    return sizes(query, value, False) == (query.shape[-1], key.shape[-1], value.shape[-1])


def padded(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of sizes that torch's kernels take, whose output has at least as many columns as the values.

    Zero columns change neither the scores nor the other columns of the output.
    """
    wanted = sizes(query, value, masked)
    query, key, value = (
        t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1]))
        for t, size in zip((query, key, value), wanted, strict=True)
    )
    return query, key, value


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute torch's fused attention by the fastest kernel that serves."""
    if scale is not None and scale <= 0:  # some kernels mask with −inf before scaling, which then gives +inf or NaN
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    if not query.is_cuda:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    plain = attn_mask is None and not is_causal and dropout_p == 0.0 and scale is not None
    if plain and scale is not None and by_products(query, key, value):
        return _products(query, key, value, scale)
    others = excludes_cudnn(query, key, value, attn_mask is not None)
    if enable_gqa and _has_no_groups(query, key, attn_mask is not None, is_causal, others):
        key, value, enable_gqa = _repeated(key, query.shape[-3]), _repeated(value, query.shape[-3]), False
    run = functools.partial(F.scaled_dot_product_attention, query, key, value, attn_mask, dropout_p, is_causal)
    run = functools.partial(run, scale=scale, enable_gqa=enable_gqa)
    return _by_others(run) if others else _fed_alike(run())


def prepared(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scale: float) -> Direct:
    """Return `attend` without a mask for eager calls with the signature of this one; it decides nothing again."""
    grouped, on_cuda = query.shape[1] != key.shape[1], query.is_cuda
    others = on_cuda and excludes_cudnn(query, key, value, False)
    learning = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    products = on_cuda and not causal and dropout == 0.0 and by_products(query, key, value)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": grouped}
    if scale <= 0 or products or (grouped and on_cuda and _has_no_groups(query, key, False, causal, others)):
        options |= {"dropout_p": dropout, "is_causal": causal}
        return lambda query, key, value, score, mask, bias: attend(query, key, value, **options)
    kernel: Any = F.scaled_dot_product_attention
    if grouped or scale != 1.0 / math.sqrt(query.shape[-1]):  # options take torch half a microsecond to read
        kernel = functools.partial(kernel, **options)

    def plain(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        return kernel(query, key, value, None, dropout, causal)

    def excluding(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        return _by_others(kernel, query, key, value, None, dropout, causal)

    def fed_alike(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        return _fed_alike(kernel(query, key, value, None, dropout, causal))

    return excluding if others else fed_alike if learning and on_cuda and query.dtype in _BY_CUDNN else plain


def by_products(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether this is a call of few queries in float32 on CUDA that two matrix products compute faster.

    torch's kernel has one block of threads for each head there, which goes through all keys. The products read keys and
    values once if batch and heads are one axis in memory; else they would copy them.
    """
    if query.dtype != torch.float32 or not query.is_cuda or query.ndim != 4 or query.shape[2] > _FEW:
        return False
    joined = all(t.shape[0] == 1 or t.stride(0) == t.stride(1) * t.shape[1] for t in (key, value))
    return joined and not torch.is_autocast_enabled("cuda")


def _products(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute softmax(scale · Q Kᵀ) V; queries of a group are rows of one product."""
    rows = (query * scale).reshape(key.shape[0], key.shape[1], -1, query.shape[3])
    output = torch.softmax(rows @ key.mT, -1) @ value
    return output.view(*query.shape[:3], value.shape[3])


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Return whether torch has its flash kernel for this GPU."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def small(query: Tensor, key: Tensor) -> bool:
    """Return whether the host takes longer for such a call in half precision on CUDA than the device."""
    return query.dtype in _BY_CUDNN and query.numel() * key.shape[-2] <= _SMALL


def _has_no_groups(query: Tensor, key: Tensor, masked: bool, causal: bool, others: bool) -> bool:
    """Return whether torch has no kernel on CUDA for fewer key heads than query heads."""
    uneven = causal and query.shape[-2] != key.shape[-2]
    return query.dtype not in _BY_CUDNN or ((masked or uneven) and others)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values with as many heads as the queries have."""
    tensor = tensor.unsqueeze(-3)
    return tensor.expand(*tensor.shape[:-3], heads // tensor.shape[-4], *tensor.shape[-2:]).flatten(-4, -3)


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> list[Tensor] | None:
    """Return output and log-sum-exp (b, h, q) by the kernel that torch picks on CUDA; None if it has no log-sum-exp.

    The log-sum-exp has no gradient of its own.
    """
    if scale <= 0 or query.shape[-1] % 8 or query.shape[-3] != key.shape[-3] or query.dtype not in _BY_CUDNN:
        return None
    picked = functools.partial(torch._fused_sdp_choice, scale=scale)
    others = excludes_cudnn(query, key, value, False)
    choice = (functools.partial(_by_others, picked) if others else picked)(query, key, value, None, 0.0, causal)
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        output, lse, *_ = cudnn(query, key, value, None, True, 0.0, causal, False, scale=scale)
    elif choice == SDPBackend.FLASH_ATTENTION.value:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
    else:
        return None
    output = _fed_alike(output)
    return [output, lse.detach().reshape(*query.shape[:2], -1)[..., : query.shape[-2]]]


def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> str:
    """Return the name of the kernel that torch would pick for these tensors, without computing any values."""
    if query.device.type not in ("cpu", "cuda"):
        return "math"
    if mask is None and not causal and dropout == 0.0 and by_products(query, key, value):
        return "products"
    grouped = query.shape[-3] != key.shape[-3]
    others = query.is_cuda and excludes_cudnn(query, key, value, mask is not None)
    if grouped and query.is_cuda and _has_no_groups(query, key, mask is not None, causal, others):
        key, value, grouped = _repeated(key, query.shape[-3]), _repeated(value, query.shape[-3]), False
    picked = functools.partial(torch._fused_sdp_choice, enable_gqa=grouped)
    choice = (functools.partial(_by_others, picked) if others else picked)(query, key, value, mask, dropout, causal)
    return _KERNELS.get(choice, "math")


def excludes_cudnn(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> bool:
    """Return whether cuDNN is excluded: for gradients whose layout cannot be changed or of other head sizes, and for
    small calls."""
    if transformed() and (mapped() or torch.compiler.is_compiling()):
        return True
    half = query.dtype in _BY_CUDNN or torch.is_autocast_enabled("cuda")
    if half and torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        sizes = query.shape[-1], value.shape[-1]
        if sizes[0] != sizes[1] or sizes[0] not in _CUDNN_SIZES:
            return True
    return not masked and not torch.compiler.is_compiling() and small(query, key)


def _by_others(kernel: Callable[..., R], *arguments: Any) -> R:
    """Return kernel(*arguments), computed without cuDNN.

    Setting the switch is twenty times faster than torch's context manager.
    """
    on = torch.backends.cuda
    if torch.compiler.is_compiling() or not on.math_sdp_enabled() or (transformed() and mapped()):
        with sdpa_kernel(_others()):
            return kernel(*arguments)
    if not on.cudnn_sdp_enabled():
        return kernel(*arguments)
    on.enable_cudnn_sdp(False)
    try:
        return kernel(*arguments)
    finally:
        on.enable_cudnn_sdp(True)


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


def _fed_alike(output: Tensor) -> Tensor:
    """Return the output; if cuDNN computed it, the gradient that arrives at it gets its strides."""
    # The output's dtype decides, because autocast may have narrowed float32 inputs.
    if not output.requires_grad or output.dtype not in _BY_CUDNN:
        return output
    if torch.compiler.is_compiling() or transformed() or output.grad_fn is None:
        return returning_alike(output)
    node = output.grad_fn.name()  # the names of the other kernels' nodes
    return output if "FlashAttention" in node or "EfficientAttention" in node else returning_alike(output)


def returning_alike(output: Tensor) -> Tensor:
    """Return the same tensor; the gradient that arrives at it gets the tensor's strides."""
    if torch.compiler.is_compiling():
        return _ReturningAlike.apply(output)
    if output.grad_fn is None or transformed() or output._backward_hooks is not None:
        output.register_hook(functools.partial(_alike, output.stride()))
        return output
    # The two steps of register_hook; the handle that it returns takes ten times as long to make.
    output._backward_hooks = {0: functools.partial(_alike, output.stride())}
    output.grad_fn._register_hook_dict(output)
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
