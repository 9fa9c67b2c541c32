"""A mask as a conjunction of simple rules that kernels can evaluate."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.masks import And, Band, Dense, Mask, Padding, Segments


@dataclass(frozen=True, eq=False)
class Clauses:
    """low ≤ j − i ≤ high, and j < lengths, and equal ids, and every dense tensor: all must hold."""

    low: int | None = None
    high: int | None = None
    lengths: Tensor | None = None  # (*leading)
    segments: tuple[tuple[Tensor, Tensor], ...] = ()
    dense: tuple[Tensor, ...] = ()

    @property
    def banded(self) -> bool:
        """Return whether the band excludes anything."""
        return self.low is not None or self.high is not None

    @property
    def by_head(self) -> bool:
        """Return whether lengths or segments differ between heads; kernels take one list for all heads."""
        padded = self.lengths is not None and self.lengths.shape[-1] > 1
        return padded or any(ids.shape[-2] > 1 for pair in self.segments for ids in pair)

    @property
    def separate(self) -> bool:
        """Return whether each fully masked key is excluded by a single rule (the band together with the segments is
        one)."""
        pairs = sum(tensor.shape[-2] > 1 for tensor in self.dense)
        return pairs + len(self.segments) <= 1 and not (pairs and self.banded)

    @property
    def by_key(self) -> bool:
        """Return whether every query may attend the same keys, so that the mask is one row."""
        return not self.banded and len(self.segments) == 0 and all(t.shape[-2] == 1 for t in self.dense)


def clauses(mask: Mask | None, queries: int, keys: int) -> Clauses | None:
    """Return the mask as a conjunction, without a band that excludes nothing; None if it holds an `|` or a `~`."""
    found = _collect(mask) if mask is not None else Clauses()
    if found is None:
        return None
    low, high = found.low, found.high
    return replace(
        found,
        low=None if low is not None and low <= 1 - queries else low,
        high=None if high is not None and high >= keys - 1 else high,
    )


def _collect(mask: Mask) -> Clauses | None:
    match mask:
        case Band(low, high):
            return Clauses(low=low, high=high)
        case Padding(lengths):
            return Clauses(lengths=lengths)
        case Segments(query_ids, key_ids):
            return Clauses(segments=((query_ids, key_ids),))
        case Dense(tensor):
            return Clauses(dense=(tensor,))
        case And(left, right):
            a, b = _collect(left), _collect(right)
            return None if a is None or b is None else _both(a, b)
    return None


def _both(a: Clauses, b: Clauses) -> Clauses:
    lows, highs = [x for x in (a.low, b.low) if x is not None], [x for x in (a.high, b.high) if x is not None]
    lengths = a.lengths if b.lengths is None else b.lengths
    if a.lengths is not None and b.lengths is not None:
        lengths = torch.minimum(a.lengths, b.lengths)
    return Clauses(
        max(lows, default=None), min(highs, default=None), lengths, a.segments + b.segments, a.dense + b.dense
    )
