"""Biases, added to the scores before the normaliser: a tensor, or a function of the distance of query and key.

A bias of −inf masks its pair. Learned biases get gradients with every backend.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.core.spans import Span, Stretch, positions, take
from regard.core.tensor_arguments import broadcastable, position
from regard.core.transforms import mapped, resolved


@dataclass(frozen=True, eq=False)
class Bias:
    """A term that is added to the scores. Create one with `alibi` or `relative`; a float tensor is accepted too."""

    plain: bool = field(default=False, kw_only=True)  # whether the caller gave Python numbers, not a tensor

    def aligned(self, shape: tuple[int, ...]) -> "Bias":
        """Return the bias with its tensors reshaped to broadcast to scores of `shape` (*leading, q, k), or raise."""
        return self

    @property
    def may_mask(self) -> bool:
        """Return whether any entry can be −inf, which masks its pair."""
        return False

    def holding(self, swap: Callable[[Tensor], Tensor]) -> "Bias":
        """Return a copy of the bias whose tensor is replaced by `swap(tensor)`."""
        raise NotImplementedError

    def on(self, device: torch.device) -> "Bias":
        """Return the bias for queries on this device: a tensor that was created from Python numbers is moved to it."""
        return self.holding(lambda tensor: tensor.to(device)) if self.plain else self

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the bias, for gradients."""
        raise NotImplementedError

    def lead(self) -> tuple[int, ...]:
        """Return the leading axes (batch, heads) of the tensor that `values` returns."""
        raise NotImplementedError

    def values(self, rows: Span, columns: Span, dtype: torch.dtype) -> Float[Tensor, "..."]:
        """Return the bias of these queries (rows) and keys (columns); it broadcasts to (*leading, rows, columns)."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class DenseBias(Bias):
    """A bias given as a float tensor that broadcasts to the scores."""

    tensor: Float[Tensor, "..."]

    def aligned(self, shape: tuple[int, ...]) -> "DenseBias":
        return DenseBias(broadcastable(resolved(self.tensor), shape, "bias"))

    @property
    def may_mask(self) -> bool:
        return True

    def holding(self, swap: Callable[[Tensor], Tensor]) -> "DenseBias":
        return replace(self, tensor=swap(self.tensor))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def lead(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[:-2])

    def values(self, rows: Span, columns: Span, dtype: torch.dtype) -> Float[Tensor, "..."]:
        return _rounded(take(take(self.tensor, -2, rows), -1, columns), dtype)


@dataclass(frozen=True, eq=False)
class Rule(Bias):
    """A bias that depends only on the distance j − i − offset of key j and query i."""

    offset: int = field(default=0, kw_only=True)

    def at(self, distance: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "*h n"]:
        """Return the bias at these distances."""
        raise NotImplementedError

    def values(self, rows: Span, columns: Span, dtype: torch.dtype) -> Float[Tensor, "..."]:
        device, exact = self.tensors()[0].device, torch.promote_types(dtype, torch.float32)
        if isinstance(rows, Tensor) or isinstance(columns, Tensor) or rows.stop == rows.start:
            distance = positions(columns, device) - positions(rows, device).unsqueeze(-1)
            pairs = self.at(distance.flatten() - self.offset, exact)
            return _rounded(pairs, dtype).unflatten(-1, distance.shape)
        # Each row equals the row above shifted by one, so every row is a slice of the values at all distances. The
        # backward pass then sums the gradient along diagonals first; otherwise millions of numbers would be added one
        # by one to the same entry of the table of a `relative` bias.
        queries, keys = rows.stop - rows.start, columns.stop - columns.start
        # The block has `step` different distances, and `every` has one more. If copies of these step + 1 numbers follow
        # one another and are viewed as rows of `step` numbers, each row is shifted by one against the row above.
        every = Stretch(columns.start - rows.stop + 1, columns.stop - rows.start + 1)
        line = _rounded(self.at(positions(every, device) - self.offset, exact), dtype)
        step = queries + keys - 1
        flat = line.unsqueeze(-2).expand(*line.shape[:-1], queries, step + 1).flatten(-2)
        return flat.narrow(-1, queries - 1, queries * step).unflatten(-1, (queries, step)).narrow(-1, 0, keys)


@dataclass(frozen=True, eq=False)
class Alibi(Rule):
    """The bias −slope · |i + offset − j| of query i and key j, with one slope per head."""

    slopes: Float[Tensor, "*h"]

    def aligned(self, shape: tuple[int, ...]) -> "Alibi":
        _one_per_head(self.slopes.shape[:1], shape, "slopes of alibi()")
        return self

    def holding(self, swap: Callable[[Tensor], Tensor]) -> "Alibi":
        return replace(self, slopes=swap(self.slopes))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slopes,)

    def lead(self) -> tuple[int, ...]:
        return tuple(self.slopes.shape)

    def at(self, distance: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "*h n"]:
        return -self.slopes.to(dtype)[..., None] * distance.abs().to(dtype)


@dataclass(frozen=True, eq=False)
class Relative(Rule):
    """The bias table[clip(j − i − offset, −R, R) + R] of query i and key j; `table` has 2R + 1 numbers per head."""

    table: Float[Tensor, "*h distances"]

    def aligned(self, shape: tuple[int, ...]) -> "Relative":
        _one_per_head(self.table.shape[:-1], shape, "table of relative()")
        return self

    @property
    def may_mask(self) -> bool:
        # On the CPU the table is small enough to be inspected. On a GPU inspecting it is a synchronisation, and under
        # vmap it is impossible.
        unreadable = self.table.device.type != "cpu" or torch.compiler.is_compiling() or mapped()
        return unreadable or bool((self.table == -torch.inf).any())

    @property
    def reach(self) -> int:
        """Return R, the largest distance with an entry of its own in the table; larger distances use the entry of R."""
        return self.table.shape[-1] // 2

    def holding(self, swap: Callable[[Tensor], Tensor]) -> "Relative":
        return replace(self, table=swap(self.table))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def lead(self) -> tuple[int, ...]:
        return tuple(self.table.shape[:-1])

    def at(self, distance: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "*h n"]:
        return self.table.to(dtype).index_select(-1, (distance + self.reach).clamp(0, 2 * self.reach))


def alibi(slopes: Tensor | Sequence[float], offset: int = 0) -> Bias:
    """Return the bias −slope · |distance| of attention with linear biases (Press et al. 2022); one slope per head.

    `offset` is the position of the first query among the keys, as in `causal`. A layer with a cache adds the cache's
    length itself.

    >>> alibi([0.5]).values(range(2), range(3), torch.float32)
    tensor([[[-0.0000, -0.5000, -1.0000],
             [-0.5000, -0.0000, -0.5000]]])
    """
    tensor = _floats(slopes, "slopes of alibi()")
    if tensor.ndim > 1:
        raise ValueError(f"slopes of alibi() must be one number for each head, got shape {tuple(tensor.shape)}")
    return Alibi(tensor, offset=position(offset, "offset of alibi()"), plain=not isinstance(slopes, Tensor))


def relative(table: Tensor, offset: int = 0) -> Bias:
    """Return the bias with a learned number for each distance of key and query, clipped to ±R (Shaw et al. 2018).

    `table` is (2R + 1,), or (heads, 2R + 1) with numbers for each head. `offset` means the same as in `alibi`.
    """
    tensor = _floats(table, "table of relative()")
    if tensor.ndim not in (1, 2) or tensor.shape[-1] % 2 == 0:
        raise ValueError(
            f"table of relative() must be (2R + 1,) or (heads, 2R + 1), an odd size last, got {tuple(tensor.shape)}"
        )
    return Relative(tensor, offset=position(offset, "offset of relative()"), plain=not isinstance(table, Tensor))


def as_bias(bias: Bias | Tensor) -> Bias:
    """Return a bias unchanged, and a float tensor as a dense bias."""
    return bias if isinstance(bias, Bias) else DenseBias(_floats(bias, "bias"), plain=not isinstance(bias, Tensor))


def _floats(values: Tensor | Sequence[float], name: str) -> Tensor:
    if not isinstance(values, (Tensor, list, tuple)):
        raise TypeError(f"{name} must be a float tensor or a list of numbers, got {type(values).__name__}")
    try:
        tensor = _stacked(values)
    except (TypeError, ValueError, RuntimeError) as error:
        came = f"a {type(values).__name__} that makes no tensor: {error}"
        raise TypeError(f"{name} must be a float tensor or a list of numbers, got {came}") from None
    if not tensor.is_floating_point():
        hint = " (a bool tensor goes to mask=)" if tensor.dtype == torch.bool else ""
        raise TypeError(f"{name} must be a float tensor, got {tensor.dtype}{hint}")
    return tensor


def _stacked(values: object) -> Tensor:
    """Return nested lists of numbers and tensors as one tensor, through which the tensors receive gradients."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, (list, tuple)) and any(isinstance(value, (Tensor, list, tuple)) for value in values):
        tensor = torch.stack([_stacked(value) for value in values])
        return tensor if tensor.is_floating_point() else tensor.double()
    return torch.tensor(values, dtype=torch.float64)


def _one_per_head(own: Sequence[int], shape: tuple[int, ...], name: str) -> None:
    heads = shape[-3] if len(shape) > 2 else 1
    if own and own[0] not in (1, heads):
        raise ValueError(f"{name}: for {own[0]} heads, query has {heads}; they must be equal")


def _rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers in another dtype.

    Finite numbers beyond the range of a half-precision dtype become its largest or lowest finite number, because −inf
    would mask a pair.
    """
    rounded = numbers.to(dtype)
    if dtype.itemsize > 2 or numbers.dtype == dtype:
        return rounded
    most = torch.finfo(dtype).max
    return torch.where(numbers.isinf(), rounded, rounded.clamp(-most, most))
