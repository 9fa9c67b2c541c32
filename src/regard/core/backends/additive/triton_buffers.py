"""Buffers that the main kernels read instead of query, key and value, made on the device once per pass."""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.core.backends.additive import series, triton_prepare
from regard.core.backends.additive.triton_plan import SPAN, Inputs, Sizes, launch

PARTS = 32  # of the rows, in the search for ranges


def series_serves(inputs: Inputs) -> bool:
    half = inputs.query.dtype in (torch.bfloat16, torch.float16)
    return half and inputs.activation in series.TARGETS


@functools.cache
def _table(activation: str, dtype: torch.dtype, direction: str, device: torch.device) -> Tensor:
    rows = series.packed(activation, str(dtype).removeprefix("torch."), direction)
    count = triton.next_power_of_2(len(rows))
    # rows that reach nothing come first: a range skips them, and the index needs no correction
    none = tuple((-1.0,) + (0.0,) * (series.WIDTH - 1) for _ in range(count - len(rows)))
    return torch.tensor(none + rows, dtype=torch.float32, device=device)


def _operands(inputs: Inputs, *, value: bool) -> list[Any]:
    q, k, v = inputs.query, inputs.key, inputs.value
    parts: list[Any] = [q, *q.stride(), k, *k.stride()]
    return [*parts, v, *v.stride(), inputs.weight, inputs.weight_step, inputs.lengths] if value else parts


class Survey(NamedTuple):
    """What the inputs' ranges decide, on the device alone."""

    centre: Tensor  # (b * g, f): tanh(a + b) does not see it, the exponentials do
    table: Tensor | None
    plan: Tensor | None  # (b * g,): row of the table, or -1 where the exact kernels serve


def survey(inputs: Inputs, fit: str | None) -> Survey:
    """Read query and key once; with a fit, its direction, also choose from the series' table."""
    s, device = inputs.sizes, inputs.query.device
    heads = s.b * (s.h + s.g)
    lows = torch.empty(heads, PARTS, s.f, device=device, dtype=torch.float32)
    highs = torch.empty_like(lows)
    launch(
        triton_prepare.ranges, (PARTS, heads, 1),
        *_operands(inputs, value=False), inputs.lengths, lows, highs, s.h, s.g, s.q, s.k, s.f, s.b * s.h,
        PARTS=PARTS, ROWS=64, FB=s.f_block,
    )  # fmt: skip
    found = Survey(
        torch.empty(s.b * s.g, s.f, device=device, dtype=torch.float32),
        None if fit is None else _table(inputs.activation, inputs.query.dtype, fit, device),
        None if fit is None else torch.empty(s.b * s.g, device=device, dtype=torch.int32),
    )
    rows = 1 if found.table is None else found.table.shape[0]
    launch(
        triton_prepare.survey, (s.b * s.g, 1, 1),
        lows, highs, inputs.weight, inputs.weight_step, found.table, found.plan, found.centre,
        s.g, s.f, s.h // s.g, s.b * s.h, TABLE_ROWS=rows, WIDTH=series.WIDTH, PARTS=PARTS, FB=s.f_block,
    )  # fmt: skip
    return found


class Notes(NamedTuple):
    """Copy of value without NaN and Inf, and where they were."""

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


class Features(NamedTuple):
    query: Tensor  # (b * h * q_pad, 32 * f_pad)
    key: Tensor


class Factors(NamedTuple):
    raw: tuple[Tensor, Tensor]
    powers: tuple[Any, Any, Any]
    tops: tuple[Any, Any]
    sizes: tuple[Any, Any]


def features(inputs: Inputs, found: Survey, notes: Notes, dtype: torch.dtype, group: int = 1) -> Features:
    """Features of the series chosen, `group` harmonics of a hidden unit side by side."""
    s, device = inputs.sizes, inputs.query.device
    made = Features(
        torch.empty(s.b * s.h * s.q_pad, 2 * series.MOST * s.f_pad, device=device, dtype=dtype),
        torch.empty(s.b * s.g * s.k_pad, 2 * series.MOST * s.f_pad, device=device, dtype=dtype),
    )
    launch(
        triton_prepare.features, (max(s.q_pad, s.k_pad) // SPAN, s.b * (s.h + s.g), 1),
        *_operands(inputs, value=True), found.table, found.plan, made.query, made.key, *notes,
        s.h, s.g, s.q, s.k, s.q_pad, s.k_pad, s.f, s.f_pad, s.e, s.b * s.h, WIDTH=series.WIDTH, GROUP=group, ROWS=SPAN,
        FB=min(64 if group == 1 else 16, s.f_block), RB=s.f_block, EB=s.e_block, NATIVE=inputs.native,
    )  # fmt: skip
    return made


def factors(inputs: Inputs, found: Survey, notes: Notes, *, by_row: bool) -> Factors:
    """Operands of the exact kernels, feature by feature or row by row."""
    plan = found.plan
    s, device = inputs.sizes, inputs.query.device
    factored = inputs.factored

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=torch.float32)

    def sides() -> tuple[Tensor, Tensor]:
        return empty(s.b * s.h, s.q_pad, s.f_pad), empty(s.b * s.g, s.k_pad, s.f_pad)

    def facts() -> tuple[Tensor, Tensor]:
        return empty(s.b * s.h, s.q_pad // SPAN), empty(s.b * s.g, s.k_pad // SPAN)

    raw = sides()
    powers = (*sides(), empty(s.b * s.h, s.f_pad)) if factored else (None, None, None)
    tops, sizes = (facts(), facts()) if factored else ((None, None), (None, None))
    launch(
        triton_prepare.factors, (max(s.q_pad, s.k_pad) // SPAN, s.b * (s.h + s.g), 1),
        *_operands(inputs, value=True), found.centre, plan, *raw, *powers, tops[0], sizes[0], tops[1], sizes[1], *notes,
        s.h, s.g, s.q, s.k, s.q_pad, s.k_pad, s.f, s.f_pad, s.e, s.b * s.h, inputs.low_step,
        ROW_MAJOR=by_row, FACTORED=factored, COPY=plan is None, SPLIT=inputs.split, FB=min(16, s.f_block),
        EB=s.e_block,
    )  # fmt: skip
    return Factors(raw, powers, tops, sizes)


def value_steps(s: Sizes, plan: Tensor | None) -> tuple[int, int]:
    """Strides of the value copy by key and by column: row-major for the series, transposed for the exact kernels."""
    return (1, s.k_pad) if plan is None else (s.e_block, 1)


def output_gradient(
    inputs: Inputs, output: Tensor, grad_output: Tensor, change: Tensor, plan: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor], int]:
    """delta, copies of dO by row and by column, and where these copies' low parts lie."""
    s, device = inputs.sizes, inputs.query.device
    split = inputs.split
    step = s.b * s.h * s.q_pad * s.e_block if split else 0
    delta = torch.empty(s.b, s.h, s.q, device=device, dtype=torch.float32)
    size = (1 + split) * s.b * s.h * s.q_pad * s.e_block
    copies = tuple(torch.empty(size, device=device, dtype=inputs.value.dtype) for _ in range(2))
    launch(
        triton_prepare.output_gradient, (s.q_pad // SPAN, s.b * s.h, 1),
        output, *output.stride(), grad_output, *grad_output.stride(), change, delta, plan, *copies,
        s.h, s.g, s.q, s.q_pad, s.e, step, COPY=True, SPLIT=split, EB=s.e_block,
    )  # fmt: skip
    return delta, (copies[0], copies[1]), step
