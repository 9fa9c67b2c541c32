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

    Here i is the position of a query, and j that of a key it may attend. The value of a rule that does not apply is
    None or (). The operator `&` returns the conjunction of two `Clauses`.
    """

    low: int | None = None
    high: int | None = None
    lengths: Tensor | None = None  # the lengths of the sequences, with the leading axes of the scores as shape
    segments: tuple[tuple[Tensor, Tensor], ...] = ()
    dense: tuple[Tensor, ...] = ()

    @property
    def banded(self) -> bool:
        """Return whether the rules include a band, bounded on at least one side."""
        return self.low is not None or self.high is not None

    @property
    def by_head(self) -> bool:
        """Return whether lengths or segment ids differ between heads, which kernels do not support."""
        padded = self.lengths is not None and self.lengths.shape[-1] > 1
        return padded or any(ids.shape[-2] > 1 for pair in self.segments for ids in pair)

    @property
    def separate(self) -> bool:
        """Return whether each key that no query may attend is excluded by one rule alone, where band and segments
        together count as one rule."""
        pairs = sum(tensor.shape[-2] > 1 for tensor in self.dense)
        return pairs + len(self.segments) <= 1 and not (pairs and self.banded)

    @property
    def by_key(self) -> bool:
        """Return whether every query may attend to the same keys, so that one row of the mask represents all rows."""
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
        """Return the rules without the bounds of the band that exclude no pair of this number of queries and keys."""
        return replace(
            self,
            low=None if self.low is not None and self.low <= 1 - queries else self.low,
            high=None if self.high is not None and self.high >= keys - 1 else self.high,
        )


def clauses(mask: "Mask | None", queries: int, keys: int) -> Clauses | None:
    """Return the rules of a mask for this number of queries and keys; None if kernels cannot evaluate the mask."""
    rules = mask.clauses() if mask is not None else Clauses()
    return None if rules is None else rules.restricting(queries, keys)
