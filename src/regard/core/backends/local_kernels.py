"""Local attention with dot products by kernels that read only the windows: compiled loops on the CPU, Triton on CUDA.

The choice of a kernel is cached under the shapes, dtypes and options of a call (its signature), so that repeated calls
skip the checks.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor

from regard.core import attention
from regard.core.backends.kernel_arguments import odd_values
from regard.core.problem import HALF
from regard.core.scores import Dot, ScaledDot
from regard.core.transforms import transformed
from regard.kernels import local_attention
from regard.kernels.availability import TRITON

_MOST = 1024  # the largest number of signatures (cache keys of calls) for which the chosen kernel is stored
_SIZE = 256  # the largest vector size of queries, keys and values that the CUDA kernel supports
_SINGLE = 128  # the largest vector size on CUDA in float32, in which larger tiles do not fit the registers
_REACH = 1024  # the largest number of keys on each side of the centre of a window
_PROGRAMS = 65_535  # the largest number of thread blocks on the second axis of a CUDA kernel launch
# Local attention in torch operations: a function of query, key, value, centre and lengths that returns output and
# weights.
Plain = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
_plans: dict[Hashable, Any] = {}


def signature(
    query: Tensor, key: Tensor, value: Tensor, centre: Tensor, reach: int, score: object, gaussian: bool
) -> Hashable | None:
    """Return a cache key of all properties of a call that its kernel depends on; None if no kernel supports it."""
    if type(score) not in (Dot, ScaledDot) or not type(query) is type(key) is type(value) is type(centre) is Tensor:
        return None
    if torch.compiler.is_compiling() or attention.observers or transformed() or torch.jit.is_tracing():
        return None
    if torch._C._len_torch_dispatch_stack() or query.is_nested or key.is_nested or value.is_nested or centre.is_nested:
        return None
    device = query.device
    # Triton launches kernels on the current device.
    if torch.is_autocast_enabled(device.type) or (query.is_cuda and device.index != torch.cuda.current_device()):
        return None
    layouts = [(t.shape, t.stride(), t.dtype, t.device) for t in (query, key, value, centre) if _readable(t)]
    return None if len(layouts) < 4 else (*layouts, reach, score, gaussian)


def _readable(tensor: Tensor) -> bool:
    """Return whether a kernel can read the tensor's values from its memory."""
    return tensor.layout is torch.strided and not tensor.is_neg()


def known(call: Hashable | None) -> Any:
    """Return the cached plan (an object that runs the kernel) of a signature: False if no kernel supports such calls,
    None if nothing is cached."""
    return False if call is None else _plans.get(call)


def planned(
    call: Hashable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    centre: Tensor,
    reach: int,
    score: Dot | ScaledDot,
    gaussian: bool,
) -> Any:
    """Return and cache the plan, an object that runs the kernel for calls with this signature; False if no kernel
    supports them."""
    if len(_plans) >= _MOST:
        _plans.clear()
    plan: Any = False
    if isinstance(score, Dot) or score.softcap is None:
        scale = score.factor(query.shape[-1]) if isinstance(score, ScaledDot) else 1.0
        make = _maker(query, key, value, centre, reach)
        plan = make is not None and make(query, key, value, centre, reach, scale, gaussian)
    _plans[call] = plan
    return plan


def _maker(query: Tensor, key: Tensor, value: Tensor, centre: Tensor, reach: int) -> Callable[..., Any] | None:
    """Return the class whose instances run the kernel for tensors like these, or None if no kernel supports them."""
    tensors, cpu = (query, key, value), query.device.type == "cpu"
    served = (torch.float32, torch.bfloat16) if cpu else (torch.float32, *HALF)
    if any(t.ndim != 4 or t.stride(-1) != 1 or t.dtype != query.dtype or t.device != query.device for t in tensors):
        return None
    # Half precision cannot represent large positions.
    if query.dtype not in served or centre.dtype != torch.float32 or centre.device != query.device or reach > _REACH:
        return None
    if query.shape[-1] != key.shape[-1] or 0 in (*query.shape, *key.shape, *value.shape):
        return None
    if cpu:
        return local_attention.Loops if local_attention.available() else None
    if not query.is_cuda or not TRITON or odd_values(query, value) or query.shape[:2].numel() > _PROGRAMS:
        return None
    # 32-bit offsets in the kernel must address all rows of a head, also in newly allocated tensors and in the weights.
    longest = max(query.shape[2], key.shape[2])
    if max(query.shape[-1], value.shape[-1]) > (_SINGLE if query.dtype == torch.float32 else _SIZE):
        return None
    widest = max(query.shape[1] * _SIZE, 2 * reach + 1, centre.stride(2), *(t.stride(2) for t in tensors))
    if longest * widest >= 2**31:
        return None
    from regard.kernels.triton.local_launches import Launches  # imported here: the module imports Triton

    return Launches


def attend(
    plan: Any, query: Tensor, key: Tensor, value: Tensor, centre: Tensor, lengths: Tensor | None, plain: Plain
) -> tuple[Tensor, Tensor] | None:
    """Return output and weights, computed by the kernel of `plan`.

    The result is None if the centre of a window is not finite, or `lengths` does not have one length per batch item.
    `plain` computes output and weights in torch operations; it is differentiated where the kernel's gradients do not
    suffice.
    """
    if lengths is not None:
        if lengths.shape != query.shape[:1]:
            return None
        lengths = lengths.long().contiguous()
    learned = query.requires_grad or key.requires_grad or value.requires_grad or centre.requires_grad
    if not (learned and torch.is_grad_enabled()):
        results = plan.forward(query, key, value, centre, lengths, False)
        return None if results is None else results[:2]
    pair = cast(tuple[Tensor, Tensor], _Windows.apply(query, key, value, centre, lengths, plan, plain))
    return None if pair[0].numel() == 0 else pair


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple([tensor.stride() for tensor in tensors])


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        centre: Tensor,
        lengths: Tensor | None,
        plan: Any,
        plain: Plain,
    ) -> tuple[Tensor, Tensor]:
        results = plan.forward(query, key, value, centre, lengths, True)
        if results is None:
            return query.new_empty(0), query.new_empty(0)
        output, weights, state = results
        ctx.save_for_backward(query, key, value, centre, lengths, *state)
        ctx.plan, ctx.plain, ctx.strides = plan, plain, _strides(query, key, value, centre)
        ctx.set_materialize_grads(False)
        return output, weights

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, centre, lengths, *state = ctx.saved_tensors
        change, weights_change = upstream
        moved = ctx.strides != _strides(query, key, value, centre)
        if torch.is_grad_enabled() or weights_change is not None or moved:
            # The kernel supports no gradients of the returned weights, no second derivatives, and no saved-tensor hooks
            # that change strides. These cases are rare, so `plain` is differentiated instead.
            learned = ctx.needs_input_grad[:4]
            grads = _again(
                functools.partial(ctx.plain, lengths=lengths), (query, key, value, centre), learned, upstream
            )
            return *grads, None, None, None
        if change is None:
            return (None,) * 7
        return *ctx.plan.gradients(query, key, value, centre, lengths, change, *state), None, None, None


def _again(
    plain: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    learned: tuple[bool, ...],
    upstream: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Return the gradients by differentiating `plain`; in grad mode the gradients have an autograd graph themselves."""
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of the inputs are differentiated, because two inputs may be the same tensor and each needs its own
        # gradient.
        views = [tensor.view_as(tensor) for tensor in tensors]
        pairs = [(y, g) for y, g in zip(plain(*views), upstream, strict=True) if g is not None]
        leaves = [view for view, needed in zip(views, learned, strict=True) if needed]
        if not pairs:
            return [None] * 4
        outputs, changes = zip(*pairs, strict=True)
        grads = iter(torch.autograd.grad(outputs, leaves, changes, create_graph=twice, allow_unused=True))
    return [next(grads) if needed else None for needed in learned]
