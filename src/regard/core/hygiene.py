"""NaN and Inf in keys and values that a row may not attend must not reach it, not even as 0 · NaN.

A matrix product cannot skip a pair, so keys and values are cleaned first and the rows that do attend something
non-finite are marked after. What no row may attend is simply 0, which also keeps numbers out whose products would
overflow. Cleaning happens only where it is needed: with a mask, and such data.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.core.custom import Custom
from regard.core.machine import capturing
from regard.core.problem import HALF, Problem
from regard.core.spans import all_of, cut
from regard.core.unseen import of_key_heads, seen_by_any, zeroed

_ROWS = 512  # rows of the mask evaluated at a time


def unruly(problem: Problem) -> bool:
    """Is there a number that a mask could have to keep out: NaN, Inf, or one so large that its products overflow?

    Reads the data, so a CUDA stream would have to wait.
    """
    if problem.mask is None and problem.bias is None:
        return False
    if _unreadable(problem) or isinstance(problem.score, Custom):
        return True  # clean in any case: nobody can look, or nobody knows which numbers a score of one's own takes
    limit = math.sqrt(torch.finfo(problem.dtype).max) / 256
    try:
        if not (_largest(problem.key) < limit and _largest(problem.query) < limit):
            return True
        # Values meet no factor but weights until there is a way back: finite is enough, and sooner seen.
        return not (_largest(problem.value) < limit if problem.differentiated else _finite(problem.value))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # under vmap, or fake tensors
        return True


def _unreadable(problem: Problem) -> bool:
    """Can the data not be looked at: compiled, or captured?"""
    return torch.compiler.is_compiling() or capturing(problem.device)


def _largest(tensor: Tensor) -> float:
    """The largest number by its size; NaN where there is one."""
    if tensor.numel() == 0:
        return 0.0
    tensor = tensor.detach()
    # In one pass where that is the faster way: over float32 with gaps, such as part of a cache, it is ten times slower.
    low, high = tensor.aminmax() if tensor.is_contiguous() else (tensor.amin(), tensor.amax())
    return float(torch.maximum(-low, high))


def _finite(tensor: Tensor) -> bool:
    if tensor.dtype in HALF:  # of which sums are slow
        return math.isfinite(_largest(tensor))
    return quickly_finite(tensor) or bool(tensor.isfinite().all())


def all_finite(problem: Problem) -> bool:
    """Is there no NaN or Inf, as far as one can see?"""
    try:
        return all(_finite(t) for t in (problem.query, problem.key, problem.value))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # under vmap, or fake tensors
        return False


def quickly_finite(*tensors: Tensor) -> bool:
    """Is there certainly no NaN or Inf? A sum is quick to take, and non-finite if any term is; it may also overflow."""
    return math.isfinite(sum(float(t.detach().sum(dtype=torch.float32)) for t in tensors))


def cleaned(problem: Problem) -> tuple[Problem, Tensor | None]:
    """The problem with finite keys and values, and what to add to its output: inf or NaN where it is attended."""
    if problem.bad_keys is not None or 0 in problem.shape or not unruly(problem):
        return problem, None
    seen = seen_by_any(problem)
    custom = isinstance(problem.score, Custom)
    query: Tensor | float = 0.0
    key: Tensor | float = 0.0
    if custom:
        good = problem.key.isfinite().all(-1)
        key = _one_of(problem.key, good if seen is None else good & of_key_heads(problem, seen))
    problem = zeroed(problem, seen, key)
    finite_already = not _unreadable(problem) and all_finite(problem)
    if finite_already and not custom:
        return problem, None
    filled = _filled(problem)
    if custom:
        query = _one_of(problem.query, problem.query.isfinite().all(-1) & filled.squeeze(-1))
    # A row with nothing to attend gives its query no part.
    problem = replace(problem, query=torch.where(filled, problem.query, query))
    if finite_already:
        return problem, None
    bad = ~problem.key.isfinite().all(-1)
    finite = problem.value.isfinite()
    marks = _attended(problem)
    problem = replace(
        problem,
        key=torch.where(bad.unsqueeze(-1), key, problem.key),
        value=torch.where(finite, problem.value, 0),
        bad_keys=bad,
    )
    return problem, marks


def _one_of(rows: Tensor, good: Bool[Tensor, "... n"]) -> Tensor:
    """The first good row, (…, 1, size), where there is one.

    What a score of the caller's own makes of zeros, or of any other number, nobody knows: of this it is asked anyway.
    """
    first = good.to(torch.uint8).argmax(-1, keepdim=True)
    row = rows.detach().gather(-2, first.unsqueeze(-1).expand(*first.shape, rows.shape[-1]))
    return torch.where(good.any(-1)[..., None, None], row, 0)


def _filled(problem: Problem) -> Bool[Tensor, "*lead h q 1"]:
    """Which rows attend anything."""
    lead = problem.shape[:-2]
    return torch.cat([allowed.any(-1, keepdim=True).expand(*lead, -1, 1) for allowed in _blocks(problem)], -2)


def _blocks(problem: Problem) -> Iterator[Bool[Tensor, "... rows k"]]:
    """What may be attended, some rows after the others; matrices that heads share are given once."""
    queries, keys = problem.shape[-2:]
    for rows in cut(queries, _ROWS):
        allowed = problem.allowed(rows, all_of(keys))
        if allowed is None:  # a bias rule such as ALiBi: everything may be attended
            allowed = torch.ones(1, 1, dtype=torch.bool, device=problem.device)
        yield allowed.expand(*allowed.shape[:-2], rows.stop - rows.start, keys)


def _attended(problem: Problem) -> Tensor:
    """For each output number inf, −inf or NaN if a value attended there is, else 0."""
    value = problem.repeat(problem.value.detach()).to(problem.dtype)
    marks: list[Tensor] = []
    for allowed in _blocks(problem):
        allowed = allowed.expand(*problem.shape[:-2], *allowed.shape[-2:])
        block = value.new_zeros(())
        for mark, found in ((math.inf, value == math.inf), (-math.inf, value == -math.inf), (math.nan, value.isnan())):
            block = block + torch.where(allowed.to(value.dtype) @ found.to(value.dtype) > 0, mark, 0.0)
        marks.append(block)
    return torch.cat(marks, -2)
