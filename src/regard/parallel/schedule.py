"""The exchange schedule: which keys each process needs from every other process. The mask, the lengths and the layout
determine it."""

from dataclasses import dataclass

import torch

from regard.core.backends.block_grid import survey
from regard.core.clauses import clauses
from regard.core.masks import Mask
from regard.core.spans import Stretch
from regard.parallel.sequences import Layout


@dataclass(frozen=True)
class Block:
    """A block of scores: queries of this process and keys of one chunk, as positions in the whole sequences."""

    rows: Stretch
    columns: Stretch
    first_row: int  # index of the first query in this process's part
    masked: bool  # whether the mask excludes any pair of the block


@dataclass(frozen=True, eq=False)
class Schedule:
    """The chunks of queries (rows) and keys (columns) of whole sequences, and what the mask allows between them.

    `visible` holds, for each pair of chunks, the range of keys that the queries may attend; `masked`, whether any pair
    is masked.
    """

    layout: Layout
    rows: list[Stretch]
    columns: list[Stretch]
    visible: list[list[Stretch | None]]
    masked: list[list[bool]]

    def needed(self, asking: int, holding: int) -> list[Stretch]:
        """Return the keys of process `holding` that process `asking` needs: at most one range of each chunk."""
        stretches = []
        for column in self.layout.owned(holding):
            seen = [s for row in self.layout.owned(asking) if (s := self.visible[row][column]) is not None]
            if seen:
                stretches.append(Stretch(min(s.start for s in seen), max(s.stop for s in seen)))
        return stretches

    def blocks(self, holding: int) -> list[Block]:
        """Return the blocks that this process computes with the keys of process `holding`."""
        blocks: list[Block] = []
        first = 0
        for row in self.layout.owned(self.layout.rank):
            for column in self.layout.owned(holding):
                stretch = self.visible[row][column]
                if stretch is not None:
                    blocks.append(Block(self.rows[row], stretch, first, self.masked[row][column]))
            first += len(self.rows[row])
        return blocks

    def within(self, stretch: Stretch, rank: int) -> Stretch:
        """Return the range of indices, in the part of process `rank`, of a range of positions of the whole sequence."""
        before = 0
        for number in self.layout.owned(rank):
            chunk = self.columns[number]
            if chunk.start <= stretch.start < chunk.stop:
                first = stretch.start - chunk.start + before
                return Stretch(first, first + len(stretch))
            before += len(chunk)
        raise AssertionError("a stretch lies in one chunk of its process")


def schedule(layout: Layout, queries: int, keys: int, mask: Mask | None, device: torch.device) -> Schedule:
    """Return the schedule for whole sequences with these numbers of queries and keys, under their mask."""
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
    """Return the bounds of the mask's band and its largest length: keys outside of this band or length are not sent."""
    rules = clauses(mask, queries, keys)
    if rules is None:
        return None, None, keys
    length = keys if rules.lengths is None or rules.lengths.numel() == 0 else int(rules.lengths.max())
    return rules.low, rules.high, min(length, keys)


def _seen(rows: Stretch, columns: Stretch, low: int | None, high: int | None, length: int) -> Stretch | None:
    """Return the range of keys in the chunk `columns` that the mask's band and length allow for the chunk of queries
    `rows`; None if empty."""
    start = columns.start if low is None else max(columns.start, rows.start + low)
    stop = min(columns.stop, length) if high is None else min(columns.stop, length, rows.stop + high)
    return Stretch(start, stop) if start < stop else None
