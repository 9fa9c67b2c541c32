"""Attention in blocks of queries and keys, for any score, normaliser and mask: memory O(n · block), in training too.

The forward pass stores the output and a few numbers or vectors for each row; the backward pass recomputes the scores of
each block, so even a score with a hidden layer for each pair (additive, an MLP) never holds more than one block of that
layer in memory.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.core.backends import reference, sparse_rows
from regard.core.backends.block_grid import Grid, grid, square
from regard.core.backends.online_normalizers import (
    Block,
    EntmaxStream,
    Finished,
    SoftmaxStream,
    Stream,
    Upstream,
    stream,
)
from regard.core.backends.result import Result
from regard.core.backward_checks import Unchanged, once_only
from regard.core.biases import DenseBias
from regard.core.custom import Custom, Swapped, leaves
from regard.core.kernel_scores import by_kernel
from regard.core.nonfinite import cleaned
from regard.core.normalizers import gumbel_like
from regard.core.problem import Problem
from regard.core.requests import LogSumExp
from regard.core.spans import take
from regard.kernels.device_memory import affordable

NAME = "blocked"
_BUDGET = 24 * 2**20  # on a CPU, bytes of one block of scores with its intermediate tensors
_SHARE = 256  # on a GPU, a block may take 1 / _SHARE of the memory
_CUDA_ROWS = 48 * 2**20  # on a GPU, bytes of a block of whole rows of scores: smaller blocks would leave it idle
_CUDA_COLUMNS = 8192  # on a GPU, keys in a block for sparsemax and entmax


def refuses(problem: Problem) -> str | None:
    """Return the reason why this backend cannot compute the call, or None."""
    if stream(problem.normalize, problem.sample) is None:
        return f"no blockwise form of {type(problem.normalize).__name__}"
    return problem.score.unfit if isinstance(problem.score, Custom) else None


def not_worth_it(problem: Problem) -> str | None:
    """Return the reason why another backend is faster, if the matrix of all scores is small; else None."""
    return "small: the plain form is the fastest" if reference.small(problem) else None


def gives_weights(problem: Problem) -> bool:
    """Return whether what the call requests is computed together with the output: so only for the log-sum-exp."""
    return isinstance(problem.request, LogSumExp)


def working_bytes(problem: Problem) -> int:
    """Return the bytes of one block of scores, for any length; for sparsemax and entmax, with whole rows of scores."""
    if sparse_rows.serves(problem):
        return sparse_rows.working_bytes(problem)
    rows, columns = _sizes(problem)
    slices, floats = math.prod(problem.shape[:-2]), 3 + problem.score.floats(problem.query.shape[-1])
    whole = 4 * rows * problem.shape[-1] if _two_pass(problem) else 0
    return int(slices * (rows * columns * floats + whole) * problem.dtype.itemsize)


def kernel(problem: Problem) -> str:
    """Return the name of the code that runs: the Triton kernels of entmax on whole rows, or torch operations on
    blocks."""
    return "triton entmax" if sparse_rows.serves(problem) else "blocks"


def attend(problem: Problem) -> Result:
    """Compute attention block by block. The loops depend on the data, so torch.compile breaks the graph here."""
    if torch.compiler.is_compiling():
        from regard.core import graph_breaks  # imported here: the module imports torch's compiler, which takes a second

        return graph_breaks.blocks(problem)
    return run(problem)


def run(problem: Problem) -> Result:
    """Compute attention block by block, outside of torch.compile."""
    problem = by_kernel(problem)
    problem, marks = cleaned(problem) if problem.masked else (problem, None)
    if marks is None and _two_pass(problem) and sparse_rows.serves(problem):
        return sparse_rows.attend(problem)
    bias = problem.bias.tensor if isinstance(problem.bias, DenseBias) and problem.bias.tensor.requires_grad else None
    learned = tuple(t for t in problem.learned if t is not bias)
    logsumexp = isinstance(problem.request, LogSumExp)
    rule = SoftmaxStream(logsumexp=True) if logsumexp else stream(problem.normalize, problem.sample)
    assert rule is not None  # `refuses` has checked that the normaliser has a blockwise form
    originals = learned if bias is None else (*learned, bias)
    job = Job(problem, rule, grid(problem, *_sizes(problem)), seed(problem), originals)
    output, log_prob, chosen = _Blocked.apply(job, problem.query, problem.key, problem.value, bias, *learned)
    if marks is not None:
        output = output + marks
    if logsumexp:
        return Result(output.to(problem.query.dtype), log_prob)
    return Result(output.to(problem.query.dtype), None, log_prob, chosen)


@dataclass(frozen=True, eq=False)
class Job:
    """A call's problem, its normaliser in blockwise form, its blocks of scores, and its random seed."""

    problem: Problem
    rule: Stream
    grid: Grid
    seed: int
    originals: tuple[Tensor, ...]  # learned tensors of the score and the bias; a dense bias is last

    def scores(self, query: Tensor, key: Tensor, r: int, c: int) -> tuple[Tensor, Tensor | None]:
        """Return the scores of block (r, c) before the mask, and its mask (None: every pair is allowed)."""
        rows, columns = self.grid.rows[r], self.grid.columns[c]
        raw = self.problem.scores(query, self.problem.repeat(key), rows, columns)
        if self.grid.every[r][c] and not (self.problem.bias is not None and self.problem.bias.may_mask):
            return raw, None
        return raw, self.problem.allowed(rows, columns)

    def block(self, raw: Tensor, allowed: Tensor | None, value: Tensor, r: int, c: int) -> Block:
        """Return block (r, c) for the normaliser, with the same random numbers in the forward and backward pass."""
        problem, columns = self.problem, self.grid.columns[c]
        scores = raw if allowed is None else torch.where(allowed, raw, -math.inf)
        values = problem.repeat(take(value, -2, columns).to(problem.dtype))
        noise, keep = None, None
        if problem.sample or problem.dropout > 0.0:
            generator = torch.Generator(scores.device).manual_seed(self.seed + r * len(self.grid.columns) + c)
            noise = gumbel_like(scores, generator) if problem.sample else None
            if problem.dropout > 0.0:
                keep = torch.rand(scores.shape, generator=generator, device=scores.device) >= problem.dropout
                keep = keep.to(scores.dtype) / max(1.0 - problem.dropout, torch.finfo(scores.dtype).tiny)
        return Block(scores, values, columns.start, keep, noise)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, job: Job, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *learned: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output, log_prob, chosen, stored = _forward(job, query, key, value)
        ctx.job, ctx.stored_count, ctx.has_bias = job, len(stored), bias is not None
        ctx.unchanged = Unchanged(job.problem)
        ctx.save_for_backward(query, key, value, *stored, *((bias,) if bias is not None else ()), *learned)
        if chosen is not None:
            ctx.mark_non_differentiable(chosen)
        return output, log_prob, chosen

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        once_only(NAME)
        # Autocast is disabled as in the forward pass: scores rounded to another dtype would not match the sums of
        # exponentials stored in the forward pass.
        device = ctx.job.problem.device.type
        with torch.autocast(device, enabled=False) if device in ("cpu", "cuda") else nullcontext():
            return _Blocked._back(ctx, *upstream)

    @staticmethod
    def _back(ctx: Any, doutput: Tensor, dlog_prob: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        query, key, value, *rest = ctx.saved_tensors
        ctx.unchanged.check()
        stored, rest = rest[: ctx.stored_count], rest[ctx.stored_count :]
        bias, learned = (rest[0], rest[1:]) if ctx.has_bias else (None, rest)
        sums = _Sums(ctx.job, query, key, value, bias, learned)
        sums.add_all(Upstream(doutput.to(ctx.job.problem.dtype), dlog_prob), tuple(stored))
        grads = (sums.query, sums.key, sums.value, sums.bias, *sums.learned)
        inputs = (query, key, value, bias, *learned)
        return None, *(None if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))


def _forward(
    job: Job, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Tensor, ...]]:
    """Compute all blocks: return output, log-probabilities, chosen keys, and tensors stored for the backward pass."""
    dtype = job.problem.dtype
    finished = []
    for r, rows in enumerate(job.grid.rows):
        part = take(query, -2, rows).to(dtype)
        state = job.rule.begin(part.new_empty(part.shape[:-1]), value.shape[-1])
        for c, columns in enumerate(job.grid.columns):
            if job.grid.some[r][c]:
                raw, allowed = job.scores(part, take(key, -2, columns).to(dtype), r, c)
                state = job.rule.add(state, job.block(raw, allowed, value, r, c))
        finished.append(job.rule.finish(state))
    return _joined(finished)


def part_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of softmax over a part of the keys, in at least float32, without autograd graph."""
    with torch.no_grad():
        problem, marks = cleaned(problem)
        output, total, _, _ = _forward(_part_job(problem), problem.query, problem.key, problem.value)
        assert total is not None  # the softmax of `_part_job` returns a log-sum-exp
        return output if marks is None else output + marks, total


def part_backward(
    problem: Problem, output: Tensor, total: Tensor, doutput: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and learned tensors for a part of the keys, in at least float32.

    `output`, the log-sum-exp `total` and their gradients are those over all keys, so the gradients of all parts sum to
    the gradient over all keys.
    """
    with torch.no_grad():
        problem, _ = cleaned(problem)
        sums = _Sums(_part_job(problem), problem.query, problem.key, problem.value, None, list(problem.learned))
        total = total.unsqueeze(-1)
        # exp(s − total) is already the softmax weight over all keys, so the divisor is 1.
        stored = (total, (total != -math.inf).to(total.dtype), output)
        sums.add_all(Upstream(doutput.to(problem.dtype), dtotal), stored)
        return sums.query, sums.key, sums.value, *sums.learned


def _part_job(problem: Problem) -> Job:
    return Job(problem, SoftmaxStream(logsumexp=True), grid(problem, *_sizes(problem)), 0, problem.learned)


class _Sums:
    """The gradients of all inputs of a blockwise call, summed block by block."""

    def __init__(
        self, job: Job, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, learned: list[Tensor]
    ) -> None:
        dtype = job.problem.dtype
        self.inputs = (query, key, value)
        # Parameters are cast to at least float32, because sums over many blocks would lose digits in half precision.
        # Only the parameters of a caller's score function keep their dtype.
        custom = isinstance(job.problem.score, Custom)
        wide = [t if custom else t.to(torch.promote_types(t.dtype, dtype)) for t in learned]
        self.parameters = tuple(tensor.detach().requires_grad_() for tensor in wide)
        # Detached leaves replace the learned tensors, so that each gets only its own gradient, even if one is computed
        # from another. A dense bias is a constant here, because its gradient is the gradient of the scores.
        leaf = (*self.parameters, *((bias.detach(),) if bias is not None else ()))
        self.leaves = {id(original): other for original, other in zip(job.originals, leaf, strict=True)}
        swap = self._swapped
        score, rule = job.problem.score.holding(swap), job.problem.bias
        self.job = replace(job, problem=replace(job.problem, score=score, bias=rule and rule.holding(swap)))
        self.query, self.key, self.value = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in self.inputs)
        self.bias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=bias.device)
        self.learned = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, dtype)) for t in learned]

    def add_all(self, upstream: Upstream, stored: tuple[Tensor, ...]) -> None:
        """Add the gradients of every block; `stored` holds the tensors that the normaliser stored for each row."""
        for r, rows in enumerate(self.job.grid.rows):
            log_prob = None if upstream.log_prob is None else take(upstream.log_prob, -1, rows)
            arriving = Upstream(take(upstream.output, -2, rows), log_prob)
            for c in range(len(self.job.grid.columns)):
                if self.job.grid.some[r][c]:
                    self.add(r, c, arriving, tuple(take(tensor, -2, rows) for tensor in stored))

    def add(self, r: int, c: int, upstream: Upstream, stored: tuple[Tensor, ...]) -> None:
        """Recompute the scores of block (r, c), and add its gradients to the gradient of each input."""
        problem = self.job.problem
        rows, columns = self.job.grid.rows[r], self.job.grid.columns[c]
        query = take(self.inputs[0], -2, rows).detach().to(problem.dtype).requires_grad_()
        key = take(self.inputs[1], -2, columns).detach().to(problem.dtype).requires_grad_()
        custom = isinstance(problem.score, Custom)  # a torch function mode replaces captured tensors
        with torch.enable_grad(), Swapped(self._swapped) if custom else nullcontext():
            raw, allowed = self.job.scores(query, key, r, c)
        self._refuse_strangers(raw, query, key)
        block = self.job.block(raw.detach(), allowed, self.inputs[2], r, c)
        dscores, weights = self.job.rule.gradient(block, upstream, stored)
        if allowed is not None:
            dscores = torch.where(allowed, dscores, 0)

        totals = (take(self.query, -2, rows), take(self.key, -2, columns), *self.learned)
        if raw.requires_grad:  # a caller's score function may have no derivative
            grads = torch.autograd.grad(raw, (query, key, *self.parameters), dscores, allow_unused=True)
            for total, grad in zip(totals, grads, strict=True):
                if grad is not None:
                    total += grad
        values = take(self.value, -2, columns)
        values += summed_groups(weights.mT @ upstream.output, problem.group)
        if self.bias is not None:
            target = take(take(self.bias, -2, rows), -1, columns)
            target += dscores.sum_to_size(target.shape)

    def _swapped(self, tensor: Tensor) -> Tensor:
        return self.leaves.get(id(tensor), tensor)

    def _refuse_strangers(self, raw: Tensor, query: Tensor, key: Tensor) -> None:
        """Raise if the caller's score function uses learned tensors that are not among its recorded tensors
        (`Custom.probe`).

        Before the first block, the function is called once on a few pairs, and the learned tensors that it uses are
        recorded. Scripted modules, and branches that this first call did not take, may use other learned tensors.
        """
        custom = isinstance(self.job.problem.score, Custom) and raw.numel() > 0
        if custom and leaves(raw, (query, key, *self.parameters)):
            raise RuntimeError(
                "the score uses parameters that were not seen when it was tried on the first pairs: their gradient "
                "would be lost; use backend='reference', or pass the score as a torch.nn.Module that holds them"
            )


def _joined(finished: list[Finished]) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Tensor, ...]]:
    """Concatenate blocks of rows: output, log-probabilities, chosen keys, and tensors stored for the backward pass."""
    outputs, stored, log_probs, chosen = zip(*finished, strict=True)
    return (
        torch.cat(outputs, -2),
        torch.cat(log_probs, -1) if log_probs[0] is not None else None,
        torch.cat(chosen, -1) if chosen[0] is not None else None,
        tuple(torch.cat(parts, -2) for parts in zip(*stored, strict=True)),
    )


def summed_groups(tensor: Tensor, group: int) -> Tensor:
    """Return the gradient of each key head, summed over the `group` query heads that share it."""
    return tensor if group == 1 else tensor.unflatten(-3, (-1, group)).sum(-3)


def _two_pass(problem: Problem) -> bool:
    return isinstance(stream(problem.normalize, problem.sample), EntmaxStream)


def _sizes(problem: Problem) -> tuple[int, int]:
    """Return the number of rows and columns of a block.

    Sparsemax and entmax need the scores of whole rows in memory, so their blocks have fewer rows.
    """
    side = square(problem, affordable(problem.device, _BUDGET, _SHARE))
    if not _two_pass(problem):
        return side, side
    row_bytes = max(1, math.prod(problem.shape[:-2]) * problem.shape[-1] * problem.dtype.itemsize)
    if problem.device.type == "cuda":
        row_bytes *= max(1, round(problem.score.floats(problem.query.shape[-1])))
        # If a whole row of scores exceeds the budget, a block has a part of one row.
        columns = problem.shape[-1] * _CUDA_ROWS // row_bytes
        return max(1, _CUDA_ROWS // row_bytes), max(side, min(_CUDA_COLUMNS, columns))
    return max(1, min(side, _BUDGET // row_bytes)), side


def seed(problem: Problem) -> int:
    """Return the seed of the call's random numbers, sampled from the given generator or torch's own."""
    if not problem.sample and problem.dropout == 0.0:
        return 0
    device = problem.generator.device if problem.generator is not None else torch.device("cpu")
    return int(torch.randint(2**62, (), generator=problem.generator, device=device))
