"""`F.scaled_dot_product_attention` with the incoming gradient copied to the layout of the output.

On CUDA torch caches cuDNN's backward graphs under the layout of query, key and value; the layout of the incoming
gradient is built into the graph but is not part of the cache key (torch 2.11). A second backward pass over inputs laid
out alike, with a gradient laid out otherwise, such as that of a mean over the queries, or of a compiled function beside
a plain one, is read as if it were laid out like the first: the gradients are wrong, silently. The output's layout
follows the query's, so a gradient laid out like the output always fits. Under vmap the layout cannot be controlled, so
the other kernels are used.

They are also used for gradients of head sizes other than 64 and 128, 80 and 96 over long sequences without a mask
excepted: torch 2.11's cuDNN gave NaN gradients in bfloat16 for 64 keys of size 96 with padding where weights are nearly
0 or 1 (docs/experiments.md).

Small calls and all calls in float32 run torch's efficient or flash kernel as an operator: there the host takes longer
than the device, `F.scaled_dot_product_attention` and cuDNN's set-up take longer on the host, and cuDNN's gradients need
a hook in Python. Few queries over many keys in float32 are two matrix products: torch's kernel has one block of threads
for each head there, which goes through all keys.

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
# Further ones for which it does without a mask tensor and takes less time, from a number of queries and keys on.
_CUDNN_LONG, _LONG = (80, 96), 512
_HEAD = 256  # the largest head size of the operators
# Pairs times head size up to which a kernel takes less time than cuDNN's, whose set-up on the host is longer, and the
# number of keys up to which the efficient kernel does.
_EFFICIENT, _FLASH, _FLASH_LEARNING, _KEYS = 2**28, 2**29, 2**31, 256
_SHORT = 64  # the number of keys up to which cuDNN's backward pass takes less time than flash's
_FEW, _MANY = 8, 1024  # the numbers of queries and keys for which two matrix products are faster in float32
_KERNELS = {1: "flash", 2: "efficient", 3: "cudnn"}  # values of torch.nn.attention.SDPBackend
# torch's own functions, which are faster to call than their wrappers in Python. The operators have no stubs.
_ENABLED = {"flash": torch._C._get_flash_sdp_enabled, "efficient": torch._C._get_mem_efficient_sdp_enabled}
_flash_operator: Any = getattr(torch, "_scaled_dot_product_flash_attention", None)
_efficient_operator: Any = getattr(torch, "_scaled_dot_product_efficient_attention", None)


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
    scale = 1.0 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    eager = query.is_cuda and attn_mask is None and query.ndim == 4
    if eager and not torch.compiler.is_compiling() and not transformed():
        output = prepared(query, key, value, is_causal, dropout_p, scale)(query, key, value, None, None, None)
        assert output is not None  # no kernel here refuses data
        return output
    return _by_choice(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def prepared(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scale: float) -> Direct:
    """Return `attend` without a mask for eager calls with the signature of this one; it decides nothing again."""
    heads, grouped = query.shape[1], query.shape[1] != key.shape[1]
    kernel = "" if scale <= 0 else operator(query, key, value, causal, dropout)

    def by_products(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        rows = query.reshape(key.shape[0], key.shape[1], -1, query.shape[3])  # queries of a group are rows
        output = torch.softmax(rows @ key.mT * scale, -1) @ value
        return output.view(*query.shape[:3], value.shape[3])

    if kernel == "products":
        return by_products
    if not kernel:
        return _chosen(query, key, value, causal, dropout, scale)
    learning, enabled = _learning(query, key, value), _ENABLED[kernel]
    flash = _flash_operator if kernel == "flash" else None

    def by_operator(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        if not enabled():
            return _by_choice(query, key, value, None, dropout, causal, scale, grouped)
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
            query, key, value = _aligned(query, key, value)
        if flash is not None:
            return flash(query, key, value, dropout, causal, False, scale=scale)[0]
        if grouped:
            key, value = _repeated(key, heads), _repeated(value, heads)
        return _efficient_operator(query, key, value, None, learning, dropout, causal, scale=scale)[0]

    return by_operator


def _chosen(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scale: float) -> Direct:
    """Return `_by_choice` without a mask for calls with the signature of this one."""
    grouped = query.shape[1] != key.shape[1]
    if scale <= 0:
        options: dict[str, Any] = {"dropout_p": dropout, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
        return lambda query, key, value, score, mask, bias: attend(query, key, value, **options)
    heads, others = query.shape[1], query.is_cuda and excludes_cudnn(query, key, value)
    repeats = grouped and query.is_cuda and _has_no_groups(query, key, False, causal, others)
    kernel: Any = F.scaled_dot_product_attention
    if (grouped and not repeats) or scale != 1.0 / math.sqrt(query.shape[-1]):  # torch reads options in half a µs
        kernel = functools.partial(kernel, scale=scale, enable_gqa=grouped and not repeats)
    if not query.is_cuda and not causal and dropout == 0.0:
        return lambda query, key, value, score, mask, bias: kernel(query, key, value)
    if not query.is_cuda:
        return lambda query, key, value, score, mask, bias: kernel(query, key, value, None, dropout, causal)
    learning = query.dtype in _BY_CUDNN and _learning(query, key, value)

    def run(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        query, key, value = _aligned(query, key, value)
        if repeats:
            key, value = _repeated(key, heads), _repeated(value, heads)
        if others:
            return _by_others(kernel, query, key, value, None, dropout, causal)
        output = kernel(query, key, value, None, dropout, causal)
        return _fed_alike(output) if learning else output

    return run


def _by_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
    grouped: bool,
) -> Tensor:
    """Compute attention by the kernel that torch picks."""
    kernel: Any = F.scaled_dot_product_attention
    if not query.is_cuda:
        return kernel(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    query, key, value = _aligned(query, key, value)
    others = excludes_cudnn(query, key, value, mask is not None)
    if grouped and _has_no_groups(query, key, mask is not None, causal, others):
        key, value, grouped = _repeated(key, query.shape[-3]), _repeated(value, query.shape[-3]), False
    run = functools.partial(kernel, scale=scale, enable_gqa=grouped)
    if others:
        return _by_others(run, query, key, value, mask, dropout, causal)
    return _fed_alike(run(query, key, value, mask, dropout, causal))


def _aligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies of tensors that do not begin at a multiple of 16 bytes.

    The kernels load 16 bytes at a time, and torch 2.11 runs them on other tensors too: with wrong results, or errors.
    """
    if torch.compiler.is_compiling() or transformed():
        return tensors
    try:
        return tuple(t.clone() if t.data_ptr() & 15 else t for t in tensors)
    except RuntimeError:  # a fake tensor has no memory
        return tensors


def operator(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> str:
    """Return the kernel that an eager call without a mask runs directly: flash, efficient, products, or none."""
    if not query.is_cuda or query.dtype == torch.float64 or torch.are_deterministic_algorithms_enabled():
        return ""
    tensors, queries, keys = (query, key, value), query.shape[2], key.shape[2]
    if torch.is_autocast_enabled("cuda") or not has_flash(query.device) or _efficient_operator is None:
        return ""
    # The products read keys and values once if batch and heads are one axis in memory; else they would copy them.
    joined = all(t.shape[0] == 1 or t.stride(0) == t.stride(1) * t.shape[1] for t in (key, value))
    few = queries <= _FEW and keys >= _MANY and not causal and dropout == 0.0
    if query.dtype == torch.float32 and few and joined:
        return "products"
    step = 16 // query.element_size()
    if any(t.shape[3] % step or t.shape[3] > _HEAD or t.stride(3) != 1 for t in tensors):
        return ""
    if any(stride % step for t in tensors for stride in t.stride()[:3]):
        return ""
    if query.dtype == torch.float32:
        return "efficient"
    work, learning, grouped = query.numel() * keys, _learning(query, key, value), query.shape[1] != key.shape[1]
    others, equal = excludes_cudnn(query, key, value), query.shape[3] == value.shape[3]
    small = work <= _EFFICIENT and keys <= _KEYS and not grouped
    if small or (others and not equal):
        return "efficient"
    # Some GPUs have no gradients of large heads.
    if not equal or (causal and queries != keys) or (learning and query.shape[3] > 192) or _flash_operator is None:
        return ""
    most = 0 if learning and keys <= _SHORT else _FLASH_LEARNING if learning else _FLASH
    return "flash" if others or work <= most else ""


def _learning(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Return whether torch has its flash kernel for this GPU."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _has_no_groups(query: Tensor, key: Tensor, masked: bool, causal: bool, others: bool) -> bool:
    """Return whether torch has no kernel on CUDA for fewer key heads than query heads."""
    uneven = causal and query.shape[-2] != key.shape[-2]
    return query.dtype not in _BY_CUDNN or ((masked or uneven) and others)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values with as many heads as the queries have."""
    tensor = tensor.unsqueeze(-3)
    return tensor.expand(*tensor.shape[:-3], heads // tensor.shape[-4], *tensor.shape[-2:]).flatten(-4, -3)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return output and log-sum-exp (b, h, q) by the kernel that torch picks on CUDA; None if it has none.

    The log-sum-exp has no gradient of its own.
    """
    if scale <= 0 or query.shape[-1] % 8 or query.shape[-3] != key.shape[-3]:
        return None, None
    query, key, value = _aligned(query, key, value)
    named = operator(query, key, value, causal, 0.0)
    if not named or (named in _ENABLED and not _ENABLED[named]()):
        picked = functools.partial(torch._fused_sdp_choice, scale=scale)
        others = excludes_cudnn(query, key, value)
        choice = (functools.partial(_by_others, picked) if others else picked)(query, key, value, None, 0.0, causal)
        named = _KERNELS.get(choice, "math")
    if named == "cudnn":
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        output, lse, *_ = cudnn(query, key, value, None, True, 0.0, causal, False, scale=scale)
    elif named == "flash":
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
    elif named == "efficient":
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        output, lse, *_ = efficient(query, key, value, None, True, 0.0, causal, scale=scale)
    else:
        return None, None
    output = _fed_alike(output)
    return output, lse.detach().reshape(*query.shape[:2], -1)[..., : query.shape[-2]]


def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> str:
    """Return the name of the kernel that torch would pick for these tensors, without computing any values."""
    if query.device.type not in ("cpu", "cuda"):
        return "math"
    eager = mask is None and query.ndim == 4 and not torch.compiler.is_compiling() and not transformed()
    if eager and (named := operator(query, key, value, causal, dropout)) and (named == "products" or _ENABLED[named]()):
        return named
    grouped = query.shape[-3] != key.shape[-3]
    others = query.is_cuda and excludes_cudnn(query, key, value, mask is not None)
    if grouped and query.is_cuda and _has_no_groups(query, key, mask is not None, causal, others):
        key, value, grouped = _repeated(key, query.shape[-3]), _repeated(value, query.shape[-3]), False
    picked = functools.partial(torch._fused_sdp_choice, enable_gqa=grouped)
    choice = (functools.partial(_by_others, picked) if others else picked)(query, key, value, mask, dropout, causal)
    return _KERNELS.get(choice, "math")


def excludes_cudnn(query: Tensor, key: Tensor, value: Tensor, masked: bool = False) -> bool:
    """Return whether cuDNN must be excluded: for gradients whose layout cannot be changed, or of other head sizes."""
    if transformed() and (mapped() or torch.compiler.is_compiling()):
        return True
    if not (query.dtype in _BY_CUDNN or torch.is_autocast_enabled("cuda")) or not _learning(query, key, value):
        return False
    size, value_size = query.shape[-1], value.shape[-1]
    if size == value_size and size in _CUDNN_SIZES:
        return False
    long = size == value_size and size in _CUDNN_LONG and min(query.shape[-2], key.shape[-2]) >= _LONG
    return masked or not long


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
