"""Additive attention on the CPU in compiled C: one parallel region for the forward pass, two for the backward pass.

On a machine with other busy processes each parallel region may wait for a core, so their number matters more there than
their work. Each row is scored, normalised and multiplied with the values by one thread, over the keys that it attends;
masked keys and values are never read. Reference implementation: `regard.core.backends.reference`.
"""

import ctypes
import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.kernels.additive.exponential import NEAR, REACH
from regard.kernels.additive.pair_loops import call_native, lanes, segments
from regard.kernels.derivatives import REFERENCE, once_only


class Visible(NamedTuple):
    """The keys that rows attend: j < lengths (z,) int64 contiguous, if given, and j ≤ i + high, if given."""

    lengths: Tensor | None
    high: int | None


class _Prepared(NamedTuple):
    """Exponentials of queries and keys (z, n, f), weights (z, f), padded to whole vectors, and their form."""

    rows: Tensor
    columns: Tensor
    weight: Tensor
    near: bool


def attention(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible) -> Tensor | None:
    """Return the output (b, h, q, e); None if a number is too large or not finite.

    query (b, h, q, f), key (b, h, k, f), value (b, h, k, e) and weight (f,) or (h, f) are float32.
    """
    tensors = query, key, value, weight
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        output = cast(Tensor | None, _Attention.apply(*tensors, visible))
        return None if output is not None and output.numel() == 0 else output
    found = _forward(*tensors, visible)
    return None if found is None else found[0]


def _prepared(query: Tensor, key: Tensor, weight: Tensor) -> _Prepared | None:
    """Return the exponentials of all rows; None if they would overflow, or a number is not finite."""
    query, key, weight = query.contiguous(), key.contiguous(), weight.contiguous()
    largest = [call_native("regard_largest", (t,), t.numel(), result=ctypes.c_float) for t in (query, key, weight)]
    if not (largest[0] <= REACH and largest[1] <= REACH and largest[2] < math.inf):
        return None
    near, size = largest[0] + largest[1] <= NEAR, query.shape[-1]
    padded, slices = size + -size % lanes(), query.shape[0] * query.shape[1]
    made = []
    for t in (query, key):
        target = t.new_empty(slices, t.shape[2], padded)
        call_native("regard_exponentials", (t, target), slices * t.shape[2], size, padded, int(near))
        made.append(target)
    weights = weight.new_zeros(*query.shape[:2], padded)
    weights[..., :size] = weight
    return _Prepared(made[0], made[1], weights, near)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible
) -> tuple[Tensor, Tensor, _Prepared] | None:
    """Return output, the largest score and inverse sum of each row (z, q, 2), and what was prepared."""
    made = _prepared(query.detach(), key.detach(), weight.detach())
    if made is None:
        return None
    value = value.detach().contiguous()
    output = value.new_empty(*query.shape[:3], value.shape[-1])
    totals = value.new_empty(*made.rows.shape[:2], 2)
    given = made.rows, made.columns, made.weight, value, visible.lengths, output, totals
    name = "regard_near_attention" if made.near else "regard_far_attention"
    bad = call_native(name, given, *_sizes(made, value, visible), torch.get_num_threads(), result=ctypes.c_int)
    return None if bad else (output, totals, made)


def _sizes(made: _Prepared, value: Tensor, visible: Visible) -> tuple[int, ...]:
    banded = visible.high is not None
    slices, queries, features = made.rows.shape
    return slices, queries, made.columns.shape[1], features, value.shape[-1], visible.high or 0, int(banded)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, visible: Visible) -> Tensor:
        found = _forward(query, key, value, weight, visible)
        if found is None:
            return query.new_empty(0)
        output, totals, made = found
        ctx.save_for_backward(query, key, value, weight, output, totals)
        ctx.visible, ctx.near = visible, made.near
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        once_only("backend 'additive'", REFERENCE)
        query, key, value, weight, output, totals = ctx.saved_tensors
        made = _prepared(query, key, weight)
        assert made is not None  # the forward pass prepared the same inputs
        values, change = value.contiguous(), upstream[0].contiguous()
        slices, queries, keys = *made.rows.shape[:2], made.columns.shape[1]
        changes, weights = (values.new_empty(slices, queries, keys) for _ in range(2))
        given = made.rows, made.columns, made.weight, values, ctx.visible.lengths, change, output, totals
        name = "regard_near_changes" if made.near else "regard_far_changes"
        call_native(name, (*given, changes, weights), *_sizes(made, values, ctx.visible), torch.get_num_threads())
        parts = segments(*made.rows.shape)
        room = [
            torch.empty_like(made.rows),
            torch.empty_like(made.rows),
            made.columns.new_empty(parts, *made.columns.shape),
        ]
        grads = [values.new_empty(t.shape) for t in (query, key)]
        dweight, dvalue = values.new_empty(*query.shape[:2], query.shape[-1]), torch.empty_like(values)
        given = made.rows, made.columns, made.weight, changes, weights, change, ctx.visible.lengths
        numbers = *_sizes(made, values, ctx.visible), parts, query.shape[-1], torch.get_num_threads()
        name = "regard_near_gradients" if made.near else "regard_far_gradients"
        call_native(name, (*given, *room, *grads, dweight, dvalue), *numbers)
        return grads[0], grads[1], dvalue, dweight.sum_to_size(weight.shape), None
