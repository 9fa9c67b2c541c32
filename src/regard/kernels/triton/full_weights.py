"""All softmax weights of a call, written to memory once, tile by tile, in the dtype of the result.

A program computes the log-sum-exp L of its rows, unless L is given, then the weights exp(s − L) of each tile of scores
s and, if values are given, their weighted sum. The results must equal `regard.core.backends.reference`.
"""

from collections.abc import Callable
from typing import Any

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
    pair_scores,
    row_sums,
    tile_rows,
    tile_scores,
)

# Tile sizes of `full`. In half precision: `_HALF` without values, `_VALUES` with values if no vector has more than 64
# columns, else `_LARGE`, of which two programs fit a multiprocessor; also for queries of more than 128 columns. In
# float32: `_SINGLE`.
_HALF = Block(128, 128, warps=8, stages=3)
_LARGE = Block(64, 64, warps=4, stages=2)
_VALUES = Block(64, 64, warps=4, stages=3)
_SINGLE = Block(64, 32, warps=4, stages=2)
# `few_keys` serves calls whose tile of keys or values has at most so many numbers, in half precision and in float32,
# and at most 128 rows and columns.
_FEW_HALF, _FEW_SINGLE = 128 * 128, 64 * 64


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


@triton.jit
def few_keys(
    query, key, value, pairs, known, weights, output, places, q_b, q_h, q_n, k_b, k_h, k_n, heads, group, n_q, n_k,
    scale, v_b, v_h, v_n, n_w,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KNOWN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute what `full` computes, from scores that are computed once, because all keys are in one tile.

    If `places` (n_q,) is given, the weights have n_w rows: row places[i] holds the weights of query i, and those of a
    query with a negative place are not stored.
    """
    i, z = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    b, h = z // heads, z % heads
    j = tl.arange(0, BN)
    q = tile_rows(query + b.to(tl.int64) * q_b + h * q_h, i, n_q, q_n, SIZE, D)
    k = tile_rows(key + b.to(tl.int64) * k_b + (h // group) * k_h, j, n_k, k_n, SIZE, D)
    s = pair_scores(q, k, pairs, b, h, i, j, n_q, n_k, scale, False, PRECISION, BM, BN)
    if KNOWN:
        row = known_sums(known, z.to(tl.int64) * n_q + i, i < n_q)
    else:
        most = tl.max(s, 1)
        pivot = tl.where(most == float("-inf"), 0.0, most)
        total = tl.sum(power_of_two(s - pivot[:, None], PRECISION != "interpreted"), 1)
        total = lost_sums(total, pairs, b, h, tl.program_id(0) * BM, 0, n_k, n_q, n_k, BM, BN)
        row = tl.where(total == 0.0, float("inf"), pivot + tl.log2(tl.where(total == 0.0, 1.0, total)))
    p = power_of_two(s - row[:, None], PRECISION != "interpreted")
    to = i
    if places is not None:
        to = tl.load(places + i, mask=i < n_q, other=-1)
    at = weights + z.to(tl.int64) * n_w * n_k + (to[:, None] * n_k + j[None, :])
    inside = ((i < n_q) & (to >= 0))[:, None] & (j < n_k)[None, :]
    tl.store(at, p.to(weights.dtype.element_ty), mask=inside)
    if value is not None:
        value += b.to(tl.int64) * v_b + (h // group) * v_h
        v = tile_rows(value, j, key_limit(pairs, b, n_k), v_n, VALUE_SIZE, E)
        poison = tl.zeros((BM,), tl.int32)
        if MASKED:
            finite = tl.abs(v.to(tl.float32)) < float("inf")
            bad = tl.max((~finite).to(tl.int32), 1)
            poison = tl.max(tl.where(s > float("-inf"), bad[None, :], 0), 1)
            v = tl.where(finite, v, 0.0)
        acc = product(p.to(v.dtype), v, tl.zeros((BM, E), tl.float32), PRECISION)
        acc = tl.where((poison > 0)[:, None], float("nan"), acc)
        c = tl.arange(0, E)
        to = output + (z.to(tl.int64) * n_q + i)[:, None] * VALUE_SIZE + c[None, :]
        tl.store(to, acc.to(output.dtype.element_ty), mask=(i < n_q)[:, None] & (c < VALUE_SIZE)[None, :])


def _few(query: Tensor, key: Tensor, value_size: int) -> Block | None:
    """Return the tile size of `few_keys`, or None if keys or values do not fit its tile."""
    (_, _, q, d), k, single = query.shape, key.shape[2], query.dtype == torch.float32
    columns, size = (max(16, triton.next_power_of_2(n)) for n in (k, max(d, value_size)))
    if columns * size > (_FEW_SINGLE if single else _FEW_HALF) or max(columns, size) > 128:
        return None
    # A program has a warp for every 16 rows. With fewer than four warps Triton uses no asynchronous products.
    rows = 16 if q <= 16 else 32
    return Block(rows, columns, warps=rows // 16, stages=1)


def _plan(scored: Scored, value_size: int) -> tuple[bool, Block, dict[str, Any]]:
    """Return whether `few_keys` serves the call, the tile size of its kernel, and the kernel's constants."""
    (*_, d), single, few = scored.query.shape, scored.query.dtype == torch.float32, True
    size, constants = max(16, triton.next_power_of_2(value_size)), scored.constants
    block = _few(scored.query, scored.key, value_size)
    if block is None:
        few = False
        narrow = _HALF if value_size == 0 else _VALUES if max(d, value_size) <= 64 else _LARGE
        block = _SINGLE if single else narrow if d <= 128 else _LARGE
        # If key and value tiles differ in size, Triton 3.6 computes wrong results for some TF32 products on Hopper.
        if single and value_size > 0:
            constants["D"] = size = max(size, constants["D"])
    elif single and scored.query.is_cuda:
        constants["PRECISION"] = "six"
    return few, block, {**constants, "VALUE_SIZE": value_size, "E": size, "BM": block.rows, "BN": block.columns}


def full_weights(scored: Scored, lse: Tensor | None) -> Tensor:
    """Return the weights (b, h, q, k) in the dtype of the queries.

    `lse` (b, h, q) is the log-sum-exp of the scores; if it is None, the kernel computes it.
    """
    (b, h, q, _), k, dtype = scored.query.shape, scored.key.shape[2], scored.query.dtype
    weights = torch.empty(b, h, q, k, device=scored.query.device, dtype=dtype)
    few, block, constants = _plan(scored, 0)
    tensors = (scored.query, scored.key, None, scored.pairs, lse, weights, None)
    numbers, constants = (*scored.numbers, 0, 0, 0), {**constants, "KNOWN": lse is not None, "MASKED": False}
    if few:
        launch(few_keys, over_rows(scored, block), *tensors, None, *numbers, q, **constants, block=block)
    else:
        launch(full, over_rows(scored, block), *tensors, *numbers, **constants, block=block)
    return weights


def picks_rows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `attended` can return the weights of some rows only."""
    return _few(query, key, value.shape[3]) is not None


def attended(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dtype: torch.dtype, masked: bool = False,
    rows: int | None = None,
) -> Callable[..., tuple[Tensor, Tensor]]:  # fmt: skip
    """Return a function of (query, key, value, pairs, places) that returns output and weights.

    The function accepts tensors of the same shapes, strides and dtypes as query (b, h, q, d), key (b, g, k, d) and
    value (b, g, k, e); d and e are at most 128, and the last axes are contiguous. `dtype` is that of the weights;
    `pairs` must be `EVERY` unless `masked`. If `rows` is given, the weights have that many rows: row places[i] holds
    the weights of query i, and those of queries with a negative place are not stored; `places` (q,) is in int32. Only
    tensors for which `picks_rows` is True support this.
    """
    scored, (b, h, q, _), k, e = Scored(query, key, EVERY, scale), query.shape, key.shape[2], value.shape[3]
    few, block, constants = _plan(scored, e)
    constants |= {"KNOWN": False, "MASKED": masked}
    n_w = q if rows is None else rows
    numbers = (*scored.numbers, *value.stride()[:3])
    if few:
        run = Prepared(few_keys, over_rows(scored, block), (*numbers, n_w), constants, block)
    else:
        run = Prepared(full, over_rows(scored, block), numbers, constants, block)

    def computed(
        query: Tensor, key: Tensor, value: Tensor, pairs: Pairs = EVERY, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        weights, output = query.new_empty((b, h, n_w, k), dtype=dtype), query.new_empty((b, h, q, e))
        if few:
            run(query, key, value, pairs, None, weights, output, places)
        else:
            run(query, key, value, pairs, None, weights, output)
        return output, weights

    return computed
