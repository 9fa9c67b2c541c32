"""One attention call that was seen: nothing but what is asked is computed, a block of rows at a time."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.core.requests import Entropy, Top
from regard.look.labels import Labels

_BLOCK_NUMBERS = 2**22  # weights that stand in memory at a time


@runtime_checkable
class Source(Protocol):
    """Where weights come from: kept as they are, or computed again from queries and keys."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries, keys."""
        ...

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        """The weights (heads, rows, keys) of some queries, float32 on the CPU."""
        ...

    def holds(self) -> list[Tensor]:
        """The tensors that stay in memory for it."""
        ...


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Memory behind some tensors, what they share counted once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@runtime_checkable
class Gradient(Protocol):
    """The gradient of whatever was differentiated for the weights of a call."""

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor: ...

    def hear(self, grad: Tensor) -> None: ...


@runtime_checkable
class Check(Protocol):
    """How far weights @ value is from the output that was seen."""

    def of(self, batch: int) -> float: ...

    def holds(self) -> list[Tensor]: ...


class Kept:
    """Tensors that were kept by reference, and whether anybody has written into them since."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self._versions = [_version(tensor) for tensor in tensors]

    def check(self) -> None:
        """Raise where a tensor is no longer what it was when it was kept."""
        if [_version(tensor) for tensor in self.tensors] != self._versions:
            raise RuntimeError(
                "what this call was made of was changed in place since: where it attended can no longer be told"
            )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Given:
    """Weights kept as they are, (b, h, q, k)."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights
        self._kept = Kept(weights)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, q, k = self._weights.shape
        return b, h, q, k

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        self._kept.check()
        found = self._weights[batch, heads.start : heads.stop].index_select(-2, rows.to(self._weights.device))
        return found.float().cpu()

    def block(self, batch: slice, heads: range, rows: Tensor) -> Tensor:
        """The weights of a part, where they are."""
        return self._weights[batch, heads.start : heads.stop].index_select(-2, rows)

    def holds(self) -> list[Tensor]:
        return [self._weights]


class Record:
    """Where one call attended: its shape, and its weights as far as they are asked for.

    >>> record = Record("layer", "given", Given(torch.eye(3)[None, None]))
    >>> record.weights(head=0, queries=[2])
    tensor([[0., 0., 1.]])
    >>> record
    Record('layer', call 0, given: 1 × 1 heads, 3 queries, 3 keys)
    """

    def __init__(
        self,
        name: str,
        kind: str,
        source: Source,
        *,
        call: int = 0,
        scale: float | None = None,
        note: str | None = None,
        checked: Check | None = None,
        row_labels: Labels | None = None,
        column_labels: Labels | None = None,
    ) -> None:
        self.name = name
        self.call = call
        self.kind = kind
        self.batch, self.heads, self.queries, self.keys = source.shape
        self.scale = scale
        self.note = note
        self.row_labels = row_labels
        self.column_labels = column_labels
        self.source = source
        self._checked = checked
        self.backward: Gradient | None = None

    def __repr__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return (
            f"Record({self.name!r}, call {self.call}, {self.kind}: {self.batch} × {self.heads} heads, "
            f"{self.queries} queries, {self.keys} keys{note})"
        )

    @property
    def nbytes(self) -> int:
        """Memory kept for this record."""
        return nbytes(self.holds())

    def holds(self) -> list[Tensor]:
        """The tensors kept for this record and its check."""
        return [*self.source.holds(), *(self._checked.holds() if self._checked is not None else ())]

    def weights(
        self, *, head: int | None = None, queries: slice | Sequence[int] | None = None, batch: int = 0
    ) -> Tensor:
        """The weights (heads, queries, keys), or (queries, keys) of one head; float32 on the CPU."""
        rows = self._positions(queries)
        found = self.source.rows(self._item(batch), self._range(head), rows)
        return found if head is None else found[0]

    def top(self, k: int, *, batch: int = 0) -> Top:
        """The k largest weights of each query and their keys, (heads, queries, k)."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        found = [weights.topk(min(k, self.keys), -1) for _, weights in self._blocks(None, batch)]
        return Top(torch.cat([part.values for part in found], -2), torch.cat([part.indices for part in found], -2))

    def received(self, *, batch: int = 0) -> Tensor:
        """How much weight each key got from all queries, (heads, keys)."""
        known = self._summary("received", self._item(batch))
        if known is not None:
            return known
        total = torch.zeros(self.heads, self.keys)
        for _, weights in self._blocks(None, batch):
            total += weights.sum(-2)
        return total

    def entropy(self, *, batch: int = 0) -> Tensor:
        """How spread each query's weights are, −Σ w ln w in nats, (heads, queries)."""
        known = self._summary("entropy", self._item(batch))
        if known is not None:
            return known
        parts = [Entropy().of(weights.clamp_min(0)) for _, weights in self._blocks(None, batch)]
        return torch.cat([part for part in parts if isinstance(part, Tensor)], -1)

    def overview(self, size: int = 256, *, head: int, batch: int = 0, pool: Literal["mean", "max"] = "mean") -> Tensor:
        """The map of a head in at most size × size cells, each the mean (or largest) of the weights it covers."""
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if pool not in ("mean", "max"):
            raise ValueError(f"pool must be mean or max, got {pool!r}")
        head = self._range(head).start
        known = self._summary("overview", self._item(batch), head)
        if known is not None and pool == "mean":
            return known if max(known.shape) <= size else _pooled(known, *(min(size, n) for n in known.shape))
        if 0 in (self.queries, self.keys):
            return torch.zeros(min(size, self.queries), min(size, self.keys))
        found = _Pool(self.queries, self.keys, min(size, self.queries), min(size, self.keys), pool)
        for rows, weights in self._blocks(head, batch):
            found.add(int(rows[0]), weights[0])
        return found.cells()

    def check(self, *, batch: int = 0) -> float | None:
        """The largest |weights @ value − output| over the largest |output|; None where it cannot apply.

        It was taken when the call was seen, on rows spread over the queries, with the weights that are shown here.
        """
        self._item(batch)
        error = None if self._checked is None else self._checked.of(batch)
        return None if error is None or math.isnan(error) else error

    def gradient(
        self, *, head: int | None = None, queries: slice | Sequence[int] | None = None, batch: int = 0
    ) -> Tensor:
        """∂L/∂weights = ∂L/∂output · valueᵀ, (heads, queries, keys), after `L.backward()`."""
        if self.backward is None:
            raise ValueError(
                f"no gradients were kept for {self.name!r}: watch(model, gradients=True) with grad mode on"
            )
        found = self.backward.rows(self._item(batch), self._range(head), self._positions(queries))
        return found if head is None else found[0]

    def relevance(
        self, *, head: int | None = None, queries: slice | Sequence[int] | None = None, batch: int = 0
    ) -> Tensor:
        """[weights ⊙ ∂L/∂weights]₊: where attention was both paid and of use (Chefer et al. 2021, eq. 5)."""
        weights = self.weights(head=head, queries=queries, batch=batch)
        return (weights * self.gradient(head=head, queries=queries, batch=batch)).clamp_min(0)

    def _blocks(self, head: int | None, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their weights, as many at a time as fit the block."""
        heads, item = self._range(head), self._item(batch)
        step = max(1, _BLOCK_NUMBERS // max(1, len(heads) * self.keys))
        for start in range(0, max(1, self.queries), step):
            rows = torch.arange(start, min(start + step, self.queries))
            yield rows, self.source.rows(item, heads, rows)

    def _summary(self, what: str, *place: int) -> Tensor | None:
        known = getattr(self.source, what, None)
        return known(*place) if known is not None else None

    def _item(self, batch: int) -> int:
        if not 0 <= batch < self.batch:
            raise IndexError(f"batch {batch} of {self.name!r}: there are {self.batch}, counted from 0")
        return batch

    def _range(self, head: int | None) -> range:
        if head is None:
            return range(self.heads)
        if not 0 <= head < self.heads:
            raise IndexError(f"head {head} of {self.name!r}: there are {self.heads}, counted from 0")
        return range(head, head + 1)

    def _positions(self, queries: slice | Sequence[int] | None) -> Tensor:
        if queries is None or isinstance(queries, slice):
            return torch.arange(self.queries)[queries or slice(None)]
        rows = torch.as_tensor(queries, dtype=torch.long).reshape(-1)
        if rows.numel() and not -self.queries <= int(rows.min()) <= int(rows.max()) < self.queries:
            raise IndexError(f"queries {list(queries)} of {self.name!r}: there are {self.queries}")
        return torch.where(rows < 0, rows + self.queries, rows)


class _Pool:
    """A map in few cells. Cell c covers positions from ⌈c·n / cells⌉ on: every position belongs to one.

    Rows are pooled as they come and columns at the end, when few numbers are left.
    """

    def __init__(self, queries: int, keys: int, high: int, wide: int, pool: str) -> None:
        self._edges = torch.tensor([-(-cell * queries // high) for cell in range(high + 1)])
        self._columns = torch.arange(keys) * wide // max(1, keys)
        self._found, self._wide = torch.zeros(high, keys), wide
        self._mean = pool == "mean"

    def add(self, start: int, weights: Tensor) -> None:
        """Consecutive rows of the map."""
        stop = start + len(weights)
        size, left = divmod(int(self._edges[-1]), len(self._found))
        if not left and start % size == 0 == len(weights) % size:  # cells of one size: all in one sum
            place = slice(start // size, stop // size)
            parts = weights.unflatten(0, (-1, size))
            self._found[place] = parts.sum(1) if self._mean else parts.amax(1)
            return
        first = int(torch.searchsorted(self._edges, start, right=True)) - 1
        for cell in range(first, len(self._found)):
            low, high = max(start, int(self._edges[cell])), min(stop, int(self._edges[cell + 1]))
            if low >= stop:
                break
            part, cells = weights[low - start : high - start], self._found[cell]
            if self._mean:
                cells += part.sum(0)
            else:
                torch.maximum(cells, part.amax(0), out=cells)

    def cells(self) -> Tensor:
        high = len(self._found)
        found, index = torch.zeros(high, self._wide), self._columns.expand(high, -1)
        if not self._mean:
            return found.scatter_reduce_(1, index, self._found, "amax")
        counts = self._edges.diff()[:, None] * torch.bincount(self._columns, minlength=self._wide)
        return found.scatter_add_(1, index, self._found) / counts


def _pooled(weights: Tensor, high: int, wide: int) -> Tensor:
    rows, columns = weights.shape
    pool = _Pool(rows, columns, high, wide, "mean")
    pool.add(0, weights)
    return pool.cells()
