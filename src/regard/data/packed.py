"""Sequences of many short texts or lists of numbers, stored in a few large arrays.

A separate Python object for each of a hundred thousand texts would take ten times the memory of these arrays.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
# The error handler "surrogatepass" encodes lone surrogates, which occur in JSON strings and in paths that are not
# UTF-8; strict UTF-8 could not encode them.
_ERRORS = "surrogatepass"


class Lazy(Sequence[Item], Generic[Item]):
    """A sequence of `count` items; item i is created by `make(i)` at each access, and a slice is a list.

    >>> squares = Lazy(4, lambda place: place * place)
    >>> squares[-1], squares[1:3], list(squares)
    (9, [1, 4], [0, 1, 4, 9])
    """

    def __init__(self, count: int, make: Callable[[int], Item]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self._make(index) for index in range(*place.indices(self._count))]
        if not -self._count <= place < self._count:
            raise IndexError(f"item {place} of {self._count}")
        return self._make(int(place) % self._count)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != self._count:
            return False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))


def picked(items: Sequence[Item], places: Sequence[int]) -> Sequence[Item]:
    """Return a lazy sequence of the items at the indices `places`; an item is accessed only when it is read."""
    indices = np.array(places, np.int64)
    return Lazy(len(indices), lambda place: items[indices[place]])


class Texts(Sequence[str]):
    """A sequence of texts, stored in one append-only buffer of UTF-8.

    >>> texts = Texts(["a cat", "一只猫"])
    >>> texts[1], len(texts)
    ('一只猫', 2)
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._content, self._ends = bytearray(), array("q")
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        self._content += text.encode("utf-8", _ERRORS)
        self._ends.append(len(self._content))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        end = self._ends[place]
        place %= len(self)
        begin = self._ends[place - 1] if place else 0
        return self._content[begin:end].decode("utf-8", _ERRORS)


class Numbers(Sequence[list[int]]):
    """A sequence of lists of integers below 2³¹, stored in one append-only array.

    >>> numbers = Numbers([[3, 1], [], [4]])
    >>> numbers[0], numbers[-1], numbers.lengths.tolist()
    ([3, 1], [4], [2, 0, 1])
    """

    def __init__(self, lists: Iterable[Iterable[int]] = ()) -> None:
        self._content, self._ends = array("i"), array("q")
        for numbers in lists:
            self.append(numbers)

    def append(self, numbers: Iterable[int]) -> None:
        self._content.extend(numbers)
        self._ends.append(len(self._content))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        end = self._ends[place]
        place %= len(self)
        return self._content[self._ends[place - 1] if place else 0 : end].tolist()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the length of each list as an array."""
        return np.diff(np.array(self._ends, np.int64), prepend=0)


class Distinct:
    """Assigns equal texts equal numbers, in the order of first occurrence; stores only a 16-byte digest of each text.

    >>> names = Distinct()
    >>> for name in ("b", "a", "b", "b"):
    ...     names.append(name)
    >>> first, number = names.numbered()
    >>> first.tolist(), number.tolist()
    ([0, 1], [0, 1, 0, 0])
    """

    def __init__(self) -> None:
        self._digests = bytearray()

    def append(self, text: str) -> None:
        self._digests += blake2b(text.encode("utf-8", _ERRORS), digest_size=16).digest()

    def numbered(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the index at which each distinct text first occurs, and for each text the number of its distinct text.

        The distinct texts are numbered from 0 in the order of their first occurrence.
        """
        _, first, number = np.unique(self.digests, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return first[order], rank[number.reshape(-1)]

    @property
    def digests(self) -> NDArray[Any]:
        """Return the digests of all texts as an array of byte strings, which can be sorted and searched."""
        # NumPy drops trailing zero bytes of byte strings. Comparisons stay exact, because all digests have 16 bytes and
        # NumPy drops the zeros on both sides.
        return np.frombuffer(bytes(self._digests), "S16")
