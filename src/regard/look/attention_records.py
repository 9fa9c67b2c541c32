"""The record of one attention call, which computes weights when they are requested, a block of rows at a time."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.core.requests import Entropy, Top
from regard.look.batch_items import CheckOf, GradientPart, Part, Places, stored
from regard.look.labels import Labels
from regard.look.pooling import Pool, pooled

BLOCK_NUMBERS = 2**22  # largest number of attention weights that are computed at a time
ROUNDING = 1e-6  # a weight between −ROUNDING and 0 counts as 0 with a rounding error, not as negative


@runtime_checkable
class Source(Protocol):
    """Returns a record's attention weights, from a stored tensor or recomputed from stored queries and keys."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the numbers of sequences, heads, queries and keys."""

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        """Return the weights (heads, rows, keys) of the queries `rows` of sequence `batch`, float32 on the CPU."""

    def holds(self) -> list[Tensor]:
        """Return the tensors that this source of weights holds in memory."""


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory of the tensors; storage that several tensors share counts once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@runtime_checkable
class Gradient(Protocol):
    """The gradient of the loss with respect to the attention weights of one call."""

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor: ...

    def store(self, grad: Tensor) -> None: ...


@runtime_checkable
class Check(Protocol):
    """The relative difference between weights @ value and the output that the attention call returned."""

    def of(self, batch: int) -> float: ...

    def holds(self) -> list[Tensor]: ...


class VersionedTensors:
    """Tensors that are stored without a copy, and their version counters, which show later in-place changes."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self._versions = [_version(tensor) for tensor in tensors]

    def check(self) -> None:
        """Raise RuntimeError if a tensor has been modified in place since this object was created."""
        if [_version(tensor) for tensor in self.tensors] != self._versions:
            raise RuntimeError(
                "what this call was made of was changed in place since: where it attended can no longer be told"
            )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Given:
    """A `Source` of attention weights that are stored as one tensor (batch, heads, queries, keys)."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights
        self._versioned = VersionedTensors(weights)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, q, k = self._weights.shape
        return b, h, q, k

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        self._versioned.check()
        weights = self._weights[batch, heads.start : heads.stop].index_select(-2, rows.to(self._weights.device))
        return weights.float().cpu()

    def block(self, batch: slice, heads: range, rows: Tensor) -> Tensor:
        """Return the attention weights (batch, heads, rows, keys), on the device of the stored weights."""
        return self._weights[batch, heads.start : heads.stop].index_select(-2, rows)

    def holds(self) -> list[Tensor]:
        return [self._weights]


class Axes(NamedTuple):
    """The labels of the rows and of the columns of an attention map, for one sequence."""

    rows: Labels | None
    columns: Labels | None


# The labels of one axis: one Labels object if the batch has one sequence, otherwise a list with one for each sequence.
LabelsOfAll = Labels | Sequence[Labels | None] | None


class Record:
    """The record of one attention call: its shape, and its weights, which are computed when requested.

    `name` is the path of the module that made the call, and `call` counts the module's calls from 0. The numbers
    `batch`, `heads`, `queries` and `keys` are the shape of the weights. `kind` is the function that computed the
    attention, such as "sdpa" or "softmax". `scale` is the factor of the scores and `note` a remark about the weights;
    each is None if there is none.

    >>> record = Record("layer", "given", Given(torch.eye(3)[None, None]))
    >>> record.weights(head=0, queries=[2])
    tensor([[0., 0., 1.]])
    >>> record
    Record('layer', call 0, given: 1 × 1 head, 3 queries, 3 keys)
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
        row_labels: LabelsOfAll = None,
        column_labels: LabelsOfAll = None,
    ) -> None:
        self.name = name
        self.call = call
        self.kind = kind
        self.batch, self.heads, self.queries, self.keys = source.shape
        self.scale = scale
        self.note = note
        self._rows = self._each(row_labels, "rows", self.queries)
        self._columns = self._each(column_labels, "columns", self.keys)
        self.source = source
        self._checked = checked
        self.backward: Gradient | None = None

    def __repr__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        heads, queries, keys = (
            _counted(*axis)
            for axis in ((self.heads, "head", "heads"), (self.queries, "query", "queries"), (self.keys, "key", "keys"))
        )
        where = f"{self.name!r}, call {self.call}, {self.kind}"
        return f"Record({where}: {self.batch} × {heads}, {queries}, {keys}{note})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays: the viewer's page with this record only."""
        from regard.look.trace import Trace

        return Trace(self.name or "Attention", [self])._repr_html_()

    @property
    def row_labels(self) -> Labels | None:
        """Return the labels of the rows of sequence 0; `labels(batch=1)` returns those of another sequence."""
        return self._rows[0] if self._rows else None

    @row_labels.setter
    def row_labels(self, given: LabelsOfAll) -> None:
        self._rows = self._each(given, "rows", self.queries)

    @property
    def column_labels(self) -> Labels | None:
        """Return the labels of the columns of sequence 0; `labels(batch=1)` returns those of another sequence."""
        return self._columns[0] if self._columns else None

    @column_labels.setter
    def column_labels(self, given: LabelsOfAll) -> None:
        self._columns = self._each(given, "columns", self.keys)

    def labels(self, *, batch: int = 0) -> Axes:
        """Return the labels of the rows and columns of the sequence `batch`."""
        item = self._item(batch)
        return Axes(self._rows[item], self._columns[item])

    def _each(self, labels: LabelsOfAll, what: str, length: int) -> list[Labels | None]:
        """Return a list with the labels of each sequence of the batch; ValueError if there are too many or too few."""
        if labels is None:
            return [None] * self.batch
        if isinstance(labels, Labels) and self.batch != 1:
            raise ValueError(
                f"{what} of {self.name!r} has labels for one sequence, but there are {self.batch}: give labels for each"
            )
        by_sequence: list[Labels | None] = [labels] if isinstance(labels, Labels) else list(labels)
        if len(by_sequence) != self.batch:
            raise ValueError(
                f"{what} of {self.name!r} has labels for {len(by_sequence)} sequences; there are {self.batch}"
            )
        wrong = next((len(entry) for entry in by_sequence if entry is not None and len(entry) != length), None)
        if wrong is not None:
            raise ValueError(f"{what} of {self.name!r} has {wrong} labels, but there are {length} {what}")
        return by_sequence

    def sequence(self, batch: int) -> "Record":
        """Return one sequence of the batch as a separate record, with its labels and without its padding.

        >>> labels = [Labels("tokens", ("a", "b")), Labels("tokens", ("c", "[PAD]"), shown=(0,))]
        >>> record = Record("layer", "given", Given(torch.rand(2, 1, 2, 2)), row_labels=labels, column_labels=labels)
        >>> record.sequence(1)
        Record('layer', call 0, given: 1 × 1 head, 1 query, 1 key)
        """
        rows, columns = self.labels(batch=batch)
        if self.batch == 1 and all(labels is None or labels.shown is None for labels in (rows, columns)):
            return self
        places = Places(batch, *(labels.shown if labels is not None else None for labels in (rows, columns)))
        sequence = Record(
            self.name,
            self.kind,
            Part(self.source, places),
            call=self.call,
            scale=self.scale,
            note=self.note,
            checked=None if self._checked is None else CheckOf(self._checked, batch),
            row_labels=None if rows is None else rows.trimmed(),
            column_labels=None if columns is None else columns.trimmed(),
        )
        sequence.backward = None if self.backward is None else GradientPart(self.backward, places)
        return sequence

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory of the tensors that this record holds."""
        return nbytes(self.holds())

    def holds(self) -> list[Tensor]:
        """Return the tensors that this record holds for its weights and for `check()`."""
        return [*self.source.holds(), *(self._checked.holds() if self._checked is not None else ())]

    def weights(
        self, *, head: int | None = None, queries: slice | Sequence[int] | None = None, batch: int = 0
    ) -> Tensor:
        """Return the attention weights (heads, queries, keys), or (queries, keys) of one head; float32 on the CPU."""
        rows = self._positions(queries)
        weights = self.source.rows(self._item(batch), self._range(head), rows)
        return weights if head is None else weights[0]

    def top(self, k: int, *, batch: int = 0, magnitude: bool = False) -> Top:
        """Return the k largest weights of each query and the indices of their keys, (heads, queries, k).

        NaN counts as the largest weight. With `magnitude` weights are ranked by |weight|, for weights that may be
        negative.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        parts = []
        for _, weights in self._blocks(None, batch):
            indices = (weights.abs() if magnitude else weights).topk(min(k, self.keys), -1).indices
            parts.append(Top(weights.gather(-1, indices), indices))
        return Top(torch.cat([part.values for part in parts], -2), torch.cat([part.indices for part in parts], -2))

    def received(self, *, batch: int = 0) -> Tensor:
        """Return the sum over all queries of the weights of each key, (heads, keys)."""
        known = stored(self.source, "received", self._item(batch))
        if known is not None:
            return known
        total = torch.zeros(self.heads, self.keys)
        for _, weights in self._blocks(None, batch):
            total += weights.sum(-2)
        return total

    def entropy(self, *, batch: int = 0) -> Tensor:
        """Return the entropy −Σ w ln w of each query's weights in nats, (heads, queries).

        The entropy of a query with a negative weight is NaN.
        """
        known = stored(self.source, "entropy", self._item(batch))
        if known is not None:
            return known
        parts = [Entropy().of(shares(weights)) for _, weights in self._blocks(None, batch)]
        return torch.cat([part for part in parts if isinstance(part, Tensor)], -1)

    def overview(self, size: int = 256, *, head: int, batch: int = 0, pool: Literal["mean", "max"] = "mean") -> Tensor:
        """Return the attention map of a head, pooled to at most size × size cells.

        Each cell of the pooled map is the mean (or the maximum) of the weights that it covers.
        """
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        if pool not in ("mean", "max"):
            raise ValueError(f"pool must be mean or max, got {pool!r}")
        head = self._range(head).start
        known = stored(self.source, "overview", self._item(batch), head)
        if known is not None and pool == "mean":
            return known if max(known.shape) <= size else pooled(known, *(min(size, n) for n in known.shape))
        if 0 in (self.queries, self.keys):
            return torch.zeros(min(size, self.queries), min(size, self.keys))
        pooled_map = Pool(self.queries, self.keys, min(size, self.queries), min(size, self.keys), pool)
        for rows, weights in self._blocks(head, batch):
            pooled_map.add(int(rows[0]), weights[0])
        return pooled_map.cells()

    def check(self, *, batch: int = 0) -> float | None:
        """Return the largest |weights @ value − output| divided by the largest |output|.

        `weights` are those of this record at some rows spread over the queries, and `output` is what the recorded call
        returned. The result is None if the call has no check, or one of its tensors has been modified since.
        """
        self._item(batch)
        error = None if self._checked is None else self._checked.of(batch)
        return None if error is None or math.isnan(error) else error

    def gradient(
        self, *, head: int | None = None, queries: slice | Sequence[int] | None = None, batch: int = 0
    ) -> Tensor:
        """Return the gradient ∂L/∂weights = ∂L/∂output · valueᵀ, (heads, queries, keys), after `L.backward()`."""
        if self.backward is None:
            raise ValueError(
                f"no gradients were kept for {self.name!r}: watch(model, gradients=True) with grad mode on"
            )
        grads = self.backward.rows(self._item(batch), self._range(head), self._positions(queries))
        return grads if head is None else grads[0]

    def relevance(
        self, *, head: int | None = None, queries: slice | Sequence[int] | None = None, batch: int = 0
    ) -> Tensor:
        """Return weights · ∂L/∂weights with negative products set to 0 (Chefer et al. 2021, eq. 5 without the mean)."""
        weights = self.weights(head=head, queries=queries, batch=batch)
        return (weights * self.gradient(head=head, queries=queries, batch=batch)).clamp_min(0)

    def _blocks(self, head: int | None, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows in blocks of at most `BLOCK_NUMBERS` weights or one row: the rows' indices and weights."""
        heads, item = self._range(head), self._item(batch)
        step = max(1, BLOCK_NUMBERS // max(1, len(heads) * self.keys))
        for start in range(0, max(1, self.queries), step):
            rows = torch.arange(start, min(start + step, self.queries))
            yield rows, self.source.rows(item, heads, rows)

    def _item(self, batch: int) -> int:
        if not 0 <= batch < self.batch:
            there = "there is 1 sequence" if self.batch == 1 else f"there are {self.batch} sequences"
            allowed = f": batch must be from 0 to {self.batch - 1}" if self.batch else ""
            raise IndexError(f"batch {batch} of {self.name!r}: {there}{allowed}")
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


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def shares(weights: Tensor) -> Tensor:
    """Return the weights, with values between −ROUNDING and 0 set to 0 and smaller values set to NaN."""
    return torch.where(weights < -ROUNDING, math.nan, weights.clamp_min(0))
