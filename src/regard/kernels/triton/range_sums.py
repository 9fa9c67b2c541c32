"""Gradients of a bias and of a table of relative positions: sums of dS, the gradient of the scores.

The gradient of a bias is the sum of dS over the sequences that share it; that of an entry of the table is the sum of dS
over all pairs with its distance j − i, which lie on a diagonal. A program adds tiles of dS in registers: for a bias,
the tiles of all sequences at the same queries and keys; for a table, the tiles along one diagonal. So no two programs
add to the same sum, and results are deterministic. For a table, the sums of tiles with a distance strictly between its
two ends are stored, and a second kernel adds their diagonals.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.pairs import product
from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.range_pairs import (
    Rules,
    ids_of,
    keys_of,
    limits,
    masked_scores,
    rows_of,
    slopes_of,
    weights_of,
)

_PROGRAMS = 528  # the batch is split into parts for at most this many programs: four per multiprocessor of an H200


@triton.jit
def _slopes_of_tile(
    query, key, value, change, lse, delta, rules, b, h, i0, j0, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    c_b, c_h, c_n, heads, group, n_q, n_k, first, limit, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, B: tl.constexpr, UNIT: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the scores (with bias) of a tile of B queries from i0 on and B keys from j0 on."""
    i = i0 + tl.arange(0, B)
    j = j0 + tl.arange(0, B)
    q = rows_of(query + (b * q_b + h * q_h) * UNIT, i, 0, n_q, q_n * UNIT, D, BD, True)
    k = rows_of(key + (b * k_b + (h // group) * k_h) * UNIT, j, first, limit, k_n * UNIT, D, BD, True)
    s = product(q, k.T, tl.zeros((B, B), tl.float32), PRECISION)
    query_id = i[:, None]
    if rules.query_ids is not None:
        query_id = ids_of(rules.query_ids, b, i, n_q, rules.query_b, rules.query_n)[:, None]
    s, _ = masked_scores(
        s, i[:, None], j[None, :], query_id, rules, b, h, n_q, n_k, first, limit, scale, True, False, HOLES
    )
    row_lse = tl.zeros((B,), tl.float32)
    row_delta = row_lse
    if rules.shift is None:
        row = (b * heads + h) * n_q + i
        row_lse = tl.load(lse + row, mask=i < n_q, other=float("inf"))
        row_delta = tl.load(delta + row, mask=i < n_q, other=0.0)
    p = weights_of(s, row_lse[:, None], rules, HOLES, NATIVE)
    do = rows_of(change + (b * c_b + h * c_h) * UNIT, i, 0, n_q, c_n * UNIT, E, BE, True)
    v = rows_of(value + (b * v_b + (h // group) * v_h) * UNIT, j, first, limit, v_n * UNIT, E, BE, True)
    dp = product(do, v.T, tl.zeros((B, B), tl.float32), PRECISION)
    return slopes_of(p, dp, row_delta[:, None], s, rules, HOLES)


@triton.jit
def range_sums(
    query, key, value, change, lse, delta, sums, rules, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, c_b, c_h, c_n,
    heads, group, n_q, n_k, scale, batch, part, outputs, near, nears,
    DIAGONAL: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, B: tl.constexpr, UNIT: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Sum dS over the heads that share a bias or table and over a part of the batch.

    With DIAGONAL, for a table, also sum along a diagonal of tiles; `near` is the first diagonal that is stored, `nears`
    the number of stored diagonals.
    """
    tile, chunk = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1)
    tiles_q, tiles_k = (n_q + B - 1) // B, (n_k + B - 1) // B
    shared = heads // outputs
    steps = tile * 0 + 1
    row_tile = tile // tiles_k
    column_tile = tile % tiles_k
    if DIAGONAL:
        ahead = tile - (tiles_q - 1)  # number of tiles by which the keys are ahead of the queries
        row_tile = tl.maximum(-ahead, 0)
        column_tile = tl.maximum(ahead, 0)
        steps = tl.minimum(tiles_q - row_tile, tiles_k - column_tile)
    farthest = (column_tile - row_tile) * B + (B - 1)  # the largest j - i of the tile; the smallest is less by 2 B - 2
    begin = chunk * part
    total = tl.minimum(part, batch - begin) * shared * steps
    if rules.high is not None:
        total = tl.where(farthest - (2 * B - 2) > rules.high, 0, total)
    if rules.low is not None:
        total = tl.where(farthest < rules.low, 0, total)
    acc = tl.zeros((B, B), tl.float32)
    for u in tl.range(0, total):
        step = u % steps
        h = head * shared + (u // steps) % shared
        b = (begin + u // (steps * shared)).to(tl.int64)
        i0 = (row_tile + step) * B
        j0 = (column_tile + step) * B
        first, limit = limits(rules, b, n_q, n_k)
        start, before, _, whole_stop, tested = keys_of(rules, b, i0, n_q, limit, B, B)
        if (j0 >= start) & (j0 < whole_stop + (tested - before) * B):
            acc += _slopes_of_tile(
                query, key, value, change, lse, delta, rules, b, h, i0, j0, q_b, q_h, q_n, k_b, k_h, k_n,
                v_b, v_h, v_n, c_b, c_h, c_n, heads, group, n_q, n_k, first, limit, scale,
                D, E, BD, BE, B, UNIT, NATIVE, PRECISION, HOLES,
            )  # fmt: skip
    r = tl.arange(0, B)[:, None]
    c = tl.arange(0, B)[None, :]
    place = chunk.to(tl.int64) * outputs + head
    if DIAGONAL:
        own = sums + place * (nears * B * B + 2 * tl.num_programs(0))
        n = column_tile - row_tile - near + 0 * (r + c)
        tl.store(own + n * B * B + r * B + c, acc, mask=(n >= 0) & (n < nears))
        distance = (column_tile - row_tile) * B + c - r - rules.offset
        ends = own + nears * B * B + 2 * tile
        tl.store(ends, tl.sum(tl.sum(tl.where(distance <= -rules.reach, acc, 0.0), 1), 0))
        tl.store(ends + 1, tl.sum(tl.sum(tl.where(distance >= rules.reach, acc, 0.0), 1), 0))
    else:
        i = row_tile * B + r
        j = column_tile * B + c
        at = sums + place * n_q * n_k + i.to(tl.int64) * n_k + j
        tl.store(at, acc.to(sums.dtype.element_ty), mask=(i < n_q) & (j < n_k))


@triton.jit
def table_sums(sums, grad, offset, reach, near, nears, tiles, B: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Compute the gradient of a table.

    A program sums diagonals of the stored tiles. The gradient of each of the table's two end entries is the sum of one
    stored number for each diagonal of tiles.
    """
    head = tl.program_id(1)
    own = sums + head.to(tl.int64) * (nears * B * B + 2 * tiles)
    entry = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    distance = entry - reach + offset
    beside = distance & (B - 1)  # distance modulo B, 0 <= beside < B even for negative distances
    n = (distance - beside) // B - near
    r = tl.arange(0, B)[None, :]
    total = tl.zeros((COUNT,), tl.float32)
    # A diagonal crosses two tiles: j - i is `beside` within the first, and `beside` - B within the second.
    for half in tl.static_range(2):
        c = beside[:, None] - half * B + r
        tile = (n + half)[:, None]
        inside = (c >= 0) & (c < B) & (tile >= 0) & (tile < nears)
        total += tl.sum(tl.load(own + tile * (B * B) + r * B + c, mask=inside, other=0.0), 1)
    low = tl.zeros((WIDE,), tl.float32)
    high = low
    ends = own + nears * B * B
    for t in tl.range(0, tiles, WIDE):
        at = t + tl.arange(0, WIDE)
        low += tl.load(ends + 2 * at, mask=at < tiles, other=0.0)
        high += tl.load(ends + 2 * at + 1, mask=at < tiles, other=0.0)
    total = tl.where(entry == 0, tl.sum(low, 0), total)
    total = tl.where(entry == 2 * reach, tl.sum(high, 0), total)
    at = grad + head * (2 * reach + 1) + entry
    tl.store(at, total.to(grad.dtype.element_ty), mask=entry <= 2 * reach)


class PairSums:
    """The prepared launches for the gradient of a table or bias, for tensors of given shapes and strides.

    Tiles have `size` rows and columns.
    """

    def __init__(
        self, shapes: tuple[tuple[int, ...], ...], learned: Tensor, rules: Rules, numbers: tuple[Any, ...],
        constants: dict[str, Any], size: int,
    ) -> None:  # fmt: skip
        (batch, _, queries, _), keys = shapes[0], shapes[1][2]
        self.of_table, shape = rules.table is not None, learned.shape
        tiles_q, tiles_k = -(-queries // size), -(-keys // size)
        if self.of_table:
            tiles, outputs = tiles_q + tiles_k - 1, shape[0] if learned.ndim == 2 else 1
            # Only the diagonals of tiles that hold a distance between the two ends of the table are stored: `near` to
            # `last`. Diagonals are numbered by tile of keys - tile of queries, from 1 - tiles_q on.
            near = max((rules.offset - rules.reach + 1) // size, 1 - tiles_q)
            last = min((rules.offset + rules.reach - 2) // size + 1, tiles_k - 1)
            nears, batches = max(0, last - near + 1), 1
        else:
            tiles, (batches, outputs) = tiles_q * tiles_k, ((1, 1, *shape)[-4:-2])
            near, nears = 0, 0
        pieces = batch if batches > 1 else max(1, min(batch, _PROGRAMS // (tiles * outputs)))
        part = -(-batch // pieces)
        pieces = -(-batch // part)
        # The sums of the parts of the batch are added by PyTorch.
        self.added = pieces > 1 and batches == 1
        each = nears * size * size + 2 * tiles if self.of_table else batches * queries * keys
        self.shape = (pieces, outputs * each) if self.added else (outputs * each,)
        self.dtype = torch.float32 if self.added or self.of_table else learned.dtype
        block = Block(size, size, warps=4, stages=1)
        self.launch = Prepared(
            range_sums, (tiles, outputs, pieces), (*numbers, batch, part, outputs, near, nears),
            {"DIAGONAL": self.of_table, **constants, "B": size}, block,
        )  # fmt: skip
        self.last: Prepared | None = None
        if self.of_table:
            few = Block(32, size, warps=4, stages=1)
            self.last = Prepared(
                table_sums, (-(-shape[-1] // 32), outputs, 1), (rules.offset, rules.reach, near, nears, tiles),
                {"B": size, "COUNT": 32, "WIDE": 128}, few,
            )  # fmt: skip

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, change: Tensor, lse: Tensor | None, delta: Tensor | None,
        rules: Rules, learned: Tensor, known: Any,
    ) -> Tensor:  # fmt: skip
        """Return the gradient of the table or bias in `rules`."""
        sums = torch.empty(self.shape, dtype=self.dtype, device=query.device)
        known = None if known is None else (known, learned.dtype)
        self.launch(query, key, value, change, lse, delta, sums, rules, known=known)
        if self.added:
            sums = sums.sum(0)
        if self.last is None:
            return sums.to(learned.dtype).view(learned.shape)
        grad = torch.empty(learned.shape, dtype=learned.dtype, device=query.device)
        self.last(sums, grad)
        return grad
