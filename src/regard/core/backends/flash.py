"""Dot-product attention over a part of the keys by torch's CPU flash kernel, which also returns the log-sum-exp.

For the gradient of a part, the kernel's backward pass receives the output and the log-sum-exp over all keys instead of
those of the part. It then computes exp(s − L) from the scores s of the part and the log-sum-exp L over all keys, which
are the weights among all keys (Liu et al. 2023).
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.backends import blocked, mask_blocks, sdpa
from regard.core.backends.result import Result
from regard.core.backward_checks import Unchanged, once_only
from regard.core.nonfinite import all_finite, needs_cleaning
from regard.core.problem import Problem
from regard.core.scores import Dot, ScaledDot
from regard.core.spans import Stretch, all_of, take

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def serves(problem: Problem) -> bool:
    """Return whether the call is softmax attention with dot-product scores on the CPU, with finite inputs."""
    if problem.device.type != "cpu" or problem.empty or problem.value.shape[-1] == 0:
        return False
    if not plain_softmax(problem):
        return False
    return scale_of(problem) > 0 and not needs_cleaning(problem) and all_finite(problem)


def plain_softmax(problem: Problem) -> bool:
    """Return whether the call is softmax attention with dot-product scores, without a softcap, a bias or dropout."""
    plain = type(problem.score) is Dot or (type(problem.score) is ScaledDot and problem.score.softcap is None)
    return plain and problem.normalize.is_softmax and problem.bias is None and problem.dropout == 0.0


def attend(problem: Problem) -> Result:
    """Return the output of attention and its log-sum-exp; autograd can differentiate the two results."""
    output, total = _Flash.apply(problem, problem.query, problem.key, problem.value)
    return Result(output, total)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output, total = part_forward(problem)
        ctx.set_materialize_grads(False)  # the gradient of an unused output is then None, not a tensor of zeros
        ctx.problem, ctx.unchanged = problem, Unchanged(problem)
        ctx.save_for_backward(output, total)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):  # the log-sum-exp does not depend on the values
            ctx.mark_non_differentiable(total)
        return output.to(query.dtype), total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        once_only(sdpa.NAME)
        ctx.unchanged.check()
        problem, (output, total) = ctx.problem, ctx.saved_tensors
        doutput = torch.zeros_like(output) if upstream[0] is None else upstream[0]
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            if upstream[1] is None:
                grads = part_backward(problem, output, total, doutput)
            else:
                grads = blocked.part_backward(problem, output, total, doutput, upstream[1])[:3]
        return None, *(grad.to(problem.query.dtype) for grad in grads)


class _Tile(NamedTuple):
    """A range of queries (rows), the range of keys (columns) that these queries may attend, and the mask for the
    kernel."""

    rows: Stretch
    columns: Stretch
    mask: Tensor | None
    causal: bool


def part_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over a part of the keys, in at least float32 and without an autograd graph."""
    with torch.no_grad():
        query, key, value = _four_axes(problem)
        outputs: list[Tensor] = []
        totals: list[Tensor] = []
        for tile in _tiles(problem):
            output, total = _FORWARD(
                take(query, -2, tile.rows), take(key, -2, tile.columns), take(value, -2, tile.columns),
                0.0, tile.causal, attn_mask=_numbers(tile, query), scale=scale_of(problem),
            )  # fmt: skip
            if tile.mask is not None:  # for a row without allowed keys the kernel returns a log-sum-exp of 0, not −inf
                total = torch.where(tile.mask.any(-1), total, -math.inf)
            outputs.append(output)
            totals.append(total)
        output, total = torch.cat(outputs, -2), torch.cat(totals, -1)
        lead = problem.query.shape[:-3]
        output = output[..., : problem.value.shape[-1]].reshape(*lead, *output.shape[1:-1], -1)
        return output.to(problem.dtype), total.reshape(*lead, *total.shape[1:]).to(problem.dtype)


def part_backward(problem: Problem, output: Tensor, total: Tensor, doutput: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value for a part of the keys; `output` and `total` are those over all keys."""
    with torch.no_grad():
        query, key, value = _four_axes(problem)
        output, doutput = (_padded(_flat(t.to(query.dtype)), query.shape[-1]) for t in (output, doutput))
        total = torch.where(total == -math.inf, 0, total)  # in rows without allowed keys, −inf − total would be NaN
        total = total.reshape(query.shape[0], *total.shape[-2:])
        grads = tuple(torch.zeros(t.shape, dtype=problem.dtype) for t in (query, key, value))
        for tile in _tiles(problem):
            parts = _BACKWARD(
                *(take(t, -2, tile.rows) for t in (doutput, query)),
                *(take(t, -2, tile.columns) for t in (key, value)),
                take(output, -2, tile.rows), take(total, -1, tile.rows),
                0.0, tile.causal, attn_mask=_numbers(tile, query), scale=scale_of(problem),
            )  # fmt: skip
            for grad, part, span in zip(grads, parts, (tile.rows, tile.columns, tile.columns), strict=True):
                target = take(grad, -2, span)
                target += part
        dquery, dkey, dvalue = grads
        sizes = (problem.query.shape[-1], problem.key.shape[-1], problem.value.shape[-1])
        heads = (dquery, *(blocked.summed_groups(t, problem.group) for t in (dkey, dvalue)))
        lead = problem.query.shape[:-3]
        dquery, dkey, dvalue = (
            t[..., :size].reshape(*lead, *t.shape[1:-1], size) for t, size in zip(heads, sizes, strict=True)
        )
        return dquery, dkey, dvalue


def scale_of(problem: Problem) -> float:
    """Return the factor with which the score multiplies dot products."""
    score = problem.score
    return score.factor(problem.query.shape[-1]) if isinstance(score, ScaledDot) else 1.0


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, *tensor.shape[-3:])


def _padded(tensor: Tensor, size: int) -> Tensor:
    """Return the tensor with columns of zeros appended up to a size; its last axis has stride 1."""
    missing = size - tensor.shape[-1]
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()  # torch's kernel assumes a last stride of 1


def _four_axes(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as (batch, heads, length, size), with repeated key heads and equal sizes.

    The smaller size is padded with zero columns, which change neither scores nor output.
    """
    size = max(problem.query.shape[-1], problem.value.shape[-1])
    query, key, value = (
        _padded(_flat(t), size) for t in (problem.query, problem.repeat(problem.key), problem.repeat(problem.value))
    )
    return query, key, value


def _tiles(problem: Problem) -> Iterator[_Tile]:
    """Yield one `_Tile` if the kernel supports the mask, else a `_Tile` for each block of queries and its allowed
    keys."""
    queries, keys = problem.shape[-2:]
    rules = problem.mask_rules
    by_band = rules is not None and rules.lengths is None and not rules.segments and not rules.dense
    if rules is not None and by_band and (not rules.banded or (rules.low is None and rules.high == 0)):
        yield _Tile(all_of(queries), all_of(keys), None, rules.banded)
        return
    for rows, columns in mask_blocks.visible(problem):
        assert problem.mask is not None  # not None, because calls without a mask return above
        allowed = problem.mask.allowed(rows, columns, problem.device)
        allowed = allowed.expand(*allowed.shape[:-2], len(rows), len(columns))
        yield _Tile(rows, columns, mask_blocks.four_axes(allowed, problem), False)


def _numbers(tile: _Tile, like: Tensor) -> Tensor | None:
    """Return the mask of a `_Tile` as a tensor of 0 and −inf to add to the scores, in the queries' dtype as the kernel
    requires."""
    if tile.mask is None:
        return None
    return torch.zeros(tile.mask.shape, dtype=like.dtype).masked_fill_(~tile.mask, -math.inf)
