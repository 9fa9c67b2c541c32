"""Attention weights that are recomputed from stored queries and keys, for the requested rows and heads only."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.custom import Custom
from regard.core.masks import Band
from regard.core.normalizers import Hard
from regard.core.problem import Problem
from regard.core.scores import Additive, Bilinear, Dot, ScaledDot, Score
from regard.look.attention_records import Record, Source, VersionedTensors
from regard.look.compact_floats import Exact, Numbers, shorter

# Largest number of elements of an intermediate tensor. Some scores compute several numbers for each pair of a query and
# a key: additive scores compute a vector.
_PAIR_NUMBERS = 2**25


def copy_if_lent(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a copy if it may be modified later or is part of a larger storage."""
    tensor = tensor.detach()
    return tensor.clone(memory_format=torch.contiguous_format) if lent(tensor) else tensor


def lent(tensor: Tensor) -> bool:
    """Return whether the tensor may be modified later: it is part of a larger storage, or was modified in place before.

    An example of such a tensor is a key-value cache. In inference mode torch does not count in-place writes, so every
    inference tensor is assumed to be modified.
    """
    larger = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return larger or tensor.is_inference() or tensor._version > 0


def _frozen(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that requires a gradient, which an optimizer will modify; any other tensor uncopied."""
    return tensor.detach().clone() if tensor.requires_grad else tensor


class Shortened(NamedTuple):
    """A `Source` whose queries and keys are stored in 24 bits per number, and a note with the largest error."""

    source: "Pairs | Modified"
    note: str


class Pairs:
    """The attention weights of a `Problem` of `regard.core`, a call with any score, normaliser, mask and bias.

    The weights are recomputed with the plain implementation, also if another kernel computed the call's output. `sinks`
    (heads,) are the scores of one additional key for each head, which has no value but receives weight in each row
    (attention sinks, Xiao et al. 2024).
    """

    def __init__(self, problem: Problem, *, sinks: Tensor | None = None) -> None:
        query, key = copy_if_lent(problem.query), copy_if_lent(problem.key)
        self._problem = replace(
            problem,
            query=query,
            key=key,
            value=problem.value.new_empty((*problem.value.shape[:-1], 0)),
            score=problem.score.holding(_frozen),
            bias=problem.bias.holding(_frozen) if problem.bias is not None else None,
            request=None,
            generator=None,
        )
        self._lead = query.shape[:-3]
        self._query: Numbers
        self._key: Numbers
        self._query, self._key = (Exact(t.reshape(-1, *t.shape[-3:])) for t in (query, key))
        self._sinks = None if sinks is None else sinks.detach().clone().reshape(-1, 1, 1)
        parts = (self._problem.score, self._problem.mask, self._problem.bias)
        self._beside = [tensor for part in parts if part is not None for tensor in part.tensors()]
        self._versioned = VersionedTensors(query, key, *self._beside)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, q, _ = self._query.shape
        return b, h, q, self._key.shape[-2]

    def holds(self) -> list[Tensor]:
        return list({t.untyped_storage().data_ptr(): t for t in (*self.numbers(), *self._versioned.tensors)}.values())

    def numbers(self) -> list[Tensor]:
        """Return the tensors that hold the queries and keys."""
        return [*self._query.holds(), *self._key.holds()]

    def short(self) -> Shortened | None:
        """Return this `Source` with 24 bits per number of queries and keys; None if impossible or not smaller."""
        score = self._problem.score
        # no bound is known for the error of the scores that a function of the caller computes
        if isinstance(score, Custom):
            return None
        scale = 1.0 if isinstance(score, Dot) else None
        if isinstance(score, ScaledDot):
            scale = score.factor(self._query.shape[-1])
        shortened = shorter(self._query, self._key, scale)
        if shortened is None:
            return None
        other = copy.copy(self)
        other._query, other._key, note = shortened
        problem = self._problem
        other._problem = replace(problem, query=_shape_of(problem.query), key=_shape_of(problem.key))
        other._versioned = VersionedTensors(*self._beside)
        return Shortened(other, note)

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        self._versioned.check()
        pairs = len(heads) * self._key.shape[-2] * self._problem.score.floats(self._query.shape[-1])
        step = max(1, int(_PAIR_NUMBERS // max(1, pairs)))
        weights = torch.zeros(len(heads), len(rows), self._key.shape[-2])
        for room, part in zip(weights.split(step, -2), rows.split(step), strict=True):
            # keys from `end` on are masked for all these rows (causal mask), so their weights stay 0
            end = self._end(part)
            block = self.block(slice(batch, batch + 1), heads, part.to(self._query.device), range(end))
            room[..., :end] = block[0]
        return weights

    def _end(self, rows: Tensor) -> int:
        mask, keys = self._problem.mask, self._key.shape[-2]
        if not isinstance(mask, Band) or mask.high is None or isinstance(self._problem.score, Custom) or not len(rows):
            return keys
        return max(1, min(keys, int(rows.max()) + mask.high + 1))

    @torch.no_grad()
    def block(self, batch: slice, heads: range, rows: Tensor, columns: range | None = None) -> Tensor:
        """Return the weights (batch, heads, rows, columns), in float32 or float64, on the device of the queries."""
        problem = self._problem
        columns = range(self._key.shape[-2]) if columns is None else columns
        with torch.autocast(self._query.device.type, enabled=False):
            scores = self._scores(batch, heads, rows, columns)
            if problem.bias is not None:
                scores = scores + self._part(problem.bias.values(rows, columns, scores.dtype), batch, heads)
            allowed = problem.allowed(rows, columns)
            if allowed is not None:
                allowed = self._part(allowed, batch, heads).expand(scores.shape)
            if isinstance(problem.score, Custom) or problem.bias is not None:
                finite = scores != -math.inf
                allowed = finite if allowed is None else allowed & finite
            if self._sinks is not None:
                return _with_sinks(scores, allowed, self._sinks[heads.start : heads.stop])
            if isinstance(problem.normalize, Hard) and problem.sample:
                return problem.normalize.distribution(scores, allowed)
            return problem.weights(scores, allowed)

    def _scores(self, batch: slice, heads: range, rows: Tensor, columns: range) -> Tensor:
        problem = self._problem
        # A score function of the caller may hold tensors for all heads and sequences, so it is called with the queries
        # and keys of all of them.
        if isinstance(problem.score, Custom):
            query = problem.query.index_select(-2, rows).to(problem.dtype)
            scores = problem.score(query, problem.repeat(problem.key).to(problem.dtype))
            return scores.reshape(-1, *scores.shape[-3:])[batch, heads.start : heads.stop]
        query = self._query.take(lambda all_: all_[batch, heads.start : heads.stop].index_select(-2, rows))
        query = query.to(problem.dtype)
        groups = [head // problem.group for head in heads]
        if len(groups) == groups[-1] - groups[0] + 1:
            key = self._key.take(lambda all_: all_[batch, groups[0] : groups[-1] + 1, : columns.stop])
        else:
            chosen = torch.tensor(groups, device=rows.device)
            key = self._key.take(lambda all_: all_[batch, :, : columns.stop].index_select(1, chosen))
        return _of_heads(problem.score, heads, self._query.shape[1])(query, key.to(problem.dtype))

    def _part(self, tensor: Tensor, batch: slice, heads: range) -> Tensor:
        """Return the part of a mask or bias, broadcastable to (…, heads, rows, keys), for some sequences and heads."""
        if len(self._lead) > 1 and tensor.ndim > 3:
            own = tensor.shape[-3:]
            tensor = tensor.expand(*self._lead, *own).reshape(-1, *own)
        if tensor.ndim > 3 and tensor.shape[-4] != 1:
            tensor = tensor[batch]
        if tensor.ndim > 2 and tensor.shape[-3] != 1:
            tensor = tensor[..., heads.start : heads.stop, :, :]
        return tensor


def _shape_of(tensor: Tensor) -> Tensor:
    """Return a tensor of `tensor`'s shape that takes the memory of one element, for code that only reads the shape."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _of_heads(score: Score, heads: range, count: int) -> Score:
    """Return the score with only the parameters of some heads, if each of `count` heads has its own parameters."""
    axes = 2 if isinstance(score, Additive) else 3 if isinstance(score, Bilinear) else math.inf
    return score.holding(
        lambda tensor: tensor[heads.start : heads.stop] if tensor.ndim == axes and tensor.shape[0] == count else tensor
    )


def _with_sinks(scores: Tensor, allowed: Tensor | None, sinks: Tensor) -> Tensor:
    if allowed is not None:
        scores = torch.where(allowed, scores, -math.inf)
    beside = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


class Modified:
    """The weights of FlexAttention: `score_mod` changes each scaled dot product, and `mask_mod` masks pairs."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        scale: float,
        score_mod: Callable[..., Tensor],
        mask_mod: Callable[..., Tensor],
        score_buffers: Sequence[Any] = (),
        mask_buffers: Sequence[Any] = (),
    ) -> None:
        query, key = copy_if_lent(query), copy_if_lent(key)
        self._query: Numbers = Exact(query)
        self._key: Numbers = Exact(key)
        self._scale = scale
        self._score_mod, self._mask_mod = score_mod, mask_mod
        self._score_buffers, self._mask_buffers = tuple(score_buffers), tuple(mask_buffers)
        self._versioned = VersionedTensors(query, key)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, q, _ = self._query.shape
        return b, h, q, self._key.shape[-2]

    def holds(self) -> list[Tensor]:
        return self.numbers()

    def numbers(self) -> list[Tensor]:
        """Return the tensors that hold the queries and keys."""
        return [*self._query.holds(), *self._key.holds()]

    def short(self) -> Shortened | None:
        """Return this `Source` with queries and keys in 24 bits per number; None if 24 bits save no memory."""
        shortened = shorter(self._query, self._key, None)
        if shortened is None:
            return None
        other = copy.copy(self)
        other._query, other._key, note = shortened
        other._versioned = VersionedTensors()
        return Shortened(other, note)

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        self._versioned.check()
        return self.block(slice(batch, batch + 1), heads, rows.to(self._query.device))[0].float().cpu()

    @torch.no_grad()
    def block(self, batch: slice, heads: range, rows: Tensor) -> Tensor:
        group = self._query.shape[1] // self._key.shape[1]
        query = self._query.take(lambda all_: all_[batch, heads.start : heads.stop].index_select(-2, rows))
        key = self._key.take(lambda all_: all_[batch]).repeat_interleave(group, 1)[:, heads.start : heads.stop]
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = (query.to(wide) @ key.to(wide).mT) * self._scale
        device = query.device
        place = (
            torch.arange(self._query.shape[0], device=device)[batch],
            torch.arange(heads.start, heads.stop, device=device),
            rows,
            torch.arange(self._key.shape[-2], device=device),
        )
        # `score_mod` and `mask_mod` take the scalar indices of one pair (batch, head, query, key). vmap applies them
        # over the four axes.
        scores = _over_pairs(self._score_mod, 1)(scores, *place, *self._score_buffers)
        allowed = _over_pairs(self._mask_mod, 0)(*place, *self._mask_buffers)
        scores = torch.where(allowed, scores, -math.inf)
        # A row whose keys are all masked has weights of 0.
        return torch.where(allowed.any(-1, keepdim=True), scores.softmax(-1), 0)


def _over_pairs(function: Callable[..., Tensor], scores: int) -> Callable[..., Tensor]:
    """Return a function of the scalars (batch, head, query, key), mapped by vmap over tensors of these indices.

    `scores` is 1 if the function takes a score before the indices, else 0.
    """

    def along(axis: int, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def mapped(*arguments: Any) -> Tensor:
            places = [None] * 4
            places[axis] = 0  # type: ignore[call-overload]
            dims = (*((0,) * scores), *places, *((None,) * (len(arguments) - 4 - scores)))
            return torch.vmap(inner, in_dims=dims)(*arguments)

        return mapped

    for axis in (3, 2, 1, 0):
        function = along(axis, function)
    return function


class Joined:
    """A `Source` that stacks the rows of several sources, such as steps of text generation, into one attention map.

    Keys that did not exist yet when a call was recorded have weight 0 in the rows of that call.
    """

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts = list(parts)
        first = self._parts[0].shape
        self._shape = (first[0], first[1], sum(part.shape[2] for part in parts), max(part.shape[3] for part in parts))
        self._starts = [0]
        for part in self._parts:
            self._starts.append(self._starts[-1] + part.shape[2])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    def holds(self) -> list[Tensor]:
        return [tensor for part in self._parts for tensor in part.holds()]

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        weights = torch.zeros(len(heads), len(rows), self._shape[3])
        for part, start in zip(self._parts, self._starts, strict=False):
            mine = ((rows >= start) & (rows < start + part.shape[2])).nonzero().flatten()
            if len(mine):
                weights[:, mine, : part.shape[3]] = part.rows(batch, heads, rows[mine] - start)
        return weights


class Worst:
    """The largest error that `Record.check` returns for several records; NaN if one of the records has no check."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = list(records)

    def holds(self) -> list[Tensor]:
        return [tensor for record in self._records for tensor in record.holds()]

    def of(self, batch: int) -> float:
        errors = [record.check(batch=batch) for record in self._records]
        return math.nan if None in errors else max(error for error in errors if error is not None)
