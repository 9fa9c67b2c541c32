"""`F.scaled_dot_product_attention` and the kernels that it chooses from, called directly where that is faster.

In calls with gradients, cuDNN is used only for head sizes 64 and 128, and for 80 and 96 over long sequences without a
mask. For 64 keys of head size 96 with padding, cuDNN in torch 2.11 gave NaN gradients in bfloat16 where weights were
nearly 0 or 1 (docs/experiments.md).

Eager calls without a mask call torch's efficient, flash or cuDNN kernel directly, because
`F.scaled_dot_product_attention` would choose the kernel again at every call. Small calls and calls in float32 use the
efficient kernel: a small call takes longer on the host than on the device, and cuDNN's set-up on the host is the
longest. In float32, two matrix products compute calls of few queries over many keys, calls of many queries over few
keys, and small calls of sizes that the kernels would need padded.

With fewer key heads than query heads, torch's kernels support neither float32, nor a mask while cuDNN is disabled:
torch would compute the whole score matrix. In these cases keys and values are repeated for each query head, as a view
if there is one key head.
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
from regard.core.backends.returned_layout import Hook, add_hook, fed_alike, returner
from regard.core.transforms import mapped, transformed

R = TypeVar("R")
_BY_CUDNN = (torch.bfloat16, torch.float16)
_CUDNN_SIZES = (64, 128)  # head sizes whose gradients cuDNN computes correctly
# Head sizes for which cuDNN computes correct gradients in the least time if there is no mask tensor and there are at
# least _LONG queries and keys.
_CUDNN_LONG, _LONG = (80, 96), 512
_HEAD = 256  # the largest head size of torch's kernels
# Up to these numbers of multiplications (pairs times head size) the efficient and the flash kernel are faster than
# cuDNN's, whose set-up on the host takes longer: the efficient kernel up to _KEYS keys, flash only with gradients.
_EFFICIENT, _FLASH, _KEYS = 2**28, 2**31, 256
_SHORT = 64  # up to this number of keys, cuDNN's backward pass is faster than flash's
# In float32, two matrix products are faster than a fused kernel for at most _FEW queries over at least _MANY keys, and
# for at most _FEW_KEYS keys if the queries hold at least _QUERIES numbers.
_FEW, _MANY = 8, 1024
_FEW_KEYS, _QUERIES = 32, 2**24
_SMALL = 2**20  # up to this number of scores, two matrix products are faster than padding the tensors for a kernel
# Without gradients, flash is faster than cuDNN from _SPLIT keys on, if the queries form at most _BLOCKS blocks of _ROWS
# rows: flash divides the keys among thread blocks, but cuDNN computes each block of rows in a single thread block.
_SPLIT, _BLOCKS, _ROWS = 8192, 64, 128
_KERNELS = {1: "flash", 2: "efficient", 3: "cudnn"}  # values of torch.nn.attention.SDPBackend
# Functions of torch._C, which are faster to call than their wrappers in Python. The operators below are typed as Any,
# because torch has no type stubs for them.
_ENABLED = {
    "flash": torch._C._get_flash_sdp_enabled,
    "efficient": torch._C._get_mem_efficient_sdp_enabled,
    "cudnn": torch._C._get_cudnn_sdp_enabled,
}
_flash_operator: Any = getattr(torch, "_scaled_dot_product_flash_attention", None)
_efficient_operator: Any = getattr(torch, "_scaled_dot_product_efficient_attention", None)
_cudnn_operator: Any = getattr(torch, "_scaled_dot_product_cudnn_attention", None)


def sizes(query: Tensor, value: Tensor, masked: bool) -> tuple[int, int, int]:
    """Return the sizes to which the vectors of query, key and value must be padded for a fused kernel of torch.

    On the CPU the sizes must be equal. On CUDA they must be multiples of 16 bytes; the flash kernel, which supports no
    mask, pads equal sizes itself.
    """
    size, value_size = query.shape[-1], value.shape[-1]
    if not query.is_cuda or mapped():
        return (max(size, value_size),) * 3
    if query.dtype == torch.float64 or (size == value_size and query.dtype in _BY_CUDNN and not masked):
        return size, size, value_size
    step = 16 // query.element_size()
    size = -(-size // step) * step
    return size, size, -(-value_size // step) * step


def fits(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> bool:
    """Return whether a call without a mask tensor can be computed without padding the vectors."""
    if operator(query, key, value, causal, dropout) == "products":
        return True
    return sizes(query, value, False) == (query.shape[-1], key.shape[-1], value.shape[-1])


def padded(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors with their vectors padded by zeros to sizes that torch's kernels support.

    The zeros change neither the scores nor the first columns of the output; the caller drops the other columns.
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
    """Compute torch's fused attention by the fastest kernel that supports the call."""
    if scale is not None and scale <= 0:  # some kernels mask with −inf before scaling, which then gives +inf or NaN
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    scale = 1.0 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    eager = query.is_cuda and attn_mask is None and query.ndim == 4
    if eager and not torch.compiler.is_compiling() and not transformed():
        output = prepared(query, key, value, is_causal, dropout_p, scale)(query, key, value, None, None, None)
        assert output is not None  # functions returned by `prepared` never return None
        return output
    return _by_choice(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def prepared(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scale: float) -> Direct:
    """Return a function that computes `attend` without a mask, for eager calls with tensors of these shapes and dtypes.

    The kernel is chosen here, once, and not at each call of the function.
    """
    heads, grouped = query.shape[1], query.shape[1] != key.shape[1]
    kernel = "" if scale <= 0 else operator(query, key, value, causal, dropout)
    if kernel == "products":
        return functools.partial(_by_products, scale)
    if not kernel:
        return _chosen(query, key, value, causal, dropout, scale)
    learning, enabled = _learning(query, key, value), _ENABLED[kernel]

    def disabled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _by_choice(query, key, value, None, dropout, causal, scale, grouped)

    def by_flash(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        if not enabled():
            return disabled(query, key, value)
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
            query, key, value = _aligned(query, key, value)
        return _flash_operator(query, key, value, dropout, causal, False, scale=scale)[0]

    def by_efficient(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        if not enabled():
            return disabled(query, key, value)
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
            query, key, value = _aligned(query, key, value)
        if grouped:
            key, value = _repeated(key, heads), _repeated(value, heads)
        return _efficient_operator(query, key, value, None, learning, dropout, causal, scale=scale)[0]

    hook: Hook | None = None

    def by_cudnn(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        nonlocal hook
        if not enabled():
            return disabled(query, key, value)
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
            query, key, value = _aligned(query, key, value)
        output = _cudnn_operator(query, key, value, None, learning, dropout, causal, False, scale=scale)[0]
        if learning:  # all calls of this function return outputs of equal strides
            hook = hook or returner(output.stride())
            add_hook(output, hook)
        return output

    return {"flash": by_flash, "efficient": by_efficient, "cudnn": by_cudnn}[kernel]


def _by_products(
    scale: float, query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object
) -> Tensor:
    rows = query.reshape(key.shape[0], key.shape[1], -1, query.shape[3])  # query heads of one key head become rows
    scores = (rows * scale) @ key.mT if key.shape[2] > query.shape[3] else rows @ key.mT * scale
    return (torch.softmax(scores, -1) @ value).view(*query.shape[:3], value.shape[3])


def _chosen(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scale: float) -> Direct:
    """Return a function that computes `_by_choice` without a mask, for calls with tensors of these shapes and
    dtypes."""
    grouped = query.shape[1] != key.shape[1]
    if scale <= 0:
        options: dict[str, Any] = {"dropout_p": dropout, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
        return lambda query, key, value, score, mask, bias: attend(query, key, value, **options)
    heads, others = query.shape[1], query.is_cuda and excludes_cudnn(query, key, value)
    repeats = grouped and query.is_cuda and _has_no_groups(query, key, False, causal, others)
    kernel: Any = F.scaled_dot_product_attention
    # Keywords are passed only where necessary, because torch takes half a microsecond to parse them.
    if (grouped and not repeats) or scale != 1.0 / math.sqrt(query.shape[-1]):
        kernel = functools.partial(kernel, scale=scale, enable_gqa=grouped and not repeats)
    if not query.is_cuda and not causal and dropout == 0.0:
        return lambda query, key, value, score, mask, bias: kernel(query, key, value)
    if not query.is_cuda:
        return lambda query, key, value, score, mask, bias: kernel(query, key, value, None, dropout, causal)
    learning = query.dtype in _BY_CUDNN and _learning(query, key, value)

    def run(query: Tensor, key: Tensor, value: Tensor, score: object, mask: object, bias: object) -> Tensor:
        try:
            misaligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
        except RuntimeError:  # a fake tensor has no memory address
            misaligned = 0
        if misaligned:
            query, key, value = _aligned(query, key, value)
        if repeats:
            key, value = _repeated(key, heads), _repeated(value, heads)
        if others:
            return _by_others(kernel, query, key, value, None, dropout, causal)
        output = kernel(query, key, value, None, dropout, causal)
        return fed_alike(output) if learning else output

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
    """Compute attention by the kernel that torch chooses."""
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
    return fed_alike(run(query, key, value, mask, dropout, causal))


def _aligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, with copies in place of those whose memory does not begin at a multiple of 16 bytes.

    The kernels load 16 bytes at a time. On unaligned tensors torch 2.11 runs these kernels too, with wrong results or
    errors.
    """
    if torch.compiler.is_compiling() or transformed():
        return tensors
    try:
        return tuple(t.clone() if t.data_ptr() & 15 else t for t in tensors)
    except RuntimeError:  # a fake tensor has no memory
        return tensors


def operator(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> str:
    """Return the name of the code that an eager call without a mask runs directly, or "" if it runs none directly.

    The name is flash, efficient, cudnn, or products (two matrix products).
    """
    if not query.is_cuda or query.dtype == torch.float64 or torch.are_deterministic_algorithms_enabled():
        return ""
    tensors = (query, key, value)
    if any(type(t) is not Tensor for t in tensors) or torch.is_autocast_enabled("cuda"):
        return ""
    if not has_flash(query.device) or _efficient_operator is None:
        return ""
    if query.dtype == torch.float32 and not causal and dropout == 0.0 and products_serve(query, key, value):
        return "products"
    step = 16 // query.element_size()
    if pads(query, value) or any(t.shape[3] > _HEAD or t.stride(3) != 1 for t in tensors):
        return ""
    if any(stride % step for t in tensors for stride in t.stride()[:3]):
        return ""
    return "efficient" if query.dtype == torch.float32 else _in_half_precision(query, key, value, causal, dropout)


def pads(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's kernels on CUDA need padded copies of the tensors."""
    return (query.shape[-1] | value.shape[-1]) % (16 // query.element_size()) != 0


def products_serve(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether two matrix products take less time than the efficient kernel in float32."""
    queries, keys = query.shape[2], key.shape[2]
    scores = query.shape[0] * query.shape[1] * queries * keys
    if pads(query, value) and (queries > _FEW or _learning(query, key, value)) and scores <= _SMALL:
        return True  # few queries without gradients are left to the kernel for decoding steps
    # Matrix products need no copy of a tensor whose batch axis and head axis can be viewed as one axis.
    memory = all(_joined(t) for t in (key, value))
    if queries <= _FEW and keys >= _MANY:
        return memory
    return keys <= _FEW_KEYS and query.numel() >= _QUERIES and memory and _joined(query)


def _joined(tensor: Tensor) -> bool:
    """Return whether the batch axis and the head axis of a tensor can be viewed as one axis."""
    return 1 in tensor.shape[:2] or tensor.stride(0) == tensor.stride(1) * tensor.shape[1]


def _in_half_precision(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> str:
    """Return the name of the kernel that a call in half precision runs directly, or "" if it runs none directly."""
    (batch, heads, queries, size), keys, learning = query.shape, key.shape[2], _learning(query, key, value)
    grouped, others = heads != key.shape[1], excludes_cudnn(query, key, value)
    equal = size == value.shape[3]
    small = query.numel() * keys <= _EFFICIENT and keys <= _KEYS and not grouped
    if small or (others and not equal):
        return "efficient"
    # On some GPUs the flash kernel has no backward pass for head sizes over 192.
    flash = equal and not (causal and queries != keys) and not (learning and size > 192) and _flash_operator is not None
    if others:
        return "flash" if flash else ""
    blocks = batch * heads * -(-queries // _ROWS)
    work = blocks * _ROWS * size * keys // (2 if causal else 1)
    faster = keys > _SHORT and work <= _FLASH if learning else keys >= _SPLIT and blocks <= _BLOCKS
    if flash and faster:
        return "flash"
    if _cudnn_operator is None:
        return ""
    choice = torch._fused_sdp_choice(query, key, value, None, dropout, causal, enable_gqa=grouped)
    return "cudnn" if choice == SDPBackend.CUDNN_ATTENTION.value else ""


def _learning(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Return whether torch has its flash kernel for this GPU."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _has_no_groups(query: Tensor, key: Tensor, masked: bool, causal: bool, others: bool) -> bool:
    """Return whether torch has no CUDA kernel that supports fewer key heads than query heads for this call."""
    uneven = causal and query.shape[-2] != key.shape[-2]
    return query.dtype not in _BY_CUDNN or ((masked or uneven) and others)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values with each head repeated, so that they have as many heads as the queries."""
    tensor = tensor.unsqueeze(-3)
    return tensor.expand(*tensor.shape[:-3], heads // tensor.shape[-4], *tensor.shape[-2:]).flatten(-4, -3)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return output and log-sum-exp (b, h, q) by torch's fused kernel on CUDA; (None, None) if torch would use none.

    The log-sum-exp is detached: no gradient flows through it.
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
    output = fed_alike(output)
    return output, lse.detach().reshape(*query.shape[:2], -1)[..., : query.shape[-2]]


def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> str:
    """Return the name of the kernel that torch would choose for these tensors, without computing any values."""
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
    """Return whether cuDNN must be excluded, because its gradients could be wrong.

    cuDNN's gradients could be wrong for head sizes outside of `_CUDNN_SIZES` and `_CUDNN_LONG`, and inside vmap and
    compiled transforms, where the memory layout of the incoming gradient cannot be controlled (see `returned_layout`).
    """
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

    Where possible the flag of cuDNN is set directly, which is twenty times faster than torch's context manager.
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
    if not mapped():  # the backward pass of the efficient kernel raises under vmap
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
