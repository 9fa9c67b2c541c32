"""The backward pass of additive attention: dS, the gradient of the scores, is stored one slab of pairs at a time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.kernels.additive import series
from regard.kernels.triton.additive import bias_gradient, exact, exact_gradient, series_gradient, series_scores
from regard.kernels.triton.additive.buffers import (
    Choice,
    Factors,
    Features,
    Notes,
    choose,
    factors,
    feature_numbers,
    output_gradient,
    plain_factors,
    ranges,
    room_for_features,
    series_serves,
    value_steps,
    write_features,
)
from regard.kernels.triton.additive.pairs import Pairs
from regard.kernels.triton.additive.plan import (
    DEFAULT,
    PAD,
    SPAN,
    Gradients,
    Inputs,
    Sizes,
    Slab,
    Tuning,
    launch,
    slabs,
    trait,
)

_MOST_SEGMENTS = 8
_LARGE = 256 << 20  # features of at least this many bytes are computed for half of the heads at a time


class _Work(NamedTuple):
    """Arguments of the kernel launches that are the same for all slabs (the groups of pairs whose dS is stored at a
    time).
    """

    inputs: Inputs
    pairs: Pairs
    tuning: Tuning
    choice: Choice | None
    made: Features | None
    notes: Notes
    by_feature: Factors
    by_row: Factors
    grad_output: Tensor
    lse: Tensor
    change: Tensor | None  # the gradient of the log-sum-exp, or None
    delta: Tensor
    copies: tuple[Tensor, Tensor]
    copy_step: int
    boost: Tensor | None
    weight_part: Tensor  # (b * h, parts, f): parts of the weight's gradient, which are summed at the end
    split: bool  # whether several slabs contribute to the gradients of the same keys
    known: Any  # the part of the kernels' cache key that is the same for all slabs

    @property
    def plan(self) -> Tensor | None:
        return None if self.choice is None else self.choice.plan

    @property
    def numbers(self) -> tuple[int, ...]:
        s = self.inputs.sizes
        return s.h, s.g, s.q, s.k, s.q_pad, s.k_pad, s.f, s.f_pad

    @property
    def weight(self) -> tuple[Tensor, int]:
        return self.inputs.weight, self.inputs.weight_step


def _boost(inputs: Inputs, grad_output: Tensor) -> Tensor | None:
    """Return a power of two, computed from a bound on |dO| |V|, that scales dS into the range of float16.

    Return None for other dtypes, in which dS is not scaled.
    """
    if inputs.query.dtype != torch.float16:
        return None
    bound = grad_output.float().norm(dim=-1).amax() * inputs.value.float().nan_to_num(0, 0, 0).norm(dim=-1).amax()
    return torch.exp2(torch.floor(torch.log2(16384.0 / (2.0 * bound).clamp(1e-20, 1e20)))).reshape(1)


def backward(
    inputs: Inputs,
    pairs: Pairs,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    *,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    form: str = "auto",
    choice: Choice | None = None,
    tuning: Tuning = DEFAULT,
) -> Gradients:
    """Compute all gradients; `bias` and `table` are given if their gradients are needed.

    `choice` is the forward pass's choice of a series, if the caller has stored it.
    """
    s, device, repeat = inputs.sizes, inputs.query.device, inputs.sizes.h // inputs.sizes.g
    change = None if grad_lse is None else torch.where(lse == float("-inf"), 0.0, grad_lse).float()
    notes, dtype = Notes.empty(inputs), inputs.query.dtype
    made = None
    if form != "exact" and series_serves(inputs):
        choice = choice or choose(inputs, "backward")
        turns = _turns(inputs)
        # Features are allocated once, for the last range of heads, which is the largest.
        made = room_for_features(s, turns[-1], device, dtype, "backward")
    else:
        turns = [range(s.b * s.g)]
    plan, found = choice.plan if choice else None, ranges(inputs) if inputs.factored else None
    most = _slab_pairs(inputs, tuning, series_first=made is not None)
    parts = [list(slabs(s, pairs.low, pairs.high, most, units)) for units in turns]
    split = len({part.first_query for part in parts[0]}) > 1
    work = _Work(
        inputs, pairs, tuning, choice, made, notes,
        plain_factors(made.raw) if made else factors(inputs, notes, found=found, plan=None, by_row=False),
        factors(inputs, notes, found=found, plan=plan, by_row=True),
        grad_output, lse, change, *output_gradient(inputs, output, grad_output, change, plan),
        _boost(inputs, grad_output),
        torch.zeros(s.b * s.h, s.q_pad // SPAN * _MOST_SEGMENTS, s.f, device=device, dtype=torch.float32), split,
        (inputs.traits, trait((pairs, grad_output, lse, change)), grad_output.stride(), form, split),
    )  # fmt: skip
    partial = not parts[0] or pairs.low is not None or pairs.high is not None
    grad_query, grad_key = _rows_to_fill(inputs, partial=partial, split=split)
    whole = not (partial or split)  # whether every key belongs to exactly one slab
    grad_value = (torch.empty if whole else torch.zeros)(
        inputs.value.shape, device=device, dtype=inputs.value.dtype if whole else torch.float32
    )
    grad_bias, grad_table = (
        None if x is None else torch.zeros(x.shape, device=device, dtype=torch.float32) for x in (bias, table)
    )
    skips = any(x is not None for x in (pairs.low, pairs.high, pairs.lengths, pairs.query_ids))
    room = max((p.units * repeat * p.rows * p.columns for among in parts for p in among), default=0)
    store = torch.empty(room, device=device, dtype=dtype)
    for units, among in zip(turns, parts, strict=True):
        if made is not None and choice is not None:
            made = made._replace(units=units)
            work = work._replace(made=made)
            write_features(inputs, notes, choice, made, series.GROUPS["backward"])
        for part in among:
            heads = part.units * repeat
            slab = store[: heads * part.rows * part.columns].view(heads * part.rows, part.columns)
            if skips:
                slab.zero_()
            _add_value_gradient(work, part, slab, grad_value, whole=whole)
            for is_query, grad in ((True, grad_query), (False, grad_key)):
                _feature_gradients(work, part, slab, grad, is_query=is_query)
            if bias is not None or table is not None:
                _add_bias_gradients(s, part, slab, work.boost, grad_bias, grad_table)
    by_head = inputs.weight.dim() == 2
    weight_grad = work.weight_part.view(s.b, s.h, -1, s.f).sum((0, 2) if by_head else (0, 1, 2))
    return Gradients(
        grad_query,
        grad_key.to(dtype),
        grad_value.to(inputs.value.dtype),
        weight_grad,
        grad_bias,
        grad_table,
    )


def _rows_to_fill(inputs: Inputs, *, partial: bool, split: bool) -> tuple[Tensor, Tensor]:
    """Allocate the gradients of query and key.

    The tensors are filled with zeros if the kernels do not write all rows (`partial`). If several slabs add to the same
    keys (`split`), the gradient of the key is filled with zeros too, and is in float32.
    """
    query, key = inputs.query, inputs.key
    grad_query = (torch.zeros if partial else torch.empty)(query.shape, device=query.device, dtype=query.dtype)
    new = torch.zeros if partial or split else torch.empty
    return grad_query, new(key.shape, device=key.device, dtype=torch.float32 if split else key.dtype)


def _turns(inputs: Inputs) -> list[range]:
    """Return the groups of key heads whose features are computed at a time: all key heads, or each half of them.

    Computing half of the features at a time leaves more memory for dS.
    """
    s = inputs.sizes
    count = s.b * s.g
    if count < 2 or feature_numbers(s) * inputs.query.element_size() < _LARGE:
        return [range(count)]
    return [range(count // 2), range(count // 2, count)]


def _slab_pairs(inputs: Inputs, tuning: Tuning, *, series_first: bool) -> int:
    """Return the largest number of pairs in a slab: `slab_bytes` of dS.

    With the series, a slab may be larger, to fill the device, up to half the size of the features of all heads.
    """
    s = inputs.sizes
    room = tuning.slab_bytes // inputs.query.element_size()
    return max(room, min(feature_numbers(s) // 2, PAD * PAD * s.k_pad)) if series_first else room


def _segments(programs: int, wanted: int, most: int) -> int:
    return max(1, min(most, wanted // max(programs, 1)))


def _add_value_gradient(work: _Work, part: Slab, slab: Tensor, grad_value: Tensor, *, whole: bool) -> None:
    """Compute dS of a slab of pairs, and dV of the keys of the slab.

    dV is added to `grad_value`; with `whole`, it is written, because the keys belong to no other slab.
    """
    inputs, pairs, tuning, made = work.inputs, work.pairs, work.tuning, work.made
    s = inputs.sizes
    where = (part.first_unit, part.first_query, part.last_query, part.first_key)
    # the tiles of the series kernel are wide, so half as many programs fill the device
    block = tuning.exact_score if made is None else tuning.series_score
    wanted = tuning.programs if made is None else tuning.programs // 2
    segments = _segments(part.columns // block.columns * part.units, wanted, min(16, part.rows // PAD))
    grad_v = torch.empty(segments, part.units, part.columns, s.e, device=slab.device, dtype=torch.float32)
    known = work.known, trait((*where, part.rows, part.columns, segments, made and made.units.start))
    if made is not None and work.choice is not None:
        launch(
            series_scores.series_score, (part.columns // block.columns, segments, part.units),
            TensorDescriptor.from_tensor(made.query, [block.rows, block.depth]),
            TensorDescriptor.from_tensor(made.key, [block.columns, block.depth]),
            TensorDescriptor.from_tensor(work.notes.value, [block.columns, s.e_block]),
            *work.weight, work.choice.table, work.plan, pairs, work.grad_output, *work.grad_output.stride(), work.lse,
            work.delta, work.boost, TensorDescriptor.from_tensor(slab, [block.rows, block.columns]), grad_v,
            made.units.start, *where, part.rows, part.columns, *work.numbers, s.e, segments,
            WIDTH=series.WIDTH, PRECISION=inputs.precision, BM=block.rows, BN=block.columns, BK=block.depth,
            FB=s.f_block, EB=s.e_block, block=block, known=known,
        )  # fmt: skip
    block = tuning.exact_score
    launch(
        exact.exact_score, (part.columns // block.columns, segments, part.units),
        *work.by_feature, *value_steps(s, work.plan), work.notes.value, *work.weight, work.plan, pairs, *work.copies,
        work.lse, work.delta, work.boost, slab, grad_v, *where, part.rows, part.columns, *work.numbers, s.e,
        inputs.low_step, work.copy_step, segments,
        ACT=inputs.activation, FACTORED=inputs.factored, NATIVE=inputs.native, PRECISION=inputs.precision,
        BM=block.rows, BN=block.columns, DEPTH=block.depth, FB=s.f_block, EB=s.e_block, block=block, known=known,
    )  # fmt: skip
    keys = slice(part.first_key, part.last_key)
    flat = grad_value.view(s.b * s.g, s.k, s.e)[part.first_unit : part.first_unit + part.units, keys]
    (flat.copy_ if whole else flat.add_)(grad_v.sum(0)[:, : part.last_key - part.first_key])


def _feature_gradients(work: _Work, part: Slab, slab: Tensor, grad: Tensor, *, is_query: bool) -> None:
    """Compute the gradient of a slab's queries or keys from its dS; with the queries, also the weight's gradient."""
    inputs, made = work.inputs, work.made
    s, repeat = inputs.sizes, inputs.sizes.h // inputs.sizes.g
    heads = part.units * repeat if is_query else part.units
    extent = part.rows if is_query else part.columns
    place = (part.first_unit, part.first_query, part.last_query, part.first_key, part.last_key, part.rows)
    add = work.split and not is_query
    known = work.known, trait((*place, part.columns, made and made.units.start))
    if made is not None and work.choice is not None:
        block, own = work.tuning.series_feature, inputs.query if is_query else inputs.key
        units = block.columns // (2 * series.GROUPS["backward"])
        inner = [block.rows, block.depth] if is_query else [block.depth, block.rows]
        grid = (-(-s.f // units), -(-extent // block.rows), heads)
        launch(
            series_gradient.series_feature, grid, TensorDescriptor.from_tensor(slab, inner),
            TensorDescriptor.from_tensor(made.key if is_query else made.query, [block.depth, block.columns]),
            own, *own.stride(), *work.weight, work.choice.table, work.plan, work.pairs, work.boost, grad,
            *grad.stride(), work.weight_part, work.change, made.units.start, *place, *work.numbers,
            work.weight_part.shape[1],
            QUERY=is_query, ADD=add, ODD=inputs.activation == "tanh", NATIVE=inputs.native,
            PRECISION=inputs.precision, WIDTH=series.WIDTH, BM=block.rows, UNITS=units, BK=block.depth, block=block,
            known=known,
        )  # fmt: skip
    block = work.tuning.exact_feature
    wide = min(block.columns, s.f_block)
    grid = (extent // block.rows, -(-s.f // wide), heads)
    # If the series kernel was launched, it has usually written the gradient, and the programs of this kernel return at
    # once.
    segments = 1 if made else _segments(grid[0] * grid[1] * heads, 2 * work.tuning.programs, _MOST_SEGMENTS)
    out = grad
    if segments > 1:
        out = torch.empty(segments, heads, extent, s.f, device=slab.device, dtype=torch.float32)
    launch(
        exact_gradient.exact_feature, (grid[0], grid[1] * segments, heads), *work.by_row, *work.weight,
        work.plan, work.pairs, slab, work.boost, out, *out.stride(), work.weight_part, *place, part.columns,
        *work.numbers, work.weight_part.shape[1],
        QUERY=is_query, ADD=add and segments == 1, ACT=inputs.activation, FACTORED=inputs.factored,
        NATIVE=inputs.native, BM=block.rows, FB=wide, DEPTH=block.depth, SEGMENTS=segments, block=block, known=known,
    )  # fmt: skip
    if segments > 1:
        first, last = (part.first_query, part.last_query) if is_query else (part.first_key, part.last_key)
        size = heads // part.units
        rows = slice(part.first_unit * size, (part.first_unit + part.units) * size)
        to = grad.view(-1, *grad.shape[2:])[rows, first:last]
        total = out[:, :, : last - first].sum(0)
        to.add_(total) if add else to.copy_(total)


def _add_bias_gradients(
    s: Sizes, part: Slab, slab: Tensor, boost: Tensor | None, grad_bias: Tensor | None, grad_table: Tensor | None
) -> None:
    repeat = s.h // s.g
    heads = part.units * repeat
    rows, columns = part.last_query - part.first_query, part.last_key - part.first_key
    z = torch.arange(part.first_unit * repeat, part.first_unit * repeat + heads, device=slab.device)
    if grad_bias is not None:
        ds = slab.view(heads, part.rows, part.columns)[:, :rows, :columns]
        b_size, h_size, q_size, k_size = grad_bias.shape
        dims = [d for d, size in ((1, q_size), (2, k_size)) if size == 1]
        ds = ds.sum(dims, keepdim=True, dtype=torch.float32) if dims else ds.float()
        if boost is not None:
            ds = ds / boost
        index = (z // s.h if b_size > 1 else 0 * z) * h_size + (z % s.h if h_size > 1 else 0 * z)
        queries = slice(part.first_query, part.last_query) if q_size > 1 else slice(0, 1)
        keys = slice(part.first_key, part.last_key) if k_size > 1 else slice(0, 1)
        grad_bias.view(b_size * h_size, q_size, k_size)[:, queries, keys].index_add_(0, index, ds)
    if grad_table is not None:
        first = part.first_key - part.first_query
        wide = bias_gradient.by_distance(
            slab, boost, (heads, part.rows, part.columns), (rows, columns), first, grad_table
        )
        grad_table.index_add_(0, z % s.h, wide)
