"""Weights on request for backends that never form them: whole rows, a block of rows at a time.

A row of scores is its own normaliser, so nothing but query and key is needed again; under autograd each block is
recomputed in the backward pass, so memory stays O(block · keys + what was asked).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.core.hygiene import cleaned
from regard.core.normalizers import Hard, one_hot
from regard.core.problem import Problem
from regard.core.requests import Entropy, Full, Received, Rows, Top
from regard.core.spans import Span, cut

_BLOCK_BYTES = 8 * 2**20  # scores of one block of rows
_FEATURE_BYTES = 32 * 2**20  # what a score may make on the way to them (additive: a hidden layer for each pair)


def weights(problem: Problem, chosen: Tensor | None) -> Tensor | Top:
    """What the problem requests of its weights."""
    request = problem.request
    assert request is not None
    problem, _ = cleaned(problem)
    queries, keys = problem.shape[-2:]
    if isinstance(request, Full):
        return _rows(problem, range(queries), chosen)
    if isinstance(request, Rows):
        return _rows(problem, request.positions(queries).to(problem.device), chosen)

    row_bytes = max(1, problem.query[..., :1].numel() // max(1, queries) * keys * problem.dtype.itemsize)
    blocks = cut(queries, max(1, _BLOCK_BYTES // row_bytes)) or [range(0)]
    compute = (_keep(problem, lambda rows=rows: request.of(_rows(problem, rows, chosen))) for rows in blocks)
    if isinstance(request, Received):
        return sum(compute, start=problem.query.new_zeros((), dtype=problem.dtype))
    parts = list(compute)
    if isinstance(parts[0], Top):
        return Top(torch.cat([part.values for part in parts], -2), torch.cat([part.indices for part in parts], -2))
    return torch.cat(parts, -1)  # entropy


def _keep(problem: Problem, function: Callable[[], Tensor | Top]) -> Tensor | Top:
    """Run the function; where gradients will be asked, keep nothing and run it again in the backward pass."""
    if not problem.differentiated:
        return function()
    return checkpoint(function, use_reentrant=False, preserve_rng_state=False)


def _rows(problem: Problem, rows: Span, chosen: Tensor | None) -> Tensor:
    """The weights of some rows over all keys, in the plain dtype."""
    columns = range(problem.shape[-1])
    hard = problem.normalize if isinstance(problem.normalize, Hard) else None
    if hard is not None and not isinstance(problem.request, Entropy):
        assert chosen is not None
        index = chosen[..., rows.start : rows.stop] if isinstance(rows, range) else chosen.index_select(-1, rows)
        like = problem.query.new_zeros((*index.shape, len(columns)), dtype=problem.dtype)
        return one_hot(index, like, problem.allowed(rows, columns))
    scores = _row_scores(problem, rows)
    allowed = problem.allowed(rows, columns)
    return problem.normalize(scores, allowed) if hard is None else hard.distribution(scores, allowed)


def _row_scores(problem: Problem, rows: Span) -> Tensor:
    """Scores of whole rows; a score that makes many numbers for each pair gets its keys in pieces."""
    query = problem.query[..., rows.start : rows.stop, :] if isinstance(rows, range) else problem.query[..., rows, :]
    query = query.to(problem.dtype)
    keys = problem.shape[-1]

    def piece(columns: range) -> Tensor:
        key = problem.key[..., columns.start : columns.stop, :].to(problem.dtype)
        return problem.scores(query, problem.repeat(key), rows, columns)

    numbers = query[..., 0].numel() * problem.score.floats(query.shape[-1]) * problem.dtype.itemsize
    pieces = cut(keys, max(1, int(_FEATURE_BYTES // max(1, numbers))))
    if len(pieces) <= 1:
        return piece(range(keys))
    return torch.cat([_keep(problem, lambda columns=columns: piece(columns)) for columns in pieces], -1)
