"""Output layer and cross-entropy as one operation, so that the logits of a batch are never all in memory.

Logits are computed for a part of the rows at a time, in the dtype of the states, and their log-sum-exp in float32. The
gradients of that part are computed at once, and its logits are freed. The forward pass stores the gradients of the
states, the weight and the bias, not tokens × vocabulary numbers.
"""

import functools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.kernels.availability import TRITON
from regard.kernels.dtypes import HALF
from regard.kernels.products import matrix

# The number of logits computed at a time: enough to keep a GPU busy, few enough for a CPU's cache.
_NUMBERS = {"cuda": 2**27, "cpu": 2**22}
_TILE = 128


@torch.library.custom_op("regard::linear_cross_entropy", mutates_args=())
def summed(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    smoothing: float,
    ignore: int,
    rows: int | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss, and its gradients for states, weight and bias; those that are not `wanted` are empty.

    Reference implementation: `torch.nn.functional.cross_entropy` of `states @ weight.T + bias`, with reduction="sum".
    """
    with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
        real = (target != ignore).nonzero().squeeze(1) if states.device.type == "cpu" else target
        if len(real) == len(target):
            return _by_rows(states, weight, bias, target, smoothing, ignore, rows, wanted)
        # No logits are computed for ignored rows on a CPU. On a GPU these logits are computed, because counting the
        # ignored rows would synchronise.
        loss, some, to_weight, to_bias = _by_rows(
            states[real], weight, bias, target[real], smoothing, ignore, rows, wanted
        )
        to_states = torch.zeros_like(states).index_copy_(0, real, some) if wanted[0] else some
        return loss, to_states, to_weight, to_bias


def _by_rows(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    smoothing: float,
    ignore: int,
    rows: int | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exact = _wide(states.dtype)
    rows = min(rows or _rows(states, weight), max(1, states.shape[0]))
    parted = _kernel(states, rows, weight.shape[0])
    narrow = weight.to(states.dtype)
    added = None if bias is None else bias.to(states.dtype)
    target = target.contiguous()
    _check_targets(target, ignore, weight.shape[0])
    loss = states.new_zeros((), dtype=exact)
    to_states = torch.empty_like(states) if wanted[0] else states.new_empty(0)
    to_weight = weight.new_zeros(weight.shape, dtype=exact) if wanted[1] else weight.new_empty(0)
    to_bias = weight.new_zeros(weight.shape[:1], dtype=exact) if wanted[2] else weight.new_empty(0)
    parts = _parts(states.shape[0], rows)
    forth, back = (matrix(way, rows, uses=len(parts)) for way in (narrow, narrow.T))
    for part in parts:
        some = states[part]
        logits = forth.times(some, added)
        losses, gradients = parted(logits, target[part], smoothing, ignore, any(wanted))
        loss += losses.sum(dtype=exact)
        if wanted[0]:
            back.into(to_states[part], gradients)
        if wanted[1]:
            _add_product(to_weight, gradients.T, some)
        if wanted[2]:
            to_bias += _total(gradients)
        del logits, gradients
    return loss, to_states, to_weight.to(weight.dtype), to_bias if bias is None else to_bias.to(bias.dtype)


def _parts(length: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]


def _rows(states: Tensor, weight: Tensor) -> int:
    """Return the number of rows in a part: parts of about equal size, a multiple of a matrix product's tile."""
    most = _NUMBERS.get(states.device.type, _NUMBERS["cpu"])
    parts = -(-states.shape[0] * weight.shape[0] // most)
    even = -(-states.shape[0] // max(1, parts))
    return max(1, -(-even // _TILE) * _TILE)


def _check_targets(target: Tensor, ignore: int, vocabulary: int) -> None:
    """Raise ValueError for a wrong target on the CPU. On a GPU a check would synchronise: Triton's loss is NaN."""
    if target.device.type != "cpu":
        return
    wrong = (target != ignore) & ((target < 0) | (target >= vocabulary))
    if bool(wrong.any()):
        wrong_target = int(target[wrong][0])
        raise ValueError(f"target must be from 0 to {vocabulary - 1}, or {ignore} to ignore, got {wrong_target}")


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, in the dtype of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += left @ right


def _total(rows: Tensor) -> Tensor:
    """Return the sum of all rows, accumulated in at least float32."""
    if rows.device.type != "cpu" or rows.dtype != torch.bfloat16:
        return rows.sum(0, dtype=_wide(rows.dtype))
    # On the CPU `sum` would first copy all rows of bfloat16 to float32. A matrix product accumulates in float32 and
    # rounds once. Rows of float16 are summed in float32 above, because a result in float16 could overflow.
    return (rows.new_ones(1, len(rows)) @ rows).squeeze(0).to(_wide(rows.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


class _Space(NamedTuple):
    """Buffers (rows, vocabulary) on the CPU, used again for each part of a batch: the logits (`wide`) and their
    softmax (`weights`) in at least float32, and the gradients of the logits in their own dtype (`narrow`).

    With new allocations the operating system would map new pages for each part, which takes longer than the
    computation.
    """

    wide: Tensor
    weights: Tensor
    narrow: Tensor

    @staticmethod
    def of(rows: int, vocabulary: int, dtype: torch.dtype) -> "_Space":
        same = dtype == _wide(dtype)
        weights = torch.empty(rows, vocabulary, dtype=_wide(dtype))
        others = [weights if same else torch.empty(rows, vocabulary, dtype=kind) for kind in (_wide(dtype), dtype)]
        return _Space(others[0], weights, others[1])


def _losses(
    logits: Tensor, target: Tensor, smoothing: float, ignore: int, gradient: bool, space: _Space | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and, with `gradient`, the gradients of the losses with respect to the logits."""
    exact, rows, vocabulary = _wide(logits.dtype), *logits.shape
    copied = space is not None and exact != logits.dtype
    z = space.wide[:rows].copy_(logits) if space is not None and copied else logits.to(exact)
    real = target != ignore
    label = torch.where(real, target, 0).clamp(0, vocabulary - 1).unsqueeze(1)
    if gradient:
        # The log-sum-exp follows from softmax, which reads each row from memory only once: the largest weight of a row
        # is e^{z - lse} for its largest logit z.
        weights = torch.softmax(z, 1) if space is None else torch.softmax(z, 1, out=space.weights[:rows])
        lse = z.amax(1, keepdim=True) - weights.amax(1, keepdim=True).log()
    else:
        weights, lse = z, z.logsumexp(1, keepdim=True)
    loss = lse - (1 - smoothing) * z.gather(1, label)
    if smoothing > 0.0:
        loss = loss - smoothing / vocabulary * z.sum(1, keepdim=True)
    if gradient:
        if smoothing > 0.0:
            weights.sub_(smoothing / vocabulary)
        weights.scatter_add_(1, label, torch.full_like(lse, smoothing - 1))
        if space is None or not bool(real.all()):  # on a GPU, testing `real` would synchronise
            weights.mul_(real.unsqueeze(1))
    losses = torch.where(real, loss.squeeze(1), 0)
    return losses, space.narrow[:rows].copy_(weights) if space is not None and copied else weights.to(logits.dtype)


def _kernel(states: Tensor, rows: int, vocabulary: int) -> Any:
    """Return the function that computes losses and gradients of up to `rows` rows of logits: on CUDA and in Triton's
    interpreter a Triton kernel (not for float64), else `_losses`, of torch operations."""
    fast = states.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if fast and states.dtype != torch.float64 and TRITON:
        from regard.kernels.triton.softmax_loss import overwrite  # a lazy import, because the module imports Triton

        return overwrite
    if states.device.type != "cpu":
        return _losses
    return functools.partial(_losses, space=_Space.of(rows, vocabulary, states.dtype))


@summed.register_fake
def _(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    smoothing: float,
    ignore: int,
    rows: int | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        states.new_empty((), dtype=_wide(states.dtype)),
        torch.empty_like(states) if wanted[0] else states.new_empty(0),
        torch.empty_like(weight) if wanted[1] else weight.new_empty(0),
        torch.empty_like(bias) if wanted[2] and bias is not None else weight.new_empty(0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.wanted = inputs[-1]


def _scale(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    scaled = [
        (grad * saved).to(saved.dtype) if wanted else None
        for saved, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    ]
    return (*scaled, *(None for _ in range(5)))


summed.register_autograd(_scale, setup_context=_keep)
