"""Attention of one decoding step: a few queries over many keys, with additive or dot scores, in one or two launches.

A step has too few queries to fill a GPU with tiles of queries, so the keys are split instead: each program loads a
range of keys and values once. If there are several ranges, a second launch merges their results by their log-sum-exp.
Padded and masked keys are never loaded, so that not even NaN in them changes the output.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.additive.stored_scores import approximate_tanh

_TILE = 2**14  # bytes of keys or values that a program loads at a time
# With at most this many keys, programs for additive scores and half-precision values of more than 256 columns load
# 2 * _TILE bytes at a time.
_FEW = 128
_LEAST = 2**17  # smallest cost of a query row, in multiplications, for which its keys are split
_PART = 2**15  # smallest cost of a range of keys, in multiplications
_WAVES = 8  # keys are split into ranges for at most this many programs per multiprocessor
_COLUMNS = 128  # number of value columns that one program of the merge computes


# Whether half-precision inputs use the GPU's approximate tanh instruction, accurate to 11 bits, as training does.
APPROXIMATE = True


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return approximate_tanh(x)
    else:  # 1 − 2 / (1 + e^{2x}) is exactly −1 or 1 where e^{2x} is 0 or inf
        return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _pair_scores(query_at, key_at, weight_at, j, inside, q_f, k_f, k_n, f0, F: tl.constexpr, BF: tl.constexpr,
                 ADDITIVE: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Return the part of the scores of one query with keys j that features f0 .. f0 + BF contribute."""
    f = f0 + tl.arange(0, BF)
    x = tl.load(query_at + f * q_f, mask=f < F, other=0.0).to(tl.float32)
    k = tl.load(
        key_at + j[:, None].to(tl.int64) * k_n + f[None, :] * k_f, mask=inside[:, None] & (f < F)[None, :], other=0.0
    ).to(tl.float32)
    if ADDITIVE:
        w = tl.load(weight_at + f, mask=f < F, other=0.0).to(tl.float32)
        return tl.sum(_tanh(x[None, :] + k, FAST) * w[None, :], 1)
    else:
        return tl.sum(x[None, :] * k, 1)


@triton.jit
def _step(
    query, key, value, weight, lengths, mask, output,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, q_f, k_f, v_e, w_h, l_b,
    scale, heads, group, queries, keys, stretch, splits,
    WHOLE: tl.constexpr, UNIT: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    BK: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one query row over one range of keys.

    The row is `program_id(0)` of (batch · heads · queries), the range is `program_id(1)`. The strides of the rows,
    heads and sequences of query, key and value are given in multiples of UNIT, from which the compiler derives how many
    bytes a thread may load at once. With WHOLE, the range holds all keys, and the kernel stores the output. Without
    WHOLE, it stores for `_join`: the unnormalised outputs of all ranges, then their largest scores, then the sums of
    their weights.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    i = row % queries
    h = (row // queries) % heads
    b = (row // (queries * heads)).to(tl.int64)
    stop = tl.minimum(keys, (part + 1) * stretch)
    if lengths is not None:
        stop = tl.minimum(tl.load(lengths + b * l_b), stop).to(tl.int32)
    e = tl.arange(0, BE)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((BE,), tl.float32)
    query_at = query + (b * q_b + h * q_h + i * q_n) * UNIT
    key_at = key + (b * k_b + (h // group) * k_h) * UNIT
    value_at = value + (b * v_b + (h // group) * v_h) * UNIT
    weight_at = query
    if weight is not None:
        weight_at = weight + h * w_h
    for j0 in tl.range(part * stretch, stop, BK):
        j = j0 + tl.arange(0, BK)
        inside = j < stop
        if mask is not None:
            inside = inside & (tl.load(mask + b * keys + j, mask=inside, other=0) != 0)
        # The values are loaded before the scores are computed, so that keys and values are loaded at the same time.
        v = tl.load(
            value_at + j[:, None].to(tl.int64) * (v_n * UNIT) + e[None, :] * v_e,
            mask=inside[:, None] & (e < E)[None, :],
            other=0.0,
        )
        if BF >= F:
            scores = _pair_scores(
                query_at, key_at, weight_at, j, inside, q_f, k_f, k_n * UNIT, 0, F, BF, weight is not None, FAST
            )
        else:
            scores = tl.zeros((BK,), tl.float32)
            for f0 in range(0, F, BF):
                scores += _pair_scores(
                    query_at, key_at, weight_at, j, inside, q_f, k_f, k_n * UNIT, f0, F, BF, weight is not None, FAST
                )
        # torch.compile may pass the scale as float64.
        scores = tl.where(inside, (scores * scale).to(tl.float32), float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 0))
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)  # `new_best` is -inf if all keys so far are masked
        weights = tl.exp(scores - pivot)
        fade = tl.exp(best - pivot)
        acc = acc * fade + tl.sum(weights[:, None] * v.to(tl.float32), 0)
        total = total * fade + tl.sum(weights, 0)
        best = new_best
    if WHOLE:
        acc = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(output + row.to(tl.int64) * E + e, acc.to(output.dtype.element_ty), mask=e < E)
    else:
        at = row.to(tl.int64) * splits + part
        parts = tl.num_programs(0).to(tl.int64) * splits
        tl.store(output + at * E + e, acc, mask=e < E)
        tl.store(output + parts * E + at, best)
        tl.store(output + parts * (E + 1) + at, total)


@triton.jit
def _join(sums, output, splits, E: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr):
    """Merge the results of the key ranges of one query row.

    The result of a range is scaled by exp(largest score of the range − largest score of all ranges).
    """
    row = tl.program_id(0).to(tl.int64)
    s, e = tl.arange(0, BS), tl.program_id(1) * BE + tl.arange(0, BE)
    parts = tl.num_programs(0).to(tl.int64) * splits
    best = tl.load(sums + parts * E + row * splits + s, mask=s < splits, other=float("-inf"))
    total = tl.load(sums + parts * (E + 1) + row * splits + s, mask=s < splits, other=0.0)
    most = tl.max(best, 0)
    fade = tl.where(best == float("-inf"), 0.0, tl.exp(best - tl.where(most == float("-inf"), 0.0, most)))
    part = tl.load(
        sums + (row * splits + s[:, None]) * E + e[None, :], mask=(s < splits)[:, None] & (e < E)[None, :], other=0.0
    )
    sum_total = tl.sum(total * fade, 0)
    acc = tl.sum(part * fade[:, None], 0) / tl.where(sum_total == 0.0, 1.0, sum_total)
    tl.store(output + row * E + e, acc.to(output.dtype.element_ty), mask=e < E)


class Layout(NamedTuple):
    """The tile sizes of a decoding step, and the ranges into which its keys are split."""

    block_keys: int
    block_features: int
    block_values: int
    stretch: int  # number of keys in each range
    splits: int  # number of ranges of keys
    warps: int = 4


def layout(rows: int, keys: int, f_size: int, e_size: int, additive: bool, itemsize: int, workers: int) -> Layout:
    """Return the tile sizes and the ranges of keys of a decoding step; `workers` is the number of multiprocessors."""
    block_values = max(16, triton.next_power_of_2(e_size))
    block_features = max(16, min(128 if additive else 256, triton.next_power_of_2(f_size)))
    few = additive and itemsize == 2 and block_values >= 512 and keys <= _FEW
    block_keys = max(16, _TILE * (2 if few else 1) // itemsize // max(block_features, block_values))
    block_keys = min(128, block_keys, max(16, triton.next_power_of_2(keys)))
    cost = (4 if additive else 1) * f_size + e_size  # multiplications per key; a tanh counts as three more
    splits = 1
    if keys * cost >= _LEAST:
        splits = max(1, min(64, _WAVES * workers // max(1, rows), keys * cost // _PART, triton.cdiv(keys, block_keys)))
    stretch = triton.cdiv(triton.cdiv(keys, splits), block_keys) * block_keys
    return Layout(block_keys, block_features, block_values, stretch, max(1, triton.cdiv(keys, stretch)))


class Steps(NamedTuple):
    """All properties of a decoding step that its launch depends on, except the tensors themselves."""

    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # shapes of query, key and value, as in `prepare`
    strides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # strides of query, key and value
    itemsize: int  # number of bytes of each entry of the keys
    weight_step: int | None  # stride of the heads of the additive weight, 0 if they share it; None for dot scores
    length_step: int  # stride of the tensor of lengths
    scale: float  # factor by which dot products are multiplied
    workers: int  # number of multiprocessors of the device


Step = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]


def prepare(steps: Steps, tiles: Layout | None = None) -> Step:
    """Return a function (query, key, value, weight, lengths, mask) → output (b, h, q, e) for decoding steps with the
    properties `steps`.

    The query is (b, h, q, f), the key (b, g, k, f), and the value (b, g, k, e). With a weight, (f,) or (h, f) with
    contiguous rows, the score is additive, else scale · ⟨q, k⟩. Lengths (b,) and a contiguous mask (b, k) select the
    keys that may be attended. Reference implementation: `regard.core.backends.reference` with `Additive(weight)` or
    `ScaledDot(scale)`.
    """
    (batch, heads, queries, f_size), (_, groups, keys, e_size) = steps.shapes[0], steps.shapes[2]
    rows, additive = batch * heads * queries, steps.weight_step is not None
    tiles = tiles or layout(rows, keys, f_size, e_size, additive, steps.itemsize, steps.workers)
    places = [place[:3] for place in steps.strides]
    unit = next(n for n in (16, 8, 4, 2, 1) if all(step % n == 0 for place in places for step in place))
    numbers = (
        *(step // unit for place in places for step in place), *(place[3] for place in steps.strides),
        steps.weight_step or 0, steps.length_step, 1.0 if additive else float(steps.scale),
        heads, heads // groups, queries, keys, tiles.stretch, tiles.splits,
    )  # fmt: skip
    sizes = {"BK": tiles.block_keys, "BF": tiles.block_features, "BE": tiles.block_values}
    # FAST uses inline assembly, which Triton's interpreter cannot run.
    fast = APPROXIMATE and additive and steps.itemsize == 2 and isinstance(_step, triton.runtime.JITFunction)
    constants = {"WHOLE": tiles.splits == 1, "UNIT": unit, "F": f_size, "E": e_size, **sizes, "FAST": fast}
    block = Block(1, tiles.block_keys, warps=tiles.warps)
    step = Prepared(_step, (rows, tiles.splits, 1), numbers, constants, block)
    columns = min(_COLUMNS, tiles.block_values)
    grid = rows, triton.cdiv(e_size, columns), 1
    merged = {"E": e_size, "BS": triton.next_power_of_2(tiles.splits), "BE": columns}
    join = Prepared(_join, grid, (tiles.splits,), merged, Block(1, columns, warps=4))
    shape, room = (batch, heads, queries, e_size), rows * tiles.splits * (e_size + 2)

    def run(
        query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, lengths: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        output = torch.empty(shape, dtype=value.dtype, device=value.device)
        if tiles.splits == 1:
            step(query, key, value, weight, lengths, mask, output)
            return output
        sums = torch.empty(room, dtype=torch.float32, device=value.device)
        step(query, key, value, weight, lengths, mask, sums)
        join(sums, output)
        return output

    return run


_prepared = functools.lru_cache(maxsize=256)(prepare)


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
    """Return the attention (b, h, q, e) of one decoding step.

    The tensors are those of `prepare`, with any strides. `workers` is the number of multiprocessors of the device.
    """
    compiling = torch.compiler.is_compiling()
    return (_operator if compiling else _decoded)(query, key, value, weight, lengths, mask, float(scale), workers)


def _decoded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float,
    workers: int,
) -> Tensor:
    weight = weight if weight is None or weight.stride(-1) == 1 else weight.contiguous()
    mask = None if mask is None else mask.contiguous().view(torch.uint8)
    steps = Steps(
        (query.shape, key.shape, value.shape), (query.stride(), key.stride(), value.stride()),
        key.element_size(),
        None if weight is None else weight.stride(0) if weight.ndim == 2 else 0,
        0 if lengths is None else lengths.stride(0), scale, workers,
    )  # fmt: skip
    return _prepared(steps)(query, key, value, weight, lengths, mask)


_operator = torch.library.custom_op("regard::decode_attention", _decoded, mutates_args=())


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return value.new_empty(*query.shape[:-1], value.shape[-1])
