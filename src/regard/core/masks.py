"""Masks as symbolic rules that combine with & | ~ and become tensors only where a kernel needs one.

True means *may attend*. A mask is evaluated on any part of the score matrix (`allowed`), or block by block (`coarse`),
so that no n × n tensor is built unless the caller gave one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.core.clauses import Clauses
from regard.core.spans import Span, align_first, all_of, broadcast, constant, positions, take
from regard.core.tensor_arguments import (
    broadcastable,
    check_lengths,
    extent,
    integer,
    integers,
    position,
    second_offset,
)

_LONG = 2**30  # a number greater than the length of any sequence


class Blocks(NamedTuple):
    """Edges of a grid of blocks over the score matrix: row block r covers rows[r] ≤ i < rows[r + 1]."""

    rows: Tensor
    columns: Tensor


class Coarse(NamedTuple):
    """A conservative summary of a mask by blocks: two bool tensors (…, row blocks, column blocks).

    Where `some` is False, no query of the block may attend to any key of the block. Where `every` is True, each query
    of the block may attend to each key of the block.
    """

    some: Tensor
    every: Tensor


class Mask:
    """A rule that decides which query may attend which key.

    Create a mask with causal, window, padding, segments or dense; combine masks with & | ~.

    >>> both = causal() & padding(torch.tensor([2]))
    >>> both.aligned((1, 1, 3, 3)).allowed(range(3), range(3), torch.device("cpu"))[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 0]], dtype=torch.int32)
    """

    def __and__(self, other: "Mask | Tensor") -> "Mask":
        return And(self, as_mask(other))

    def __rand__(self, other: "Mask | Tensor") -> "Mask":
        return And(as_mask(other), self)

    def __or__(self, other: "Mask | Tensor") -> "Mask":
        return Or(self, as_mask(other))

    def __ror__(self, other: "Mask | Tensor") -> "Mask":
        return Or(as_mask(other), self)

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false: combine masks with & | ~, not with and, or, not")

    def aligned(self, shape: tuple[int, ...]) -> "Mask":
        """Return the mask with its tensors reshaped to broadcast to scores of `shape` (*leading, q, k), or raise."""
        return self

    def on(self, device: torch.device) -> "Mask":
        """Return the mask for queries on this device: tensors that were created from Python numbers are moved to it."""
        return self

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the mask, whose devices are compared with the device of the query."""
        return ()

    def lead(self) -> tuple[int, ...]:
        """Return the shape of the result of `allowed` without its last two axes, rows and columns."""
        return ()

    def allowed(self, rows: Span, columns: Span, device: torch.device) -> Bool[Tensor, "..."]:
        """Return which queries (rows) may attend which keys (columns), as a bool tensor that broadcasts to (*leading,
        rows, columns)."""
        raise NotImplementedError

    def coarse(self, blocks: Blocks) -> Coarse:
        """Return for each block of the grid whether any and whether all of its pairs are allowed, conservatively."""
        raise NotImplementedError

    def clauses(self) -> Clauses | None:
        """Return the mask as a conjunction of rules that kernels can evaluate, or None if it is no such conjunction.

        If the result is None, kernels receive the tensor of `allowed`, or the call runs in torch operations.
        """
        return None

    def by_key(self) -> bool:
        """Return whether all queries may attend to the same keys, as linear attention requires."""
        return False

    def restricting(self, queries: int, keys: int) -> "Mask | None":
        """Return the mask without the rules that exclude no pair of `queries` queries and `keys` keys; None if no rule
        remains."""
        return self

    def later(self, offset: int | Tensor, queries: int, keys: int, device: torch.device) -> "Mask":
        """Return the mask for a layer with a cache of `keys` keys, whose first of `queries` queries is at position
        `offset`.

        With a static cache, `offset` is a tensor on `device`.
        """
        kind = type(self).__name__
        raise TypeError(f"a mask of type {kind} beside a cache: how it moves with the cache is not known")


def as_mask(mask: "Mask | Tensor") -> Mask:
    """Return a mask unchanged, and a bool tensor as `dense`."""
    return mask if isinstance(mask, Mask) else dense(mask)


@dataclass(frozen=True)
class Band(Mask):
    """Query i may attend to key j if low ≤ j − i ≤ high; a bound of None does not restrict. Causal masks and windows
    are bands."""

    low: int | None
    high: int | None
    offset: int = field(default=0, compare=False)  # the caller's offset, which low and high already include

    def allowed(self, rows: Span, columns: Span, device: torch.device) -> Bool[Tensor, "..."]:
        if isinstance(rows, Tensor) or isinstance(columns, Tensor):
            return self._allowed(rows, columns, device)
        key = ("band", self.low, self.high, rows.start, rows.stop, columns.start, columns.stop)
        numbers = (rows.stop - rows.start) * (columns.stop - columns.start)
        return constant(key, device, lambda: self._allowed(rows, columns, device), numbers)

    def _allowed(self, rows: Span, columns: Span, device: torch.device) -> Bool[Tensor, "..."]:
        distance = positions(columns, device) - positions(rows, device).unsqueeze(-1)
        if self.low is None:
            return torch.ones_like(distance, dtype=torch.bool) if self.high is None else distance <= self.high
        inside = distance >= self.low
        return inside if self.high is None else inside & (distance <= self.high)

    def coarse(self, blocks: Blocks) -> Coarse:
        rows, columns = blocks.rows.unsqueeze(-1), blocks.columns
        # The smallest (`least`) and the largest (`most`) distance j − i in each block.
        least = columns[:-1] - (rows[1:] - 1)
        most = (columns[1:] - 1) - rows[:-1]
        some = torch.ones_like(least, dtype=torch.bool)
        every = some
        if self.low is not None:
            some, every = some & (most >= self.low), every & (least >= self.low)
        if self.high is not None:
            some, every = some & (least <= self.high), every & (most <= self.high)
        return Coarse(some, every)

    def clauses(self) -> Clauses:
        return Clauses(low=self.low, high=self.high)

    def restricting(self, queries: int, keys: int) -> "Band | None":
        return None if self.allows_all(queries, keys) else self

    def later(self, offset: int | Tensor, queries: int, keys: int, device: torch.device) -> Mask:
        if self.offset != 0 and not (isinstance(offset, int) and offset == 0):
            raise ValueError(second_offset("mask", self.offset, offset, "causal() or window(before, after)"))
        if not isinstance(offset, int):
            return Dense(self.allowed(torch.arange(queries, device=device) + offset, all_of(keys), device))
        return Band(None if self.low is None else self.low + offset, None if self.high is None else self.high + offset)

    def allows_all(self, queries: int, keys: int) -> bool:
        """Return whether every query may attend to every key, as for a single query at the last position under a causal
        mask."""
        return (self.low is None or self.low <= 1 - queries) and (self.high is None or self.high >= keys - 1)


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Every query may attend to the keys at positions less than the length of the sequence."""

    lengths: Int[Tensor, "*lead"]
    plain: bool = False  # whether the caller gave the lengths as Python numbers, not as a tensor
    bounds: tuple[int, int] | None = field(default=None, compare=False)  # the smallest and the largest length

    def on(self, device: torch.device) -> "Padding":
        return replace(self, lengths=self.lengths.to(device)) if self.plain else self

    def aligned(self, shape: tuple[int, ...]) -> "Padding":
        check_lengths(self.bounds or extent(self.lengths), shape[-1], "lengths of padding()")
        try:
            return Padding(align_first(self.lengths, 0, shape, "lengths of padding()"))
        except ValueError as error:
            if tuple(self.lengths.shape) == (shape[0], shape[-1]):
                raise ValueError(f"{error}; a mask of keys goes to mask=, as mask.bool()[:, None, None, :]") from None
            raise

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.lengths,)

    def lead(self) -> tuple[int, ...]:
        return tuple(self.lengths.shape)

    def allowed(self, rows: Span, columns: Span, device: torch.device) -> Bool[Tensor, "..."]:
        return positions(columns, device) < self.lengths[..., None, None]

    def coarse(self, blocks: Blocks) -> Coarse:
        lengths, columns = self.lengths[..., None, None], blocks.columns
        return Coarse(columns[:-1] < lengths, columns[1:] <= lengths)

    def clauses(self) -> Clauses:
        return Clauses(lengths=self.lengths)

    def by_key(self) -> bool:
        return True

    def later(self, offset: int | Tensor, queries: int, keys: int, device: torch.device) -> "Padding":
        return Padding(self.lengths.clamp_max(keys), self.plain)  # a length may exceed the number of keys cached so far


@dataclass(frozen=True, eq=False)
class Segments(Mask):
    """A query may attend to the keys that have the same segment id as the query."""

    query_ids: Int[Tensor, "... q"]
    key_ids: Int[Tensor, "... k"]
    plain: bool = False

    def on(self, device: torch.device) -> "Segments":
        return Segments(self.query_ids.to(device), self.key_ids.to(device)) if self.plain else self

    def aligned(self, shape: tuple[int, ...]) -> "Segments":
        for name, ids, length in (("query_ids", self.query_ids, shape[-2]), ("key_ids", self.key_ids, shape[-1])):
            if ids.ndim == 0 or ids.shape[-1] != length:
                axis = "queries" if name == "query_ids" else "keys"
                raise ValueError(f"{name} of segments() must end in {length} {axis}, got shape {tuple(ids.shape)}")
        query_ids = align_first(self.query_ids, 1, shape, "query_ids of segments()")
        if self.key_ids is self.query_ids:  # queries and keys share one tensor of ids, and still do after this
            return Segments(query_ids, query_ids)
        return Segments(query_ids, align_first(self.key_ids, 1, shape, "key_ids of segments()"))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.query_ids,) if self.key_ids is self.query_ids else (self.query_ids, self.key_ids)

    def lead(self) -> tuple[int, ...]:
        return broadcast(tuple(self.query_ids.shape[:-1]), tuple(self.key_ids.shape[:-1]))

    def allowed(self, rows: Span, columns: Span, device: torch.device) -> Bool[Tensor, "..."]:
        return take(self.query_ids, -1, rows).unsqueeze(-1) == take(self.key_ids, -1, columns).unsqueeze(-2)

    def coarse(self, blocks: Blocks) -> Coarse:
        (low_q, high_q), (low_k, high_k) = _extent(self.query_ids, blocks.rows), _extent(self.key_ids, blocks.columns)
        low_q, high_q = low_q.unsqueeze(-1), high_q.unsqueeze(-1)
        low_k, high_k = low_k.unsqueeze(-2), high_k.unsqueeze(-2)
        some = (low_q <= high_k) & (low_k <= high_q)
        return Coarse(some, (low_q == high_q) & (low_k == high_k) & (low_q == low_k))

    def clauses(self) -> Clauses:
        return Clauses(segments=((self.query_ids, self.key_ids),))

    def later(self, offset: int | Tensor, queries: int, keys: int, device: torch.device) -> "Segments":
        return self  # the caller's ids are already those of the new queries and of all keys in the cache


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A mask given as a bool tensor that broadcasts to the scores; True means may attend."""

    tensor: Bool[Tensor, "..."]

    def aligned(self, shape: tuple[int, ...]) -> "Dense":
        return Dense(broadcastable(self.tensor, shape, "mask"))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def lead(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[:-2])

    def allowed(self, rows: Span, columns: Span, device: torch.device) -> Bool[Tensor, "..."]:
        return take(take(self.tensor, -2, rows), -1, columns)

    def coarse(self, blocks: Blocks) -> Coarse:
        low, high = _extent_2d(self.tensor, blocks)
        return Coarse(high, low)

    def clauses(self) -> Clauses:
        return Clauses(dense=(self.tensor,))

    def by_key(self) -> bool:
        return self.tensor.shape[-2] == 1

    def later(self, offset: int | Tensor, queries: int, keys: int, device: torch.device) -> "Dense":
        return self  # the caller's tensor already has the new queries as rows and all keys in the cache as columns


@dataclass(frozen=True, eq=False)
class Joined(Mask):
    """Base class of a mask that combines two masks."""

    left: Mask
    right: Mask

    def on(self, device: torch.device) -> Mask:
        return replace(self, left=self.left.on(device), right=self.right.on(device))

    def aligned(self, shape: tuple[int, ...]) -> Mask:
        return replace(self, left=self.left.aligned(shape), right=self.right.aligned(shape))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.left.tensors() + self.right.tensors()

    def lead(self) -> tuple[int, ...]:
        return broadcast(self.left.lead(), self.right.lead())

    def by_key(self) -> bool:
        return self.left.by_key() and self.right.by_key()

    def later(self, offset: int | Tensor, queries: int, keys: int, device: torch.device) -> Mask:
        left, right = (part.later(offset, queries, keys, device) for part in (self.left, self.right))
        return replace(self, left=left, right=right)


@dataclass(frozen=True, eq=False)
class And(Joined):
    """A query may attend to a key if both masks allow it."""

    def allowed(self, rows: Span, columns: Span, device: torch.device) -> Bool[Tensor, "..."]:
        return self.left.allowed(rows, columns, device) & self.right.allowed(rows, columns, device)

    def coarse(self, blocks: Blocks) -> Coarse:
        left, right = self.left.coarse(blocks), self.right.coarse(blocks)
        return Coarse(left.some & right.some, left.every & right.every)

    def clauses(self) -> Clauses | None:
        left, right = self.left.clauses(), self.right.clauses()
        return None if left is None or right is None else left & right

    def restricting(self, queries: int, keys: int) -> Mask | None:
        left, right = (part.restricting(queries, keys) for part in (self.left, self.right))
        if left is None or right is None:
            return right if left is None else left
        return self


@dataclass(frozen=True, eq=False)
class Or(Joined):
    """A query may attend to a key if at least one of the two masks allows it."""

    def allowed(self, rows: Span, columns: Span, device: torch.device) -> Bool[Tensor, "..."]:
        return self.left.allowed(rows, columns, device) | self.right.allowed(rows, columns, device)

    def coarse(self, blocks: Blocks) -> Coarse:
        left, right = self.left.coarse(blocks), self.right.coarse(blocks)
        return Coarse(left.some | right.some, left.every | right.every)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """A query may attend to a key if the inner mask does not allow it."""

    mask: Mask

    def on(self, device: torch.device) -> "Not":
        return Not(self.mask.on(device))

    def aligned(self, shape: tuple[int, ...]) -> "Not":
        return Not(self.mask.aligned(shape))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.mask.tensors()

    def lead(self) -> tuple[int, ...]:
        return self.mask.lead()

    def allowed(self, rows: Span, columns: Span, device: torch.device) -> Bool[Tensor, "..."]:
        return ~self.mask.allowed(rows, columns, device)

    def coarse(self, blocks: Blocks) -> Coarse:
        inner = self.mask.coarse(blocks)
        return Coarse(~inner.every, ~inner.some)

    def by_key(self) -> bool:
        return self.mask.by_key()

    def later(self, offset: int | Tensor, queries: int, keys: int, device: torch.device) -> "Not":
        return Not(self.mask.later(offset, queries, keys, device))


def causal(offset: int = 0) -> Mask:
    """Return the mask in which query i may attend to keys j ≤ i + offset, aligned to the top left.

    If the q queries are at the last positions of c + q keys, the offset is c. A layer with a cache adds the cache's
    length itself: write `causal()` there.
    """
    if type(offset) is int and offset == 0:
        return _CAUSAL
    offset = position(offset, "offset of causal()")
    return Band(None, _edge(offset), offset)


_CAUSAL = Band(None, 0)  # the one object that `causal()` without an offset returns


def window(before: int, after: int, offset: int = 0) -> Mask:
    """Return the mask in which query i may attend to key i + offset, `before` keys before it and `after` keys after it.

    `offset` means the same as in `causal`; a layer with a cache adds the cache's length itself.
    """
    before, after = integer(before, "before of window()"), integer(after, "after of window()")
    for name, count in (("before", before), ("after", after)):
        if count < 0:
            raise ValueError(
                f"{name} of window() counts keys beside the query's own and must be 0 or more, got {count}"
            )
    offset = position(offset, "offset of window()")
    return Band(_edge(offset - before), _edge(offset + after), offset)


def _edge(distance: int) -> int:
    """Return the bound of a band, clamped to ±2³⁰, because kernels compute positions in int32."""
    return distance if -_LONG <= distance <= _LONG else _LONG if distance > 0 else -_LONG


def padding(lengths: Tensor | Sequence[int] | int) -> Mask:
    """Return the mask that excludes keys at or beyond each sequence's length.

    The axes of `lengths` correspond to the first axes of the scores: lengths (b,) fit scores (b, h, q, k) and
    (b, q, k). Each length must be from 0 to the number of keys. Other lengths raise an error if they are Python numbers
    or a tensor on the CPU. The values of a tensor on another device, or under `torch.compile` or `vmap`, are not
    inspected: a length beyond the number of keys then allows all keys, and a negative length allows none.
    """
    counts = integers(lengths, "lengths of padding()")
    if isinstance(lengths, Tensor):
        return Padding(counts)
    bounds = extent(counts)
    check_lengths(bounds, None, "lengths of padding()")
    return Padding(counts, plain=True, bounds=bounds)


def segments(query_ids: Tensor | Sequence[int], key_ids: Tensor | Sequence[int]) -> Mask:
    """Return the mask in which a query may attend to the keys of its own segment, for several sequences packed into
    one.

    The ids have shapes (…, q) and (…, k); their leading axes correspond to the first axes of the scores, as in
    `padding`.
    """
    queries, keys = integers(query_ids, "query_ids of segments()"), integers(key_ids, "key_ids of segments()")
    if isinstance(query_ids, Tensor) != isinstance(key_ids, Tensor):  # move both to the device of the one tensor
        device = queries.device if isinstance(query_ids, Tensor) else keys.device
        queries, keys = queries.to(device), keys.to(device)
    return Segments(queries, keys, plain=not isinstance(query_ids, Tensor) and not isinstance(key_ids, Tensor))


def dense(tensor: Tensor) -> Mask:
    """Return the mask given by a bool tensor that broadcasts to the scores (…, h, q, k); True = may attend."""
    if isinstance(tensor, Mask):
        raise TypeError("dense() makes a mask of a bool tensor, got a mask: it goes to mask= as it is")
    if not isinstance(tensor, Tensor):
        name = getattr(tensor, "__name__", type(tensor).__name__)
        hint = f": write {name}(…)" if callable(tensor) else ""
        raise TypeError(f"mask must be a bool tensor or a regard mask, got {type(tensor).__name__}{hint}")
    if tensor.dtype != torch.bool:
        raise TypeError(
            f"mask must be a bool tensor (True = may attend), got {tensor.dtype}: "
            "write mask.bool(), or pass numbers to add to the scores as bias="
        )
    return Dense(tensor)


def _extent(ids: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest id of each block, without a device synchronisation."""
    block = torch.bucketize(torch.arange(ids.shape[-1], device=ids.device), edges[1:], right=True).expand(ids.shape)
    blocks = ids.new_zeros(*ids.shape[:-1], edges.shape[0] - 1)
    low, high = (blocks.scatter_reduce(-1, block, ids, kind, include_self=False) for kind in ("amin", "amax"))
    return low, high


def _extent_2d(tensor: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return for each block whether all entries and whether any entry is True."""
    every = torch.stack([part.all(-1) for part in _parts(tensor, -1, blocks.columns)], -1)
    some = torch.stack([part.any(-1) for part in _parts(tensor, -1, blocks.columns)], -1)
    return (
        torch.stack([part.all(-2) for part in _parts(every, -2, blocks.rows)], -2),
        torch.stack([part.any(-2) for part in _parts(some, -2, blocks.rows)], -2),
    )


def _parts(tensor: Tensor, axis: int, edges: Tensor) -> list[Tensor]:
    return [take(tensor, axis, range(a, b)) for a, b in pairwise(edges.tolist())]
