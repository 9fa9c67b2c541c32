"""One sequence of a batch, without its padding: a view of the weights, of their check and of their gradient."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.look.attention_records import Check, Gradient, Source


def stored(source: object, what: str, *place: int) -> Tensor | None:
    """Return a summary of a map that its source stores, such as `received`; None if it does not."""
    known = getattr(source, what, None)
    return None if known is None else known(*place)


class Places(NamedTuple):
    """The index of a sequence, and its rows and columns; None means all of them."""

    batch: int
    rows: tuple[int, ...] | None
    columns: tuple[int, ...] | None

    def chosen(self, found: Tensor) -> Tensor:
        """Return the columns of the sequence, of rows that are given."""
        return found if self.columns is None else found.index_select(-1, torch.tensor(self.columns))

    def row_numbers(self, rows: Tensor) -> Tensor:
        """Return the indices of rows of the sequence in the whole map."""
        return rows if self.rows is None else torch.tensor(self.rows)[rows]

    @property
    def all(self) -> bool:
        return self.rows is None and self.columns is None


class Part:
    """The weights of one sequence, as a source of a batch of one."""

    def __init__(self, source: "Source", places: Places) -> None:
        self._source, self._places = source, places
        _, heads, queries, keys = source.shape
        rows = queries if places.rows is None else len(places.rows)
        self._shape = (1, heads, rows, keys if places.columns is None else len(places.columns))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        return self._places.chosen(self._source.rows(self._places.batch, heads, self._places.row_numbers(rows)))

    def holds(self) -> list[Tensor]:
        return self._source.holds()

    # Summaries stored in a file. They cover all rows and columns: for a subset they are recomputed.

    def received(self, batch: int) -> Tensor | None:
        return stored(self._source, "received", self._places.batch) if self._places.all else None

    def overview(self, batch: int, head: int) -> Tensor | None:
        return stored(self._source, "overview", self._places.batch, head) if self._places.all else None

    def entropy(self, batch: int) -> Tensor | None:
        found = stored(self._source, "entropy", self._places.batch)
        return found if found is None else found[:, self._places.row_numbers(torch.arange(self._shape[2]))]

    @property
    def rest(self) -> Tensor | None:
        """Return the sum of the weights that a file does not store, (1, heads, rows); None if it stores all."""
        rest = getattr(self._source, "rest", None)
        if rest is None:
            return None
        return rest[self._places.batch][None, :, self._places.row_numbers(torch.arange(self._shape[2]))]


class CheckOf:
    """The check of one sequence."""

    def __init__(self, check: "Check", batch: int) -> None:
        self._check, self._batch = check, batch

    def of(self, batch: int) -> float:
        return self._check.of(self._batch)

    def holds(self) -> list[Tensor]:
        return self._check.holds()


class GradientPart:
    """The gradient for the weights of one sequence."""

    def __init__(self, gradient: "Gradient", places: Places) -> None:
        self._gradient, self._places = gradient, places

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        return self._places.chosen(self._gradient.rows(self._places.batch, heads, self._places.row_numbers(rows)))

    def store(self, grad: Tensor) -> None:
        self._gradient.store(grad)
