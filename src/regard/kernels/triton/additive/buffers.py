"""Preprocessed copies of query, key and value for the main kernels, computed on the device once per pass."""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.kernels.additive import series
from regard.kernels.triton.additive import prepare, series_features
from regard.kernels.triton.additive.plan import SPAN, Block, Inputs, Sizes, launch, trait

PARTS = 16  # number of groups of rows whose minima and maxima are computed separately


def series_serves(inputs: Inputs) -> bool:
    half = inputs.query.dtype in (torch.bfloat16, torch.float16)
    return half and inputs.activation in series.TARGETS


@functools.cache
def _table(activation: str, dtype: torch.dtype, direction: str, device: torch.device) -> Tensor:
    rows = series.packed(activation, str(dtype).removeprefix("torch."), direction)
    count = triton.next_power_of_2(len(rows))
    # Padding rows come first and cover no range: `table_row` counts the rows that do not cover a range, and this count
    # is then the index of the first row that does.
    none = tuple((-1.0,) + (0.0,) * (len(rows[0]) - 1) for _ in range(count - len(rows)))
    return torch.tensor(none + rows, dtype=torch.float32, device=device)


def _operands(inputs: Inputs, *, value: bool) -> list[Any]:
    q, k, v = inputs.query, inputs.key, inputs.value
    parts: list[Any] = [q, *q.stride(), k, *k.stride()]
    return [*parts, v, *v.stride(), inputs.weight, inputs.weight_step, inputs.lengths] if value else parts


class Ranges(NamedTuple):
    """The minimum and maximum of every feature of each head, over each of several groups of rows."""

    lows: Tensor  # minima, shape (b * h + b * g, PARTS, f): query heads first, then key heads
    highs: Tensor


def ranges(inputs: Inputs) -> Ranges:
    """Compute the minimum and maximum of every feature in one pass over query and key."""
    s = inputs.sizes
    heads = s.b * (s.h + s.g)
    both = torch.empty(2, heads, PARTS, s.f, device=inputs.query.device, dtype=torch.float32)
    found = Ranges(both[0], both[1])
    # A step loads many rows, because every step waits for its loads, but no more than the program has to process.
    rows = min(128, max(16, triton.next_power_of_2(-(-max(s.q, s.k) // PARTS))))
    block = Block(rows, s.f_block, warps=8 if rows > 32 else 4)
    launch(
        prepare.ranges, (PARTS, heads, -(-s.f // s.f_block)),
        *_operands(inputs, value=False), inputs.lengths, *found, s.h, s.g, s.q, s.k, s.f, s.b * s.h,
        PARTS=PARTS, ROWS=block.rows, FB=s.f_block, block=block, known=inputs.traits,
    )  # fmt: skip
    return found


class Notes(NamedTuple):
    """A copy of the values with NaN and Inf as 0, and flags of the queries, keys and spans of keys with NaN or Inf."""

    value: Tensor
    query_bad: Tensor
    bad: Tensor
    bad_span: Tensor

    @classmethod
    def empty(cls, inputs: Inputs) -> "Notes":
        s, device = inputs.sizes, inputs.query.device
        parts = 2 if inputs.value.dtype == torch.float32 else 1
        return cls(
            torch.empty(parts * s.b * s.g * s.k_pad, s.e_block, device=device, dtype=inputs.value.dtype),
            torch.empty(s.b * s.h, s.q_pad, device=device, dtype=torch.int8),
            torch.empty(s.b * s.g, s.k_pad, device=device, dtype=torch.int8),
            torch.empty(s.b * s.g, s.k_pad // SPAN, device=device, dtype=torch.int32),
        )


class Choice(NamedTuple):
    """The series for each key head, chosen on the device by the range of query and key.

    For key heads whose range no series covers, the exact kernels compute the scores.
    """

    direction: str
    table: Tensor
    plan: Tensor  # (b * g,): row of the table of series, or -1 if none covers the range
    fits: Tensor | None  # (b * g, f_pad): offset of each hidden unit's fit in its table row; None with one fit per row


class Features(NamedTuple):
    """Sine-series features of the key heads `units` and of the query heads that share them."""

    units: range
    query: Tensor  # features of the queries, shape (heads * q_pad, 32 * f_pad)
    key: Tensor
    raw: tuple[Tensor, Tensor]  # float32 copies of query and key, for heads without a series
    # Two tensors: what the slopes and constants of the fits add to the scores of each query, and what the slopes add to
    # the scores of each key. Both are None for the series of the backward pass.
    shifts: tuple[Any, Any]


class Factors(NamedTuple):
    raw: tuple[Tensor, Tensor]
    powers: tuple[Any, Any, Any]
    tops: tuple[Any, Any]
    sizes: tuple[Any, Any]


def _raw(s: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(s.b * s.h, s.q_pad, s.f_pad, device=device, dtype=torch.float32),
        torch.empty(s.b * s.g, s.k_pad, s.f_pad, device=device, dtype=torch.float32),
    )


def choose(inputs: Inputs, direction: str) -> Choice:
    """Choose for each key head the row of the series table that covers the range of query and key."""
    s, device, fits = inputs.sizes, inputs.query.device, series.FITS[direction]
    made = Choice(
        direction,
        _table(inputs.activation, inputs.query.dtype, direction, device),
        torch.empty(s.b * s.g, device=device, dtype=torch.int32),
        torch.empty(s.b * s.g, s.f_pad, device=device, dtype=torch.int32) if fits > 1 else None,
    )
    launch(
        series_features.choose, (s.b * s.g, 1, 1),
        inputs.weight, inputs.weight_step, *ranges(inputs), made.table, made.plan, made.fits, s.h, s.g, s.b * s.h,
        s.f, s.f_pad,
        TABLE_ROWS=made.table.shape[0], WIDTH=series.WIDTH, FITS=fits, PARTS=PARTS, MANY=s.f_pad > s.f_block,
        FB=s.f_block, known=(inputs.traits, direction),
    )  # fmt: skip
    return made


def feature_numbers(s: Sizes) -> int:
    """Return the number of entries in the features of all heads."""
    return 2 * series.MOST * s.f_pad * s.b * (s.h * s.q_pad + s.g * s.k_pad)


def room_for_features(s: Sizes, units: range, device: torch.device, dtype: torch.dtype, direction: str) -> Features:
    """Allocate uninitialised features for the key heads `units` and the query heads that share them."""
    shifts = (None, None)
    if direction == "forward":
        shifts = tuple(torch.empty(s.b * s.h, n, device=device, dtype=torch.float32) for n in (s.q_pad, s.k_pad))
    rows = len(units) * (s.h // s.g) * s.q_pad, len(units) * s.k_pad
    query, key = (torch.empty(n, 2 * series.MOST * s.f_pad, device=device, dtype=dtype) for n in rows)
    return Features(units, query, key, _raw(s, device), (shifts[0], shifts[1]))


def write_features(inputs: Inputs, notes: Notes, choice: Choice, made: Features, group: int = 1) -> None:
    """Compute features of the key heads `made.units` and their query heads by the chosen series, and fill `notes`.

    `group` harmonics of a hidden unit are adjacent.
    """
    s, direction = inputs.sizes, choice.direction
    launch(
        series_features.features, (max(s.q_pad, s.k_pad) // SPAN, len(made.units) * (s.h // s.g + 1), 1),
        *_operands(inputs, value=True), choice.table, choice.plan, choice.fits, made.query, made.key, *made.raw,
        *made.shifts, *notes, s.h, s.g, s.q, s.k, s.q_pad, s.k_pad, s.f, s.f_pad, s.e, made.units.start,
        len(made.units),
        STEP=series.WIDTH * series.FITS[direction], GROUP=group, ODD=series.TARGETS[inputs.activation][1],
        ROWS=SPAN, FB=min(64 if group == 1 else 16, s.f_block), RB=s.f_block, EB=s.e_block, NATIVE=inputs.native,
        known=(inputs.traits, made.query.dtype, direction, trait(made.units.start), trait(len(made.units))),
    )  # fmt: skip


def factors(inputs: Inputs, notes: Notes, *, found: Ranges | None, plan: Tensor | None, by_row: bool) -> Factors:
    """Return the operands of the exact kernels, feature-major or row-major.

    `found` holds the ranges of query and key, which are needed only if tanh is computed from exponentials.
    """
    s, device = inputs.sizes, inputs.query.device
    factored = inputs.factored

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=torch.float32)

    def facts() -> tuple[Tensor, Tensor]:
        return empty(s.b * s.h, s.q_pad // SPAN), empty(s.b * s.g, s.k_pad // SPAN)

    raw = _raw(s, device)
    powers = (*_raw(s, device), empty(s.b * s.h, s.f_pad)) if factored else (None, None, None)
    tops, sizes = (facts(), facts()) if factored else ((None, None), (None, None))
    launch(
        prepare.factors, (max(s.q_pad, s.k_pad) // SPAN, s.b * (s.h + s.g), 1),
        *_operands(inputs, value=True), *(found or (None, None)), plan, *raw, *powers, tops[0], sizes[0], tops[1],
        sizes[1], *notes, s.h, s.g, s.q, s.k, s.q_pad, s.k_pad, s.f, s.f_pad, s.e, s.b * s.h, inputs.low_step,
        PARTS=PARTS, ROW_MAJOR=by_row, FACTORED=factored, COPY=plan is None, SPLIT=inputs.split,
        FB=min(16, s.f_block), EB=s.e_block, known=(inputs.traits, plan is None),
    )  # fmt: skip
    return Factors(raw, powers, tops, sizes)


def plain_factors(raw: tuple[Tensor, Tensor]) -> Factors:
    """Return `raw`, which the kernel `features` writes for heads without a series, as operands of the exact kernels."""
    return Factors(raw, (None, None, None), (None, None), (None, None))


def value_steps(s: Sizes, plan: Tensor | None) -> tuple[int, int]:
    """Return the strides of the copied values along keys and columns.

    The copy of the values is row-major if a series may be used, and transposed if only the exact kernels run.
    """
    return (1, s.k_pad) if plan is None else (s.e_block, 1)


def output_gradient(
    inputs: Inputs, output: Tensor, grad_output: Tensor, change: Tensor | None, plan: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor], int]:
    """Return delta = Σ dO O - dlse of each row, copies of dO by row and by column, and the offset of the low parts of
    these copies.

    Low parts exist if float32 numbers are split into a high and a low part; otherwise the offset is 0.
    """
    s, device = inputs.sizes, inputs.query.device
    split = inputs.split
    step = s.b * s.h * s.q_pad * s.e_block if split else 0
    delta = torch.empty(s.b, s.h, s.q, device=device, dtype=torch.float32)
    size = (1 + split) * s.b * s.h * s.q_pad * s.e_block
    copies = tuple(torch.empty(size, device=device, dtype=inputs.value.dtype) for _ in range(2))
    launch(
        prepare.output_gradient, (s.q_pad // SPAN, s.b * s.h, 1),
        output, *output.stride(), grad_output, *grad_output.stride(), change, delta, plan, *copies,
        s.h, s.g, s.q, s.q_pad, s.e, step, COPY=True, SPLIT=split, EB=s.e_block,
    )  # fmt: skip
    return delta, (copies[0], copies[1]), step
