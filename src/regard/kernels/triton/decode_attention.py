"""One decoding step in one launch: a few queries against a long memory, additive or dot scores.

A step has too few queries to fill a GPU with tiles of them, so the memory is split instead: each program loads a range
of keys and values once, and if there are several ranges, a second launch merges them by their log-sum-exp. Padded and
masked keys are never loaded, so their values do not matter.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.plan import Block, launch

_BLOCK = Block(1, 32, warps=4)


@triton.jit
def _tanh(x):
    # 1 − 2 / (1 + e^{2x}): exact at both ends, where e^{2x} is 0 or inf
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _step(
    query, key, value, weight, lengths, mask, output, best_out, total_out,
    q_b, q_h, q_n, q_f, k_b, k_h, k_n, k_f, v_b, v_h, v_n, v_e, w_h, l_b,
    scale, heads, group, queries, keys, stretch, f_size, e_size, splits,
    ADDITIVE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
    BK: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Compute row `program_id(0)` of (batch · heads · queries) against range `program_id(1)` of the keys."""
    row, part = tl.program_id(0), tl.program_id(1)
    i = row % queries
    h = (row // queries) % heads
    b = (row // (queries * heads)).to(tl.int64)
    stop = tl.minimum(keys, (part + 1) * stretch)
    if PADDED:
        stop = tl.minimum(tl.load(lengths + b * l_b), stop).to(tl.int32)
    e = tl.arange(0, BE)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((BE,), tl.float32)
    query_at = query + b * q_b + h * q_h + i * q_n
    key_at = key + b * k_b + (h // group) * k_h
    value_at = value + b * v_b + (h // group) * v_h
    for j0 in range(part * stretch, stop, BK):
        j = j0 + tl.arange(0, BK)
        inside = j < stop
        if MASKED:
            inside = inside & (tl.load(mask + b * keys + j, mask=inside, other=0) != 0)
        scores = tl.zeros((BK,), tl.float32)
        for f0 in range(0, f_size, BF):
            f = f0 + tl.arange(0, BF)
            x = tl.load(query_at + f * q_f, mask=f < f_size, other=0.0).to(tl.float32)
            k = tl.load(
                key_at + j[:, None].to(tl.int64) * k_n + f[None, :] * k_f,
                mask=inside[:, None] & (f < f_size)[None, :],
                other=0.0,
            ).to(tl.float32)
            if ADDITIVE:
                w = tl.load(weight + h * w_h + f, mask=f < f_size, other=0.0).to(tl.float32)
                scores += tl.sum(_tanh(x[None, :] + k) * w[None, :], 1)
            else:
                scores += tl.sum(x[None, :] * k, 1)
        # torch.compile may pass the scale as float64.
        scores = tl.where(inside, (scores * scale).to(tl.float32), float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 0))
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)  # no key so far
        weights = tl.exp(scores - pivot)
        fade = tl.exp(best - pivot)
        v = tl.load(
            value_at + j[:, None].to(tl.int64) * v_n + e[None, :] * v_e,
            mask=inside[:, None] & (e < e_size)[None, :],
            other=0.0,
        ).to(tl.float32)
        acc = acc * fade + tl.sum(weights[:, None] * v, 0)
        total = total * fade + tl.sum(weights, 0)
        best = new_best
    if WHOLE:
        acc = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(output + row.to(tl.int64) * e_size + e, acc.to(output.dtype.element_ty), mask=e < e_size)
    else:
        at = row.to(tl.int64) * splits + part
        tl.store(output + at * e_size + e, acc, mask=e < e_size)
        tl.store(best_out + at, best)
        tl.store(total_out + at, total)


@triton.jit
def _join(parts, bests, totals, output, e_size, splits, BS: tl.constexpr, BE: tl.constexpr):
    """Merge the ranges of one row, each scaled by its best score relative to the best of all."""
    row = tl.program_id(0).to(tl.int64)
    s, e = tl.arange(0, BS), tl.arange(0, BE)
    best = tl.load(bests + row * splits + s, mask=s < splits, other=float("-inf"))
    total = tl.load(totals + row * splits + s, mask=s < splits, other=0.0)
    most = tl.max(best, 0)
    fade = tl.where(best == float("-inf"), 0.0, tl.exp(best - tl.where(most == float("-inf"), 0.0, most)))
    part = tl.load(
        parts + (row * splits + s[:, None]) * e_size + e[None, :],
        mask=(s < splits)[:, None] & (e < e_size)[None, :],
        other=0.0,
    )
    sum_total = tl.sum(total * fade, 0)
    acc = tl.sum(part * fade[:, None], 0) / tl.where(sum_total == 0.0, 1.0, sum_total)
    tl.store(output + row * e_size + e, acc.to(output.dtype.element_ty), mask=e < e_size)


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float,
    workers: int,
) -> Tensor:
    """Attend query (b, h, q, f) with few q, key (b, g, k, f), value (b, g, k, e) → output (b, h, q, e).

    With `weight` (f,) or (h, f) the score is additive, else scale · ⟨q, k⟩. `lengths` (b,) and `mask` (b, k) select the
    keys that may be attended. `workers` is the number of programs that the device runs at once, and determines the
    number of ranges. Reference implementation: `regard.core.backends.reference` with `Additive(weight)` or
    `ScaledDot(scale)`.
    """
    batch, heads, queries, f_size = query.shape
    keys, e_size = value.shape[-2:]
    rows = batch * heads * queries
    block_keys, block_features = 32, min(128, triton.next_power_of_2(f_size))
    splits = max(1, min(64, 2 * workers // max(1, rows), triton.cdiv(keys, 256)))
    stretch = triton.cdiv(triton.cdiv(keys, splits), block_keys) * block_keys
    splits = triton.cdiv(keys, stretch)
    output = torch.empty((batch, heads, queries, e_size), dtype=value.dtype, device=value.device)
    parts, bests, totals = output, output, output
    if splits > 1:
        room = torch.empty(rows * splits * (e_size + 2), dtype=torch.float32, device=value.device)
        parts, bests, totals = room.split((rows * splits * e_size, rows * splits, rows * splits))
    block_values = triton.next_power_of_2(e_size)
    weight = weight if weight is None or weight.stride(-1) == 1 else weight.contiguous()
    _launched(
        _step, (rows, splits, 1),
        query, key, value, weight if weight is not None else query, lengths if lengths is not None else query,
        mask.contiguous().view(torch.uint8) if mask is not None else query, parts, bests, totals,
        *query.stride(), *key.stride(), *value.stride(),
        weight.stride(0) if weight is not None and weight.ndim == 2 else 0,
        lengths.stride(0) if lengths is not None else 0,
        1.0 if weight is not None else float(scale),
        heads, heads // key.shape[1], queries, keys, stretch, f_size, e_size, splits,
        ADDITIVE=weight is not None, PADDED=lengths is not None, MASKED=mask is not None, WHOLE=splits == 1,
        BK=block_keys, BF=block_features, BE=block_values,
    )  # fmt: skip
    if splits > 1:
        block_splits = triton.next_power_of_2(splits)
        sizes = {"BS": block_splits, "BE": block_values}
        _launched(_join, (rows, 1, 1), parts, bests, totals, output, e_size, splits, **sizes)
    return output


def _launched(kernel: Any, grid: tuple[int, int, int], *args: Any, **constants: Any) -> None:
    if torch.compiler.is_compiling():  # torch.compile only traces launches in Triton's own form
        kernel[grid](*args, **constants, num_warps=_BLOCK.warps)
    else:
        launch(kernel, grid, *args, **constants, block=_BLOCK)
