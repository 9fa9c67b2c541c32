"""Bias, mask and normaliser on whole rows of stored scores, in one kernel: softmax, sigmoid, or hard attention.

A program computes some rows of one head. The rows stay in registers, so every score is loaded once. The results must
equal `regard.core.backends.reference`.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.pairs import Pairs, add_bias, tile_allowed
from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.range_pairs import tanh

LONGEST = 8192  # the longest row, in keys, that a program holds in registers
_NUMBERS = 2048  # the number of scores that a program computes, unless one row has more


@triton.jit
def _scores(scores, pairs, cap, factor, z, h, b, i, n_q, n_k, BLOCK: tl.constexpr):
    """Return the scores of the rows i with softcap, bias and factor, which pairs are allowed, and the scores' offsets.

    Scores of masked pairs are -inf.
    """
    j = tl.arange(0, BLOCK)[None, :]
    i = i[:, None]
    at = (z.to(tl.int64) * n_q + i) * n_k + j
    s = tl.load(scores + at, mask=(i < n_q) & (j < n_k), other=0.0)
    if cap is not None:
        s = cap * tanh(s / cap)
    s = add_bias(s, pairs, b, h, i, j, n_q, n_k, 1.0)
    allowed = tile_allowed(pairs, b, h, i, j, n_q, n_k)
    if pairs.bias is not None or pairs.table is not None:
        allowed = allowed & (s != float("-inf"))  # a bias of -inf masks the pair
    if factor is not None:
        s = s * factor
    return tl.where(allowed, s, float("-inf")), allowed, at


@triton.jit
def _exponentials(s, allowed):
    """Return exp(s - m), its sum, m and whether all keys are masked, for each row; m is the row's largest score."""
    most = tl.max(s, 1)
    empty = tl.max(allowed.to(tl.int32), 1) == 0
    p = tl.exp(s - tl.where(empty, 0.0, most)[:, None])
    return p, tl.sum(p, 1), most, empty


@triton.jit
def row_weights(
    scores, weights, allowed_pairs, pairs, heads, n_q, n_k, cap, shift,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the weights of some rows, or with KIND "scores" their scores, -inf where masked.

    Also write which pairs are allowed, unless `allowed_pairs` is None.
    """
    z = tl.program_id(1)
    b, h = z // heads, z % heads
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s, allowed, at = _scores(scores, pairs, cap, None, z, h, b, i, n_q, n_k, BLOCK)
    if KIND == "softmax":
        p, total, _, empty = _exponentials(s, allowed)
        s = p / tl.where(empty, 1.0, total)[:, None]
    elif KIND == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-(s + shift)))
    inside = (i < n_q)[:, None] & (tl.arange(0, BLOCK) < n_k)[None, :]
    tl.store(weights + at, s.to(weights.dtype.element_ty), mask=inside)
    if allowed_pairs is not None:
        tl.store(allowed_pairs + at, allowed.to(tl.int8), mask=inside)


@triton.jit
def row_choices(
    scores, value, output, log_prob, pairs, heads, group, n_q, n_k, cap, factor, v_b, v_h, v_n, v_e,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the value of each row's largest score (of the first one on a tie), and its log-probability.

    As in torch, NaN counts as the largest score. Output and log-probability are 0 in a row whose keys are all masked.
    """
    z = tl.program_id(1)
    b, h = z // heads, z % heads
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s, allowed, _ = _scores(scores, pairs, cap, factor, z, h, b, i, n_q, n_k, BLOCK)
    _, total, most, empty = _exponentials(s, allowed)
    spoilt = tl.max((s != s).to(tl.int32), 1) > 0
    largest = tl.where(spoilt[:, None], s != s, s == most[:, None])
    chosen = tl.min(tl.where(largest, tl.arange(0, BLOCK)[None, :], BLOCK), 1)
    chosen = tl.minimum(chosen, n_k - 1)
    row = z.to(tl.int64) * n_q + i
    tl.store(log_prob + row, tl.where(empty, 0.0, -tl.log(tl.where(empty, 1.0, total))), mask=i < n_q)
    value += b.to(tl.int64) * v_b + (h // group).to(tl.int64) * v_h
    for c0 in range(0, SIZE, COLUMNS):
        c = c0 + tl.arange(0, COLUMNS)
        inside = (i < n_q)[:, None] & (c < SIZE)[None, :]
        found = tl.load(value + chosen.to(tl.int64)[:, None] * v_n + c[None, :] * v_e, mask=inside, other=0.0)
        found = tl.where(empty[:, None], 0.0, found).to(output.dtype.element_ty)
        tl.store(output + row[:, None] * SIZE + c[None, :], found, mask=inside)


def _block(queries: int, keys: int) -> Block:
    numbers = max(16, triton.next_power_of_2(keys))
    rows = max(1, min(_NUMBERS // numbers, triton.next_power_of_2(queries)))
    return Block(rows, numbers, warps=8 if numbers > 2 * _NUMBERS else 4)


def weigher(
    shape: tuple[int, int, int, int], kind: str, dtype: torch.dtype, masked: bool, *,
    cap: float | None = None, shift: float = 0.0,
) -> Callable[[Tensor, Pairs], tuple[Tensor, Tensor | None]]:  # fmt: skip
    """Return a function of (scores, pairs) that returns weights of `dtype` and, if `masked`, which pairs are allowed.

    The scores are contiguous, of `shape` (b, h, q, k) with at most `LONGEST` keys, in float32. `kind` is "softmax",
    "sigmoid" (of scores plus `shift`), or "scores", which are written in place, -inf where masked. Masked pairs are
    those of `pairs`, and those of a bias of -inf.
    """
    (b, h, q, k), block = shape, _block(shape[2], shape[3])
    constants = {"KIND": kind, "ROWS": block.rows, "BLOCK": block.columns}
    numbers = h, q, k, None if cap is None else float(cap), float(shift)
    run = Prepared(row_weights, (-(-q // block.rows), b * h, 1), numbers, constants, block)

    def weighed(scores: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor | None]:
        weights = scores if kind == "scores" else torch.empty(shape, dtype=dtype, device=scores.device)
        allowed = torch.empty(shape, dtype=torch.int8, device=scores.device) if masked else None
        run(scores, weights, allowed, pairs)
        return weights, None if allowed is None else allowed.view(torch.bool)

    return weighed


def chooser(
    shape: tuple[int, int, int, int], value: Tensor, *, cap: float | None = None, factor: float = 1.0
) -> Callable[[Tensor, Tensor, Pairs], tuple[Tensor, Tensor]]:
    """Return a function of (scores, value, pairs) that returns output and log-probability of hard attention.

    The scores are contiguous, of `shape` (b, h, q, k) with at most `LONGEST` keys, in float32. The function accepts
    values with the shape (b, g, k, e), strides and dtype of `value`. `factor` multiplies the scores after the bias.
    """
    (b, h, q, k), (_, g, _, e), block = shape, value.shape, _block(shape[2], shape[3])
    columns = max(16, min(128, triton.next_power_of_2(e)))
    constants = {"SIZE": e, "COLUMNS": columns, "ROWS": block.rows, "BLOCK": block.columns}
    numbers = (
        h, h // g, q, k, None if cap is None else float(cap), None if factor == 1.0 else float(factor), *value.stride(),
    )  # fmt: skip
    run = Prepared(row_choices, (-(-q // block.rows), b * h, 1), numbers, constants, block)

    def chosen(scores: Tensor, value: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        output = torch.empty((b, h, q, e), dtype=value.dtype, device=value.device)
        log_prob = torch.empty((b, h, q), dtype=torch.float32, device=value.device)
        run(scores, value, output, log_prob, pairs)
        return output, log_prob

    return chosen
