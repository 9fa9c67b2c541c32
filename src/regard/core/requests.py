"""What a call returns of its weights beside the output: nothing, all, some rows, the largest, or a summary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core.masks import integer


class Top(NamedTuple):
    """The largest weights of each query and the keys they belong to, largest first; −1 where the weight is 0."""

    values: Float[Tensor, "*lead q n"]
    indices: Int[Tensor, "*lead q n"]


class Request:
    """A view of the weights (…, q, k), computed from any block of whole rows."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor | Top:
        """What is asked, from the weights of all rows or of some."""
        raise NotImplementedError

    def check(self, queries: int) -> None:
        """Raise if the request cannot be met for that many queries."""


@dataclass(frozen=True)
class Full(Request):
    """Every weight."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        return weights


@dataclass(frozen=True, eq=False)
class Rows(Request):
    """The weights of some queries."""

    index: Tensor | slice

    def positions(self, queries: int) -> Tensor:
        """The rows asked, counted from 0."""
        if isinstance(self.index, slice):
            if self.index.step is not None and self.index.step < 0:  # torch takes no slice backwards
                return torch.arange(*self.index.indices(queries))
            return torch.arange(queries)[self.index]
        return torch.where(self.index < 0, self.index + queries, self.index)

    def check(self, queries: int) -> None:
        look = not torch.compiler.is_compiling() and isinstance(self.index, Tensor) and self.index.device.type == "cpu"
        if look and isinstance(self.index, Tensor) and self.index.numel():
            low, high = int(self.index.min()), int(self.index.max())
            if low < -queries or high >= queries:
                wrong = high if high >= queries else low
                raise ValueError(f"rows() asks for query {wrong}, but there are {queries} queries")

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        return weights.index_select(-2, self.positions(weights.shape[-2]).to(weights.device))


@dataclass(frozen=True)
class TopWeights(Request):
    """The largest weights of each query."""

    count: int

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Top:
        values, indices = weights.topk(min(self.count, weights.shape[-1]), -1)
        # topk would name some key for a weight of 0, a masked one as soon as another.
        return Top(values, torch.where(values.detach() == 0, -1, indices))


@dataclass(frozen=True)
class Received(Request):
    """The sum over queries."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        return weights.sum(-2)


@dataclass(frozen=True)
class Entropy(Request):
    """−Σ w ln w."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        # ln is taken at 1 where w is 0, so that neither the value nor the gradient meets ln 0.
        return -(weights * torch.where(weights > 0, weights, 1).log()).sum(-1)


@dataclass(frozen=True)
class LogSumExp(Request):
    """ln Σ exp(s), of the scores and not of the weights."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        raise ValueError("logsumexp() is computed from scores, and only weights are known here: ask regard.attention")


def full() -> Request:
    """All weights, (…, h, q, k)."""
    return Full()


def rows(index: int | Sequence[int] | Tensor | slice) -> Request:
    """The weights of some queries, (…, h, len(index), k): an int, a list, a tensor or a slice."""
    if isinstance(index, slice):
        return Rows(_slice(index))
    tensor = index if isinstance(index, Tensor) else _positions(index)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.ndim > 1:
        raise ValueError(
            f"rows() takes positions of queries, got a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
        )
    return Rows(tensor.reshape(-1).long())


def _slice(index: slice) -> slice:
    try:
        index.indices(1)
    except (TypeError, ValueError) as error:
        raise type(error)(f"rows() takes a slice of positions of queries, got {index!r}: {error}") from None
    return index


def _positions(index: int | Sequence[int]) -> Tensor:
    numbers: Any = index if isinstance(index, (list, tuple, range)) else [index]
    try:
        whole = [integer(number, "rows()") for number in numbers]
    except TypeError:
        raise TypeError(f"rows() takes positions of queries as whole numbers, got {index!r}") from None
    return torch.tensor(whole, dtype=torch.long)


def top(k: int) -> Request:
    """The k largest weights of each query as `Top(values, indices)`, (…, h, q, k); fewer where there are fewer keys.

    An index of −1 says that there is no such key: the weight beside it is 0, as where a query may attend fewer than k
    keys. To gather values with the indices write `indices.clamp_min(0)`; what is gathered in such a place has weight 0.
    """
    if (count := integer(k, "k of top()")) < 1:
        raise ValueError(f"top() takes a number of keys of at least 1, got {k!r}")
    return TopWeights(count)


def received() -> Request:
    """How much weight each key got from all queries, (…, h, k)."""
    return Received()


def entropy() -> Request:
    """How spread each query's weights are, −Σ w ln w in nats, (…, h, q); for `Hard`, of the distribution sampled."""
    return Entropy()


def logsumexp() -> Request:
    """ln Σ exp(s) over the scores that each query may attend, (…, h, q); −inf where it may attend nothing.

    With it `regard.merge` joins attention over parts of the keys. It is that of the scores with bias, before dropout,
    in float32 where the inputs are in half precision; only softmax has it.
    """
    return LogSumExp()
