"""Scaled dot-product attention with masks that are ranges of keys: bands, lengths and segments.

Biases, a softcap, and softmax or sigmoid weights are supported. A program visits the tiles between the first and the
last key that one of its rows may attend. Tiles without masked pairs come last, in a separate loop without masks. Keys
outside the range are never loaded, so that not even NaN in them changes the output. The backward pass computes the
scores of every pair twice, once for the gradient of the queries and once for those of keys and values, so that no two
programs add to the same sum and results are deterministic.
"""

import functools
import operator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.derivatives import REFERENCE, once_only
from regard.kernels.memory_order import dense_strides
from regard.kernels.triton.additive.pairs import product
from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.range_pairs import (
    Rules,
    attended_rows,
    exponential,
    ids_of,
    keys_of,
    limits,
    logistic,
    masked_scores,
    put_rows,
    queries_of,
    rows_of,
    slopes_of,
    weights_of,
)
from regard.kernels.triton.range_sums import PairSums

_LAYOUTS = 64  # a `Plan` caches backward launches for at most this many strides of the output's gradient
REACH = 2**31 - 1  # largest offset within a batch row: the kernels address its heads and rows with 32 bits


@triton.jit
def _forward_tile(
    q, key, value, i, j0, query_id, rules, b, h, n_q, n_k, first, limit, scale, k_n, v_n, most, total, acc,
    TESTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    j = j0 + tl.arange(0, BN)
    k = rows_of(key, j, first, limit, k_n, D, BD, TESTED)
    s = product(q, k.T, tl.zeros((q.shape[0], BN), tl.float32), PRECISION)
    s, _ = masked_scores(
        s, i[:, None], j[None, :], query_id, rules, b, h, n_q, n_k, first, limit, scale, TESTED, False, HOLES
    )
    new_most = most
    if rules.shift is not None:
        p = logistic(s, rules.shift, HOLES, NATIVE)
    else:
        new_most = tl.maximum(most, tl.max(s, 1))
        pivot = new_most
        if TESTED or HOLES > 0:
            pivot = tl.where(new_most == float("-inf"), 0.0, new_most)
        p = exponential(s - pivot[:, None], HOLES, NATIVE)
        fade = tl.exp(most - pivot) if HOLES > 0 else tl.exp2(most - pivot)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
    v = rows_of(value, j, first, limit, v_n, E, BE, TESTED)
    if HOLES > 1:
        v = attended_rows(v, s)
    acc = product(p.to(v.dtype), v, acc, PRECISION)
    return new_most, total, acc


@triton.jit
def range_forward(
    query, key, value, output, lse, rules, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    heads, group, n_q, n_k, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    UNIT: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    # With a causal mask, the last rows attend to the most keys: their programs start first, so that the launch does not
    # end with a few long programs.
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i = i0 + tl.arange(0, BM)
    q = rows_of(query + (b * q_b + h * q_h) * UNIT, i, 0, n_q, q_n * UNIT, D, BD, True)
    key += (b * k_b + (h // group) * k_h) * UNIT
    value += (b * v_b + (h // group) * v_h) * UNIT
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BE), tl.float32)
    first, limit = limits(rules, b, n_q, n_k)
    start, before, whole_start, whole_stop, tested = keys_of(rules, b, i0, n_q, limit, BM, BN)
    query_id = i[:, None]
    if rules.query_ids is not None:
        query_id = ids_of(rules.query_ids, b, i, n_q, rules.query_b, rules.query_n)[:, None]
    for t in tl.range(0, tested):
        j0 = tl.where(t < before, start + t * BN, whole_stop + (t - before) * BN)
        most, total, acc = _forward_tile(
            q, key, value, i, j0, query_id, rules, b, h, n_q, n_k, first, limit, scale, k_n * UNIT, v_n * UNIT,
            most, total, acc, True, D, E, BD, BE, BN, NATIVE, PRECISION, HOLES,
        )  # fmt: skip
    for j0 in tl.range(whole_start, whole_stop, BN):
        most, total, acc = _forward_tile(
            q, key, value, i, j0, query_id, rules, b, h, n_q, n_k, first, limit, scale, k_n * UNIT, v_n * UNIT,
            most, total, acc, False, D, E, BD, BE, BN, NATIVE, PRECISION, HOLES,
        )  # fmt: skip
    if rules.shift is None:
        empty = total == 0.0
        acc /= tl.where(empty, 1.0, total)[:, None]
        # The log-sum-exp of a row whose keys are all masked is inf, which makes its weights in the backward pass 0.
        if lse is not None:
            total = tl.where(empty, 1.0, total)
            row = most + tl.log(total) if HOLES > 0 else most + tl.log2(total)
            row = tl.where(empty, float("inf"), row)
            tl.store(lse + z.to(tl.int64) * n_q + i, row, mask=i < n_q)
    put_rows(output + (b * o_b + h * o_h) * UNIT, i, n_q, o_n * UNIT, acc, E, BE)


@triton.jit
def _row_tile(
    q, do, key, value, i, j0, query_id, row_lse, row_delta, rules, b, h, n_q, n_k, first, limit, scale, k_n, v_n, acc,
    TESTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    j = j0 + tl.arange(0, BN)
    k = rows_of(key, j, first, limit, k_n, D, BD, TESTED)
    s = product(q, k.T, tl.zeros((q.shape[0], BN), tl.float32), PRECISION)
    s, bend = masked_scores(
        s, i[:, None], j[None, :], query_id, rules, b, h, n_q, n_k, first, limit, scale, TESTED, False, HOLES
    )
    p = weights_of(s, row_lse[:, None], rules, HOLES, NATIVE)
    v = rows_of(value, j, first, limit, v_n, E, BE, TESTED)
    dp = product(do, v.T, tl.zeros((q.shape[0], BN), tl.float32), PRECISION)
    ds = slopes_of(p, dp, row_delta[:, None], s, rules, HOLES)
    if HOLES > 1:
        k = attended_rows(k, s)
    if rules.cap is not None:
        ds *= bend
    return product(ds.to(k.dtype), k, acc, PRECISION)


@triton.jit
def range_rows(
    query, key, value, output, change, lse, delta, grad, rules, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    o_b, o_h, o_n, c_b, c_h, c_n, g_b, g_h, g_n, heads, group, n_q, n_k, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    UNIT: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries and, for softmax weights, Σ dO · O of each row, which `range_keys` reads."""
    z = tl.program_id(1)
    b, h = (z // heads).to(tl.int64), z % heads
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i = i0 + tl.arange(0, BM)
    q = rows_of(query + (b * q_b + h * q_h) * UNIT, i, 0, n_q, q_n * UNIT, D, BD, True)
    do = rows_of(change + (b * c_b + h * c_h) * UNIT, i, 0, n_q, c_n * UNIT, E, BE, True)
    row_delta = tl.zeros((BM,), tl.float32)
    row_lse = row_delta
    if rules.shift is None:
        o = rows_of(output + (b * o_b + h * o_h) * UNIT, i, 0, n_q, o_n * UNIT, E, BE, True)
        row_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
        row = z.to(tl.int64) * n_q + i
        tl.store(delta + row, row_delta, mask=i < n_q)
        row_lse = tl.load(lse + row, mask=i < n_q, other=float("inf"))
    key += (b * k_b + (h // group) * k_h) * UNIT
    value += (b * v_b + (h // group) * v_h) * UNIT
    acc = tl.zeros((BM, BD), tl.float32)
    first, limit = limits(rules, b, n_q, n_k)
    start, before, whole_start, whole_stop, tested = keys_of(rules, b, i0, n_q, limit, BM, BN)
    query_id = i[:, None]
    if rules.query_ids is not None:
        query_id = ids_of(rules.query_ids, b, i, n_q, rules.query_b, rules.query_n)[:, None]
    for t in tl.range(0, tested):
        j0 = tl.where(t < before, start + t * BN, whole_stop + (t - before) * BN)
        acc = _row_tile(
            q, do, key, value, i, j0, query_id, row_lse, row_delta, rules, b, h, n_q, n_k, first, limit, scale,
            k_n * UNIT, v_n * UNIT, acc, True, D, E, BD, BE, BN, NATIVE, PRECISION, HOLES,
        )  # fmt: skip
    for j0 in tl.range(whole_start, whole_stop, BN):
        acc = _row_tile(
            q, do, key, value, i, j0, query_id, row_lse, row_delta, rules, b, h, n_q, n_k, first, limit, scale,
            k_n * UNIT, v_n * UNIT, acc, False, D, E, BD, BE, BN, NATIVE, PRECISION, HOLES,
        )  # fmt: skip
    put_rows(grad + (b * g_b + h * g_h) * UNIT, i, n_q, g_n * UNIT, acc * scale, D, BD)


@triton.jit
def _key_tile(
    k, v, query, change, lse, delta, i0, j, key_id, rules, b, h, n_q, n_k, first, limit, scale, q_n, c_n,
    grad_k, grad_v,
    TESTED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    NATIVE: tl.constexpr, PRECISION: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a tile of keys and values, with the contributions of queries i0 .. i0 + BM added.

    Scores are computed transposed, (keys, queries), as the matrix products for the gradients of keys and values need
    them.
    """
    i = i0 + tl.arange(0, BM)
    q = rows_of(query, i, 0, n_q, q_n, D, BD, TESTED)
    s = product(k, q.T, tl.zeros((k.shape[0], BM), tl.float32), PRECISION)
    s, bend = masked_scores(
        s, i[None, :], j[:, None], key_id, rules, b, h, n_q, n_k, first, limit, scale, TESTED, True, HOLES
    )
    row_lse = tl.zeros((BM,), tl.float32)
    row_delta = row_lse
    if rules.shift is None:
        row_lse = tl.load(lse + i, mask=i < n_q, other=float("inf"))
        row_delta = tl.load(delta + i, mask=i < n_q, other=0.0)
    p = weights_of(s, row_lse[None, :], rules, HOLES, NATIVE)
    do = rows_of(change, i, 0, n_q, c_n, E, BE, TESTED)
    grad_v = product(p.to(do.dtype), do, grad_v, PRECISION)
    dp = product(v, do.T, tl.zeros((k.shape[0], BM), tl.float32), PRECISION)
    ds = slopes_of(p, dp, row_delta[None, :], s, rules, HOLES)
    if rules.cap is not None:
        ds *= bend
    return product(ds.to(q.dtype), q, grad_k, PRECISION), grad_v


@triton.jit
def range_keys(
    query, key, value, change, lse, delta, key_grad, value_grad, rules, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    c_b, c_h, c_n, gk_b, gk_h, gk_n, gv_b, gv_h, gv_n, heads, group, n_q, n_k, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    UNIT: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values, summed over all query heads that share them."""
    y = tl.program_id(1)
    groups = heads // group
    b, g = (y // groups).to(tl.int64), y % groups
    j0 = tl.program_id(0) * BN
    j = j0 + tl.arange(0, BN)
    first, limit = limits(rules, b, n_q, n_k)
    k = rows_of(key + (b * k_b + g * k_h) * UNIT, j, first, limit, k_n * UNIT, D, BD, True)
    v = rows_of(value + (b * v_b + g * v_h) * UNIT, j, first, limit, v_n * UNIT, E, BE, True)
    grad_k = tl.zeros((BN, BD), tl.float32)
    grad_v = tl.zeros((BN, BE), tl.float32)
    start, before, whole_start, whole_stop, tested = queries_of(rules, b, j0, n_q, n_k, limit, BM, BN)
    key_id = j[:, None]
    if rules.query_ids is not None:
        key_id = ids_of(rules.key_ids, b, j, n_k, rules.key_b, rules.key_n)[:, None]
    for r in range(group):
        h = g * group + r
        row_lse = lse
        row_delta = delta
        if rules.shift is None:
            row_lse = lse + (b * heads + h) * n_q
            row_delta = delta + (b * heads + h) * n_q
        own, change_at = query + (b * q_b + h * q_h) * UNIT, change + (b * c_b + h * c_h) * UNIT
        for t in tl.range(0, tested):
            i0 = tl.where(t < before, start + t * BM, whole_stop + (t - before) * BM)
            grad_k, grad_v = _key_tile(
                k, v, own, change_at, row_lse, row_delta, i0, j, key_id, rules, b, h, n_q, n_k, first, limit,
                scale, q_n * UNIT, c_n * UNIT, grad_k, grad_v, True, D, E, BD, BE, BM, NATIVE, PRECISION, HOLES,
            )  # fmt: skip
        for i0 in tl.range(whole_start, whole_stop, BM):
            grad_k, grad_v = _key_tile(
                k, v, own, change_at, row_lse, row_delta, i0, j, key_id, rules, b, h, n_q, n_k, first, limit,
                scale, q_n * UNIT, c_n * UNIT, grad_k, grad_v, False, D, E, BD, BE, BM, NATIVE, PRECISION, HOLES,
            )  # fmt: skip
    put_rows(key_grad + (b * gk_b + g * gk_h) * UNIT, j, n_k, gk_n * UNIT, grad_k * scale, D, BD)
    put_rows(value_grad + (b * gv_b + g * gv_h) * UNIT, j, n_k, gv_n * UNIT, grad_v, E, BE)


class Tuning(NamedTuple):
    """The tile sizes of the forward kernel and of the two backward kernels."""

    forward: Block
    rows: Block
    keys: Block


# Tile sizes by the larger of the sizes of key and value, for half precision and for float32, where a matrix product is
# computed as six products of bfloat16. HALF_PAIRED and SINGLE_PAIRED are for calls with a number for each pair (a bias,
# a table or a mask), a softcap or sigmoid weights, which need more registers: larger tiles would spill.
HALF = {
    64: Tuning(Block(64, 64, warps=4), Block(64, 64, warps=4), Block(64, 64, warps=4, stages=2)),
    128: Tuning(Block(64, 64, warps=4), Block(64, 64, warps=4, stages=2), Block(64, 64, warps=4, stages=2)),
    256: Tuning(Block(128, 32, warps=8), Block(64, 32, warps=4, stages=2), Block(16, 32, warps=4, stages=2)),
}
HALF_PAIRED = {
    32: Tuning(Block(32, 32, warps=2, stages=2), Block(64, 64, warps=4, stages=2), Block(32, 64, warps=4, stages=2)),
    64: Tuning(Block(64, 64, warps=4, stages=2), Block(64, 32, warps=4, stages=2), Block(64, 64, warps=4, stages=2)),
    128: Tuning(Block(64, 32, warps=4, stages=2), Block(64, 32, warps=4, stages=2), Block(32, 64, warps=4, stages=2)),
    256: Tuning(Block(128, 32, warps=8, stages=2), Block(64, 32, warps=4, stages=2), Block(16, 32, warps=4, stages=2)),
}
SINGLE = {
    64: Tuning(Block(64, 64, warps=4, stages=1), Block(64, 64, warps=4, stages=1), Block(64, 128, warps=8, stages=1)),
    128: Tuning(Block(64, 64, warps=4, stages=1), Block(128, 32, warps=8, stages=1), Block(32, 32, warps=4, stages=2)),
    256: Tuning(Block(64, 32, warps=4, stages=1), Block(32, 32, warps=4, stages=1), Block(32, 32, warps=4, stages=1)),
}
SINGLE_PAIRED = {
    32: Tuning(Block(64, 32, warps=4, stages=1), Block(64, 32, warps=4, stages=1), Block(64, 128, warps=8, stages=1)),
    64: Tuning(Block(64, 64, warps=4, stages=1), Block(64, 32, warps=4, stages=1), Block(64, 128, warps=8, stages=1)),
    128: Tuning(Block(64, 32, warps=4, stages=1), Block(128, 32, warps=8, stages=1), Block(32, 32, warps=4, stages=2)),
    256: Tuning(Block(64, 32, warps=4, stages=1), Block(32, 32, warps=4, stages=1), Block(32, 32, warps=4, stages=1)),
}
FEW = Block(32, 32, warps=4, stages=1)  # the forward kernel's tile for at most 32 queries and _FEW_KEYS keys
_FEW_KEYS = 128


class Kind(NamedTuple):
    """The properties of a call, besides shapes and strides, that select tile sizes and compiled code."""

    dtype: torch.dtype
    native: bool  # whether the kernels run on a GPU, not in Triton's interpreter
    scale: float
    paired: bool = False  # whether there is a table, a bias, a mask of pairs, a softcap or a sigmoid
    holes: int = 0  # 1 if a table may mask pairs; 2 if a bias or a mask may mask pairs or whole keys


@functools.lru_cache(maxsize=1024)
def _tiles(d: int, e: int, few: bool, kind: Kind) -> tuple[Tuning, dict[str, Any]]:
    """Return the tile sizes and the constants that all kernels share."""
    single, native = kind.dtype == torch.float32, kind.native
    blocks = [max(16, triton.next_power_of_2(size)) for size in (d, e)]
    if single:  # if key and value tiles differ in size, Triton 3.6 computes some float32 products wrong on Hopper
        blocks = [max(blocks)] * 2
    table = (SINGLE_PAIRED if single else HALF_PAIRED) if kind.paired else SINGLE if single else HALF
    tuning = table[max(min(table), *blocks)]
    if few:
        tuning = tuning._replace(forward=FEW)
    precision = "six" if single and native else "ieee"
    return tuning, {
        "D": d, "E": e, "BD": blocks[0], "BE": blocks[1], "NATIVE": native, "PRECISION": precision, "HOLES": kind.holes,
    }  # fmt: skip


Places = tuple[tuple[int, ...], ...]  # shapes or strides of query, key and value


def _unit(*strides: tuple[int, ...]) -> int:
    """Return the largest of 16, 8, 4, 2 and 1 that divides the strides of rows, heads and sequences of all tensors."""
    joined = functools.reduce(operator.or_, (step for stride in strides for step in stride[:3]))
    return min(16, joined & -joined) or 16  # `joined` is 0 if every stride is 0 (broadcast tensors)


def _steps(unit: int, *strides: tuple[int, ...]) -> list[int]:
    return [step // unit for stride in strides for step in stride[:3]]


def _new_strides(shapes: Places, strides: Places) -> list[tuple[int, ...]]:
    """Return the strides of the output and of the gradients of query, key and value."""
    query, value = shapes[0], shapes[2]
    order = strides[0] if query[-1] == value[-1] else (0,) * len(query)
    of_output = dense_strides((*query[:-1], value[-1]), order)
    return [of_output, *(dense_strides(shape, given) for shape, given in zip(shapes, strides, strict=True))]


class Plan:
    """The prepared launches for tensors of given shapes and strides, and the strides of their output and gradients."""

    def __init__(self, shapes: Places, strides: Places, kind: Kind) -> None:
        (b, h, q, d), (_, g, k, e) = shapes[0], shapes[2]
        self.tuning, self.constants = _tiles(d, e, q <= FEW.rows and k <= _FEW_KEYS, kind)
        self.strides, (self.output, *self.grads) = strides, _new_strides(shapes, strides)
        self.shape, self.rows, self.shapes, self.dtype = (b, h, q, e), (b, h, q), shapes, kind.dtype
        # `empty_like` takes half as long as `empty_strided`; it returns tensors of these strides if there are no gaps.
        self.like_query = d == e and self.output == strides[0] == self.grads[0]
        self.grads_alike = self.grads == list(strides)
        self.numbers = h, h // g, q, k, kind.scale
        block = self.tuning.forward
        self.launch = self._prepared(range_forward, block, (*strides, self.output), -(-q // block.rows), b * h)
        self.backward: dict[tuple[int, ...], tuple[Prepared, Prepared]] = {}
        self.sums: dict[Any, PairSums] = {}

    def _prepared(self, kernel: Any, block: Block, places: Places, tiles: int, slices: int, unit: int = 0) -> Prepared:
        unit = unit or _unit(*places)
        constants = {**self.constants, "BM": block.rows, "BN": block.columns, "UNIT": unit}
        return Prepared(kernel, (tiles, slices, 1), (*_steps(unit, *places), *self.numbers), constants, block)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, rules: Rules, known: Any, learning: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the log-sum-exps: None without a backward pass or with sigmoid weights."""
        device = query.device
        if self.like_query:
            output = torch.empty_like(query)
        else:
            output = torch.empty_strided(self.shape, self.output, dtype=self.dtype, device=device)
        summed = learning and rules.shift is None
        lse = torch.empty(self.rows, dtype=torch.float32, device=device) if summed else None
        # New tensors are aligned to 16 bytes. If query, key and value are aligned to 16 bytes too, the properties of
        # the rules, `known`, suffice to select the compiled kernel.
        if known is not None and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
            self.launch(query, key, value, output, lse, rules, known=(learning, known))
        else:
            self.launch(query, key, value, output, lse, rules)
        return output, lse

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, change: Tensor,
        rules: Rules, known: Any, learned: Tensor | None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the gradients of query, key and value, and of `learned`, the table or bias, if it is given."""
        launches = self.backward.get(change.stride()) or self._backward(change.stride())
        if self.grads_alike:
            grads = [torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)]
        else:
            grads = [
                torch.empty_strided(shape, place, dtype=self.dtype, device=query.device)
                for shape, place in zip(self.shapes, self.grads, strict=True)
            ]
        query_grad, key_grad, value_grad = grads
        delta = None if lse is None else torch.empty_like(lse)
        aligned = not (query.data_ptr() | key.data_ptr() | value.data_ptr() | change.data_ptr()) & 15
        key_of = (known,) if known is not None and aligned else None
        launches[0](query, key, value, output, change, lse, delta, query_grad, rules, known=key_of)
        launches[1](query, key, value, change, lse, delta, key_grad, value_grad, rules, known=key_of)
        if learned is None:
            return [*grads, None]
        call = change.stride(), learned.shape, learned.dtype, rules.table is None, rules.offset
        of_bias = self.sums.get(call) or self._sums(call, learned, rules)
        return [*grads, of_bias(query, key, value, change, lse, delta, rules, learned, key_of)]

    def _sums(self, call: Any, learned: Tensor, rules: Rules) -> PairSums:
        """Return the launches for the gradient of a table or bias."""
        unit, sizes = _unit(*self.strides, call[0]), (self.constants["BD"], self.constants["BE"])
        if len(self.sums) >= _LAYOUTS:
            self.sums.clear()
        # Tiles have 32 rows for small sizes, where Hopper's asynchronous matrix products may be wrong, and for large
        # sizes and float32, where tiles of 64 rows spill registers.
        size = 64 if self.dtype != torch.float32 and min(sizes) >= 64 and max(sizes) <= 128 else 32
        self.sums[call] = PairSums(
            self.shapes, learned, rules, (*_steps(unit, *self.strides, call[0]), *self.numbers),
            {**self.constants, "UNIT": unit}, size,
        )  # fmt: skip
        return self.sums[call]

    def _backward(self, change: tuple[int, ...]) -> tuple[Prepared, Prepared]:
        """Return the launch for the gradient of the queries and that for the gradients of keys and values.

        `change` has the strides of the output's gradient.
        """
        (b, h, q, _), (_, g, k, _), to = self.shapes[0], self.shapes[2], self.grads
        rows, keys = self.tuning.rows, self.tuning.keys
        unit = _unit(*self.strides, self.output, change, *to)
        places = (*self.strides, self.output, change, to[0])
        by_rows = self._prepared(range_rows, rows, places, -(-q // rows.rows), b * h, unit)
        places = (*self.strides, change, to[1], to[2])
        by_keys = self._prepared(range_keys, keys, places, -(-k // keys.columns), b * g, unit)
        if len(self.backward) >= _LAYOUTS:
            self.backward.clear()
        self.backward[change] = by_rows, by_keys
        return by_rows, by_keys


_plan = functools.lru_cache(maxsize=1024)(Plan)


def plan_of(query: Tensor, key: Tensor, value: Tensor, scale: float, rules: Rules) -> Plan:
    """Return the cached launches for tensors of the given shapes, strides and dtype, and for masks and biases of the
    kinds that are set in `rules`.
    """
    shapes, strides = (query.shape, key.shape, value.shape), (query.stride(), key.stride(), value.stride())
    holes = 2 if rules.bias is not None or rules.mask is not None else int(rules.table is not None)
    paired = holes > 0 or rules.cap is not None or rules.shift is not None
    # The scale is a float, because Triton would compile other kernels for an integer.
    return _plan(shapes, strides, Kind(query.dtype, query.is_cuda, float(scale), paired, holes))


class _Ranges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, learned: Tensor | None, rules: Rules, known: Any,
        plan: Plan,
    ) -> Tensor:  # fmt: skip
        output, lse = plan.forward(query, key, value, rules, known, True)
        # The mask and bias tensors are saved too: if one of them is changed in place before the backward pass, torch
        # raises an error.
        of_mask = rules.lengths, rules.query_ids, rules.key_ids, rules.mask
        ctx.save_for_backward(query, key, value, output, lse, learned, *of_mask, rules.slopes, rules.table, rules.bias)
        ctx.settings = rules, known, plan
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        once_only("backend 'flex'", REFERENCE)
        (change,) = upstream
        query, key, value, output, lse, learned, *_ = ctx.saved_tensors
        rules, known, plan = ctx.settings
        heads, queries = plan.shape[1:3]
        if change.stride(-1) != 1 or heads * change.stride(1) > REACH or queries * change.stride(2) > REACH:
            change = change.contiguous()
        return *plan.gradients(query, key, value, output, lse, change, rules, known, learned), None, None, None


def planned_attention(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, known: Any, plan: Plan, learning: bool,
    learned: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `range_attention` of tensors with a contiguous last axis, given the result of `plan_of` for them.

    `known` is a cache key for dtypes, strides and alignment of the tensors in `rules`, or None; `learning` means that a
    gradient is required.
    """
    if learning:
        return _Ranges.apply(query, key, value, learned, rules, known, plan)
    return plan.forward(query, key, value, rules, known, False)[0]


def range_attention(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, scale: float, learned: Tensor | None = None
) -> Tensor:
    """Return attention (b, h, q, e) with scores scale · ⟨query, key⟩ under the rules.

    query (b, h, q, d), key (b, g, k, d), value (b, g, k, e); d and e are at most 256, and all heads and rows of a batch
    row span at most `REACH` numbers. `rules` are the masks and biases. `learned` is the table or bias in `rules` if it
    requires a gradient. Reference implementation: `regard.core.backends.reference`.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    wanted = query.requires_grad or key.requires_grad or value.requires_grad or learned is not None
    plan = plan_of(query, key, value, scale, rules)
    return planned_attention(query, key, value, rules, None, plan, torch.is_grad_enabled() and wanted, learned)
