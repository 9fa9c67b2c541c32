"""Sparsemax and entmax of dot products on CUDA: a block of whole rows at a time, O(n · block) memory in training too.

Chunks of keys are the first axis, (chunks, slices, C, size), so a block of rows against some chunks is one batched
product over contiguous memory. A few rows against many keys would leave most of the GPU idle, because one
multiprocessor sums over all keys; here each chunk has its own, and their outputs are added. The backward pass
recomputes the scores of a block of whole rows, so only the thresholds are stored.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from regard.kernels.availability import TRITON
from regard.kernels.derivatives import REFERENCE, once_only

CHUNK = 256  # number of keys in a chunk
LONGEST = 32_768  # the longest row, in keys, that a kernel holds in registers


@dataclass(frozen=True, eq=False)
class Rule:
    """The keys that a row may attend, its normaliser, and the number of rows computed at a time."""

    alpha: float
    low: int | None
    high: int | None
    lengths: Tensor | None  # number of keys of each slice
    rows: int

    def columns(self, i0: int, i1: int, keys: int) -> tuple[int, int]:
        """Return the chunks in which rows i0 to i1 may attend anything."""
        first = 0 if self.low is None else min(max(0, i0 + self.low), keys)
        last = keys if self.high is None else min(max(first, i1 + self.high), keys)
        return first // CHUNK, -(-last // CHUNK)

    def limits(self, i0: int, c0: int, keys: int) -> dict[str, Any]:
        """Return the rule as kernel arguments."""
        return {"i0": i0, "j0": c0 * CHUNK, "n": keys, "low": self.low, "high": self.high, "lengths": self.lengths}


def climbs(alpha: float, keys: int) -> bool:
    """Return whether the kernels can find the threshold of such rows.

    For α > 2 the sum is not convex, and Newton's method does not converge to its root. Near 1 the power is too steep
    for float32.
    """
    return 1.05 <= alpha <= 2 and 0 < keys <= LONGEST and TRITON


def attend(rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return entmax(query keyᵀ) value over (slices, q, d), (slices, k, d), (slices, k, e), float32.

    Reference implementation: `regard.core.normalizers.Entmax` (Sparsemax for alpha 2) on the scores of `reference`.
    """
    return cast(Tensor, _Rows.apply(rule, query, key, value))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from regard.kernels.triton import entmax  # imported here, because it imports Triton

        (slices, queries, _), (_, keys, size) = query.shape, value.shape
        keyed, valued = _chunked(key), _chunked(value)
        output = query.new_zeros(slices, queries, size)
        found = query.new_empty(slices, queries, 2)
        for i0 in range(0, queries, rule.rows):
            rows = slice(i0, min(i0 + rule.rows, queries))
            c0, c1 = rule.columns(i0, rows.stop, keys)
            scores = _spread(query[:, rows], c1 - c0) @ keyed[c0:c1].mT
            entmax.weigh(scores, found, rule.alpha, **rule.limits(i0, c0, keys))
            if c1 > c0:
                torch.sum(scores @ valued[c0:c1], 0, out=output[:, rows])
        ctx.rule = rule
        ctx.save_for_backward(query, key, value, found)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        once_only("backend 'blocked'", REFERENCE)
        (change,) = upstream
        with torch.autocast(change.device.type, enabled=False):
            return None, *_gradients(ctx.rule, change, *ctx.saved_tensors)


def _gradients(
    rule: Rule, change: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value."""
    from regard.kernels.triton import entmax  # imported here, because it imports Triton

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
        entmax.weigh_back(scores, dweights, found, rule.alpha, **rule.limits(i0, c0, keys))
        torch.sum(dweights @ keyed[c0:c1], 0, out=dquery[:, rows])
        _add_product(dkey[c0:c1], dweights.mT, asked)
        _add_product(dvalue[c0:c1], scores.mT, arriving)
    return dquery, _whole(dkey, keys), _whole(dvalue, keys)


def _chunked(tensor: Tensor) -> Tensor:
    """Return (slices, keys, size) as (chunks, slices, CHUNK, size), padded with zeros."""
    missing = -tensor.shape[-2] % CHUNK
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor
    return padded.unflatten(-2, (-1, CHUNK)).transpose(0, 1).contiguous()


def _whole(chunked: Tensor, keys: int) -> Tensor:
    return chunked.transpose(0, 1).flatten(1, 2)[:, :keys]


def _spread(tensor: Tensor, chunks: int) -> Tensor:
    """Return the rows repeated for every chunk in memory, because a batched product needs equal strides."""
    return tensor.expand(chunks, *tensor.shape).contiguous()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch.baddbmm(total.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1), out=total.flatten(0, 1))
