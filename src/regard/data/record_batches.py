"""Padded batches of records with any fields, in an order that depends only on the seed and can be resumed."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, make_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from regard.data.token_batches import TokenBatches

Record = Mapping[str, Any]


class PaddedBatch:
    """The base class of the batches that `padded` returns: dataclasses with one tensor for each field.

    A training step can be captured as a CUDA graph only for batches that are dataclasses of tensors.
    """

    def to(self, device: torch.device | str) -> Any:
        """Return the same batch on another device."""
        return type(self)(*(getattr(self, one.name).to(device, non_blocking=True) for one in fields(self)))  # type: ignore


def padded(records: Sequence[Record], fills: Mapping[str, int | float], *, grid: int = 1, rows: int = 0) -> Any:
    """Return one batch of records; its attributes are the fields of the records.

    With b rows, numbers become a tensor (b,). Sequences of a field named in `fills` are padded with the value given
    there to a tensor (b, padded length, …); their lengths are the attribute `<name>_lengths` (b,). Arrays of any other
    field are stacked and must have the same shape. Padded lengths are multiples of `grid`. With `rows`, the batch is
    padded to that number of rows: the added rows are empty (length 0) in padded fields and zero in the others; the
    attribute `real` (b,) is True for the rows that are records.

    >>> batch = padded([{"text": [5, 6, 7], "label": 1}, {"text": [8], "label": 0}], {"text": 0})
    >>> batch.text.tolist(), batch.text_lengths.tolist(), batch.label.tolist()
    ([[5, 6, 7], [8, 0, 0]], [3, 1], [1, 0])
    >>> padded([{"text": [5, 6, 7]}], {"text": 0}, grid=4, rows=2).text.tolist()
    [[5, 6, 7, 0], [0, 0, 0, 0]]
    """
    if not records:
        raise ValueError("a batch needs at least one record")
    if grid < 1:
        raise ValueError(f"grid must be at least 1, got {grid}")
    count = max(len(records), rows)
    columns: dict[str, Tensor] = {}
    for name in records[0]:
        values = [np.asarray(record[name]) for record in records]
        if name in fills:
            columns[name], columns[f"{name}_lengths"] = _table(values, fills[name], grid, count)
        else:
            columns[name] = _stack(name, values, count)
    columns["real"] = torch.arange(count) < len(records)
    return _batch_type(tuple(columns))(**columns)


@functools.cache
def _batch_type(names: tuple[str, ...]) -> Callable[..., Any]:
    batch_type: Any = make_dataclass(
        "Padded", [(name, Tensor) for name in names], bases=(PaddedBatch,), frozen=True, eq=False
    )
    return batch_type


def _table(values: Sequence[NDArray[Any]], fill: int | float, grid: int, count: int) -> tuple[Tensor, Tensor]:
    lengths = np.zeros(count, np.int64)
    lengths[: len(values)] = [len(value) for value in values]
    width = max(1, -(-int(lengths.max()) // grid)) * grid
    whole = np.full((count, width, *values[0].shape[1:]), fill, _kind(values))
    for row, value in zip(whole, values, strict=False):
        row[: len(value)] = value
    return torch.from_numpy(whole), torch.from_numpy(lengths)


def _stack(name: str, values: Sequence[NDArray[Any]], count: int) -> Tensor:
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise ValueError(f"{name} must have one shape in every record of a batch, got {sorted(shapes)}")
    whole = np.zeros((count, *values[0].shape), _kind(values))
    whole[: len(values)] = np.stack(values)
    return torch.from_numpy(whole)


def _kind(values: Sequence[NDArray[Any]]) -> Any:
    """Return the NumPy type of a column of a batch; empty lists are ignored, because NumPy makes them float64."""
    filled = [value for value in values if value.size] or values[:1]
    kind = np.result_type(*(value.dtype for value in filled))
    if kind == np.float64:
        return np.float32
    return np.int64 if np.issubdtype(kind, np.integer) and kind != np.uint8 else kind


def groups_by_length(lengths: Sequence[int], *, tokens: int) -> list[list[int]]:
    """Return the indices of the records in groups of similar length, each of at most `tokens` tokens with padding.

    A record with more than `tokens` tokens is a group by itself.

    >>> groups_by_length([5, 1, 9, 2], tokens=10)
    [[1, 3], [0], [2]]
    """
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        if groups and (len(groups[-1]) + 1) * lengths[place] <= tokens:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


class RecordBatches:
    """Batches of records in the order of `TokenBatches`, created by `collate(records, grid=…, rows=…)`.

    With a `grid` above 1 the batches have only a few different shapes: padded lengths are multiples of `grid`, and the
    batch is padded to the largest number of rows of that length that has at most `tokens` tokens. With `ranks`
    processes, process `rank` gets every `ranks`-th row of each batch. If a batch has fewer rows than there are
    processes, a process without a row gets the batch's first row, and `idle(batch)` marks this copy. The order of the
    batches, and therefore `state`, is the same for any number of processes.
    """

    def __init__(
        self,
        records: Sequence[Any],
        lengths: Sequence[ArrayLike],
        *,
        collate: Callable[..., Any],
        tokens: int,
        seed: int,
        grid: int = 1,
        rank: int = 0,
        ranks: int = 1,
        idle: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self._records, self._collate, self._tokens, self._grid = records, collate, tokens, grid
        self._rank, self._ranks, self._idle = rank, ranks, idle
        self._widest = np.maximum.reduce([np.asarray(column) for column in lengths])
        self._order = TokenBatches(*lengths, tokens=tokens, seed=seed, grid=grid)

    def __iter__(self) -> Iterator[Any]:
        for numbers in self._order:
            # Each process gets every `ranks`-th row, not a contiguous block: a batch may be sorted by length, and
            # interleaved shares have similar cost.
            mine = numbers[self._rank :: self._ranks]
            records = [self._records[number] for number in mine or numbers[:1]]
            rows = self._fitting(int(self._widest[numbers].max()))
            batch = self._collate(records, grid=self._grid, rows=rows)
            yield batch if mine else self._idle(batch)

    def _fitting(self, widest: int) -> int:
        """Return the number of rows to which one process's share of a batch is padded; 0 for no padding of rows.

        `widest` is the length of the longest record of the batch.
        """
        if self._grid == 1:
            return 0
        return -(-(self._tokens // (-(-widest // self._grid) * self._grid)) // self._ranks)

    def state(self) -> dict[str, Any]:
        """Return the position of the iteration in the order of batches, to be stored in a checkpoint."""
        return self._order.state()

    def resume(self, state: dict[str, Any]) -> None:
        """Continue the iteration after the last batch that was yielded before `state()` returned `state`."""
        self._order.resume(state)
