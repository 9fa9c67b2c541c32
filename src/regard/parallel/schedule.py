"""The exchange schedule: which keys each process needs from every other. The mask alone determines it."""

from dataclasses import dataclass

import torch

from regard.core.backends.block_grid import survey
from regard.core.clauses import clauses
from regard.core.masks import Mask
from regard.core.spans import Stretch
from regard.parallel.sequences import Layout


@dataclass(frozen=True)
class Block:
    """A block: queries that a process holds against keys of one chunk of another, in positions of the whole
    sequences."""

    rows: Stretch
    columns: Stretch
    first_row: int  # index of the first row in this process's part
    masked: bool  # whether any pair in it is masked


@dataclass(frozen=True, eq=False)
class Schedule:
    """The chunks of queries and keys of whole sequences, and the keys of a chunk that the queries of a chunk may
    attend."""

    layout: Layout
    rows: list[Stretch]
    columns: list[Stretch]
    visible: list[list[Stretch | None]]
    masked: list[list[bool]]

    def needed(self, asking: int, holding: int) -> list[Stretch]:
        """Return the keys of process `holding` that process `asking` needs: at most one range for each chunk."""
        stretches = []
        for column in self.layout.owned(holding):
            seen = [s for row in self.layout.owned(asking) if (s := self.visible[row][column]) is not None]
            if seen:
                stretches.append(Stretch(min(s.start for s in seen), max(s.stop for s in seen)))
        return stretches

    def blocks(self, holding: int) -> list[Block]:
        """Return the blocks that this process computes with the keys of process `holding`."""
        found: list[Block] = []
        first = 0
        for row in self.layout.owned(self.layout.rank):
            for column in self.layout.owned(holding):
                stretch = self.visible[row][column]
                if stretch is not None:
                    found.append(Block(self.rows[row], stretch, first, self.masked[row][column]))
            first += len(self.rows[row])
        return found

    def within(self, stretch: Stretch, rank: int) -> Stretch:
        """Return a range of keys of the whole sequence, counted in the part of the process that holds them."""
        before = 0
        for number in self.layout.owned(rank):
            chunk = self.columns[number]
            if chunk.start <= stretch.start < chunk.stop:
                first = stretch.start - chunk.start + before
                return Stretch(first, first + len(stretch))
            before += len(chunk)
        raise AssertionError("a stretch lies in one chunk of its process")


def schedule(layout: Layout, queries: int, keys: int, mask: Mask | None, device: torch.device) -> Schedule:
    """Return the schedule of whole sequences of that many queries and keys, under a mask in their positions."""
    rows, columns = layout.chunks(queries), layout.chunks(keys)
    shape = range(len(rows)), range(len(columns))
    if mask is None or queries == 0 or keys == 0:
        every = [[True] * len(columns)] * len(rows)
        some = every if queries > 0 and keys > 0 else [[False] * len(columns)] * len(rows)
    else:
        some, every = survey(mask, rows, columns, device)
    low, high, length = _bounds(mask, queries, keys)
    visible: list[list[Stretch | None]] = [
        [_seen(rows[r], columns[c], low, high, length) if some[r][c] else None for c in shape[1]] for r in shape[0]
    ]
    return Schedule(layout, rows, columns, visible, [[not every[r][c] for c in shape[1]] for r in shape[0]])


def _bounds(mask: Mask | None, queries: int, keys: int) -> tuple[int | None, int | None, int]:
    """Return the band of a mask and its largest length: keys beyond them are not sent."""
    found = clauses(mask, queries, keys)
    if found is None:
        return None, None, keys
    length = keys if found.lengths is None or found.lengths.numel() == 0 else int(found.lengths.max())
    return found.low, found.high, min(length, keys)


def _seen(rows: Stretch, columns: Stretch, low: int | None, high: int | None, length: int) -> Stretch | None:
    """Return the keys of a chunk that the queries of a chunk may attend."""
    start = columns.start if low is None else max(columns.start, rows.start + low)
    stop = min(columns.stop, length) if high is None else min(columns.stop, length, rows.stop + high)
    return Stretch(start, stop) if start < stop else None
