"""Pooled attention maps: each cell is the mean or the maximum of the weights that it covers.

A NaN weight makes its cell NaN.
"""

import math

import torch
from torch import Tensor


class Pool:
    """A pooled attention map of high × wide cells, to which the rows of the map are added in blocks.

    Along an axis of n positions, cell c covers the positions from ⌈c·n / cells⌉ up to the start of cell c + 1, so every
    position belongs to exactly one cell. Rows are pooled when they are added. Columns are pooled at the end, because
    after the pooling of rows only high × keys numbers are left.
    """

    def __init__(self, queries: int, keys: int, high: int, wide: int, pool: str) -> None:
        self._edges = torch.tensor([-(-cell * queries // high) for cell in range(high + 1)])
        self._columns = torch.arange(keys) * wide // max(1, keys)
        self._mean = pool == "mean"
        self._pooled_rows, self._wide = torch.full((high, keys), 0.0 if self._mean else -math.inf), wide

    def add(self, start: int, weights: Tensor) -> None:
        """Add the weights (rows, keys) of consecutive rows of the map, of which the first is row `start`."""
        stop = start + len(weights)
        size, left = divmod(int(self._edges[-1]), len(self._pooled_rows))
        # Every cell of the pooled map covers `size` rows of the map, so one operation pools all cells.
        if not left and start % size == 0 == len(weights) % size:
            place = slice(start // size, stop // size)
            parts = weights.unflatten(0, (-1, size))
            self._pooled_rows[place] = parts.sum(1) if self._mean else parts.amax(1)
            return
        first = int(torch.searchsorted(self._edges, start, right=True)) - 1
        for cell in range(first, len(self._pooled_rows)):
            low, high = max(start, int(self._edges[cell])), min(stop, int(self._edges[cell + 1]))
            if low >= stop:
                break
            part, cells = weights[low - start : high - start], self._pooled_rows[cell]
            if self._mean:
                cells += part.sum(0)
            else:
                torch.maximum(cells, part.amax(0), out=cells)

    def cells(self) -> Tensor:
        high = len(self._pooled_rows)
        pooled_cells, index = torch.zeros(high, self._wide), self._columns.expand(high, -1)
        if not self._mean:
            return pooled_cells.scatter_reduce_(1, index, self._pooled_rows, "amax", include_self=False)
        counts = self._edges.diff()[:, None] * torch.bincount(self._columns, minlength=self._wide)
        return pooled_cells.scatter_add_(1, index, self._pooled_rows) / counts


def pooled(weights: Tensor, high: int, wide: int) -> Tensor:
    """Return an attention map (queries, keys) pooled to high × wide cells, each the mean of its weights."""
    rows, columns = weights.shape
    pool = Pool(rows, columns, high, wide, "mean")
    pool.add(0, weights)
    return pool.cells()
