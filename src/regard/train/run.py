"""A run directory: what was asked, what came out, and the checkpoints on the way."""

import json
import os
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from regard.train.card import model_card
from regard.train.checkpoint import Checkpoints
from regard.train.durable import write_whole
from regard.train.metrics import Metrics
from regard.train.weights import load_model, save_model


class RunError(Exception):
    """A directory that is not the run one meant, or is in use."""


@dataclass(frozen=True)
class Run:
    """`config.json  model.safetensors  metrics.jsonl  result.json  README.md  checkpoints/`.

    >>> import tempfile
    >>> run = Run.create(Path(tempfile.mkdtemp()) / "tiny", {"task": "translation", "train": {"steps": 100}})
    >>> Run.open(run.path).config()["task"]
    'translation'
    """

    path: Path

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        changeable: Collection[str] = (),
        renewed: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
    ) -> "Run":
        """Makes a run directory, or takes up the one that is there with `resume`.

        A directory that holds something is never written over. A run is taken up with the config it was started with;
        only keys in `changeable` (written `train.steps`) may differ, and the new values are then kept. `renewed` gives
        a config that an earlier version wrote as today's would, settings that were not known then included.
        """
        run = cls(Path(path))
        plain = json.loads(json.dumps(dict(config)))
        # Hidden names are what an interrupted start left behind.
        if not run.path.exists() or all(entry.name.startswith(".") for entry in run.path.iterdir()):
            run.path.mkdir(parents=True, exist_ok=True)
            write_whole(run.path / "config.json", _json(plain))
            return run
        if not (run.path / "config.json").is_file():
            raise RunError(f"{run.path} holds files but no config.json, so it is no run: choose another directory")
        if not resume:
            raise RunError(f"{run.path} holds a run already: choose another directory, or go on with it by resuming")
        changed = _differences(json.loads(json.dumps(dict(renewed(run.config())))), plain)
        refused = {key: values for key, values in changed.items() if key not in changeable}
        if refused:
            words = "; ".join(f"{key} was {old!r} and is now {new!r}" for key, (old, new) in refused.items())
            raise RunError(f"{run.path} was started with another config: {words}")
        if changed:
            write_whole(run.path / "config.json", _json(plain))
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Run":
        """A run that is there."""
        run = cls(Path(path))
        if not (run.path / "config.json").is_file():
            raise RunError(f"{run.path} is no run: it has no config.json")
        return run

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    @property
    def metrics(self) -> Metrics:
        return Metrics(self.path / "metrics.jsonl")

    @property
    def model_path(self) -> Path:
        return self.path / "model.safetensors"

    def config(self) -> dict[str, Any]:
        """What was asked for."""
        return json.loads((self.path / "config.json").read_text())

    def save_model(self, model: nn.Module) -> None:
        """Keeps the final weights."""
        save_model(model, self.model_path)

    def load_model(self, model: nn.Module) -> None:
        """Puts the final weights into a model."""
        if not self.model_path.is_file():
            raise RunError(f"{self.path} has no model.safetensors: its training has not ended")
        load_model(model, self.model_path)

    def save_result(self, result: Mapping[str, Any]) -> None:
        """Keeps the final figures."""
        write_whole(self.path / "result.json", _json(result))

    def result(self) -> dict[str, Any]:
        """The final figures."""
        if not (self.path / "result.json").is_file():
            raise RunError(f"{self.path} has no result.json: its training has not ended")
        return json.loads((self.path / "result.json").read_text())

    def save_card(self, card: Mapping[str, Any]) -> None:
        """Writes the model card, README.md."""
        write_whole(self.path / "README.md", model_card(card))

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Keeps other processes from training in this directory; let go when the process ends, however it ends."""
        try:
            import fcntl
        except ImportError:  # Windows: two processes in one directory are then the user's care
            yield
            return
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another process is training in {self.path}") from None
            yield


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _differences(old: Any, new: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two configs differ, by dotted name."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in {**old, **new}:
            found |= _differences(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
        return found
    return {} if old == new else {name: (old, new)}
