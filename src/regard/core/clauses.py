"""Masks as conjunctions of simple rules that kernels can evaluate: a band, lengths, segments, tensors."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.core.masks import Mask


@dataclass(frozen=True, eq=False)
class Clauses:
    """The rules of a mask, all of which must hold: low ≤ j − i ≤ high, j < lengths, equal ids, every dense tensor.

    They say whether query i may attend key j. A rule that is absent is None or (). `&` joins two sets of rules.
    """

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

    def __and__(self, other: "Clauses") -> "Clauses":
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        lengths = other.lengths if self.lengths is None else self.lengths
        if self.lengths is not None and other.lengths is not None:
            lengths = torch.minimum(self.lengths, other.lengths)
        return Clauses(
            low=max(lows, default=None),
            high=min(highs, default=None),
            lengths=lengths,
            segments=self.segments + other.segments,
            dense=self.dense + other.dense,
        )

    def restricting(self, queries: int, keys: int) -> "Clauses":
        """Return the rules without bounds of the band that exclude no pair of so many queries and keys."""
        return replace(
            self,
            low=None if self.low is not None and self.low <= 1 - queries else self.low,
            high=None if self.high is not None and self.high >= keys - 1 else self.high,
        )


def clauses(mask: "Mask | None", queries: int, keys: int) -> Clauses | None:
    """Return the rules of a mask for so many queries and keys; None if the mask has none that kernels can evaluate."""
    rules = mask.clauses() if mask is not None else Clauses()
    return None if rules is None else rules.restricting(queries, keys)
