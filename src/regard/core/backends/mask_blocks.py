"""Masks and biases as tensors for torch's kernels, built for a block of queries at a time."""

import math

import torch
from torch import Tensor

from regard.core.backends.block_grid import survey
from regard.core.biases import Rule
from regard.core.mask_cache import stored
from regard.core.masks import Mask
from regard.core.problem import Problem
from regard.core.spans import Stretch, all_of, cut

CPU_NUMBERS = 2**22  # on a CPU, the largest number of entries of a mask that are built at a time
CUDA_NUMBERS = 2**26  # on a GPU, the largest number of entries of a mask that are built at a time
STORED_NUMBERS = 2**20  # the largest number of entries of a block's mask that is cached
_COLUMNS = 128  # the range of keys that a block of queries may attend is a multiple of this many keys


def visible(problem: Problem) -> list[tuple[Stretch, Stretch]]:
    """Return the blocks of queries, each with the range of keys outside of which its queries may attend to nothing."""
    queries, keys = problem.shape[-2:]
    rows = cut(queries, rows_at_once(problem))
    if problem.mask is None or len(rows) < 2:
        return [(block, all_of(keys)) for block in rows]
    mask, device, columns = problem.mask, problem.device, cut(keys, _COLUMNS)
    some, _ = stored(mask, device, ("survey", problem.shape), lambda: survey(mask, rows, columns, device))
    spans = []
    for block, sees in zip(rows, some, strict=True):
        seen = [c for c, any_seen in enumerate(sees) if any_seen] or [0]
        spans.append((block, Stretch(columns[seen[0]].start, columns[seen[-1]].stop)))
    return spans


def rows_at_once(problem: Problem) -> int:
    """Return the number of queries in a block.

    Blocks are small on the CPU, because under a causal mask or a window a smaller block needs a smaller range of keys.
    """
    queries, keys = problem.shape[-2:]
    if problem.device.type != "cpu":
        return min(queries, max(64, CUDA_NUMBERS // max(1, keys * problem.matrices)))
    slices = max(1, math.prod(problem.shape[:-2]))
    if queries * keys * slices <= CPU_NUMBERS:
        return queries
    return max(64, min(512, CPU_NUMBERS // (keys * slices)))


def built(problem: Problem, rows: Stretch, columns: Stretch) -> Tensor | None:
    """Return mask and bias of a block as one tensor with four axes: bool without a bias, else numbers added to the
    scores. Return None if there is neither."""
    allowed = None if problem.mask is None else _allowed(problem.mask, rows, columns, problem.device)
    if problem.bias is None:
        return None if allowed is None else four_axes(allowed, problem)
    # CPU kernels accept a float32 bias with half-precision queries; CUDA kernels require the queries' dtype.
    cpu = problem.device.type == "cpu"
    numbers = problem.bias.values(rows, columns, problem.dtype if cpu else problem.query.dtype)
    if allowed is not None:
        numbers = torch.where(allowed, numbers, -math.inf)
    elif not cpu and isinstance(problem.bias, Rule):
        numbers = numbers.contiguous()  # an `Alibi` or `Relative` bias is a view with overlapping, unaligned rows
    return four_axes(numbers, problem)


def _allowed(mask: Mask, rows: Stretch, columns: Stretch, device: torch.device) -> Tensor:
    """Return the mask of a block as a bool tensor; a small one is cached for the mask object."""
    # Under torch.compile the lengths in the cache key would become constants of the graph.
    if torch.compiler.is_compiling() or math.prod(mask.lead()) * len(rows) * len(columns) > STORED_NUMBERS:
        return mask.allowed(rows, columns, device)
    return stored(mask, device, ("allowed", rows, columns), lambda: mask.allowed(rows, columns, device))


def four_axes(tensor: Tensor, problem: Problem) -> Tensor:
    """Return the tensor as (batch, heads, rows, columns), with size 1 on axes that broadcast."""
    lead = problem.query.shape[:-3]
    if tensor.ndim < 4:
        return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
    return tensor if len(lead) < 2 else tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, -4)
