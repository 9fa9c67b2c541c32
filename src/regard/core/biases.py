"""What is added to the scores before they are normalised: a tensor, or a rule of the distance j − i.

A bias of −inf masks. Learned biases get gradients on every path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.masks import broadcastable, integer
from regard.core.spans import Span, Stretch, positions, take
from regard.core.transforms import mapped


@dataclass(frozen=True, eq=False)
class Bias:
    """A term of the scores. Make one with alibi or relative; a float tensor is taken as it is."""

    plain: bool = field(default=False, kw_only=True)  # given as numbers, not as a tensor

    def aligned(self, shape: tuple[int, ...]) -> "Bias":
        """The same bias with its tensors shaped for scores `shape` = (*leading, q, k), or an error."""
        return self

    @property
    def may_mask(self) -> bool:
        """Can it be −inf somewhere?"""
        return False

    def holding(self, swap: Callable[[Tensor], Tensor]) -> "Bias":
        """The same bias with its tensor exchanged."""
        raise NotImplementedError

    def on(self, device: torch.device) -> "Bias":
        """The same bias, with what was given as plain numbers where the queries are."""
        return self.holding(lambda tensor: tensor.to(device)) if self.plain else self

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the bias; those that require grad get it."""
        raise NotImplementedError

    def lead(self) -> tuple[int, ...]:
        """The leading axes of `values`."""
        raise NotImplementedError

    def values(self, rows: Span, columns: Span, dtype: torch.dtype) -> Float[Tensor, "..."]:
        """The bias of the part of the scores asked: broadcasts to (*leading, rows, columns)."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class DenseBias(Bias):
    """A float tensor that broadcasts to the scores."""

    tensor: Float[Tensor, "..."]

    def aligned(self, shape: tuple[int, ...]) -> "DenseBias":
        return DenseBias(broadcastable(self.tensor, shape, "bias"))

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
        return take(take(self.tensor, -2, rows), -1, columns).to(dtype)


@dataclass(frozen=True, eq=False)
class Alibi(Bias):
    """−slope · |i + offset − j|."""

    slopes: Float[Tensor, "*h"]
    offset: int = 0

    def aligned(self, shape: tuple[int, ...]) -> "Alibi":
        _one_per_head(self.slopes.shape[:1], shape, "slopes of alibi()")
        return self

    def holding(self, swap: Callable[[Tensor], Tensor]) -> "Alibi":
        return replace(self, slopes=swap(self.slopes))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slopes,)

    def lead(self) -> tuple[int, ...]:
        return tuple(self.slopes.shape)

    def values(self, rows: Span, columns: Span, dtype: torch.dtype) -> Float[Tensor, "..."]:
        distance = _distance(rows, columns, self.offset, self.slopes.device).abs()
        return -self.slopes.to(dtype)[..., None, None] * distance.to(dtype)


@dataclass(frozen=True, eq=False)
class Relative(Bias):
    """table[clip(j − i − offset, −R, R) + R], a learned number for each distance up to R and head."""

    table: Float[Tensor, "*h distances"]
    offset: int = 0

    def aligned(self, shape: tuple[int, ...]) -> "Relative":
        _one_per_head(self.table.shape[:-1], shape, "table of relative()")
        return self

    @property
    def may_mask(self) -> bool:
        # A table is small enough to look at, except on a GPU, where looking means waiting, and in vmap.
        unseen = self.table.device.type != "cpu" or torch.compiler.is_compiling() or mapped()
        return unseen or bool((self.table == -torch.inf).any())

    @property
    def reach(self) -> int:
        """R: distances beyond it share the last entry."""
        return self.table.shape[-1] // 2

    def holding(self, swap: Callable[[Tensor], Tensor]) -> "Relative":
        return replace(self, table=swap(self.table))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def lead(self) -> tuple[int, ...]:
        return tuple(self.table.shape[:-1])

    def values(self, rows: Span, columns: Span, dtype: torch.dtype) -> Float[Tensor, "..."]:
        if isinstance(rows, Tensor) or isinstance(columns, Tensor) or len(rows) == 0:
            distance = _distance(rows, columns, self.offset, self.table.device)
            return self._entries(distance.flatten(), dtype).unflatten(-1, distance.shape)
        # Each row is the row above moved on by one: a stretch of all the distances there are. A gradient is summed
        # along its diagonal first; pair by pair, one entry of the table would be added to millions of times.
        every = Stretch(columns.start - rows.stop + 1, columns.stop - rows.start)
        entries = self._entries(positions(every, self.table.device) - self.offset, dtype)
        return entries.unfold(-1, len(columns), 1).flip(-2)

    def _entries(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        return self.table.to(dtype).index_select(-1, distance.clamp(-self.reach, self.reach) + self.reach)


def alibi(slopes: Tensor | Sequence[float], offset: int = 0) -> Bias:
    """−slope · distance: attention with linear biases (Press et al. 2022); one slope for each head.

    `offset` is the position of the first query among the keys, as in `causal`.

    >>> alibi([0.5]).values(range(2), range(3), torch.float32)
    tensor([[[-0.0000, -0.5000, -1.0000],
             [-0.5000, -0.0000, -0.5000]]])
    """
    tensor = _floats(slopes, "slopes of alibi()")
    if tensor.ndim > 1:
        raise ValueError(f"slopes of alibi() must be one number for each head, got shape {tuple(tensor.shape)}")
    return Alibi(tensor, integer(offset, "offset of alibi()"), plain=not isinstance(slopes, Tensor))


def relative(table: Tensor, offset: int = 0) -> Bias:
    """A learned bias for each distance j − i, clipped to ±R: a table (2R + 1,) or (h, 2R + 1) (Shaw et al. 2018)."""
    tensor = _floats(table, "table of relative()")
    if tensor.ndim not in (1, 2) or tensor.shape[-1] % 2 == 0:
        raise ValueError(
            f"table of relative() must be (2R + 1,) or (heads, 2R + 1), an odd size last, got {tuple(tensor.shape)}"
        )
    return Relative(tensor, integer(offset, "offset of relative()"), plain=not isinstance(table, Tensor))


def as_bias(bias: Bias | Tensor) -> Bias:
    """A bias as it is; a float tensor as a dense one."""
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
    """Numbers as a tensor; tensors among them keep their gradient."""
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


def _distance(rows: Span, columns: Span, offset: int, device: torch.device) -> Tensor:
    """j − (i + offset) for the rows and columns asked."""
    return positions(columns, device) - (positions(rows, device) + offset).unsqueeze(-1)
