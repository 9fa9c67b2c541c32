"""The splits of data from a generator in `regard.data.worlds` (a "world"), converted to the examples of a task."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from regard.tasks.config import TaskData


class Parts(NamedTuple):
    """Training, validation and test examples, and test examples that are longer than any training example."""

    train: Sequence[Any]
    valid: Sequence[Any]
    test: Sequence[Any]
    longer: Sequence[Any]


def parts_of(splits: Callable[..., Any], data: TaskData, example: Callable[[Any], Any], **world: Any) -> Parts:
    """Return the splits that `splits(seed, train=, valid=, test=, longer=, **world)` generates.

    `example` converts each generated item to an example of the task.
    """
    parts = splits(data.seed, train=data.train, valid=data.valid, test=data.test, longer=data.longer, **world)
    return Parts(*([example(one) for one in part] for part in (parts.train, parts.valid, parts.test, parts.longer)))
