"""Keys that no query may attend: zeros before a kernel multiplies whole tiles, in which 0 · NaN would be NaN.

They are found from the rules of the mask where one rule at a time closes them, so that no pair is looked at; else from
the pairs, a block of rows after the other.
"""

import functools
import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.core.biases import DenseBias
from regard.core.clauses import Clauses, clauses
from regard.core.problem import Problem
from regard.core.spans import all_of, cut

_NUMBERS = 2**26  # entries of mask and bias looked at together


def without_unseen(problem: Problem) -> Problem:
    """Zero the keys and values that no query may attend, for fused kernels on data that cannot be looked at.

    On the CPU `unruly` has looked; on a GPU looking would mean waiting for it, so unseen keys are cleaned in any case.
    """
    if _looked_at(problem) or 0 in problem.shape:
        return problem
    return zeroed(problem, seen_by_any(problem))


def zeroed(problem: Problem, seen: Bool[Tensor, "... k"] | None, key: Tensor | float = 0.0) -> Problem:
    """Keys and values that are not among the seen ones as zeros, or with another key in their place."""
    if seen is None:
        return problem
    seen = of_key_heads(problem, seen).unsqueeze(-1)
    return replace(problem, key=torch.where(seen, problem.key, key), value=torch.where(seen, problem.value, 0))


def of_key_heads(problem: Problem, seen: Bool[Tensor, "... k"]) -> Bool[Tensor, "... g n"]:
    """Seen by any of the query heads that share a key head."""
    seen = seen.expand(*problem.shape[:-2], problem.shape[-1])
    return seen.unflatten(-2, (-1, problem.group)).any(-2) if problem.group > 1 else seen


def seen_by_any(problem: Problem) -> Bool[Tensor, "... k"] | None:
    """Keys that some query may attend, by mask and bias; None where that is all of them.

    A table of `relative` is only looked at where looking is free: it would have to hold −inf for a whole column.
    """
    queries, keys = problem.shape[-2:]
    found, bias = clauses(problem.mask, queries, keys), problem.bias
    closing = bias is not None and bias.may_mask and (isinstance(bias, DenseBias) or _looked_at(problem))
    if found is not None and found.separate and not closing:
        return seen_keys(found, queries, keys, problem.device)
    if problem.mask is None and isinstance(bias, DenseBias):
        return bias.tensor.detach().amax(-2).to(problem.dtype) != -math.inf
    seen: list[Tensor] = []
    for rows in cut(queries, max(16, _NUMBERS // (keys * max(1, problem.matrices)))):
        allowed = problem.allowed(rows, all_of(keys))
        if allowed is None:
            return None
        seen.append(allowed.any(-2))
    return functools.reduce(torch.logical_or, seen)


def seen_keys(found: Clauses, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "... k"] | None:
    """Keys that some query may attend by each clause for itself; None where that is all of them."""
    parts: list[Tensor] = []
    if found.low is not None and found.high is not None and found.low > found.high:
        return torch.zeros(keys, dtype=torch.bool, device=device)
    early = found.low is not None and found.low > 0
    late = found.high is not None and queries - 1 + found.high < keys - 1
    if early or late or found.lengths is not None:
        position = torch.arange(keys, device=device)
        if found.low is not None and early:
            parts.append(position >= found.low)
        if found.high is not None and late:
            parts.append(position <= queries - 1 + found.high)
        if found.lengths is not None:
            parts.append(position < found.lengths[..., None])
    for query_ids, key_ids in found.segments:
        # In packed self-attention every key has a query: its own.
        if query_ids is not key_ids or (found.low or 0) > 0 or (found.high or 0) < 0:
            parts.append(_with_company(query_ids, key_ids, found.low, found.high))
    parts += [dense.any(-2) for dense in found.dense]
    return functools.reduce(torch.logical_and, parts) if parts else None


def _with_company(
    query_ids: Int[Tensor, "... q"], key_ids: Int[Tensor, "... k"], low: int | None, high: int | None
) -> Bool[Tensor, "... k"]:
    """Keys j with a query i of their segment for which low ≤ j − i ≤ high."""
    queries, position = query_ids.shape[-1], torch.arange(key_ids.shape[-1], device=key_ids.device)
    lead = torch.broadcast_shapes(query_ids.shape[:-1], key_ids.shape[:-1])
    ordered, place = (t.expand(*lead, -1).contiguous() for t in query_ids.sort(stable=True))
    wanted = key_ids.expand(*lead, -1).contiguous()
    nearest = torch.searchsorted(ordered, wanted)  # the first query of the key's segment,
    if high is not None:  # or the first that is not too far before it: by segment, then by place, queries rise
        least = (position - high).clamp(0, queries - 1)
        nearest = torch.searchsorted(torch.searchsorted(ordered, ordered) * queries + place, nearest * queries + least)
    nearest = nearest.clamp_max(queries - 1)
    distance = position - place.gather(-1, nearest)
    found = ordered.gather(-1, nearest) == wanted
    found = found if low is None else found & (distance >= low)
    return found if high is None else found & (distance <= high)


def _looked_at(problem: Problem) -> bool:
    """Can the data be looked at, and at no cost?"""
    return problem.device.type == "cpu" and not torch.compiler.is_compiling()
