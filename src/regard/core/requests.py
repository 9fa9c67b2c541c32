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

_FEW = 64  # number of rows up to which their positions are stored


class Top(NamedTuple):
    """The largest weights of each query and the keys they belong to, largest first; −1 where the weight is 0."""

    values: Float[Tensor, "*lead q n"]
    indices: Int[Tensor, "*lead q n"]


class Request:
    """A function of the weights (…, q, k) that can be computed from any block of whole rows."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor | Top:
        """Return the result for the weights of all rows or of some."""
        raise NotImplementedError

    def check(self, queries: int) -> None:
        """Raise if the request is impossible for that number of queries."""


@dataclass(frozen=True)
class Full(Request):
    """The request for every weight."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        return weights


@dataclass(frozen=True, eq=False)
class Rows(Request):
    """The request for the weights of some queries."""

    index: Tensor | slice

    def positions(self, queries: int) -> Tensor:
        """Return the requested rows, counted from 0."""
        if isinstance(self.index, slice):
            if self.index.step is not None and self.index.step < 0:  # torch does not support negative steps
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

    def positions_on(self, device: torch.device, queries: int) -> Tensor:
        """Return `positions` on a device; a few rows are copied there once, because the host waits for each copy."""
        found = self.positions(queries)
        if found.device == device or len(found) > _FEW or torch.compiler.is_compiling() or mapped():
            return found.to(device)
        return constant(("rows", *found.tolist()), device, lambda: found.to(device), len(found))

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
    """The request for the sum over queries."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        return weights.sum(-2)


@dataclass(frozen=True)
class Entropy(Request):
    """The request for the entropy, −Σ w ln w."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        if not (weights.requires_grad and torch.is_grad_enabled()) and not forwards():
            return torch.special.entr(weights).sum(-1)
        if torch.compiler.is_compiling() or transformed() or forwards():
            # The logarithm of 1 replaces ln 0, in the value and in the gradient.
            return -(weights * torch.where(weights > 0, weights, 1).log()).sum(-1)
        return cast(Tensor, _Entropy.apply(weights))


class _Entropy(torch.autograd.Function):
    """−Σ w ln w, whose gradient is 0 at weights of 0."""

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
    """The request for ln Σ exp(s), of the scores and not of the weights."""

    def of(self, weights: Float[Tensor, "*lead q k"]) -> Tensor:
        raise ValueError("logsumexp() is computed from scores, and only weights are known here: ask regard.attention")


def returned(found: Tensor | Top | None, request: Request | None, dtype: torch.dtype) -> Tensor | Top | None:
    """Return what a request gave in the dtype of the queries.

    The log-sum-exp stays in float32, because half precision would lose digits.
    """
    if isinstance(found, Top):
        return found if found.values.dtype == dtype else Top(found.values.to(dtype), found.indices)
    if found is None or found.dtype == dtype or isinstance(request, LogSumExp):
        return found
    return found.to(dtype)


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
    """Request the k largest weights of each query as `Top(values, indices)`, (…, h, q, k); fewer if keys are fewer.

    An index of −1 marks a missing key, with weight 0, where a query may attend fewer than k keys. To gather values with
    the indices write `indices.clamp_min(0)`: the keys gathered for −1 have weight 0.
    """
    if (count := integer(k, "k of top()")) < 1:
        raise ValueError(f"top() takes a number of keys of at least 1, got {k!r}")
    return TopWeights(count)


def received() -> Request:
    """Request the sum of the weights that each key gets from all queries, (…, h, k)."""
    return Received()


def entropy() -> Request:
    """Request the entropy of each query's weights, −Σ w ln w in nats, (…, h, q); for `Hard`, of the sampled
    distribution."""
    return Entropy()


def logsumexp() -> Request:
    """Request ln Σ exp(s) over the keys that each query may attend, (…, h, q); −inf where it may attend nothing.

    `regard.merge` uses it to combine attention over parts of the keys. Scores include the bias and precede dropout;
    half-precision inputs give float32. Only softmax supports it.
    """
    return LogSumExp()
