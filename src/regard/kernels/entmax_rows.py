"""Sparsemax and entmax of dot products on CUDA, also in training, with the scores of one block of whole rows in memory.

Keys and values are stored in chunks of C keys, (chunks, slices, C, size), so that the products of a block of rows with
some chunks are one batched product over contiguous memory. If a product of a few rows with many keys were not divided,
one multiprocessor would sum over all keys, and most of the GPU would be idle; with chunks, each chunk has a
multiprocessor of its own, and the outputs of the chunks are added. The backward pass recomputes the scores of a block
of rows, so the forward pass stores only the largest score and the threshold of each row.
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
    """The band and lengths of keys that rows may attend to, α of entmax, and the number of rows computed at a time."""

    alpha: float
    low: int | None
    high: int | None
    lengths: Tensor | None  # number of keys of each slice (a head of a sequence)
    rows: int

    def columns(self, i0: int, i1: int, keys: int) -> tuple[int, int]:
        """Return the first chunk that contains a key of the band of rows i0 to i1, and the chunk after the last one."""
        first = 0 if self.low is None else min(max(0, i0 + self.low), keys)
        last = keys if self.high is None else min(max(first, i1 + self.high), keys)
        return first // CHUNK, -(-last // CHUNK)

    def limits(self, i0: int, c0: int, keys: int) -> dict[str, Any]:
        """Return the keyword arguments of the kernels for rows from `i0` and chunks from `c0`."""
        return {"i0": i0, "j0": c0 * CHUNK, "n": keys, "low": self.low, "high": self.high, "lengths": self.lengths}


def climbs(alpha: float, keys: int) -> bool:
    """Return whether the kernels can compute the threshold of rows with this number of keys by Newton's method.

    For α > 2 the sum of the weights is not a convex function of the threshold, and Newton's method does not converge.
    For α near 1 the exponent 1 / (α − 1) of the weights is too large for float32.
    """
    return 1.05 <= alpha <= 2 and 0 < keys <= LONGEST and TRITON


def attend(rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return entmax(query keyᵀ) value for float32 query (slices, q, d), key (slices, k, d), value (slices, k, e).

    Reference implementation: `regard.core.normalizers.Entmax` (Sparsemax for alpha 2) applied to the masked scores
    query keyᵀ.
    """
    return cast(Tensor, _Rows.apply(rule, query, key, value))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from regard.kernels.triton import entmax  # a lazy import, because the module imports Triton

        (slices, queries, _), (_, keys, size) = query.shape, value.shape
        keyed, valued = _chunked(key), _chunked(value)
        output = query.new_zeros(slices, queries, size)
        thresholds = query.new_empty(slices, queries, 2)
        for i0 in range(0, queries, rule.rows):
            rows = slice(i0, min(i0 + rule.rows, queries))
            c0, c1 = rule.columns(i0, rows.stop, keys)
            scores = _spread(query[:, rows], c1 - c0) @ keyed[c0:c1].mT
            entmax.weigh(scores, thresholds, rule.alpha, **rule.limits(i0, c0, keys))
            if c1 > c0:
                torch.sum(scores @ valued[c0:c1], 0, out=output[:, rows])
        ctx.rule = rule
        ctx.save_for_backward(query, key, value, thresholds)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        once_only("backend 'blocked'", REFERENCE)
        (change,) = upstream
        with torch.autocast(change.device.type, enabled=False):
            return None, *_gradients(ctx.rule, change, *ctx.saved_tensors)


def _gradients(
    rule: Rule, change: Tensor, query: Tensor, key: Tensor, value: Tensor, thresholds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    `thresholds` holds the largest score and the threshold of each row.
    """
    from regard.kernels.triton import entmax  # a lazy import, because the module imports Triton

    keys, queries = key.shape[-2], query.shape[-2]
    keyed, valued = _chunked(key), _chunked(value)
    dquery, dkey, dvalue = torch.zeros_like(query), torch.zeros_like(keyed), torch.zeros_like(valued)
    for i0 in range(0, queries, rule.rows):
        rows = slice(i0, min(i0 + rule.rows, queries))
        c0, c1 = rule.columns(i0, rows.stop, keys)
        if c1 == c0:
            continue
        query_rows, change_rows = (_spread(t[:, rows], c1 - c0) for t in (query, change))
        scores, dweights = query_rows @ keyed[c0:c1].mT, change_rows @ valued[c0:c1].mT
        entmax.weigh_back(scores, dweights, thresholds, rule.alpha, **rule.limits(i0, c0, keys))
        torch.sum(dweights @ keyed[c0:c1], 0, out=dquery[:, rows])
        _add_product(dkey[c0:c1], dweights.mT, query_rows)
        _add_product(dvalue[c0:c1], scores.mT, change_rows)
    return dquery, _whole(dkey, keys), _whole(dvalue, keys)


def _chunked(tensor: Tensor) -> Tensor:
    """Return a tensor (slices, keys, size) rearranged as (chunks, slices, CHUNK, size), padded with zeros."""
    missing = -tensor.shape[-2] % CHUNK
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor
    return padded.unflatten(-2, (-1, CHUNK)).transpose(0, 1).contiguous()


def _whole(chunked: Tensor, keys: int) -> Tensor:
    return chunked.transpose(0, 1).flatten(1, 2)[:, :keys]


def _spread(tensor: Tensor, chunks: int) -> Tensor:
    """Return the rows copied for every chunk, because a batched product requires equal strides between its matrices."""
    return tensor.expand(chunks, *tensor.shape).contiguous()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch.baddbmm(total.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1), out=total.flatten(0, 1))
