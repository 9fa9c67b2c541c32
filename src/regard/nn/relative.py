"""Relative positions of keys and values (Shaw et al. 2018), without a vector for each pair."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.core.attended import Attended
from regard.core.biases import Bias
from regard.core.hard import choose
from regard.core.masks import Mask
from regard.core.nonfinite import cleaned
from regard.core.normalizers import Hard, Normalizer, Softmax, log_sum_exp
from regard.core.problem import Problem, build
from regard.core.requests import Entropy, LogSumExp, Received, Request, Rows, Top
from regard.core.scores import Dot, ScaledDot, Score
from regard.core.spans import Stretch, all_of, cut, take

_BLOCK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}  # bytes of the scores of a block of queries, by device


class RelativePositions(nn.Module):
    """Keys and values with a learned vector for each distance: k_j + a_{j−i} and v_j + c_{j−i}, clipped to ±reach.

    scores q_i · (k_j + a_{j−i}) / √d, outputs Σ_j w_ij (v_j + c_{j−i}) (Shaw et al. 2018, equations 3 to 5; the tables
    are shared by the heads). The scores' term is q Aᵀ, (n, 2 reach + 1), indexed along diagonals; the values' term is
    the weights summed by distance, times the table. No (n, n, d) tensor is formed, and queries are processed in blocks.

    >>> positions = RelativePositions(head_size=4, reach=2)
    >>> tuple(positions.key_table.shape), tuple(positions.value_table.shape)
    ((5, 4), (5, 4))
    """

    def __init__(self, head_size: int, reach: int) -> None:
        super().__init__()
        if head_size < 1 or reach < 1:
            raise ValueError(f"head_size and reach must be at least 1, got {head_size} and {reach}")
        self.head_size = head_size
        self.reach = reach
        self.key_table = nn.Parameter(torch.empty(2 * reach + 1, head_size))
        self.value_table = nn.Parameter(torch.empty(2 * reach + 1, head_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise both tables by Xavier uniform."""
        nn.init.xavier_uniform_(self.key_table)
        nn.init.xavier_uniform_(self.value_table)

    def attend(
        self,
        query: Float[Tensor, "b h q d"],
        key: Float[Tensor, "b g k d"],
        value: Float[Tensor, "b g k d"],
        *,
        score: Score = ScaledDot(),
        normalize: Normalizer = Softmax(),
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        dropout: float = 0.0,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
        offset: int | Tensor = 0,
    ) -> Attended:
        """Compute attention with relative positions; the first query is at position `offset` among the keys."""
        factor = self.factor(score)
        device = query.device.type
        with torch.autocast(device, enabled=False) if device in ("cpu", "cuda") else nullcontext():
            problem = build(query, key, value, score, normalize, mask, bias, dropout, weights, generator)
            problem, marks = cleaned(problem)
            keys, values = self.key_table.to(problem.dtype) * factor, self.value_table.to(problem.dtype)
            output, seen, log_prob = _in_blocks(Tables(problem, keys, values, self.reach, offset))
        output = output if marks is None else output + marks
        if isinstance(seen, Top):
            seen = Top(seen.values.to(query.dtype), seen.indices)
        elif seen is not None:
            seen = seen.to(query.dtype)
        return Attended(output.to(query.dtype), seen, log_prob)

    def factor(self, score: object) -> float:
        """Return the factor by which the score multiplies q · k, and hence q · a; raise if the score is not a dot
        product."""
        if isinstance(score, Dot):
            return 1.0
        if isinstance(score, ScaledDot) and score.softcap is None:
            return score.factor(self.head_size)
        said = "a softcap" if isinstance(score, ScaledDot) else getattr(score, "name", type(score).__name__)
        raise ValueError(f"RelativePositions goes with dot and scaled_dot scores (a term q · a is added), got {said}")


@dataclass(frozen=True, eq=False)
class Tables:
    """The arguments of a call (`Problem`) with the two tables of relative positions, (2 reach + 1, d) each.

    `keys` is already multiplied by the factor of the score.
    """

    problem: Problem
    keys: Tensor
    values: Tensor
    reach: int
    offset: int | Tensor


class Part(NamedTuple):
    """The result for a block of queries: outputs, requested weights, log-probabilities of the keys that hard attention
    chose."""

    output: Tensor
    seen: Tensor | Top | None
    log_prob: Tensor | None


def _in_blocks(tables: Tables) -> Part:
    """Compute all queries in blocks that fit memory; the backward pass recomputes each block."""
    problem = tables.problem
    *lead, queries, keys = problem.shape
    row_bytes = math.prod(lead) * keys * problem.dtype.itemsize
    budget = _BLOCK_BYTES.get(problem.device.type, _BLOCK_BYTES["cpu"])
    if queries * row_bytes <= budget:
        return _block(tables, all_of(queries), all_of(keys))
    # A generator given by the caller cannot be rewound for a recomputation, so the intermediate tensors of the blocks
    # are stored instead.
    again = problem.differentiated and problem.generator is None
    parts = [
        checkpoint(_block, tables, rows, columns, use_reentrant=False) if again else _block(tables, rows, columns)
        for rows, columns in _visible(problem, max(1, budget // row_bytes))
    ]
    return _joined(parts, problem.request)


def _visible(problem: Problem, size: int) -> list[tuple[Stretch, Stretch]]:
    """Return blocks of queries, each with the range of keys that it needs: under a causal mask up to its last query."""
    queries, keys = problem.shape[-2:]
    rules = problem.mask_rules
    ahead = None if rules is None or problem.request is not None else rules.high
    return [
        (rows, all_of(keys if ahead is None else max(1, min(keys, rows.stop + ahead)))) for rows in cut(queries, size)
    ]


def _block(tables: Tables, rows: Stretch, columns: Stretch) -> Part:
    """Compute attention for the queries `rows` over the keys `columns`, with relative positions of keys and values."""
    problem = tables.problem
    query = take(problem.query, -2, rows).to(problem.dtype)
    key, value = (problem.repeat(take(t, -2, columns).to(problem.dtype)) for t in (problem.key, problem.value))
    distance = _distance(rows, columns, tables.offset, problem.device)

    scores = problem.scores(query, key, rows, columns)
    scores = scores + _Spread.apply(query @ tables.keys.mT, distance, tables.reach)
    allowed = problem.allowed(rows, columns)
    log_prob = None
    if isinstance(problem.normalize, Hard):
        choice = choose(problem.normalize, scores, allowed, problem.sample, problem.generator)
        weights, log_prob = choice.weights, choice.log_prob
        entropy = isinstance(problem.request, Entropy)
        seen = problem.normalize.distribution(scores, allowed) if entropy else weights.detach()
    else:
        seen = weights = problem.weights(scores, allowed)
    weights = _dropped(weights, problem)
    output = weights @ value + _Summed.apply(weights, distance, tables.reach) @ tables.values
    if isinstance(problem.request, LogSumExp):
        return Part(output, log_sum_exp(scores, allowed), log_prob)
    return Part(output, _requested(seen, problem, rows), log_prob)


def _requested(weights: Tensor, problem: Problem, rows: Stretch) -> Tensor | Top | None:
    """Return the requested weights of a block; requested rows of other blocks are zeros."""
    request = problem.request
    if not isinstance(request, Rows):
        return None if request is None else request.of(weights)
    position = request.positions(problem.shape[-2]).to(weights.device)
    inside = (position >= rows.start) & (position < rows.stop)
    selected = weights.index_select(-2, (position - rows.start).clamp(0, rows.stop - rows.start - 1))
    return torch.where(inside.unsqueeze(-1), selected, 0)


def _joined(parts: list[Part], request: Request | None) -> Part:
    """Combine the results of blocks of queries: `Received` and `Rows` weights are added, all else is concatenated."""
    outputs, requested, log_probs = zip(*parts, strict=True)
    seen: Tensor | Top | None = None
    if isinstance(requested[0], Top):
        seen = Top(*(torch.cat(pieces, -2) for pieces in zip(*requested, strict=True)))
    elif isinstance(request, (Received, Rows)):
        seen = sum(requested[1:], requested[0])
    elif request is not None:
        seen = torch.cat(requested, -1 if isinstance(request, (Entropy, LogSumExp)) else -2)
    return Part(torch.cat(outputs, -2), seen, None if log_probs[0] is None else torch.cat(log_probs, -1))


def _dropped(weights: Tensor, problem: Problem) -> Tensor:
    """Apply dropout to the weights once, so that it is the same for the values and for their relative positions."""
    if problem.generator is None or problem.dropout in (0.0, 1.0):
        return nn.functional.dropout(weights, problem.dropout)
    mask = torch.rand(weights.shape, generator=problem.generator, device=weights.device) >= problem.dropout
    return weights * mask / (1.0 - problem.dropout)


def _distance(rows: Stretch, columns: Stretch, offset: int | Tensor, device: torch.device) -> Int[Tensor, "q k"]:
    """Return the distance j − i − offset of each query i and key j of the block."""
    own = torch.arange(rows.start, rows.stop, device=device) + offset
    return torch.arange(columns.start, columns.stop, device=device) - own.unsqueeze(-1)


class _Spread(torch.autograd.Function):
    """Expand (…, q, 2R + 1), a number for each distance up to the reach R, to (…, q, k).

    Row i has at key j the number of the distance j − i, clipped to ±R.

    The gradient of `_Spread` is computed by `_Summed`, and the gradient of `_Summed` by `_Spread`. torch's own gradient
    of `gather` would add the many keys beyond distance R one by one, in no fixed order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, distance: Tensor, reach: int) -> Tensor:
        ctx.save_for_backward(distance)
        ctx.reach = reach
        index = distance.clamp(-reach, reach) + reach
        return numbers.gather(-1, index.expand(*numbers.shape[:-1], index.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (distance,) = ctx.saved_tensors
        return _Summed.apply(upstream[0], distance, ctx.reach), None, None


class _Summed(torch.autograd.Function):
    """Sum (…, q, k) over keys of equal distance, clipped to the reach ±R: the result is (…, q, 2R + 1)."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, distance: Tensor, reach: int) -> Tensor:
        ctx.save_for_backward(distance)
        ctx.reach = reach
        keys = numbers.shape[-1]
        if keys == 0:
            return numbers.new_zeros((*numbers.shape[:-1], 2 * reach + 1))
        # For each query, a distance between −R and R occurs at one key at most; the keys at R or beyond it are summed.
        near = torch.arange(1 - reach, reach, device=distance.device) - distance[:, :1]
        inside = (near >= 0) & (near < keys)
        near = near.clamp(0, keys - 1).expand(*numbers.shape[:-1], near.shape[-1])
        before = torch.where(distance <= -reach, numbers, 0).sum(-1, keepdim=True)
        after = torch.where(distance >= reach, numbers, 0).sum(-1, keepdim=True)
        return torch.cat((before, torch.where(inside, numbers.gather(-1, near), 0), after), -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (distance,) = ctx.saved_tensors
        return _Spread.apply(upstream[0], distance, ctx.reach), None, None
