"""Ring attention: keys arrive from every process in turn, and blocks are merged by their log-sum-exp (Liu et al. 2023).

In step t, process r sends keys and values to process r + t and receives keys and values from process r − t, only those
that the receiver needs. Meanwhile it computes with the keys and values of step t − 1. The backward pass exchanges keys
and values again instead of storing them, and sends the gradients of keys and values back to the process that holds
them.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core import key_parts
from regard.core.backward_checks import Unchanged
from regard.core.biases import Rule
from regard.core.key_parts import Part
from regard.core.masks import Mask
from regard.core.merging import merge
from regard.core.problem import Problem
from regard.core.spans import Stretch
from regard.parallel.block_masks import local
from regard.parallel.exchange import Exchange, packed, room, start, unpacked
from regard.parallel.schedule import Block, Schedule
from regard.parallel.sequences import Group


@dataclass(frozen=True, eq=False)
class Job:
    """The arguments of one call: a `Problem` of this process's parts, without a mask, and the mask of the whole
    sequences."""

    problem: Problem
    mask: Mask | None
    schedule: Schedule
    group: Group
    with_logsumexp: bool  # whether the caller requests the log-sum-exp, which then has a gradient

    @property
    def rank(self) -> int:
        return self.schedule.layout.rank

    @property
    def size(self) -> int:
        return self.schedule.layout.size


class Held(NamedTuple):
    """Keys and values of a range of the whole sequence."""

    stretch: Stretch
    key: Tensor
    value: Tensor

    def covers(self, columns: Stretch) -> bool:
        return self.stretch.start <= columns.start and columns.stop <= self.stretch.stop


def attend(job: Job) -> tuple[Tensor, Tensor]:
    """Return output (…, h, q, e) and log-sum-exp (…, h, q) of this process's queries over the keys of all processes."""
    problem = job.problem
    return _Ring.apply(job, problem.query, problem.key, problem.value, *problem.learned)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, job: Job, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        whole = _forward(job, query, key, value)
        output = whole.output.to(query.dtype)
        ctx.set_materialize_grads(False)  # the gradient of an unused output is then None, not a tensor of zeros
        ctx.job, ctx.unchanged = job, Unchanged(replace(job.problem, mask=job.mask))
        ctx.save_for_backward(query, key, value, whole.output, whole.logsumexp, *learned)
        if not job.with_logsumexp:
            ctx.mark_non_differentiable(whole.logsumexp)
        return output, whole.logsumexp

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("attention over a process group is differentiable once")
        query, key, value, output, total, *learned = ctx.saved_tensors
        ctx.unchanged.check()
        job, device = ctx.job, query.device.type
        doutput, dtotal = torch.zeros_like(output) if upstream[0] is None else upstream[0], upstream[1]
        with torch.autocast(device, enabled=False) if device in ("cpu", "cuda") else nullcontext():
            grads = _backward(job, (query, key, value), Part(output, total), doutput, dtotal)
        return None, *(grad.to(t.dtype) for grad, t in zip(grads, (query, key, value, *learned), strict=True))


def _forward(job: Job, query: Tensor, key: Tensor, value: Tensor) -> Part:
    """Return output and log-sum-exp of all queries of this process, in at least float32."""
    parts: dict[int, Part] = {}
    for source, held in _arriving(job, key, value, "forward"):
        for block in job.schedule.blocks(source):
            part = key_parts.forward(_block_problem(job, block, query, held))
            before = parts.get(block.first_row)
            if before is not None:
                merged = merge([before, part])
                assert isinstance(merged.weights, Tensor)
                part = Part(merged.output, merged.weights)
            parts[block.first_row] = part
    output = torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=job.problem.dtype, device=query.device)
    total = torch.full(query.shape[:-1], -math.inf, dtype=job.problem.dtype, device=query.device)
    for first, part in parts.items():
        output.narrow(-2, first, part.output.shape[-2]).copy_(part.output)
        total.narrow(-1, first, part.output.shape[-2]).copy_(part.logsumexp)
    return Part(output, total)


def _backward(
    job: Job, inputs: tuple[Tensor, Tensor, Tensor], whole: Part, doutput: Tensor, dtotal: Tensor | None
) -> list[Tensor]:
    """Return gradients of this process's query, key and value, and this process's part of the learned tensors'
    gradients."""
    query, key, value = inputs
    dtype = job.problem.dtype
    sums = [_zeros(t, dtype) for t in inputs]
    learned = [_zeros(t, torch.promote_types(t.dtype, dtype)) for t in job.problem.learned]
    returning: tuple[Exchange, list[Stretch]] | None = None
    for step, (source, held) in enumerate(_arriving(job, key, value, "backward")):
        gradients = [Held(h.stretch, _zeros(h.key, dtype), _zeros(h.value, dtype)) for h in held]
        for block in job.schedule.blocks(source):
            rows = Stretch(block.first_row, block.first_row + len(block.rows))
            part = Part(_take(whole.output, rows), whole.logsumexp.narrow(-1, rows.start, len(rows)))
            dpart = None if dtotal is None else dtotal.narrow(-1, rows.start, len(rows))
            problem = _block_problem(job, block, query, held)
            dquery, dkey, dvalue, *more = key_parts.backward(problem, part, _take(doutput, rows), dpart)
            target = _take(sums[0], rows)
            target += dquery
            for mine, other in zip(_inside(gradients, block.columns), (dkey, dvalue), strict=True):
                mine += other
            for mine, other in zip(learned, more, strict=True):
                mine += other
        if step == 0:
            _add(job, sums[1:], [(h.stretch, (h.key, h.value)) for h in gradients])
            continue
        _finish(job, sums[1:], returning)
        returning = _send_back(job, step, source, gradients, key, value)
    _finish(job, sums[1:], returning)
    return [*sums, *learned]


def _arriving(job: Job, key: Tensor, value: Tensor, kind: str) -> Iterator[tuple[int, list[Held]]]:
    """Yield the rank of each process, this process first, with the keys and values of that rank that this process
    needs."""
    plan, rank, size = job.schedule, job.rank, job.size

    def begin(step: int) -> Exchange:
        to, source = (rank + step) % size, (rank - step) % size
        sent = [plan.within(stretch, rank) for stretch in plan.needed(to, rank)]
        received = room((key, value), plan.needed(rank, source))
        return start(job.group, to, packed((key, value), sent), source, received, kind)

    ahead = begin(1) if size > 1 else None
    own = [(stretch, plan.within(stretch, rank)) for stretch in plan.needed(rank, rank)]
    yield rank, [Held(stretch, _take(key, here), _take(value, here)) for stretch, here in own]
    for step in range(1, size):
        assert ahead is not None
        source = (rank - step) % size
        stretches, flat = plan.needed(rank, source), ahead.wait()
        ahead = begin(step + 1) if step + 1 < size else None
        if flat is None:
            yield source, []
            continue
        pieces = unpacked(flat, (key, value), [len(s) for s in stretches])
        yield source, [Held(stretch, *piece) for stretch, piece in zip(stretches, pieces, strict=True)]


def _block_problem(job: Job, block: Block, query: Tensor, held: list[Held]) -> Problem:
    """Return the problem restricted to the queries and keys of one block, with its mask and bias."""
    key, value = _inside(held, block.columns)
    mask = local(job.mask, block.rows, block.columns) if job.mask is not None and block.masked else None
    bias = job.problem.bias
    if isinstance(bias, Rule):
        bias = replace(bias, offset=bias.offset + block.rows.start - block.columns.start)
    rows = Stretch(block.first_row, block.first_row + len(block.rows))
    return replace(job.problem, query=_take(query, rows), key=key, value=value, mask=mask, bias=bias)


def _inside(held: list[Held], columns: Stretch) -> tuple[Tensor, Tensor]:
    """Return the keys and values at positions `columns`, from the range in `held` that contains them."""
    [whole] = [piece for piece in held if piece.covers(columns)]
    here = Stretch(columns.start - whole.stretch.start, columns.stop - whole.stretch.start)
    return _take(whole.key, here), _take(whole.value, here)


def _send_back(
    job: Job, step: int, source: int, gradients: list[Held], key: Tensor, value: Tensor
) -> tuple[Exchange, list[Stretch]]:
    """Send gradients to the process that holds the keys, and receive gradients of this process's own keys."""
    pieces = [t.reshape(-1) for piece in gradients for t in (piece.key, piece.value)]
    sent = torch.cat(pieces).to(key.dtype) if pieces else None
    other = (job.rank + step) % job.size
    stretches = job.schedule.needed(other, job.rank)
    return start(job.group, source, sent, other, room((key, value), stretches), "backward"), stretches


def _finish(job: Job, sums: list[Tensor], returning: tuple[Exchange, list[Stretch]] | None) -> None:
    """Wait for received gradients, and add them to the gradients of this process's keys and values."""
    if returning is None:
        return
    exchange, stretches = returning
    flat = exchange.wait()
    if flat is not None:
        pieces = unpacked(flat, sums, [len(s) for s in stretches])
        _add(job, sums, [(s, (dkey, dvalue)) for s, (dkey, dvalue) in zip(stretches, pieces, strict=True)])


def _add(job: Job, sums: list[Tensor], pieces: list[tuple[Stretch, tuple[Tensor, Tensor]]]) -> None:
    for stretch, tensors in pieces:
        here = job.schedule.within(stretch, job.rank)
        for total, piece in zip(sums, tensors, strict=True):
            target = _take(total, here)
            target += piece


def _take(tensor: Tensor, rows: Stretch) -> Tensor:
    """Return positions `rows` of (…, n, size); unlike `spans.take`, it also slices an axis of length 1."""
    return tensor.narrow(-2, rows.start, len(rows))


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous zeros in the shape of `like`, even if that is an expanded view."""
    return torch.zeros(like.shape, dtype=dtype, device=like.device)
