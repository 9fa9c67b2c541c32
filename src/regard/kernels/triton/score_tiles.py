"""Device functions for tiles of scaled dot products with mask and bias, and for the sums of rows that softmax needs.

The kernels of `weight_summaries`, `full_weights` and `largest_weights` are built from the functions of this module.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.pairs import (
    EVERY,
    LOG2E,
    Pairs,
    add_bias,
    power_of_two,
    product,
    tile_allowed,
    tile_state,
)
from regard.kernels.triton.additive.plan import Block, launch, trait


@triton.jit
def tile_rows(x, row, n, step, SIZE: tl.constexpr, D: tl.constexpr):
    """Return rows of a matrix (n, SIZE) as a tile of D columns; entries outside the matrix are 0."""
    c = tl.arange(0, D)
    inside = (row < n)[:, None]
    if SIZE != D:
        inside = inside & (c < SIZE)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * step + c[None, :], mask=inside, other=0.0)


@triton.jit
def pair_scores(q, k, pairs, b, h, i, j, n_q, n_k, scale, every, PRECISION: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """Return a tile of scores with bias, multiplied by log2(e); −inf where a pair is masked."""
    s = product(q, k.T, tl.zeros((BM, BN), tl.float32), PRECISION) * (scale * LOG2E)
    s = add_bias(s, pairs, b, h, i[:, None], j[None, :], n_q, n_k, LOG2E)
    if not every:
        s = tl.where(tile_allowed(pairs, b, h, i[:, None], j[None, :], n_q, n_k), s, float("-inf"))
    return s


@triton.jit
def tile_scores(
    q, key, pairs, b, h, i0, j0, n_q, n_k, k_n, scale, every, SIZE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return `pair_scores` of queries q, which begin at row i0, and the BN keys from j0 on."""
    i, j = i0 + tl.arange(0, BM), j0 + tl.arange(0, BN)
    k = tile_rows(key, j, n_k, k_n, SIZE, D)
    if (pairs.table is None) | (pairs.bias is not None):
        s = pair_scores(q, k, pairs, b, h, i, j, n_q, n_k, scale, every, PRECISION, BM, BN)
    else:
        s = product(q, k.T, tl.zeros((BM, BN), tl.float32), PRECISION) * (scale * LOG2E)
        # If all pairs of the tile lie beyond the radius on the same side, they have one entry of the table.
        after = j0 - (i0 + BM - 1) >= pairs.radius
        if after | (j0 + BN - 1 - i0 <= -pairs.radius):
            row = pairs.table + h * (2 * pairs.radius + 1)
            added = LOG2E * tl.load(row + tl.where(after, 2 * pairs.radius, 0)).to(tl.float32)
            s = tl.where(added == float("-inf"), float("-inf"), s + added)
        else:
            s = add_bias(s, pairs, b, h, i[:, None], j[None, :], n_q, n_k, LOG2E)
        if not every:
            s = tl.where(tile_allowed(pairs, b, h, i[:, None], j[None, :], n_q, n_k), s, float("-inf"))
    return s


@triton.jit
def row_sums(
    q, key, pairs, b, h, i0, start, stop, n_q, n_k, k_n, scale, ENTROPY: tl.constexpr, SIZE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return for each row the maximum m of its base-2 scores s, Σ 2^(s − m) and, with ENTROPY, Σ 2^(s − m) (s − m).

    The sum Σ 2^(s − m) is NaN if a score is NaN or +inf, and 0 if all scores are −inf. The maximum does not show NaN,
    because a GPU's maximum ignores it.
    """
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    spread = tl.zeros((BM,), tl.float32)
    for j0 in range(start, stop, BN):
        some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
        if some:
            s = tile_scores(q, key, pairs, b, h, i0, j0, n_q, n_k, k_n, scale, every, SIZE, PRECISION, D, BM, BN)
            new_most = tl.maximum(most, tl.max(s, 1))
            pivot = tl.where(new_most == float("-inf"), 0.0, new_most)
            fade = tl.exp2(most - pivot)
            x = s - pivot[:, None]
            p = power_of_two(x, PRECISION != "interpreted")
            if ENTROPY:
                moved = tl.where(most == float("-inf"), 0.0, most - pivot)
                spread = (spread + total * moved) * fade + tl.sum(tl.where(p > 0.0, p * x, 0.0), 1)
            total = total * fade + tl.sum(p, 1)
            most = new_most
    return most, total, spread


@triton.jit
def lost_sums(total, pairs, b, h, i0, start, stop, n_q, n_k, BM: tl.constexpr, BN: tl.constexpr):
    """Return the sums `total` from `row_sums`, but NaN for rows whose attended scores are all −inf: the softmax of
    these rows is NaN.

    With a bias, the sums are not changed, because a bias of −inf masks a pair.
    """
    if (pairs.bias is None) & (pairs.table is None):
        i = i0 + tl.arange(0, BM)
        if tl.max(((total == 0.0) & (i < n_q)).to(tl.int32), 0) > 0:
            for j0 in range(start, stop, BN):
                j = j0 + tl.arange(0, BN)
                attended = tl.max(tile_allowed(pairs, b, h, i[:, None], j[None, :], n_q, n_k).to(tl.int32), 1)
                total = tl.where((total == 0.0) & (attended > 0), float("nan"), total)
    return total


@triton.jit
def known_sums(lse, at, inside):
    """Return the log-sum-exps L of rows, multiplied by log2(e).

    Rows whose keys are all masked (L = −inf) give +inf, which makes their weights 0. L = +inf gives NaN, because
    PyTorch's flash attention kernel returns +inf for a row with NaN.
    """
    row = tl.load(lse + at, mask=inside, other=float("-inf"))
    row = tl.where(row == float("inf"), float("nan"), row * LOG2E)
    return tl.where(row == float("-inf"), float("inf"), row)


class Scored(NamedTuple):
    """Queries (b, h, q, d), keys (b, g, k, d), masks and biases of pairs, and the scale of the dot products."""

    query: Tensor
    key: Tensor
    pairs: Pairs
    scale: float

    @property
    def numbers(self) -> tuple[Any, ...]:
        (_, h, q, _), (_, g, k, _) = self.query.shape, self.key.shape
        return *self.query.stride()[:3], *self.key.stride()[:3], h, h // g, q, k, float(self.scale)

    @property
    def constants(self) -> dict[str, Any]:
        size = self.query.shape[-1]
        split = "three" if self.query.dtype == torch.float32 else "ieee"
        precision = split if self.query.is_cuda else "interpreted"
        return {"SIZE": size, "PRECISION": precision, "D": max(16, 1 << (size - 1).bit_length())}

    def block(self, narrow: Block, wide: Block) -> Block:
        """Return one of two tile sizes: `wide` for float32 or vectors of more than 128 numbers, `narrow` otherwise."""
        return wide if self.query.dtype == torch.float32 or self.query.shape[-1] > 128 else narrow

    @property
    def traits(self) -> Any:
        """Return a cache key for all properties of query, key, pairs and scale that select the compiled kernel."""
        tensors = ((t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in (self.query, self.key))
        return *tensors, type(self.scale), None if self.pairs is EVERY else trait(self.pairs)

    def run(self, kernel: Any, grid: tuple[int, int, int], block: Block, *tensors: Tensor, **constants: Any) -> None:
        """Launch a kernel whose arguments are query, key, pairs, the given tensors, and `numbers`."""
        known = self.traits, tuple(map(trait, tensors))
        launch(
            kernel, grid, self.query, self.key, self.pairs, *tensors, *self.numbers, **self.constants, **constants,
            BM=block.rows, BN=block.columns, block=block, known=known,
        )  # fmt: skip

    def rows(self) -> Tensor:
        """Return an empty tensor (b, h, q): one float32 number for each row."""
        b, h, q, _ = self.query.shape
        return torch.empty(b, h, q, device=self.query.device, dtype=torch.float32)


def over_rows(scored: Scored, block: Block) -> tuple[int, int, int]:
    b, h, q, _ = scored.query.shape
    return -(-q // block.rows), b * h, 1
