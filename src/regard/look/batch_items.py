"""The attention weights of one sequence of a batch without its padding, with their error check and their gradient."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.look.attention_records import Check, Gradient, Source


def stored(source: object, what: str, *place: int) -> Tensor | None:
    """Return a summary that a `Source` of weights stores, such as `received`; None if it has no method of that name."""
    known = getattr(source, what, None)
    return None if known is None else known(*place)


class Places(NamedTuple):
    """The index of a sequence in the batch, and which rows and columns are not padding (None: all of them)."""

    batch: int
    rows: tuple[int, ...] | None
    columns: tuple[int, ...] | None

    def chosen(self, weights: Tensor) -> Tensor:
        """Return the columns of the weights that are not padding of this sequence."""
        return weights if self.columns is None else weights.index_select(-1, torch.tensor(self.columns))

    def row_numbers(self, rows: Tensor) -> Tensor:
        """Return the indices of rows in the map with padding, from the rows' indices in the map without padding."""
        return rows if self.rows is None else torch.tensor(self.rows)[rows]

    @property
    def all(self) -> bool:
        return self.rows is None and self.columns is None


class Part:
    """A `Source` with the weights of one sequence of another `Source`, as a batch of one sequence without padding."""

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

    # The methods below return summaries that a trace file stores. Stored sums and overviews cover all rows and columns,
    # so a sequence with padding returns None for them, and the record computes them from the weights.

    def received(self, batch: int) -> Tensor | None:
        return stored(self._source, "received", self._places.batch) if self._places.all else None

    def overview(self, batch: int, head: int) -> Tensor | None:
        return stored(self._source, "overview", self._places.batch, head) if self._places.all else None

    def entropy(self, batch: int) -> Tensor | None:
        entropy = stored(self._source, "entropy", self._places.batch)
        return entropy if entropy is None else entropy[:, self._places.row_numbers(torch.arange(self._shape[2]))]

    @property
    def rest(self) -> Tensor | None:
        """Return for each row the sum of its weights that a trace file does not store, (1, heads, rows).

        None is returned if all weights are known.
        """
        rest = getattr(self._source, "rest", None)
        if rest is None:
            return None
        return rest[self._places.batch][None, :, self._places.row_numbers(torch.arange(self._shape[2]))]


class CheckOf:
    """The `Check` of one sequence of a batch, with the interface of a batch that has only this sequence."""

    def __init__(self, check: "Check", batch: int) -> None:
        self._check, self._batch = check, batch

    def of(self, batch: int) -> float:
        return self._check.of(self._batch)

    def holds(self) -> list[Tensor]:
        return self._check.holds()


class GradientPart:
    """The gradient of the loss with respect to the weights of one sequence of a batch, without its padding."""

    def __init__(self, gradient: "Gradient", places: Places) -> None:
        self._gradient, self._places = gradient, places

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        return self._places.chosen(self._gradient.rows(self._places.batch, heads, self._places.row_numbers(rows)))

    def store(self, grad: Tensor) -> None:
        self._gradient.store(grad)
