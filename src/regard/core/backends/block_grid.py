"""The score matrix in blocks: the size of a block, and which blocks to skip or to compute without a mask."""

import math
from typing import NamedTuple

import torch

from regard.core.masks import Blocks, Mask
from regard.core.problem import Problem
from regard.core.spans import Stretch, all_of, cut
from regard.core.transforms import mapped


class Grid(NamedTuple):
    """Blocks of queries (rows) and of keys (columns), and whether the mask allows some or all pairs of two blocks.

    `some` is whether any query of the row block may attend to any key of the column block; `every`, whether each query
    may attend to each key.
    """

    rows: list[Stretch]
    columns: list[Stretch]
    some: list[list[bool]]
    every: list[list[bool]]


def grid(problem: Problem, row_size: int, column_size: int) -> Grid:
    """Divide the score matrix of a call into blocks, and evaluate the mask for each block."""
    rows, columns = cut(problem.shape[-2], row_size) or [all_of(0)], cut(problem.shape[-1], column_size)
    if problem.mask is None or not rows[0] or not columns:
        yes = [[True] * len(columns) for _ in rows]
        return Grid(rows, columns, yes, yes)
    return Grid(rows, columns, *survey(problem.mask, rows, columns, problem.device))


def survey(
    mask: Mask, rows: list[Stretch], columns: list[Stretch], device: torch.device
) -> tuple[list[list[bool]], list[list[bool]]]:
    """Return `Grid.some` and `Grid.every` of a mask, taken together over batch and heads."""
    if values_unavailable(mask, device):
        return [[True] * len(columns) for _ in rows], [[False] * len(columns) for _ in rows]
    device = torch.device("cpu") if device.type == "meta" else device
    blocks = Blocks(_edges(rows, device), _edges(columns, device))
    coarse = mask.coarse(blocks)
    shape = (len(rows), len(columns))
    some = coarse.some.expand(*coarse.some.shape[:-2], *shape).reshape(-1, *shape).any(0)
    every = coarse.every.expand(*coarse.every.shape[:-2], *shape).reshape(-1, *shape).all(0)
    return some.tolist(), every.tolist()


def values_unavailable(mask: Mask, device: torch.device) -> bool:
    """Return whether the mask holds tensors whose values are unavailable: on the meta device, or under vmap."""
    return len(mask.tensors()) > 0 and (device.type == "meta" or mapped())


def _edges(blocks: list[Stretch], device: torch.device) -> torch.Tensor:
    return torch.tensor([block.start for block in blocks] + [blocks[-1].stop], device=device)


def square(problem: Problem, budget: int) -> int:
    """Return the side of a square block whose scores and intermediate tensors fit the budget in bytes."""
    slices = max(1, math.prod(problem.shape[:-2]))
    floats = 3 + problem.score.floats(problem.query.shape[-1])
    side = math.isqrt(int(budget / (slices * floats * problem.dtype.itemsize)))
    return max(1, side // 16 * 16 if side >= 16 else side)
