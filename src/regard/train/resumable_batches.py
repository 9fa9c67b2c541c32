"""Training data for the loop: epoch after epoch, in an order that can be resumed."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from regard.train.training_state import TrainingState


@runtime_checkable
class Batches(Protocol):
    """The interface of training data whose order can be resumed.

    Iterating yields the remaining batches of the current epoch; iterating once more yields the next epoch. `state`
    returns the position after the last batch that was yielded, as a JSON value, and `resume` moves to that position.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def state(self) -> Any: ...

    def resume(self, state: Any) -> None: ...


class Passes:
    """Divides the batches of all epochs into the groups that the updates use, and counts them in the training state."""

    def __init__(self, batches: Batches, *, most: int | None) -> None:
        self._batches = batches
        self._most = most
        self._rest: Iterator[Any] | None = None

    def take(self, wanted: int, training: TrainingState) -> Iterator[Any]:
        """Yield the `wanted` batches of one update; fewer, or none, at the end of the last epoch."""
        empty = 0
        while wanted:
            if self._rest is None:
                self._rest = iter(self._batches)
            for batch in self._rest:
                training.batch += 1
                wanted, empty = wanted - 1, 0
                yield batch
                if not wanted:
                    return
            empty += 1
            if empty > 2:  # a resumed epoch may have no batches left, but the next whole epoch must have some
                raise ValueError("batches gave nothing: it must give at least one batch in each pass")
            self._rest, training.epoch, training.batch = None, training.epoch + 1, 0
            if self._most is not None and training.epoch >= self._most:
                return
