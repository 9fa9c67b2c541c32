"""Dot-product attention over a part of the keys by torch's flash kernel on CUDA, in half precision.

As in `flash` (the module for the CPU), the kernel's backward pass receives the output and the log-sum-exp over all keys
instead of those over the part.
"""

import torch
from torch import Tensor

from regard.core.backends import blocked, torch_sdpa
from regard.core.backends.flash import plain_softmax, scale_of
from regard.core.problem import HALF, Problem
from regard.core.transforms import transformed

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_SIZE = 256  # the largest head size that torch's flash kernel supports


def serves(problem: Problem) -> bool:
    """Return whether the call is softmax attention of dot products in half precision, without a mask or with a causal
    one."""
    if problem.device.type != "cuda" or problem.query.dtype not in HALF or problem.empty:
        return False
    if not plain_softmax(problem):
        return False
    sizes = {t.shape[-1] for t in (problem.query, problem.key, problem.value)}
    if len(sizes) > 1 or max(sizes) > _SIZE or max(sizes) % 8 or scale_of(problem) <= 0:
        return False
    if transformed() or torch.compiler.is_compiling() or not torch_sdpa.has_flash(problem.device):
        return False
    return _causal(problem) is not None


def part_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over a part of the keys, in float32 and without an autograd graph."""
    with torch.no_grad():
        query, key, value = _four_axes(problem)
        output, total, *_ = _FORWARD(query, key, value, 0.0, _causal(problem) or False, False, scale=scale_of(problem))
        lead = problem.shape[:-1]
        return output.reshape(*lead, -1).float(), total[..., : lead[-1]].reshape(lead)


def part_backward(problem: Problem, output: Tensor, total: Tensor, doutput: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value for a part of the keys; `output` and `total` are those over all keys."""
    with torch.no_grad():
        query, key, value = _four_axes(problem)
        output, doutput = (t.to(query.dtype).reshape(query.shape) for t in (output, doutput))
        total = total.reshape(query.shape[:3]).contiguous()
        queries, keys = problem.shape[-2:]
        # The None arguments are the lengths of packed sequences, and the zeros the random state of dropout: this call
        # has neither.
        grads = _BACKWARD(
            doutput, query, key, value, output, total, None, None, queries, keys, 0.0, _causal(problem) or False,
            *torch.zeros(2, dtype=torch.int64, device=query.device).unbind(), scale=scale_of(problem),
        )  # fmt: skip
        lead, size = problem.query.shape[:-3], query.shape[-1]
        heads = (grads[0], *(blocked.summed_groups(t.float(), problem.group) for t in grads[1:]))
        dquery, dkey, dvalue = (t.float().reshape(*lead, *t.shape[1:-1], size) for t in heads)
        return dquery, dkey, dvalue


def _causal(problem: Problem) -> bool | None:
    """Return True for a causal mask and False for no mask; None if the kernel does not support the mask."""
    queries, keys = problem.shape[-2:]
    rules = problem.mask_rules
    if rules is None or rules.lengths is not None or rules.segments or rules.dense:
        return None
    if not rules.banded:
        return False
    return True if rules.low is None and rules.high == 0 and queries == keys else None


def _four_axes(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as (batch, heads, length, size) with repeated key heads and a last stride of 1."""
    tensors = (problem.query, problem.repeat(problem.key), problem.repeat(problem.value))
    query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in tensors)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    return query, key, value
