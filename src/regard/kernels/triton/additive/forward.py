"""The forward pass of additive attention: output and log-sum-exp, without autograd."""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.kernels.additive import series
from regard.kernels.additive.autotuning import Tiles
from regard.kernels.triton.additive import exact as exact_kernels
from regard.kernels.triton.additive import series_scores
from regard.kernels.triton.additive.buffers import (
    Choice,
    Notes,
    choose,
    factors,
    plain_factors,
    ranges,
    room_for_features,
    series_serves,
    value_steps,
    write_features,
)
from regard.kernels.triton.additive.pairs import Pairs
from regard.kernels.triton.additive.plan import DEFAULT, Block, Inputs, Sizes, Tuning, launch, trait

_TILES = Tiles()
_SERIES = (DEFAULT, DEFAULT._replace(series_forward=Block(128, 128, 64, warps=8, stages=4), pieces=1),
           DEFAULT._replace(series_forward=Block(64, 128, 64, stages=4), pieces=1))  # fmt: skip
_EXACT = (DEFAULT, DEFAULT._replace(exact_forward=Block(128, 32, 4)), DEFAULT._replace(exact_forward=Block(64, 32, 8)))


@functools.lru_cache(maxsize=1024)
def _where(kind: str, s: Sizes, dtype: torch.dtype, device: torch.device) -> str:
    rough = [1 << (n - 1).bit_length() for n in (s.b * s.h, s.q, s.k)]
    return f"{kind} {dtype} {s.f_block} {s.e_block} {rough} {device}"


def _tuned(inputs: Inputs, pairs: Pairs, form: str, learning: bool) -> Tuning:
    """Return the tile sizes for a call: the defaults, or the fastest ones measured for calls of similar shapes."""
    if not inputs.native:
        return DEFAULT
    s, series_first, query = inputs.sizes, form != "exact" and series_serves(inputs), inputs.query
    kind = f"{'series' if series_first else 'exact'} {'' if pairs.high is None else 'causal '}{inputs.activation}"
    where = _where(kind, s, query.dtype, query.device)
    choices, number = (_SERIES if s.e_block <= 64 else _SERIES[:1]) if series_first else _EXACT, _TILES.known(where)
    if number is None:
        if torch.cuda.is_current_stream_capturing():  # no timing is possible in a graph capture
            return DEFAULT

        def seconds(number: int) -> float:
            settings: dict[str, Any] = {"form": form, "learning": learning, "tuning": choices[number]}
            for _ in range(2):
                forward(inputs, pairs, **settings)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(5):
                forward(inputs, pairs, **settings)
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 5e3

        device = torch.cuda.get_device_name(inputs.query.device)
        names = [
            f"{tuple(c.series_forward)} {c.pieces}" if series_first else str(tuple(c.exact_forward)) for c in choices
        ]
        number = _TILES.choose(where, device, names, seconds)
    return choices[number]


def forward(
    inputs: Inputs, pairs: Pairs, *, form: str = "auto", learning: bool = False, tuning: Tuning | None = None
) -> tuple[Tensor, Tensor, Choice | None]:
    """Return output (b, h, q, e), log-sum-exp (b, h, q), and the chosen series, or None if no series serves the call.

    With `learning`, the series is that of the backward pass, so that the weights that the backward pass computes from
    the log-sum-exp sum to 1. The series is chosen on the device: both the series kernel and the exact kernel are
    launched, and for each head one of them returns at once.
    """
    s, device = inputs.sizes, inputs.query.device
    tuning = tuning or _tuned(inputs, pairs, form, learning)
    output = torch.empty(s.b, s.h, s.q, s.e, device=device, dtype=inputs.value.dtype)
    lse = torch.empty(s.b, s.h, s.q, device=device, dtype=torch.float32)
    notes, plan, choice = Notes.empty(inputs), None, None
    known = (inputs.traits, trait(pairs), form, learning)
    numbers = (s.h, s.g, s.q, s.k, s.q_pad, s.k_pad, s.f, s.f_pad, s.e)
    bounded = inputs.activation == "tanh" and pairs.bias is None and pairs.table is None
    if form != "exact" and series_serves(inputs):
        # float16 rounds features less than bfloat16 does, at the same speed
        dtype, direction = (inputs.query.dtype, "backward") if learning else (torch.float16, "forward")
        choice = choose(inputs, direction)
        made = room_for_features(s, range(s.b * s.g), device, dtype, direction)
        write_features(inputs, notes, choice, made)
        plan, exact = choice.plan, plain_factors(made.raw)
        # values of more than 64 columns leave less shared memory for prefetched feature columns
        block, pieces = (tuning.series_forward, tuning.pieces) if s.e_block <= 64 else (tuning.series_wide, 1)
        launch(
            series_scores.series_forward, (-(-s.q // block.rows), s.b * s.h, 1),
            TensorDescriptor.from_tensor(made.query, [block.rows, block.depth]),
            TensorDescriptor.from_tensor(made.key, [block.columns, block.depth]),
            TensorDescriptor.from_tensor(notes.value, [block.columns // pieces, s.e_block]),
            *made.shifts, notes.bad, notes.bad_span, notes.query_bad, inputs.weight, inputs.weight_step,
            choice.table, plan, pairs, output, lse, *numbers, *output.stride(),
            WIDTH=series.WIDTH * series.FITS[direction], BOUNDED=bounded, PIECES=pieces,
            PRECISION=inputs.precision, BM=block.rows, BN=block.columns, BK=block.depth, FB=s.f_block, EB=s.e_block,
            block=block, known=known,
        )  # fmt: skip
    else:
        found = ranges(inputs) if inputs.factored else None
        exact = factors(inputs, notes, found=found, plan=None, by_row=False)
    block = tuning.exact_forward
    launch(
        exact_kernels.exact_forward, (-(-s.q // block.rows), s.b * s.h, 1),
        *exact, *value_steps(s, plan), *notes, inputs.weight, inputs.weight_step, plan, pairs, output, lse,
        *numbers, inputs.low_step, *output.stride(),
        ACT=inputs.activation, BOUNDED=bounded, FACTORED=inputs.factored, NATIVE=inputs.native,
        PRECISION=inputs.precision, BM=block.rows, BN=block.columns, DEPTH=block.depth, FB=s.f_block, EB=s.e_block,
        block=block, known=known,
    )  # fmt: skip
    return output, lse, choice
