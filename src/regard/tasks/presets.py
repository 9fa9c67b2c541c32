"""Functions that build the presets (named configurations) of all tasks."""

from collections.abc import Callable
from typing import Any

from regard.tasks.task import Preset
from regard.train.train_settings import TrainSettings


def cosine(watch: str, steps: int, learning_rate: float, *, weight_decay: float = 0.0, **others: Any) -> TrainSettings:
    """Return training settings with a cosine schedule; the checkpoint with the best value of `watch` is selected.

    If `watch` is "loss", the lowest value is the best; for any other metric, the highest.

    >>> cosine("accuracy", 1000, 6e-3, warmup=50).watch_for
    'highest'
    """
    return TrainSettings(
        steps=steps,
        learning_rate=learning_rate,
        schedule="cosine",
        weight_decay=weight_decay,
        watch=watch,
        watch_for="lowest" if watch == "loss" else "highest",
        **others,
    )


def presets(makers: dict[str, Callable[[], Any]], times: dict[str, str]) -> dict[str, Preset]:
    """Return the presets by name; `makers` are the functions that return their configurations.

    The docstring of a function in `makers` is the description of its preset; `times` gives training times, on two CPU
    cores unless they mention a GPU.
    """
    return {name: Preset(make.__doc__ or "", make, times.get(name, "")) for name, make in makers.items()}
