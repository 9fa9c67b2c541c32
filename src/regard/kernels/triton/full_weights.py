"""All softmax weights of a call, written to memory once, tile by tile, in the dtype of the result.

A program computes the log-sum-exp L of its rows, unless L is given, then the weights exp(s − L) of each tile of scores
s and, if values are given, their weighted sum. The results must equal `regard.core.backends.reference`.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.pairs import EVERY, Pairs, key_limit, key_range, power_of_two, product, tile_state
from regard.kernels.triton.additive.plan import Block, Prepared, launch
from regard.kernels.triton.score_tiles import (
    Scored,
    known_sums,
    lost_sums,
    over_rows,
    row_sums,
    tile_rows,
    tile_scores,
)

_HALF = Block(128, 128, warps=8, stages=3)
# For queries of more than 128 columns or, with values, queries or values of more than 64; two programs fit a
# multiprocessor.
_LARGE = Block(64, 64, warps=4, stages=2)
_VALUES = Block(64, 64, warps=4, stages=3)
_SINGLE = Block(64, 32, warps=4, stages=2)


@triton.jit
def _put(weights, tile, i, j, n_q, n_k, BM: tl.constexpr):
    """Store a tile of the weights; `weights` points to the first row of the tile."""
    place = tl.arange(0, BM)[:, None] * n_k + j[None, :]
    tl.store(weights + place, tile.to(weights.dtype.element_ty), mask=(i < n_q)[:, None] & (j < n_k)[None, :])


@triton.jit
def full(
    query, key, value, pairs, known, weights, output, q_b, q_h, q_n, k_b, k_h, k_n, heads, group, n_q, n_k, scale,
    v_b, v_h, v_n,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KNOWN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the weights of a block of rows over all keys, and the output if there are values.

    The weights of masked pairs are 0, or NaN in a row with NaN. With MASKED, values of NaN or Inf may be masked; the
    output of a row that attends to such a value in a partly masked tile is NaN.
    """
    # With a causal mask, the last rows attend to the most keys: their programs start first, so that the launch does not
    # end with a few long programs.
    i0, z = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM, tl.program_id(1)
    b, h = z // heads, z % heads
    i = i0 + tl.arange(0, BM)
    q = tile_rows(query + b.to(tl.int64) * q_b + h * q_h, i, n_q, q_n, SIZE, D)
    key += b.to(tl.int64) * k_b + (h // group) * k_h
    weights += (z.to(tl.int64) * n_q + i0) * n_k
    start, stop = key_range(pairs, b, i0, n_k, BM, BN)
    if KNOWN:
        row = known_sums(known, z.to(tl.int64) * n_q + i, i < n_q)
    else:
        most, total, _ = row_sums(
            q, key, pairs, b, h, i0, start, stop, n_q, n_k, k_n, scale, False, SIZE, PRECISION, D, BM, BN
        )
        total = lost_sums(total, pairs, b, h, i0, start, stop, n_q, n_k, BM, BN)
        row = tl.where(total == 0.0, float("inf"), most + tl.log2(tl.where(total == 0.0, 1.0, total)))
    nothing = tl.zeros((BM, BN), tl.float32) + tl.where(row == row, 0.0, float("nan"))[:, None]
    acc = tl.zeros((BM, E), tl.float32)
    poison = tl.zeros((BM,), tl.int32)
    if value is not None:
        value += b.to(tl.int64) * v_b + (h // group) * v_h
    for j0 in range(start, stop, BN):
        some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
        j = j0 + tl.arange(0, BN)
        if some:
            s = tile_scores(q, key, pairs, b, h, i0, j0, n_q, n_k, k_n, scale, every, SIZE, PRECISION, D, BM, BN)
            p = power_of_two(s - row[:, None], PRECISION != "interpreted")
            _put(weights, p, i, j, n_q, n_k, BM)
            if value is not None:
                v = tile_rows(value, j, key_limit(pairs, b, n_k), v_n, VALUE_SIZE, E)
                if MASKED:  # noqa: SIM102 - a constant, unlike the other condition
                    if not every:
                        finite = tl.abs(v.to(tl.float32)) < float("inf")
                        bad = tl.max((~finite).to(tl.int32), 1)
                        poison = tl.maximum(poison, tl.max(tl.where(s > float("-inf"), bad[None, :], 0), 1))
                        v = tl.where(finite, v, 0.0)
                acc = product(p.to(v.dtype), v, acc, PRECISION)
        else:
            _put(weights, nothing, i, j, n_q, n_k, BM)
    if value is not None:
        c = tl.arange(0, E)
        acc = tl.where((poison > 0)[:, None], float("nan"), acc)
        to = output + (z.to(tl.int64) * n_q + i)[:, None] * VALUE_SIZE + c[None, :]
        tl.store(to, acc.to(output.dtype.element_ty), mask=(i < n_q)[:, None] & (c < VALUE_SIZE)[None, :])
    after = start + (tl.maximum(stop - start, 0) + BN - 1) // BN * BN
    for j0 in range(0, tl.minimum(start, n_k), BN):
        _put(weights, nothing, i, j0 + tl.arange(0, BN), n_q, n_k, BM)
    for j0 in range(after, n_k, BN):
        _put(weights, nothing, i, j0 + tl.arange(0, BN), n_q, n_k, BM)


def full_weights(scored: Scored, lse: Tensor | None) -> Tensor:
    """Return the weights (b, h, q, k) in the dtype of the queries.

    `lse` (b, h, q) is the log-sum-exp of the scores; if it is None, the kernel computes it.
    """
    (b, h, q, d), k, dtype = scored.query.shape, scored.key.shape[2], scored.query.dtype
    weights = torch.empty(b, h, q, k, device=scored.query.device, dtype=dtype)
    block = _SINGLE if dtype == torch.float32 else _LARGE if d > 128 else _HALF
    launch(
        full, over_rows(scored, block), scored.query, scored.key, None, scored.pairs, lse, weights, None,
        *scored.numbers, 0, 0, 0, **scored.constants, VALUE_SIZE=0, KNOWN=lse is not None, MASKED=False, E=16,
        BM=block.rows, BN=block.columns, block=block,
    )  # fmt: skip
    return weights


def attended(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dtype: torch.dtype, masked: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of (query, key, value, pairs) that returns output and weights.

    The function accepts tensors of the same shapes, strides and dtypes as query (b, h, q, d), key (b, g, k, d) and
    value (b, g, k, e); d and e are at most 128, and the last axes are contiguous. `dtype` is that of the weights;
    `pairs` must be `EVERY` unless `masked`.
    """
    scored, (b, h, q, _), k, e = Scored(query, key, EVERY, scale), query.shape, key.shape[2], value.shape[3]
    block = _SINGLE if query.dtype == torch.float32 else _VALUES if max(query.shape[3], e) <= 64 else _LARGE
    constants = {
        **scored.constants, "VALUE_SIZE": e, "KNOWN": False, "MASKED": masked,
        "E": max(16, 1 << (e - 1).bit_length()), "BM": block.rows, "BN": block.columns,
    }  # fmt: skip
    run = Prepared(full, over_rows(scored, block), (*scored.numbers, *value.stride()[:3]), constants, block)

    def computed(query: Tensor, key: Tensor, value: Tensor, pairs: Pairs = EVERY) -> tuple[Tensor, Tensor]:
        weights, output = query.new_empty((b, h, q, k), dtype=dtype), query.new_empty((b, h, q, e))
        run(query, key, value, pairs, None, weights, output)
        return output, weights

    return computed
