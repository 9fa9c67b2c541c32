"""Sparsemax and entmax of dot products on CUDA, computed one block of whole rows at a time.

This module decides which calls are supported and how large a block is; `regard.kernels.entmax_rows` computes a block.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from regard.core.backends.result import Result
from regard.core.clauses import Clauses
from regard.core.normalizers import Entmax, Sparsemax
from regard.core.problem import Problem
from regard.kernels import entmax_rows

BYTES = 64 * 2**20  # bytes of the scores of a block
# The least number of rows of a block where possible: to keep to BYTES, fewer slices (batch times heads) are computed at
# once.
ROWS = 256


def serves(problem: Problem) -> bool:
    """Return whether this is sparsemax or entmax of dot products on CUDA that the kernels of `entmax_rows` support.

    The dtype is at most float32, the mask consists of a band and lengths at most, and a row fits the registers.
    """
    rules = problem.mask_rules
    if rules is None or rules.segments or rules.dense or problem.bias is not None or problem.bad_keys is not None:
        return False
    if problem.dropout > 0.0 or problem.sample or problem.dtype != torch.float32 or problem.score.why_no_product():
        return False
    alpha, sizes = _alpha(problem), (*problem.shape, problem.value.shape[-1])
    return (
        alpha is not None
        and entmax_rows.climbs(alpha, problem.shape[-1])
        and 0 not in sizes
        and problem.device.type == "cuda"
    )


def working_bytes(problem: Problem) -> int:
    """Return the bytes of a block's scores, its queries and outputs per chunk of keys, and the keys and values."""
    at_once, rows, keys = _block(problem)
    chunks, sizes = -(-keys // entmax_rows.CHUNK), problem.query.shape[-1] + problem.value.shape[-1]
    return 4 * at_once * chunks * (rows * (entmax_rows.CHUNK + sizes) + entmax_rows.CHUNK * sizes)


def _block(problem: Problem) -> tuple[int, int, int]:
    """Return the number of heads (of all batch items) and of query rows in a block, and the keys padded to whole
    chunks."""
    *lead, queries, keys = problem.shape
    keys += -keys % entmax_rows.CHUNK
    at_once = max(1, min(math.prod(lead), BYTES // (4 * keys * min(queries, ROWS))))
    return at_once, min(queries, max(1, BYTES // (4 * keys * at_once))), keys


def attend(problem: Problem) -> Result:
    """Compute attention by blocks of whole rows, in float32."""
    alpha, rules = _alpha(problem), problem.mask_rules
    query, key, value = (t.to(torch.float32) for t in (problem.query, problem.key, problem.value))
    with torch.autocast(problem.device.type, enabled=False):
        product = problem.score.as_product(query, key)
        assert product is not None  # `serves` has checked that the score is a dot product of vectors
        assert alpha is not None
        assert rules is not None
        parts = (product.query * product.scale, problem.repeat(product.key), problem.repeat(value))
        at_once, rows, _ = _block(problem)
        split = [t.reshape(-1, *t.shape[-2:]).split(at_once) for t in parts]
        rule = entmax_rows.Rule(alpha, rules.low, rules.high, _lengths(rules, problem.shape), rows)
        groups = enumerate(zip(*split, strict=True))
        outputs = [entmax_rows.attend(_part(rule, n * at_once, at_once), *slices) for n, slices in groups]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return Result(output.reshape(*problem.shape[:-1], -1).to(problem.query.dtype))


def _alpha(problem: Problem) -> float | None:
    match problem.normalize:
        case Sparsemax():
            return 2.0
        case Entmax(alpha):
            return float(alpha)
    return None


def _lengths(rules: Clauses, shape: tuple[int, ...]) -> Tensor | None:
    if rules.lengths is None:
        return None
    return rules.lengths.expand(shape[:-2]).reshape(-1).clamp(max=shape[-1]).to(torch.int32)


def _part(rule: entmax_rows.Rule, start: int, count: int) -> entmax_rows.Rule:
    """Return the kernel's mask arguments with the lengths of `count` heads (of all batch items) from index `start`
    on."""
    return rule if rule.lengths is None else replace(rule, lengths=rule.lengths[start : start + count])
