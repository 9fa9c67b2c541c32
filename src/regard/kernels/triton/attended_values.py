"""Weighted sums in which masked values of NaN or Inf have no effect: the correction of a product of weights and values.

A matrix product multiplies a masked value with its weight of 0, which is NaN if the value is not finite. The kernel
scans the values: tiles of the output whose values are all finite are not changed, the other tiles are computed again.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.plan import Block, launch

_BLOCK = Block(64, 64, warps=4)


@triton.jit
def _values(value, j, c, keys, size, v_k, v_e):
    place = value + j.to(tl.int64)[:, None] * v_k + c[None, :] * v_e
    return tl.load(place, mask=(j < keys)[:, None] & (c < size)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _repair(
    output, weights, value, allowed, o_b, o_h, o_q, w_b, w_h, w_q, v_b, v_h, v_k, v_e, a_b, a_h, a_q, a_k,
    heads, group, queries, keys, size, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a tile (ROWS, COLUMNS) of one head's output again if its columns of the values hold NaN or Inf.

    The last axes of `output` and `weights` are contiguous.
    """
    b, h = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    i, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    value += b * v_b + h // group * v_h
    spoilt = tl.zeros([STEP], tl.int32)
    for j0 in range(0, keys, STEP):
        v = _values(value, j0 + step, c, keys, size, v_k, v_e)
        spoilt = tl.maximum(spoilt, tl.max(tl.where(tl.abs(v) < float("inf"), 0, 1), 1))
    if tl.max(spoilt, 0) > 0:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        above = tl.zeros([ROWS, COLUMNS], tl.float32)  # number of attended values that are +inf or NaN
        below = tl.zeros([ROWS, COLUMNS], tl.float32)  # number of attended values that are -inf or NaN
        for j0 in range(0, keys, STEP):
            j = j0 + step
            v = _values(value, j, c, keys, size, v_k, v_e)
            inside = (i < queries)[:, None] & (j < keys)[None, :]
            row = i.to(tl.int64)[:, None]
            w = tl.load(weights + b * w_b + h * w_h + row * w_q + j[None, :], mask=inside, other=0.0).to(tl.float32)
            place = allowed + b * a_b + h * a_h + row * a_q + j[None, :] * a_k
            seen = (tl.load(place, mask=inside, other=0) != 0).to(tl.float32)
            clean = tl.where(tl.abs(v) < float("inf"), v, 0.0)
            total += tl.dot(w, clean, input_precision="ieee")
            above += tl.dot(seen, tl.where(v < float("inf"), 0.0, 1.0))
            below += tl.dot(seen, tl.where(v > float("-inf"), 0.0, 1.0))
        total += tl.where(above > 0, float("inf"), 0.0) + tl.where(below > 0, float("-inf"), 0.0)
        place = output + b * o_b + h * o_h + i.to(tl.int64)[:, None] * o_q + c[None, :]
        tl.store(place, total.to(output.dtype.element_ty), mask=(i < queries)[:, None] & (c < size)[None, :])


def repair(output: Tensor, weights: Tensor, value: Tensor, allowed: Tensor) -> None:
    """Correct the output (b, h, q, e) = weights @ value in place if a value is NaN or Inf.

    After the correction, a value of NaN or Inf changes only the outputs of the queries that may attend to it.

    weights (b, h, q, k), value (b, g, k, e); allowed is bool and broadcasts to the weights.
    Reference implementation: `regard.core.backends.plain_form.attended`.
    """
    (b, h, q, k), (_, g, _, e) = weights.shape, value.shape
    columns = min(64, max(16, triton.next_power_of_2(e)))
    steps: list[Any] = [
        *output.stride()[:3],
        *weights.stride()[:3],
        *value.stride(),
        *allowed.expand_as(weights).stride(),
    ]
    tensors = (output, weights, value, allowed)
    launch(
        _repair, (b * h, -(-q // _BLOCK.rows), -(-e // columns)), *tensors, *steps, h, h // g, q, k, e,
        ROWS=_BLOCK.rows, STEP=_BLOCK.columns, COLUMNS=columns, block=_BLOCK,
        known=(*((t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors),),
    )  # fmt: skip
