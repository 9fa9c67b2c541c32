"""Additive attention on the CPU in compiled C: one parallel region for the forward pass, two for the backward pass.

On a machine with other busy processes each parallel region may wait for a core, so the number of parallel regions can
matter more than the work in them. One thread computes a whole row: its scores, their softmax, and the weighted sum of
the values, over the keys that the row attends to; masked keys and values are never read. Reference implementation:
`regard.core.backends.reference`.
"""

import ctypes
import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.kernels.additive.exponential import NEAR, REACH
from regard.kernels.additive.pair_loops import PARALLEL, loaded, plain, segments
from regard.kernels.derivatives import REFERENCE, once_only
from regard.kernels.huge_pages import LARGE, on_huge_pages

_AGAIN = 2**24  # up to this many hidden units in all pairs, gradients can be differentiated again


class Visible(NamedTuple):
    """The keys j that row i attends to: j < lengths and j ≤ i + high, where None means no limit.

    `lengths` (batch · heads,) is int64 and contiguous.
    """

    lengths: Tensor | None
    high: int | None


def attention(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible) -> Tensor | None:
    """Return the output (b, h, q, e), or None if a number is not finite or too large for the formula with exponentials.

    query (b, h, q, f), key (b, h, k, f), value (b, h, k, e) and weight (f,) or (h, f) are float32 or half precision.
    """
    output = _attended(query, key, value, weight, visible, False)[0]
    return None if output.numel() == 0 else output


def with_weights(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible
) -> tuple[Tensor, Tensor] | None:
    """Return the output and the weights (b, h, q, k) in float32, or None under the conditions of `attention`."""
    output, weights = _attended(query, key, value, weight, visible, True)
    return None if output.numel() == 0 else (output, weights)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible, weighted: bool
) -> tuple[Tensor, Tensor]:
    """Return output and weights, computed in float32; both are empty if a number is not finite or too large."""
    dtype = query.dtype
    learning = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, weight))
    if learning or value.dtype != torch.bfloat16:  # the forward pass alone reads values in bfloat16 too
        value = _in_float32(value)
    query, key, weight = _in_float32(query), _in_float32(key), _in_float32(weight)
    if learning:
        results = cast(tuple[Tensor, Tensor], _Attention.apply(query, key, value, weight, visible, weighted))
    else:
        results = _forward(query, key, value, weight, visible, weighted)
    return results[0] if dtype == torch.float32 else results[0].to(dtype), results[1]


def _in_float32(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float32:
        return tensor
    if 4 * tensor.numel() < LARGE or (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor.float()
    return on_huge_pages(torch.empty_like(tensor, dtype=torch.float32)).copy_(tensor)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible, weighted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, weights and totals; all three are empty if a number is not finite or too large, or
    a length is out of range.

    The values are in float32 or bfloat16, the other tensors in float32.

    The weights are empty unless `weighted`. The totals (b, h, q, 2) are the largest score of each row and the inverse
    of its sum of exponentials.
    """
    inputs = [t.contiguous() for t in (query, key, weight, value)]
    lead, empty = query.shape[:3], query.new_empty(0)
    output, totals = query.new_empty(*lead, value.shape[3]), query.new_empty(*lead, 2)
    weights = query.new_empty(*lead, key.shape[2]) if weighted else empty
    numbers = *_numbers(query, key, value, weight, visible), int(value.dtype == torch.bfloat16)
    bad = _functions()[0](
        *[t.data_ptr() for t in inputs], _pointer(visible.lengths), output.data_ptr(), totals.data_ptr(),
        weights.data_ptr() if weighted else None, *numbers, REACH, NEAR, _threads(query, key),
    )  # fmt: skip
    return (empty, empty, empty) if bad else (output, weights, totals)


def _numbers(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible) -> tuple[int, ...]:
    """Return the integer arguments of the C functions.

    They are the sizes; the upper bound `high` of j − i (0 if there is none) and whether there is one; the number of
    rows of the weight; and 1 if the scores are computed by tanh, else 0.
    """
    batch, heads, rows, size = query.shape
    columns, high = key.shape[2], visible.high
    sizes = (batch * heads, rows, columns, size, value.shape[3])
    return *sizes, high or 0, int(high is not None), weight.numel() // size, int(plain(rows, columns))


def _threads(query: Tensor, key: Tensor) -> int:
    return torch.get_num_threads() if query.numel() * key.shape[2] >= PARALLEL else 1


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _functions() -> tuple[Any, Any]:
    library = loaded()
    forward, backward = library.regard_additive_attention, library.regard_additive_gradients
    ends = [ctypes.c_double] * 2 + [ctypes.c_long]
    forward.argtypes = [ctypes.c_void_p] * 8 + [ctypes.c_long] * 10 + ends
    backward.argtypes = [ctypes.c_void_p] * 12 + [ctypes.c_long] * 10 + ends
    forward.restype, backward.restype = ctypes.c_int, None
    return forward, backward


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible, weighted: bool
    ) -> tuple[Tensor, Tensor]:
        output, weights, totals = _forward(query, key, value, weight, visible, weighted)
        ctx.save_for_backward(query, key, value, weight, totals)
        ctx.visible = visible
        ctx.set_materialize_grads(False)
        if not weighted:
            ctx.mark_non_differentiable(weights)
        return output, weights

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, weight, totals = ctx.saved_tensors
        change, dweights = upstream
        if torch.is_grad_enabled() and query.numel() * key.shape[2] <= _AGAIN:
            return *_again((query, key, value, weight), ctx.visible, ctx.needs_input_grad[:4], upstream), None, None
        once_only("backend 'additive'", REFERENCE)
        change = value.new_zeros(*query.shape[:3], value.shape[3]) if change is None else change.contiguous()
        dweights = None if dweights is None else dweights.contiguous()
        inputs, lengths = [t.contiguous() for t in (query, key, weight, value)], ctx.visible.lengths
        dquery, dkey, dvalue = (value.new_empty(t.shape) for t in (query, key, value))
        dweight = value.new_empty(*query.shape[:2], query.shape[3])
        parts = segments(query.shape[0] * query.shape[1], *query.shape[2:])
        _functions()[1](
            *[t.data_ptr() for t in inputs], *[_pointer(t) for t in (lengths, change, dweights, totals)],
            dquery.data_ptr(), dkey.data_ptr(), dweight.data_ptr(), dvalue.data_ptr(),
            *_numbers(query, key, value, weight, ctx.visible), parts, REACH, NEAR, _threads(query, key),
        )  # fmt: skip
        return dquery, dkey, dvalue, dweight.sum_to_size(weight.shape), None, None


def _again(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    visible: Visible,
    learned: tuple[bool, ...],
    upstream: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Return the gradients of `formula` with an autograd graph, so that these gradients can be differentiated again."""
    # The inputs are views, because one tensor may be passed as query, key and value, and each input needs its own
    # gradient.
    query, key, value, weight = (tensor.view_as(tensor) for tensor in tensors)
    tensors = (query, key, value, weight)
    leaves = [tensor for tensor, needed in zip(tensors, learned, strict=True) if needed]
    pairs = [(y, dy) for y, dy in zip(formula(*tensors, visible), upstream, strict=True) if dy is not None]
    if not pairs:
        return [None] * len(learned)
    outputs, changes = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(outputs, leaves, changes, create_graph=True, allow_unused=True))
    return [next(grads) if needed else None for needed in learned]


def formula(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
    """Return output and weights, computed by torch operations that store the hidden units of all pairs."""
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if visible.high is not None:
        allowed = allowed.tril(visible.high)
    if visible.lengths is not None:
        allowed = allowed & (torch.arange(keys) < visible.lengths.view(batch, heads, 1, 1))
    seen = allowed.any(-2).unsqueeze(-1)  # keys that no row attends to may be NaN, and are replaced by 0
    key, value = torch.where(seen, key, 0.0), torch.where(seen, value, 0.0)
    scores = (torch.tanh(query.unsqueeze(3) + key.unsqueeze(2)) * weight[..., None, None, :]).sum(-1)
    lowest = torch.finfo(scores.dtype).min
    weights = torch.where(allowed, torch.softmax(scores.masked_fill(~allowed, lowest), -1), 0.0)
    return weights @ value, weights
