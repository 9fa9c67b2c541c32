"""Training data for the loop: epoch after epoch, in an order that can be resumed."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from regard.train.training_state import TrainingState


@runtime_checkable
class Batches(Protocol):
    """Training data in an order that can be resumed.

    Iterating yields the rest of the current epoch; iterating again, the next epoch. `state` is the position after the
    last batch, as JSON, and `resume` continues from there.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def state(self) -> Any: ...

    def resume(self, state: Any) -> None: ...


class Passes:
    """Batches in groups, one group for each update; epochs and batches are counted in the training state."""

    def __init__(self, batches: Batches, *, most: int | None) -> None:
        self._batches = batches
        self._most = most
        self._rest: Iterator[Any] | None = None

    def take(self, wanted: int, training: TrainingState) -> Iterator[Any]:
        """Yield the batches of one update: fewer, or none, at the end of the last epoch."""
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
            if empty > 2:  # the rest of a resumed epoch may be empty, but not a whole epoch
                raise ValueError("batches gave nothing: it must give at least one batch in each pass")
            self._rest, training.epoch, training.batch = None, training.epoch + 1, 0
            if self._most is not None and training.epoch >= self._most:
                return
