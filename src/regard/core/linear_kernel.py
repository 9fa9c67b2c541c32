"""Linear attention with elu or Performer features by kernels on CUDA; `linear` serves every device and feature map."""

import torch
from torch import Tensor

from regard.core.features import EluFeatures, Features, PerformerFeatures
from regard.core.linear_masks import filled, kept_keys
from regard.core.problem import HALF, Problem
from regard.core.transforms import transformed
from regard.kernels.availability import TRITON

_SIZE = 128  # of keys and values: their sum, a matrix, lies in registers
_CHUNK, _SUMS = 64, 4 << 30  # positions of a causal chunk, and bytes of the sums of all chunks
_PROGRAMS = 65_535  # on the second axis of a launch


def serves(problem: Problem, features: Features, causal: bool) -> bool:
    """Do the kernels compute this call?"""
    if problem.device.type != "cuda" or not TRITON or torch.compiler.is_compiling() or transformed():
        return False
    if problem.query.dtype not in (*HALF, torch.float32) or problem.empty or problem.value.shape[-1] == 0:
        return False
    if isinstance(features, PerformerFeatures):
        count = features.projection.shape[0]
        if features.projection.requires_grad:
            return False
    elif isinstance(features, EluFeatures):
        count = problem.query.shape[-1]
    else:
        return False
    heads, size = problem.query[..., 0, 0].numel(), problem.value.shape[-1]
    chunks = problem.shape[-1] // _CHUNK if causal else 0
    fits = heads * chunks * count * size * 4 <= _SUMS
    return fits and max(problem.query.shape[-1], size) <= _SIZE and heads <= _PROGRAMS


def attend(problem: Problem, features: Features, causal: bool) -> Tensor:
    """The output, (…, h, q, e)."""
    from regard.kernels.triton.linear.operator import linear_attention  # imports Triton: only where it is used

    projection = None
    if isinstance(features, PerformerFeatures):
        features.check(problem.query)
        projection = features.projection
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
    output = linear_attention(rows, keys, values, keep, projection, causal)
    output = output.reshape(*problem.shape[:-1], value.shape[-1])
    return output.squeeze(0) if problem.headless else output
