"""Linear attention with elu features by a Triton kernel; `linear` computes the same for every device and feature
map."""

import torch
from torch import Tensor

from regard.core.linear_masks import filled, kept_keys
from regard.core.problem import HALF, Problem
from regard.core.transforms import transformed
from regard.kernels.availability import TRITON

_SIZE = 128  # the largest key and value size: their sum, a matrix, is held in registers
_PROGRAMS = 65_535  # the largest number of programs on the second axis of a launch


def serves(problem: Problem) -> bool:
    """Return whether the kernel can compute this call."""
    if problem.device.type != "cuda" or not TRITON or torch.compiler.is_compiling() or transformed():
        return False
    if problem.query.dtype not in (*HALF, torch.float32) or problem.empty or problem.value.shape[-1] == 0:
        return False
    heads = problem.query[..., 0, 0].numel()
    return max(problem.query.shape[-1], problem.value.shape[-1]) <= _SIZE and heads <= _PROGRAMS


def attend(problem: Problem, causal: bool) -> Tensor:
    """Return the output, (…, h, q, e)."""
    from regard.kernels.triton.linear_attention import linear_attention  # imported here, because it imports Triton

    query, key, value, keep = problem.query, problem.key, problem.value, kept_keys(problem)
    if keep is not None:
        if keep.shape[-2] > 1 and problem.group > 1:  # query heads that share a key head have different masks
            key, value = problem.repeat(key), problem.repeat(value)
        # A query with nothing to attend must not affect any result, even if it is NaN.
        query = torch.where(filled(keep, query.shape[-2], causal).unsqueeze(-1), query, 0)
        keep = keep.expand(*key.shape[:-1]).reshape(-1, *key.shape[-3:-1])
    if causal and key.shape[-2] > query.shape[-2]:  # later keys are attended by no query
        seen = query.shape[-2]
        key, value, keep = key[..., :seen, :], value[..., :seen, :], None if keep is None else keep[..., :seen]
    rows, keys, values = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    output = linear_attention(rows, keys, values, keep, causal).reshape(*problem.shape[:-1], value.shape[-1])
    return output.squeeze(0) if problem.headless else output
