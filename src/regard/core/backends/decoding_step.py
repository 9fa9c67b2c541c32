"""Decoding steps on CUDA: the condition for a call to be one, and the call of their kernel."""

import functools

import torch
from torch import Tensor

from regard.core.clauses import clauses
from regard.core.problem import HALF, Problem
from regard.core.transforms import transformed
from regard.kernels.availability import TRITON

# The largest number of queries for which splitting the keys over programs is faster than splitting the queries.
MOST = 8


def serves(problem: Problem) -> bool:
    """Return whether the call is a decoding step: a few queries, no gradient, and no mask but padding."""
    if problem.device.type != "cuda" or not 0 < problem.shape[-2] <= MOST or problem.shape[-1] == 0 or transformed():
        return False
    if problem.differentiated or problem.bias is not None or problem.dropout > 0.0 or not TRITON:
        return False
    found = clauses(problem.mask, *problem.shape[-2:])
    if found is None or found.banded or found.by_head or len(found.segments) > 0:
        return False
    if any(tensor.shape[-2] > 1 or tensor.shape[-3] > 1 for tensor in found.dense):
        return False  # the kernel only takes masks that are equal for all heads and queries
    return problem.query.dtype in (*HALF, torch.float32) and problem.value.shape[-1] <= 1024


def attend(problem: Problem, query: Tensor, key: Tensor, weight: Tensor | None, scale: float) -> Tensor:
    """Return the output of the step: additive scores if a weight is given, else scale · ⟨query, key⟩."""
    from regard.kernels.triton.decode_attention import decode  # imported here, because it imports Triton

    found = clauses(problem.mask, *problem.shape[-2:])
    lead = problem.query.shape[:-3]
    assert found is not None  # checked by serves()
    lengths = None if found.lengths is None else found.lengths.expand(*lead, 1).reshape(-1)
    mask = None
    if found.dense:
        keys = problem.shape[-1]
        mask = functools.reduce(torch.logical_and, found.dense).expand(*lead, 1, 1, keys).reshape(-1, keys)
    query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, problem.value))
    workers = torch.cuda.get_device_properties(problem.device).multi_processor_count
    output = decode(query, key, value, weight, lengths, mask, scale, workers)
    return output.reshape(*lead, *output.shape[-3:])
