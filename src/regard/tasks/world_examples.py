"""The parts of a built-in world as the examples of a task."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from regard.tasks.config import TaskData


class Parts(NamedTuple):
    """Examples to train on, to validate with and to test with; those of `longer` are longer than any trained on."""

    train: Sequence[Any]
    valid: Sequence[Any]
    test: Sequence[Any]
    longer: Sequence[Any]


def parts_of(splits: Callable[..., Any], data: TaskData, example: Callable[[Any], Any], **world: Any) -> Parts:
    """Return the result of `splits(seed, train=, valid=, test=, longer=, **world)`, each item converted to an
    example."""
    made = splits(data.seed, train=data.train, valid=data.valid, test=data.test, longer=data.longer, **world)
    return Parts(*([example(one) for one in part] for part in (made.train, made.valid, made.test, made.longer)))
