"""Training data as the loop takes it: pass after pass, in an order that can be taken up again."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from regard.train.training_state import Course


@runtime_checkable
class Batches(Protocol):
    """Training data in an order that can be taken up again.

    Iterating gives the rest of the current pass over the data; iterating once more, the next pass. `state` is where
    the data stands after the batch that was given last, in plain JSON, and `resume` goes there.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def state(self) -> Any: ...

    def resume(self, state: Any) -> None: ...


class Passes:
    """Batches in groups of as many as an update wants; passes and batches are counted in the course."""

    def __init__(self, batches: Batches, *, most: int | None) -> None:
        self._batches = batches
        self._most = most
        self._rest: Iterator[Any] | None = None

    def take(self, wanted: int, course: Course) -> Iterator[Any]:
        """The batches of one update: fewer, or none, when the last pass ends."""
        empty = 0
        while wanted:
            if self._rest is None:
                self._rest = iter(self._batches)
            for batch in self._rest:
                course.batch += 1
                wanted, empty = wanted - 1, 0
                yield batch
                if not wanted:
                    return
            empty += 1
            if empty > 2:  # the rest of a pass may be empty, a whole one may not
                raise ValueError("batches gave nothing: it must give at least one batch in each pass")
            self._rest, course.epoch, course.batch = None, course.epoch + 1, 0
            if self._most is not None and course.epoch >= self._most:
                return
