"""Mask and bias of a call as tensors and numbers, for Triton kernels that evaluate them pair by pair."""

import functools
from typing import Any

import torch
from torch import Tensor

from regard.core.biases import DenseBias, Relative, Rule
from regard.core.clauses import clauses
from regard.core.problem import Problem


def mask_arguments(problem: Problem, lead: torch.Size) -> dict[str, Any]:
    """Return the mask as the kernels take it."""
    found = clauses(problem.mask, *problem.shape[-2:])
    assert found is not None  # the caller has checked this
    pairs: dict[str, Any] = {"band": (found.low, found.high)}
    if found.lengths is not None:
        pairs["lengths"] = found.lengths.expand(*lead, 1).reshape(-1)
    if found.segments:
        ids = (t.expand(*lead, 1, -1).reshape(-1, t.shape[-1]) for t in found.segments[0])
        pairs["query_ids"], pairs["key_ids"] = ids
    if found.dense:
        pairs["mask"] = _four_axes(functools.reduce(torch.logical_and, found.dense), lead)
    return pairs


def bias_arguments(problem: Problem, lead: torch.Size) -> dict[str, Any]:
    """Return the bias as the kernels take it."""
    heads, bias = problem.shape[-3], problem.bias
    if isinstance(bias, DenseBias):
        return {"bias": _four_axes(bias.tensor, lead)}
    if bias is None or (isinstance(bias, Relative) and bias.offset == 0):
        return {} if bias is None else {"relative": bias.table.expand(heads, -1)}
    assert isinstance(bias, Rule)  # the caller has checked this
    # A bias rule becomes a table over all distances j - i that occur: its size is linear in the length.
    reach = bias.reach if isinstance(bias, Relative) else max(problem.shape[-2:])
    far = reach + abs(bias.offset)
    table = bias.values(range(1), range(-far, far + 1), torch.float32).squeeze(-2)
    return {"relative": table.expand(heads, -1)}


def _four_axes(tensor: Tensor, lead: torch.Size) -> Tensor:
    """Return the tensor as (batch, heads, queries, keys), with 1 on axes that broadcast."""
    if len(lead) < 2:
        return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
    return tensor.expand(*lead, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])
