"""Gradient of a table of relative biases: sums of dS, the gradient of the scores, along its diagonals."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.plan import launch


@triton.jit
def diagonal_sums(slab, boost, sums, slab_q, slab_k, rows, columns, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Compute sums[z, d] = Σ_i slab[z, i, i + d - (rows - 1)] / boost, d from 0 to rows + columns - 2.

    z is the index of a head in the slab; `boost` is 1 if it is None.
    """
    z = tl.program_id(1)
    d = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    distance = d - (rows - 1)
    acc = tl.zeros((WIDE,), tl.float32)
    first = tl.program_id(0) * WIDE - (rows - 1)
    # Only rows start .. stop of the slab have an entry whose distance j - i this program sums.
    start = tl.maximum(0, -(first + WIDE - 1)) // ROWS * ROWS
    stop = tl.minimum(rows, columns - first)
    for i0 in range(start, stop, ROWS):
        i = i0 + tl.arange(0, ROWS)
        j = i[:, None] + distance[None, :]
        inside = (i < rows)[:, None] & (j >= 0) & (j < columns)
        at = slab + (z * slab_q + i).to(tl.int64)[:, None] * slab_k + j
        acc += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
    if boost is not None:
        acc /= tl.load(boost)
    tl.store(sums + z.to(tl.int64) * (rows + columns - 1) + d, acc, mask=d < rows + columns - 1)


def by_distance(
    slab: Tensor, boost: Tensor | None, room: tuple[int, int, int], size: tuple[int, int], first: int, table: Tensor
) -> Tensor:
    """Return the gradient (heads of the slab, 2r + 1) of a table (h, 2r + 1) of biases, given dS in `slab`.

    `room` is the padded shape (heads, rows, columns) of the slab, `size` are the rows and columns without padding, and
    `first` is the distance j - i of its pair (0, 0).
    """
    (heads, slab_q, slab_k), (rows, columns) = room, size
    count, radius = rows + columns - 1, table.shape[1] // 2
    sums = torch.empty(heads, count, device=slab.device, dtype=torch.float32)
    grid = (-(-count // 128), heads, 1)
    launch(diagonal_sums, grid, slab, boost, sums, slab_q, slab_k, rows, columns, ROWS=16, WIDE=128)
    least = first - (rows - 1)
    distance = torch.arange(least, least + count, device=slab.device).clamp(-radius, radius) + radius
    return torch.zeros(heads, table.shape[1], device=slab.device).index_add_(1, distance, sums)
