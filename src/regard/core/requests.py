"""The weights that a call returns beside the output: none, all, some rows, the largest, or a summary."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core.spans import constant
from regard.core.tensor_arguments import integer
from regard.core.transforms import forwards, mapped, transformed

_FEW = 64  # up to this number of requested rows, their positions are cached on the device


class Top(NamedTuple):
    """The largest weights of each query, in descending order, and the key index of each weight; −1 for a weight of
    0."""

    values: Float[Tensor, "*lead q n"]
    indices: Int[Tensor, "*lead q n"]


class Request:
    """The base of requests: functions of the weights (…, q, k) that can be computed from any block of whole rows."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor | Top:
        """Return the request's result for these weights, which may be those of all rows or of some rows."""
        raise NotImplementedError

    def check(self, queries: int) -> None:
        """Raise if the requested rows do not exist among this number of queries."""


@dataclass(frozen=True)
class Full(Request):
    """The request for all weights (`full`)."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        return weights


@dataclass(frozen=True, eq=False)
class Rows(Request):
    """The request for the weights of the queries at `index`."""

    index: Tensor | slice

    def positions(self, queries: int) -> Tensor:
        """Return the positions of the requested rows, from 0 to queries − 1."""
        if isinstance(self.index, slice):
            if self.index.step is not None and self.index.step < 0:  # torch does not slice with negative steps
                chosen = range(*self.index.indices(queries))
                return torch.arange(chosen.start, chosen.stop, chosen.step) if chosen else torch.arange(0)
            return torch.arange(queries)[self.index]
        return torch.where(self.index < 0, self.index + queries, self.index)

    def check(self, queries: int) -> None:
        look = not torch.compiler.is_compiling() and isinstance(self.index, Tensor) and self.index.device.type == "cpu"
        if look and isinstance(self.index, Tensor) and self.index.numel():
            low, high = int(self.index.min()), int(self.index.max())
            if low < -queries or high >= queries:
                wrong = high if high >= queries else low
                raise ValueError(f"rows() asks for query {wrong}, but there are {queries} queries")

    def positions_on(self, device: torch.device, queries: int) -> Tensor:
        """Return `positions` on a device.

        The positions of a few rows are copied to a GPU once and cached, because the host waits for each copy.
        """
        positions = self.positions(queries)
        if positions.device == device or len(positions) > _FEW or torch.compiler.is_compiling() or mapped():
            return positions.to(device)
        return constant(("rows", *positions.tolist()), device, lambda: positions.to(device), len(positions))

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        return weights.index_select(-2, self.positions_on(weights.device, weights.shape[-2]))


@dataclass(frozen=True)
class TopWeights(Request):
    """The request for the largest weights of each query."""

    count: int

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Top:
        values, indices = weights.topk(min(self.count, weights.shape[-1]), -1)
        # topk returns arbitrary keys, even masked ones, for weights of 0.
        return Top(values, torch.where(values.detach() == 0, -1, indices))


@dataclass(frozen=True)
class Received(Request):
    """The request for the weights that each key receives, summed over the queries."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        return weights.sum(-2)


@dataclass(frozen=True)
class Entropy(Request):
    """The request for the entropy of each query's weights, −Σ w ln w."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        if not (weights.requires_grad and torch.is_grad_enabled()) and not forwards():
            return torch.special.entr(weights).sum(-1)
        if torch.compiler.is_compiling() or transformed() or forwards():
            # A weight of 0 is replaced by 1 before the logarithm, so that value and gradient are 0 and not NaN.
            return -(weights * torch.where(weights > 0, weights, 1).log()).sum(-1)
        return cast(Tensor, _Entropy.apply(weights))


class _Entropy(torch.autograd.Function):
    """The autograd function of the entropy −Σ w ln w, with a gradient of 0 for weights of 0."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return torch.special.entr(weights).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        slope = torch.where(weights == 0, 0, torch.where(weights == 0, 1, weights).log() + 1)
        return grads[0].unsqueeze(-1) * -slope


@dataclass(frozen=True)
class LogSumExp(Request):
    """The request for ln Σ exp(s) of each query, which is computed from the scores, not from the weights."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        raise ValueError("logsumexp() is computed from scores, and only weights are known here: ask regard.attention")


def returned(result: Tensor | Top | None, request: Request | None, dtype: torch.dtype) -> Tensor | Top | None:
    """Return the result of a request converted to `dtype`, the dtype of the queries.

    A log-sum-exp is not converted, because in half precision it would lose digits.
    """
    if isinstance(result, Top):
        return result if result.values.dtype == dtype else Top(result.values.to(dtype), result.indices)
    if result is None or result.dtype == dtype or isinstance(request, LogSumExp):
        return result
    return result.to(dtype)


def full() -> Request:
    """Request all weights, (…, h, q, k)."""
    return Full()


def rows(index: int | Sequence[int] | Tensor | slice) -> Request:
    """Request the weights of some queries, (…, h, len(index), k); index is an int, a list, a tensor or a slice."""
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
    """Request the k largest weights of each query as `Top(values, indices)`, (…, h, q, k).

    If there are fewer than k keys, the last axis is as long as the keys. Where a query may attend to fewer than k keys,
    the missing ones have weight 0 and index −1. To gather values with the indices write `indices.clamp_min(0)`: the
    entries gathered for −1 have weight 0.
    """
    if (count := integer(k, "k of top()")) < 1:
        raise ValueError(f"top() takes a number of keys of at least 1, got {k!r}")
    return TopWeights(count)


def received() -> Request:
    """Request the sum of the weights that each key gets from all queries, (…, h, k)."""
    return Received()


def entropy() -> Request:
    """Request the entropy of each query's weights, −Σ w ln w in nats, (…, h, q).

    With `normalize=Hard(…)` the result is the entropy of the distribution from which the key is sampled.
    """
    return Entropy()


def logsumexp() -> Request:
    """Request ln Σ exp(s) over the keys that each query may attend, (…, h, q); −inf where it may attend to nothing.

    `regard.merge` uses the result to combine attention over parts of the keys. The scores s include the bias, and
    dropout has no effect on them. For half-precision inputs the result is float32. Only softmax supports this request.
    """
    return LogSumExp()
