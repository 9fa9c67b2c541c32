"""Requested weights for backends that do not compute them: by a kernel (`summaries`) where one supports the call,
otherwise one block of whole rows at a time.

A row of weights depends only on the scores of that row, so query and key suffice. Under autograd each block is
recomputed in the backward pass, so memory stays O(rows of a block · keys + requested weights).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.core import kernel_scores, summaries
from regard.core.backward_checks import Unchanged
from regard.core.custom import Custom
from regard.core.nonfinite import finite_keys
from regard.core.normalizers import Hard, log_sum_exp, one_hot
from regard.core.problem import Problem
from regard.core.requests import Entropy, Full, LogSumExp, Received, Request, Rows, Top, TopWeights
from regard.core.spans import Span, Stretch, all_of, cut
from regard.kernels.device_memory import affordable

Weights = TypeVar("Weights", Tensor, "Tensor | Top")

_BLOCK_BYTES = 8 * 2**20  # bytes of the scores of one block of rows on a CPU
_FEATURE_BYTES = 32 * 2**20  # bytes on a CPU of intermediate tensors such as the hidden layer of additive scores
_SHARE = 512  # on a GPU scores of a block and intermediate tensors may each take this fraction (1/512) of the memory


def weights(problem: Problem, chosen: Tensor | None, lse: Tensor | None = None) -> Tensor | Top:
    """Return the requested weights; `lse` is the log-sum-exp of each row, if the backend returned it.

    `chosen` holds the index of each query's key in hard attention.
    """
    request = problem.request
    assert request is not None
    if summaries.serves(problem):
        if isinstance(request, TopWeights) and problem.differentiated:
            return Top(*_Top.apply(problem, lse, problem.query, problem.key))
        return summaries.weights(problem, lse)
    if lse is not None and summaries.sums_serve(problem):
        return summaries.sums(problem, lse)
    return _in_blocks(problem, chosen)


class _Top(torch.autograd.Function):
    """The autograd function of the largest weights: forward by a kernel, backward by computing them again in blocks."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, lse: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        top = summaries.weights(problem, lse)
        assert isinstance(top, Top)
        ctx.save_for_backward(query, key)
        ctx.problem, ctx.unchanged = problem, Unchanged(problem, value=False)
        ctx.mark_non_differentiable(top.indices)
        return top.values, top.indices

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.unchanged.check()
        again, wanted = torch.is_grad_enabled(), ctx.needs_input_grad[2:]
        leaves = list(ctx.saved_tensors)
        if not again:
            leaves = [t.detach().requires_grad_(needed) for t, needed in zip(leaves, wanted, strict=True)]
        with torch.enable_grad():
            top = _in_blocks(replace(ctx.problem, query=leaves[0], key=leaves[1]), None)
        assert isinstance(top, Top)
        inputs = [leaf for leaf, needed in zip(leaves, wanted, strict=True) if needed]
        grads = iter(torch.autograd.grad(top.values, inputs, upstream[0].to(top.values.dtype), create_graph=again))
        return None, None, *(next(grads) if needed else None for needed in wanted)


def _in_blocks(problem: Problem, chosen: Tensor | None) -> Tensor | Top:
    """Return the requested weights, computed one block of rows at a time."""
    request = problem.request
    assert request is not None
    problem = finite_keys(kernel_scores.by_kernel(problem))
    queries = problem.shape[-2]
    if isinstance(request, Full):
        return _rows(problem, all_of(queries), chosen)
    if isinstance(request, Rows):
        return _rows(problem, request.positions_on(problem.device, queries), chosen)

    whole: list[Tensor] = []
    for rows in cut(queries, _block_rows(problem)) or [all_of(0)]:
        part = _keep(problem, lambda rows=rows: _part(problem, request, rows, chosen))
        pieces = list(part) if isinstance(part, Top) else [part]
        if isinstance(request, Received):
            whole = [a + b for a, b in zip(whole, pieces, strict=True)] if whole else pieces
            continue
        axis = -2 if isinstance(request, TopWeights) else -1
        whole = whole or [_room(piece, axis, queries) for piece in pieces]
        for room, piece in zip(whole, pieces, strict=True):
            room.narrow(axis, rows.start, len(rows)).copy_(piece)
    return Top(*whole) if isinstance(request, TopWeights) else whole[0]


def working_bytes(problem: Problem) -> int:
    """Return the bytes of working memory in which the requested weights are computed.

    The working memory holds one block of rows, or all rows if full rows are requested. The kernels of `summaries` only
    store one number for each row.
    """
    if summaries.serves(problem):
        return 4 * math.prod(problem.shape[:-1])
    problem = kernel_scores.by_kernel(problem)
    rows = rows_requested(problem)
    if not isinstance(problem.request, (Full, Rows)):
        rows = min(rows, _block_rows(problem))
    pairs = math.prod(problem.shape[:-2]) * rows * problem.shape[-1] * problem.dtype.itemsize
    features = affordable(problem.device, _FEATURE_BYTES, _SHARE)
    return 3 * pairs + min(features, int(pairs * problem.score.floats(problem.query.shape[-1])))


def rows_requested(problem: Problem) -> int:
    """Return the number of queries whose weights are computed for the request (all of them, or the requested rows)."""
    request, queries = problem.request, problem.shape[-2]
    return len(request.positions(queries)) if isinstance(request, Rows) else queries


def _block_rows(problem: Problem) -> int:
    """Return the number of query rows whose scores, over batch and heads, fit the memory of one block."""
    row_bytes = math.prod(problem.shape[:-2]) * problem.shape[-1] * problem.dtype.itemsize
    return max(1, affordable(problem.device, _BLOCK_BYTES, _SHARE) // max(1, row_bytes))


def _room(like: Tensor, axis: int, length: int) -> Tensor:
    """Return an empty tensor for the results of all blocks, in the shape of the first result but with `length` entries
    along `axis`.

    The tensor is allocated before further blocks: small results between large blocks would fragment the heap.
    """
    shape = list(like.shape)
    shape[axis] = length
    return like.new_empty(shape)


def _keep(problem: Problem, function: Callable[[], Weights]) -> Weights:
    """Return function(); if gradients are needed, the backward pass calls the function again instead of storing
    activations."""
    if not problem.differentiated:
        return function()
    unchanged: list[Unchanged] = []  # this list is filled after the forward pass, for the check in the backward pass

    def run() -> Weights:
        for since in unchanged:
            since.check()
        return function()

    result = cast(Weights, checkpoint(run, use_reentrant=False, preserve_rng_state=False))
    unchanged.append(Unchanged(problem, value=False))
    return result


def _part(problem: Problem, request: Request, rows: Stretch, chosen: Tensor | None) -> Tensor | Top:
    """Return the request's result for a block of rows."""
    if not isinstance(request, LogSumExp):
        return request.of(_rows(problem, rows, chosen))
    scores = _row_scores(problem, rows)
    return log_sum_exp(scores, problem.open(scores, rows, all_of(problem.shape[-1])))


def _rows(problem: Problem, rows: Span, chosen: Tensor | None) -> Tensor:
    """Return the weights of some rows over all keys, in at least float32."""
    columns = all_of(problem.shape[-1])
    hard = problem.normalize if isinstance(problem.normalize, Hard) else None
    if hard is not None and not isinstance(problem.request, Entropy):
        assert chosen is not None
        index = chosen[..., rows.start : rows.stop] if not isinstance(rows, Tensor) else chosen.index_select(-1, rows)
        like = problem.query.new_zeros((*index.shape, len(columns)), dtype=problem.dtype)
        with torch.no_grad():  # a user's score function may return −inf, which masks, so its scores must be computed
            scores = _row_scores(problem, rows) if isinstance(problem.score, Custom) else like
        return one_hot(index, like, problem.open(scores, rows, columns))
    scores = _row_scores(problem, rows)
    allowed = problem.open(scores, rows, columns)
    return problem.weights(scores, allowed) if hard is None else hard.distribution(scores, allowed)


def _row_scores(problem: Problem, rows: Span) -> Tensor:
    """Return the scores of some rows over all keys.

    A score with large intermediate tensors, such as an additive score, is computed for a part of the keys at a time.
    """
    query = (
        problem.query[..., rows.start : rows.stop, :] if not isinstance(rows, Tensor) else problem.query[..., rows, :]
    )
    query = query.to(problem.dtype)
    keys = problem.shape[-1]

    def piece(columns: Stretch) -> Tensor:
        key = problem.key[..., columns.start : columns.stop, :].to(problem.dtype)
        return problem.scores(query, problem.repeat(key), rows, columns)

    numbers = math.prod(query.shape[:-1]) * problem.score.floats(query.shape[-1]) * problem.dtype.itemsize
    features = affordable(problem.device, _FEATURE_BYTES, _SHARE)
    pieces = cut(keys, max(1, int(features // max(1, numbers))))
    if len(pieces) <= 1:
        return piece(all_of(keys))
    return torch.cat([_keep(problem, lambda columns=columns: piece(columns)) for columns in pieces], -1)
