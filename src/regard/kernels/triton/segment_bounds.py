"""Bounds of segments: for each span of queries, the range of keys that have one of its segment ids, and for each span
of keys, the range of queries.

The kernels of `range_attention` read the bounds and visit only these ranges of keys (see `range_pairs`).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.plan import Block, Prepared

SPAN = tl.constexpr(32)  # number of positions that share one entry of the bounds
FAR = tl.constexpr(2**24)  # larger than the number of spans of any sequence


@triton.jit
def bounds_of_segments(own, other, bounds, own_b, own_n, other_b, other_n, n_own, n_other, CHUNK: tl.constexpr):
    """Store four positions of `other` for one span of `own`: start, whole start, whole stop, stop.

    Outside [start, stop), no position has an id of the span. Within [whole start, whole stop), every position has the
    id of the span; this range is empty if the span holds several ids, or if positions with its id are not adjacent. All
    four are multiples of SPAN.
    """
    span, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.minimum(span * SPAN + tl.arange(0, SPAN), n_own - 1)
    ids = tl.load(own + b * own_b + at.to(tl.int64) * own_n)
    least = tl.min(ids, 0)
    most = tl.max(ids, 0)
    start = span * 0 + FAR
    stop = span * 0
    whole_start = span * 0 + FAR
    whole_stop = span * 0
    count = span * 0
    for first in range(0, (n_other + SPAN - 1) // SPAN, CHUNK):
        index = first + tl.arange(0, CHUNK)
        place = tl.minimum(index[:, None] * SPAN + tl.arange(0, SPAN)[None, :], n_other - 1)
        them = tl.load(other + b * other_b + place.to(tl.int64) * other_n)
        lowest = tl.min(them, 1)
        highest = tl.max(them, 1)
        meets = (index * SPAN < n_other) & (lowest <= most) & (highest >= least)
        whole = meets & (lowest == highest) & (least == most)
        start = tl.minimum(start, tl.min(tl.where(meets, index, FAR), 0))
        stop = tl.maximum(stop, tl.max(tl.where(meets, index + 1, 0), 0))
        whole_start = tl.minimum(whole_start, tl.min(tl.where(whole, index, FAR), 0))
        whole_stop = tl.maximum(whole_stop, tl.max(tl.where(whole, index + 1, 0), 0))
        count += tl.sum(whole.to(tl.int32), 0)
    gapless = count == whole_stop - whole_start
    place = bounds + (b * tl.num_programs(0) + span) * 4
    tl.store(place, start * SPAN)
    tl.store(place + 1, tl.where(gapless, whole_start, FAR) * SPAN)
    tl.store(place + 2, tl.where(gapless, whole_stop, 0) * SPAN)
    tl.store(place + 3, stop * SPAN)


@functools.lru_cache(maxsize=1024)
def _launch(shapes: tuple[torch.Size, torch.Size], strides: tuple[tuple[int, ...], ...]) -> Prepared:
    (batch, queries), (_, keys) = shapes
    numbers = (*strides[0], *strides[1], queries, keys)
    return Prepared(bounds_of_segments, (-(-queries // SPAN.value), batch, 1), numbers, {"CHUNK": 32}, Block(1, 32))


def segment_bounds(own: Tensor, other: Tensor) -> Tensor:
    """Return the bounds (b, spans, 4) within ids `other` (b, m) for each span of ids `own` (b, n), in one launch."""
    shape = own.shape
    bounds = torch.empty((shape[0], -(-shape[1] // SPAN.value), 4), device=own.device, dtype=torch.int32)
    _launch((shape, other.shape), (own.stride(), other.stride()))(own, other, bounds)
    return bounds
