"""Training runs that the studio (`regard studio`) can query for predictions while they are still training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any

from regard.tasks.loading import Loaded, load, task_of
from regard.tasks.task import InputError, Prediction, Task
from regard.train.run_directory import Run, RunError


@dataclass(eq=False)
class LiveRun:
    """A run directory whose newest weights are loaded: those of the model, or of the last checkpoint in training."""

    run: Run
    task: Task
    _loaded: Loaded | None = None
    _more: Any = None
    _version: tuple[Any, ...] | None = None  # identifies the loaded weights: a value that `_newest` returned
    _lock: RLock = field(default_factory=RLock)

    @property
    def name(self) -> str:
        return self.run.path.resolve().name

    @property
    def ready(self) -> bool:
        """Return whether weights are loaded or can be loaded."""
        return self._loaded is not None or self._newest() is not None

    @property
    def weights(self) -> str | None:
        """Return the name of the loaded weights; None before the first checkpoint."""
        loaded = self.loaded()
        return None if loaded is None else loaded.weights

    @property
    def more(self) -> Any:
        """Return the task's further functions for the studio, such as forced prefixes; None if it has none."""
        with self._lock:
            try:
                return None if self.loaded() is None else self._more
            # loading failed because the weights are damaged; the next call of `ask` reports the error
            except (RunError, OSError):
                return None

    def ask(self, inputs: Mapping[str, Any]) -> Prediction:
        """Return the prediction for one input, a mapping by the names of the task's inputs.

        Raise an `InputError` if the input is invalid, and a `RunError` before the first checkpoint.
        """
        with self._lock:  # a predictor is not thread-safe
            loaded = self.loaded()
            if loaded is None:
                raise RunError(f"{self.name} cannot answer yet: its training has written no checkpoint")
            [answer] = loaded.answers([inputs])
        if isinstance(answer, InputError):
            raise answer
        return answer

    def loaded(self) -> Loaded | None:
        """Return the predictor with the newest weights; None before the first checkpoint."""
        with self._lock:
            newest = self._newest()
            if newest is None or newest == self._version:
                return self._loaded
            try:
                loaded = load(self.run)
            except (RunError, OSError):
                if self._loaded is None:
                    raise
                # training removed the checkpoint while it was being loaded; the next call of `loaded` tries again
                return self._loaded
            self._more = None if self.task.live is None else self.task.live(self.name, loaded.predictor)
            self._loaded, self._version = loaded, newest
            return loaded

    def _newest(self) -> tuple[Any, ...] | None:
        """Return a value that changes when newer weights are written; None if there are no weights."""
        if self.run.model_path.is_file():
            status = self.run.model_path.stat()
            return status.st_mtime_ns, status.st_size
        steps = self.run.checkpoints.steps()
        return (steps[-1],) if steps else None


def open_run(path: Path) -> LiveRun:
    """Return the run in a directory, which may have no weights yet; a damaged run directory raises an error."""
    run = Run.open(path)
    live = LiveRun(run, task_of(run))
    run.config_as(live.task.config)
    live.loaded()
    return live
