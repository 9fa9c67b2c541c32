"""Sparsemax and entmax of products on CUDA: a block of whole rows at a time, O(n · block) memory in training too.

The keys stand in chunks before everything else, (chunks, slices, C, size): a block of rows against some chunks is then
one batched product over memory without gaps. Few rows against many keys would leave most of the GPU idle, as the sum
over the keys is one processor's; here each chunk has its own, and their outputs are added. The backward pass computes
a block's scores again, and its rows are whole, so nothing but the thresholds is kept.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.core.backends.once import once_only
from regard.core.backends.result import Result
from regard.core.clauses import Clauses, clauses
from regard.core.machine import TRITON
from regard.core.normalizers import Entmax, Sparsemax
from regard.core.problem import Problem

CHUNK = 256  # keys
LONGEST = 32_768  # keys of a row that a kernel holds in registers
BYTES = 64 * 2**20  # scores of a block
ROWS = 256  # at least; slices wait for each other rather than that a block has fewer


@dataclass(frozen=True, eq=False)
class Rule:
    """Whom a row may attend, how it is normalised, and how many rows are weighed at a time."""

    alpha: float
    low: int | None
    high: int | None
    lengths: Tensor | None  # of each slice
    rows: int

    def columns(self, i0: int, i1: int, keys: int) -> tuple[int, int]:
        """The chunks that rows from i0 to i1 may attend anything in."""
        first = 0 if self.low is None else min(max(0, i0 + self.low), keys)
        last = keys if self.high is None else min(max(first, i1 + self.high), keys)
        return first // CHUNK, -(-last // CHUNK)

    def limits(self, i0: int, c0: int, keys: int) -> dict[str, Any]:
        """As the kernels want to know it."""
        return {"i0": i0, "j0": c0 * CHUNK, "n": keys, "low": self.low, "high": self.high, "lengths": self.lengths}


def serves(problem: Problem) -> bool:
    """Products of float32 or less, a band and lengths at most, no dropout, rows that fit registers."""
    found = clauses(problem.mask, *problem.shape[-2:])
    if found is None or found.segments or found.dense or problem.bias is not None or problem.bad_keys is not None:
        return False
    if problem.dropout > 0.0 or problem.sample or problem.dtype != torch.float32 or problem.score.why_no_product():
        return False
    alpha, sizes = _alpha(problem), (*problem.shape, problem.value.shape[-1])
    return alpha is not None and climbs(alpha, problem.shape[-1]) and 0 not in sizes and problem.device.type == "cuda"


def climbs(alpha: float, keys: int) -> bool:
    """Do the kernels find the threshold of such rows?

    Beyond 2 the sum is not convex: no steps climb to its root. Near 1 the power is too steep for float32.
    """
    return 1.05 <= alpha <= 2 and 0 < keys <= LONGEST and TRITON


def working_bytes(problem: Problem) -> int:
    """Scores and outputs of a block, its rows spread over the chunks, and the chunks of keys and values."""
    at_once, rows, keys = _block(problem)
    chunks, sizes = -(-keys // CHUNK), problem.query.shape[-1] + problem.value.shape[-1]
    return 4 * at_once * chunks * (rows * (CHUNK + sizes) + CHUNK * sizes)


def _block(problem: Problem) -> tuple[int, int, int]:
    """Slices at once, rows of each at once, and keys with what fills up the last chunk."""
    *lead, queries, keys = problem.shape
    keys += -keys % CHUNK
    at_once = max(1, min(math.prod(lead), BYTES // (4 * keys * min(queries, ROWS))))
    return at_once, min(queries, max(1, BYTES // (4 * keys * at_once))), keys


def attend(problem: Problem) -> Result:
    """Attention by whole rows, in float32 from the beginning."""
    alpha, found = _alpha(problem), clauses(problem.mask, *problem.shape[-2:])
    query, key, value = (t.to(torch.float32) for t in (problem.query, problem.key, problem.value))
    with torch.autocast(problem.device.type, enabled=False):
        product = problem.score.as_product(query, key)
        assert product is not None  # serves() has said so
        assert alpha is not None
        assert found is not None
        parts = (product.query * product.scale, problem.repeat(product.key), problem.repeat(value))
        at_once, rows, _ = _block(problem)
        split = [t.reshape(-1, *t.shape[-2:]).split(at_once) for t in parts]
        rule = Rule(alpha, found.low, found.high, _lengths(found, problem.shape), rows)
        groups = enumerate(zip(*split, strict=True))
        outputs = [_Rows.apply(_part(rule, n * at_once, at_once), *slices) for n, slices in groups]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return Result(output.reshape(*problem.shape[:-1], -1).to(problem.query.dtype))


def _alpha(problem: Problem) -> float | None:
    match problem.normalize:
        case Sparsemax():
            return 2.0
        case Entmax(alpha):
            return float(alpha)
    return None


def _lengths(found: Clauses, shape: tuple[int, ...]) -> Tensor | None:
    if found.lengths is None:
        return None
    return found.lengths.expand(shape[:-2]).reshape(-1).clamp(max=shape[-1]).to(torch.int32)


def _part(rule: Rule, start: int, count: int) -> Rule:
    """The rule of some slices."""
    return rule if rule.lengths is None else replace(rule, lengths=rule.lengths[start : start + count])


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from regard.core.backends import triton_entmax  # imports Triton: only where it is used

        (slices, queries, _), (_, keys, size) = query.shape, value.shape
        keyed, valued = _chunked(key), _chunked(value)
        output = query.new_zeros(slices, queries, size)
        found = query.new_empty(slices, queries, 2)
        for i0 in range(0, queries, rule.rows):
            rows = slice(i0, min(i0 + rule.rows, queries))
            c0, c1 = rule.columns(i0, rows.stop, keys)
            scores = _spread(query[:, rows], c1 - c0) @ keyed[c0:c1].mT
            triton_entmax.weigh(scores, found, rule.alpha, **rule.limits(i0, c0, keys))
            if c1 > c0:
                torch.sum(scores @ valued[c0:c1], 0, out=output[:, rows])
        ctx.rule = rule
        ctx.save_for_backward(query, key, value, found)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        once_only("blocked")
        (change,) = upstream
        with torch.autocast(change.device.type, enabled=False):
            return None, *_gradients(ctx.rule, change, *ctx.saved_tensors)


def _gradients(
    rule: Rule, change: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of query, key and value."""
    from regard.core.backends import triton_entmax

    keys, queries = key.shape[-2], query.shape[-2]
    keyed, valued = _chunked(key), _chunked(value)
    dquery, dkey, dvalue = torch.zeros_like(query), torch.zeros_like(keyed), torch.zeros_like(valued)
    for i0 in range(0, queries, rule.rows):
        rows = slice(i0, min(i0 + rule.rows, queries))
        c0, c1 = rule.columns(i0, rows.stop, keys)
        if c1 == c0:
            continue
        asked, arriving = (_spread(t[:, rows], c1 - c0) for t in (query, change))
        scores, dweights = asked @ keyed[c0:c1].mT, arriving @ valued[c0:c1].mT
        triton_entmax.weigh_back(scores, dweights, found, rule.alpha, **rule.limits(i0, c0, keys))
        torch.sum(dweights @ keyed[c0:c1], 0, out=dquery[:, rows])
        _add_product(dkey[c0:c1], dweights.mT, asked)
        _add_product(dvalue[c0:c1], scores.mT, arriving)
    return dquery, _whole(dkey, keys), _whole(dvalue, keys)


def _chunked(tensor: Tensor) -> Tensor:
    """(slices, keys, size) as (chunks, slices, CHUNK, size), with zeros after the last key."""
    missing = -tensor.shape[-2] % CHUNK
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor
    return padded.unflatten(-2, (-1, CHUNK)).transpose(0, 1).contiguous()


def _whole(chunked: Tensor, keys: int) -> Tensor:
    return chunked.transpose(0, 1).flatten(1, 2)[:, :keys]


def _spread(tensor: Tensor, chunks: int) -> Tensor:
    """The rows once for every chunk, in memory: a batched product wants its matrices at equal distances."""
    return tensor.expand(chunks, *tensor.shape).contiguous()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch.baddbmm(total.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1), out=total.flatten(0, 1))
