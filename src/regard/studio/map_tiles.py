"""Tiles of an attention map that is too large to draw at once: a large tile is pooled, a small tile has exact weights.

Weights are recomputed from the record, some rows at a time, so a map of 8,192 × 8,192 can be scrolled without being in
memory. A cell is the mean of the block × block weights it covers. If computing all weights would be too much work for
one picture, only some rows of each block, evenly spaced, are computed; `read` is the number of these rows.
"""

import json
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.look.attention_records import Record
from regard.look.head_mean import WithMean, with_mean
from regard.studio.limits import LIMITS, RefusedError, within

CELLS = LIMITS.tile  # largest number of rows, and of columns, of a picture that is sent
AT_ONCE = 2**21  # largest number of attention weights that are in memory at a time
WORK = 2**23  # largest number of weights computed for one tile: less than 0.1 s on two cores
OVERVIEW = 2**24  # largest number of attention weights computed for a picture of the whole map
THUMBNAIL = 32
Block = tuple[int | float, int | float]
Pool = Callable[[Tensor, tuple[int, int]], Tensor]


class Grid:
    """The cells of a pooled map, their position in the map, and the number of rows of each block that were computed."""

    def __init__(
        self, cells: Float[Tensor, "r c"], *, at: tuple[int, int] = (0, 0), block: Block, read: float | int
    ) -> None:
        self.cells, self.at, self.block, self.read = cells, at, block, read

    def packed(self, type: Literal["uint8", "float16"]) -> tuple[bytes, str]:
        """Return the cells of a pooled map, divided by the largest one, as bytes or half floats, and a JSON header.

        NaN, infinite and negative numbers are sent as half floats, which can represent them.
        """
        sizes = self.cells.abs().nan_to_num(0.0, 0.0, 0.0)
        highest = float(sizes.max()) if sizes.numel() else 0.0
        shares = self.cells / highest if highest > 0 else self.cells
        if not bool((self.cells >= 0).all() & self.cells.isfinite().all()):
            type = "float16"
        if type == "uint8":
            body, scale, error = (shares * 255).round().to(torch.uint8), highest / 255, highest / 510
        else:
            body, scale, error = shares.half(), highest, highest / 4096
        about = {
            "row0": self.at[0],
            "column0": self.at[1],
            "rows": self.cells.shape[0],
            "columns": self.cells.shape[1],
            "rowBlock": self.block[0],
            "columnBlock": self.block[1],
            "read": self.read,
            "highest": highest,
            "scale": scale,
            "error": error,
            "type": type,
        }
        return body.contiguous().numpy().tobytes(), json.dumps(about)


def whole(record: Record, head: int, batch: int = 0) -> Grid:
    """Return the whole attention map of a head, pooled to at most CELLS × CELLS cells."""
    record = _inside(record, head, batch)
    # the trace file of a large map includes a pooled overview of the map
    known = getattr(record.source, "overview", None)
    if known is not None and known(0, head) is not None and max(record.queries, record.keys) > CELLS:
        cells = record.overview(CELLS, head=head).float()
        block = (record.queries / cells.shape[0], record.keys / cells.shape[1])
        return Grid(cells, block=block, read=block[0])
    return _part(record, head, (0, 0, record.queries, record.keys), OVERVIEW // _heads(record))


def tile(record: Record, head: int, row: int, column: int, rows: int, columns: int, batch: int = 0) -> Grid:
    """Return the part of an attention map that begins at (row, column), pooled to about CELLS × CELLS cells."""
    record = _inside(record, head, batch)
    within(row, 0, record.queries - 1, "row")
    within(column, 0, record.keys - 1, "column")
    rows = min(within(rows, 1, 2**31, "rows"), record.queries - row)
    columns = min(within(columns, 1, 2**31, "columns"), record.keys - column)
    return _part(record, head, (row, column, rows, columns), WORK // _heads(record))


def thumbnail(record: Record, head: int, batch: int = 0) -> Grid:
    """Return an attention map as at most 32 × 32 cells, each with its largest weight, which a mean would hide.

    For a large map only one row of each block is computed, so that the thumbnails of all heads appear fast.
    """
    record = _inside(record, head, batch)
    block = (max(1, math.ceil(record.queries / THUMBNAIL)), max(1, math.ceil(record.keys / THUMBNAIL)))
    work = CELLS * CELLS if record.queries * record.keys <= CELLS * CELLS else 0
    cells, read = _pooled(record, head, range(record.queries), block, work, _largest)
    return Grid(cells, block=block, read=read)


def row(record: Record, head: int, at: int, batch: int = 0) -> Float[Tensor, "k"]:
    """Return the exact (not pooled) attention weights of one query."""
    record = _inside(record, head, batch)
    within(at, 0, record.queries - 1, "row")
    return _rows(record, head, [at])[0]


def received(record: Record, head: int, batch: int = 0) -> Float[Tensor, "k"]:
    """Return the mean weight that each key receives; for a large map, the mean over evenly spaced rows only."""
    record = _inside(record, head, batch)
    known = getattr(record.source, "received", None)
    if known is not None and known(0) is not None:
        return known(0)[head].float() / max(1, record.queries)
    heads = _heads(record)
    stride = max(1, math.ceil(record.queries * record.keys * heads / WORK))
    rows = list(range(stride // 2, record.queries, stride))
    step = max(1, AT_ONCE // max(1, record.keys * heads))
    total = torch.zeros(record.keys)
    for start in range(0, len(rows), step):
        total += _rows(record, head, rows[start : start + step]).sum(0)
    return total / max(1, len(rows))


def is_sampled(record: Record) -> bool:
    """Return whether the picture of the whole map is computed from only some of its rows."""
    return max(record.queries, record.keys) > CELLS and record.queries * record.keys > OVERVIEW


def _inside(record: Record, head: int, batch: int) -> Record:
    """Return one sequence of a record; if `head` is the index after the last head, with the mean of all heads."""
    within(head, 0, record.heads - (record.heads < 2), "head")
    within(batch, 0, record.batch - 1, "batch")
    sequence = record.sequence(batch)
    return with_mean(sequence) if head == record.heads else sequence


def _heads(record: Record) -> int:
    """Return the number of heads whose weights must be computed to show one head: all of them if it is their mean."""
    return record.heads - 1 if isinstance(record.source, WithMean) else 1


def _part(record: Record, head: int, part: tuple[int, int, int, int], work: int) -> Grid:
    row, column, rows, columns = part
    if not rows * columns:
        return Grid(torch.zeros(rows, columns), block=(1, 1), read=1)
    block = math.ceil(max(rows, columns) / CELLS)
    first, left = row // block * block, column // block * block
    cells, read = _pooled(record, head, range(first, row + rows), (block, block), work)
    stop = math.ceil((column + columns) / block)
    return Grid(cells[:, left // block : stop], at=(first, left), block=(block, block), read=read)


def _pooled(
    record: Record, head: int, rows: range, block: tuple[int, int], work: int, pool: Pool | None = None
) -> tuple[Float[Tensor, "r c"], int]:
    """Return the weights of some rows, pooled over blocks, and the number of rows per block that were computed."""
    pool = pool or _mean
    blocks = math.ceil(len(rows) / block[0])
    read = min(block[0], max(1, work // max(1, blocks * record.keys)))
    if blocks * record.keys > 2 * OVERVIEW:
        raise RefusedError(f"{blocks} rows of {record.keys} keys are too many for one picture: ask for fewer rows")
    step = max(1, AT_ONCE // max(1, read * record.keys * _heads(record)))
    parts: list[Tensor] = []
    for first in range(0, blocks, step):
        mine = rows[first * block[0] : (first + step) * block[0]]
        if read == block[0]:
            parts.append(pool(_rows(record, head, slice(mine.start, mine.stop)), block))
        else:  # compute evenly spaced rows of each block: the rows at the centres of equal parts of the block
            offsets = [(2 * at + 1) * block[0] // (2 * read) for at in range(read)]
            picked = [min(low + offset, rows[-1]) for low in mine[:: block[0]] for offset in offsets]
            parts.append(pool(_rows(record, head, picked), (read, block[1])))
    return (torch.cat(parts) if parts else torch.zeros(0, 0)), read


def _rows(record: Record, head: int, rows: slice | list[int]) -> Float[Tensor, "q k"]:
    return record.weights(head=head, queries=rows)


def _mean(weights: Float[Tensor, "q k"], block: tuple[int, int]) -> Float[Tensor, "r c"]:
    """Return the mean of each block of weights; blocks at the edges may have fewer weights."""
    return weights if block == (1, 1) or not weights.numel() else F.avg_pool2d(weights[None], block, ceil_mode=True)[0]


def _largest(weights: Float[Tensor, "q k"], block: tuple[int, int]) -> Float[Tensor, "r c"]:
    """Return for each block the weight with the largest magnitude."""
    if block == (1, 1) or not weights.numel():
        return weights
    high, low = (sign * F.max_pool2d(sign * weights[None], block, ceil_mode=True)[0] for sign in (1, -1))
    return torch.where(-low > high, low, high)
