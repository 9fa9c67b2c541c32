"""Runs that the studio asks while someone watches."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.tasks.loading import Loaded, load
from regard.tasks.task import Prediction


@dataclass(frozen=True, eq=False)
class LiveRun:
    """A trained run, ready to be asked. `more` is what its task can do beside answering, such as forced beginnings."""

    loaded: Loaded
    more: Any = None

    @property
    def name(self) -> str:
        return self.loaded.name

    def ask(self, inputs: Mapping[str, Any]) -> Prediction:
        """The answer to one input, given by the names of the task's inputs; `InputError` says what is wrong with it."""
        return self.loaded.predict([inputs])[0]


def open_run(path: Path) -> LiveRun:
    """The run in a directory."""
    loaded = load(path)
    return LiveRun(loaded, None if loaded.task.live is None else loaded.task.live(loaded.name, loaded.predictor))
