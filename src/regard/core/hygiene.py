"""NaN and Inf in keys and values that a row may not attend must not reach it, not even as 0 · NaN.

A matrix product cannot skip a pair, so keys and values are cleaned first and the rows that do attend something
non-finite are marked after. Cleaning happens only where it is needed: with a mask, and non-finite data.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from regard.core.clauses import clauses
from regard.core.problem import Problem
from regard.core.spans import cut

_ROWS = 512  # rows of the mask evaluated at a time


def tainted(problem: Problem) -> bool:
    """Is there a NaN or Inf that a mask could have to keep out? Reads the data, so a CUDA stream would have to wait."""
    if problem.mask is None and problem.bias is None:
        return False
    if torch.compiler.is_compiling() or (problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return True  # the data cannot be looked at: clean in any case
    # A sum is non-finite if any term is. It may also overflow: then cleaning finds nothing, and costs only time.
    query, key, value = (t.detach().sum(dtype=torch.float32) for t in (problem.query, problem.key, problem.value))
    return not math.isfinite(query + key + value)


def cleaned(problem: Problem) -> tuple[Problem, Tensor | None]:
    """The problem with finite keys and values, and what to add to its output: inf or NaN where it is attended."""
    if problem.bad_keys is not None or not tainted(problem):
        return problem, None
    bad = ~problem.key.isfinite().all(-1)
    finite = problem.value.isfinite()
    marks, filled = _attended(problem)
    problem = replace(
        problem,
        query=torch.where(filled, problem.query, 0),  # a row with nothing to attend gives its query no part
        key=problem.key.masked_fill(bad.unsqueeze(-1), 0),
        value=torch.where(finite, problem.value, 0),
        bad_keys=bad,
    )
    return problem, marks


def _attended(problem: Problem) -> tuple[Tensor, Tensor]:
    """For each output number inf, −inf or NaN if a value attended there is, else 0; and which rows attend anything."""
    value = problem.repeat(problem.value.detach()).to(problem.dtype)
    queries, keys = problem.shape[-2:]
    marks: list[Tensor] = []
    filled: list[Tensor] = []
    for rows in cut(queries, _ROWS):
        allowed = problem.allowed(rows, range(keys))
        if allowed is None:  # a bias rule such as ALiBi: everything may be attended
            allowed = torch.ones(1, 1, dtype=torch.bool, device=problem.device)
        allowed = allowed.expand(*problem.shape[:-2], len(rows), keys)
        filled.append(allowed.any(-1, keepdim=True))
        block = value.new_zeros(())
        for mark, found in ((math.inf, value == math.inf), (-math.inf, value == -math.inf), (math.nan, value.isnan())):
            block = block + torch.where(allowed.to(value.dtype) @ found.to(value.dtype) > 0, mark, 0.0)
        marks.append(block)
    return torch.cat(marks, -2), torch.cat(filled, -2)


def without_unseen(problem: Problem) -> Problem:
    """Zero the keys and values that no query may attend, for fused kernels on data that cannot be looked at.

    On the CPU `tainted` has looked; on a GPU looking would mean waiting for it, so padding is cleaned in any case.
    """
    found = clauses(problem.mask, *problem.shape[-2:])
    if found is None or (problem.device.type == "cpu" and not torch.compiler.is_compiling()):
        return problem
    seen = None
    positions = torch.arange(problem.shape[-1], device=problem.device)
    if found.lengths is not None:
        seen = positions < found.lengths[..., None]
    for dense in found.dense:
        some = dense.any(-2)
        seen = some if seen is None else seen & some
    if seen is None:
        return problem
    seen = seen.expand(*problem.shape[:-2], problem.shape[-1])
    if problem.group > 1:
        seen = seen.unflatten(-2, (-1, problem.group)).any(-2)
    return replace(
        problem,
        key=torch.where(seen.unsqueeze(-1), problem.key, 0),
        value=torch.where(seen.unsqueeze(-1), problem.value, 0),
    )
