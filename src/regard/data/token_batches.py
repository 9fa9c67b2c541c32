"""Batches of records of similar length with a limited number of tokens, in an order that depends only on the seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Ids = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Batch:
    """A padded batch of pairs of a source and a target sequence, such as a sentence and its translation.

    The decoder's input is `prefix` (begin, y_1 … y_n), and the decoder should predict `target` (y_1 … y_n, end). For b
    pairs, `source` (b, source length) and `prefix` (b, target length) are padded with the number of the padding token,
    `target` (b, target length) with the number that the loss ignores. The lengths (b,) include the end marks.
    """

    source: Tensor
    source_lengths: Tensor
    prefix: Tensor
    target: Tensor
    target_lengths: Tensor

    @property
    def tokens(self) -> int:
        """Return the number of target tokens, including the end marks."""
        return int(self.target_lengths.sum())

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on another device."""
        return Batch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))


def collate(
    pairs: Sequence[tuple[Ids, Ids]],
    *,
    pad: int = 0,
    bos: int = 1,
    eos: int = 2,
    ignore: int = -100,
    source_end: bool = True,
    grid: int = 1,
    rows: int = 0,
) -> Batch:
    """Return pairs of token numbers as one padded batch, with begin and end marks added.

    With `source_end=False` the sources have no end mark, because a model could attend to the end mark instead of a
    word. Padded lengths are multiples of `grid`, and rows of padding, which do not affect the loss, are added up to
    `rows` rows, so that batches have only a few different shapes. A row of padding has a source length of 1, because a
    mean over no source tokens would be undefined.

    >>> batch = collate([([5, 6, 7], [8]), ([9], [10, 11])])
    >>> batch.source.tolist(), batch.source_lengths.tolist()
    ([[5, 6, 7, 2], [9, 2, 0, 0]], [4, 2])
    >>> batch.prefix.tolist(), batch.target.tolist()
    ([[1, 8, 0], [1, 10, 11]], [[8, 2, -100], [10, 11, 2]])
    >>> batch = collate([([5], [6])], grid=4, rows=2)
    >>> batch.source.tolist(), batch.source_lengths.tolist(), batch.target_lengths.tolist()
    ([[5, 2, 0, 0], [0, 0, 0, 0]], [2, 1], [2, 0])
    """
    if not pairs:
        raise ValueError("a batch needs at least one pair")
    if grid < 1:
        raise ValueError(f"grid must be at least 1, not {grid}")
    sources, targets = zip(*pairs, strict=True)
    source, source_lengths = _table(sources, pad, grid, rows, last=eos if source_end else None)
    target, target_lengths = _table(targets, ignore, grid, rows, last=eos)
    prefix, _ = _table(targets, pad, grid, rows, first=bos)
    source_lengths[len(pairs) :] = 1
    tables = source, source_lengths, prefix, target, target_lengths
    return Batch(*(torch.from_numpy(table) for table in tables))


def _table(
    rows: Sequence[Ids], fill: int, grid: int, least: int, *, first: int | None = None, last: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows padded to one length, and their lengths; the token `first` or `last` is added to each row.

    Empty rows are added until there are `least` rows; neither `first` nor `last` is added to an empty row.
    """
    count = max(len(rows), least)
    lengths = np.zeros(count, np.int64)
    lengths[: len(rows)] = [len(row) for row in rows]
    shift = 0 if first is None else 1
    marked = lengths + (np.arange(count) < len(rows)) * (shift + (last is not None))
    width = max(1, -(-int(marked.max()) // grid)) * grid if grid > 1 else int(marked.max())
    table = np.full((count, width), fill, np.int64)
    place = np.arange(width) - shift
    table[(place >= 0) & (place < lengths[:, None])] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    if first is not None:
        table[: len(rows), 0] = first
    if last is not None:
        table[np.arange(len(rows)), lengths[: len(rows)] + shift] = last
    return table, marked


class TokenBatches:
    """Yields batches as lists of record indices: on each side, a padded batch has at most `tokens` tokens.

    A side is a field of the records that is padded, such as the source or the target; `lengths` holds for each side the
    list of its lengths.

    Each epoch has a new random order, which depends only on (seed, epoch). The shuffled records are divided into
    windows of `bucket` records; each window is sorted by length and cut into batches, and the batches are then
    shuffled. A record longer than `tokens` is a batch by itself. With `ranks` processes, each process gets the same
    number of different batches in every epoch. With a `grid`, lengths are rounded up to a multiple of this number, as
    in `collate`.

    Iterating yields the rest of the current epoch. If `state()` is saved after any batch and passed to `resume` of a
    new object, the new object continues with the next batch.

    >>> batches = TokenBatches([3, 9, 4, 8, 3], [4, 9, 4, 9, 3], tokens=18, seed=1)
    >>> first = next(iter(batches))
    >>> later = TokenBatches([3, 9, 4, 8, 3], [4, 9, 4, 9, 3], tokens=18, seed=1)
    >>> later.resume(batches.state())
    >>> sorted(sum(later, first))
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        *lengths: ArrayLike,
        tokens: int,
        seed: int,
        bucket: int = 8192,
        grid: int = 1,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._lengths = [np.ascontiguousarray(column, np.int32) for column in lengths]
        shapes = [column.shape for column in self._lengths]
        if not shapes or len(set(shapes)) > 1 or len(shapes[0]) != 1:
            raise ValueError(f"lengths must be lists of equal length, one for each side, got shapes {shapes}")
        if not shapes[0][0]:
            raise ValueError("there are no records to make batches of")
        if min(tokens, bucket, grid) < 1:
            raise ValueError(f"tokens, bucket and grid must be at least 1, not {tokens}, {bucket} and {grid}")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be from 0 to ranks - 1, not {rank} of {ranks}")
        self._tokens, self._seed, self._bucket, self._grid = tokens, seed, bucket, grid
        self._total = sum(int(column.sum(dtype=np.int64)) for column in self._lengths)
        self._rank, self._ranks = rank, ranks
        self._epoch = 0
        self._position = 0

    @property
    def epoch(self) -> int:
        """Return the number of the current epoch, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[list[int]]:
        mine = self.batches(self._epoch)
        for skipped in range(self._position):
            if next(mine, None) is None:
                raise ValueError(f"position {self._position} is past the {skipped} batches of epoch {self._epoch}")
        for batch in mine:
            self._position += 1
            yield batch
        self._epoch, self._position = self._epoch + 1, 0

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """Yield all batches of an epoch for this rank; the position of the iteration does not change."""
        waiting: list[list[int]] = []
        for batch in self._all(epoch):
            waiting.append(batch)
            # Batches are handed out in rounds of one batch for each rank. An incomplete last round is dropped, because
            # all ranks need the same number of batches.
            if len(waiting) == self._ranks:
                yield waiting[self._rank]
                waiting = []

    def count(self, epoch: int = 0) -> int:
        """Return the number of batches in an epoch for this rank."""
        return sum(1 for _ in self.batches(epoch))

    def state(self) -> dict[str, Any]:
        """Return the position of the iteration as a dictionary of numbers, for a checkpoint."""
        return {**self._facts(), "epoch": self._epoch, "position": self._position}

    def resume(self, state: dict[str, Any]) -> None:
        """Continue at the position that `state()` returned; raise ValueError if records or settings have changed."""
        for name, value in self._facts().items():
            # a state dictionary saved by an earlier version has no entry "grid"
            before = state.get(name, 1 if name == "grid" else None)
            if before != value:
                raise ValueError(f"{name} was {before} when the state was taken, and is {value} now")
        self._epoch, self._position = int(state["epoch"]), int(state["position"])

    def _facts(self) -> dict[str, int]:
        return {
            "pairs": len(self._lengths[0]),
            "length": self._total,
            "tokens": self._tokens,
            "seed": self._seed,
            "bucket": self._bucket,
            "ranks": self._ranks,
            "grid": self._grid,
        }

    def _all(self, epoch: int) -> Iterator[list[int]]:
        random = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order = random.permutation(len(self._lengths[0]))
        for first in range(0, len(order), self._bucket):
            window = order[first : first + self._bucket]
            # lexsort is stable, so that records with equal lengths stay in shuffled order.
            window = window[np.lexsort([column[window] for column in self._lengths])]
            widest = np.maximum.reduce([column[window] for column in self._lengths])
            widths = -(-widest // self._grid) * self._grid
            cuts = _cut(widths, self._tokens)
            for place in random.permutation(len(cuts) - 1):
                yield window[cuts[place] : cuts[place + 1]].tolist()


def _cut(widths: NDArray[np.int32], tokens: int) -> list[int]:
    """Return the indices at which to split records sorted by width into padded batches of at most `tokens` tokens.

    `widths` has each record's length on its longest side, rounded up to the grid. The first index is 0, the last is the
    number of records.
    """
    cuts = [0]
    widest = 0
    for place, width in enumerate(widths.tolist()):
        widest = max(widest, width)
        if widest * (place + 1 - cuts[-1]) > tokens and place > cuts[-1]:
            cuts.append(place)
            widest = width
    return [*cuts, len(widths)]
