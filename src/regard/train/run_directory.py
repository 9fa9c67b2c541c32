"""A run directory: configuration, results and checkpoints."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from torch import nn

from regard.train.atomic_files import write_whole
from regard.train.checkpoint_files import Checkpoints
from regard.train.data_fingerprints import changes, fingerprint
from regard.train.directory_lock import lock_path, locked
from regard.train.errors import RunError
from regard.train.manifest import NAME as MANIFEST
from regard.train.manifest import Manifest
from regard.train.metrics_log import Metrics
from regard.train.model_card import model_card
from regard.train.weight_files import load_model, put_weights, save_model

Config = TypeVar("Config", bound=BaseModel)

__all__ = ["Run", "RunError"]


@dataclass(frozen=True)
class Run:
    """The directory of a training run, in which `fit` saves its weights and from which training is resumed.

    A run directory holds `config.json`, `data.json`, `model.safetensors`, `metrics.jsonl`, `result.json`,
    `manifest.json`, `README.md` and the folder `checkpoints`.

    >>> import tempfile
    >>> run = Run.create(Path(tempfile.mkdtemp()) / "tiny", {"task": "translation", "train": {"steps": 100}})
    >>> Run.open(run.path).config()["task"]
    'translation'
    """

    path: Path
    accepts_changed_data: bool = field(default=False, compare=False)
    # `_holds` has one entry while this object holds the lock of the directory; otherwise it is empty.
    _holds: list[None] = field(default_factory=list, init=False, repr=False, compare=False)

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
        """Create a run directory, or with `resume` open an existing one, and release its lock before returning.

        A directory with contents is never overwritten. A run is resumed with the config it was started with; only
        settings whose dotted names, such as `train.steps`, are in `changeable` may differ, and their new values are
        stored. `renewed` converts the stored config of an older release to the current form, and adds settings that
        did not exist then.
        """
        with cls.training(path, config, resume=resume, changeable=changeable, renewed=renewed) as run:
            return run

    @classmethod
    @contextmanager
    def training(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        changeable: Collection[str] = (),
        renewed: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
        inputs: Sequence[Path] = (),
        accept_changed_data: bool = False,
    ) -> Generator["Run", None, None]:
        """A context that creates or opens a run as `create` does, and locks its directory until the context ends.

        `inputs` are the data files. Their size, modification time and SHA-256 are recorded in data.json. If their
        contents differ when the run is resumed, an error is raised, unless `accept_changed_data` is true. If an error
        occurs before the first checkpoint of a new run, everything written is removed, so that the corrected command
        may use the same directory.
        """
        run = cls(Path(path), accept_changed_data)
        try:
            run._check_free(resume)
        except RunError:
            # Another process may have locked the directory and not written config.json yet. Taking the lock below then
            # raises the error that names this reason.
            if not lock_path(run.path).is_file():
                raise
        new = not run.path.exists()
        with run.held():
            fresh = run._check_free(resume)
            try:
                if fresh:
                    run._begin(config, inputs)
                else:
                    run._take_up(config, changeable, renewed, inputs)
                yield run
            except BaseException:  # not only Exception is caught, but also KeyboardInterrupt and SystemExit
                if fresh and not run.checkpoints.steps():
                    run._clear(whole=new)
                raise

    def _check_free(self, resume: bool) -> bool:
        """Return True if a new run may use the directory, and False if it holds a run that is to be resumed.

        `RunError` is raised if the directory holds other files, or if it holds a run and `resume` is false.
        """
        # A directory with only hidden files counts as empty: an interrupted start may have left these files.
        if not self.path.exists() or all(entry.name.startswith(".") for entry in self.path.iterdir()):
            return True
        if not (self.path / "config.json").is_file():
            raise RunError(f"{self.path} holds files but no config.json, so it is no run: choose another directory")
        if not resume:
            raise RunError(f"{self.path} holds a run already: choose another directory, or go on with it by resuming")
        return False

    def _begin(self, config: Mapping[str, Any], inputs: Sequence[Path]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.manifest.path.unlink(missing_ok=True)
        if inputs:
            self._record(inputs)
        self.manifest.write("config.json", _json(json.loads(json.dumps(dict(config)))))

    def _take_up(
        self,
        config: Mapping[str, Any],
        changeable: Collection[str],
        renewed: Callable[[dict[str, Any]], Mapping[str, Any]],
        inputs: Sequence[Path],
    ) -> None:
        """Resume the existing run: compare config and data files with the stored ones, and only then write changes."""
        plain = json.loads(json.dumps(dict(config)))
        changed = _differences(json.loads(json.dumps(dict(renewed(self.config())))), plain)
        refused = {key: values for key, values in changed.items() if key not in changeable}
        if refused:
            words = "; ".join(f"{key} was {old!r} and is now {new!r}" for key, (old, new) in refused.items())
            raise RunError(f"{self.path} was started with another config: {words}")
        if not self.accepts_changed_data:
            self.check_inputs(inputs, "--accept-changed-data goes on all the same")
        self.manifest.sweep()
        self.manifest.adopt(path.name for path in self._listed())
        if changed:
            self.manifest.write("config.json", _json(plain))
        if inputs and (self.accepts_changed_data or not (self.path / "data.json").is_file()):
            self._record(inputs)

    def _listed(self) -> list[Path]:
        """Return the files of the run that its manifest must list, for a run without a manifest."""
        files = [*self.path.glob("*.json"), *self.path.glob("*.safetensors")]
        return sorted(path for path in files if not path.name.startswith(".") and path.name != MANIFEST)

    def _clear(self, *, whole: bool) -> None:
        """Remove the files of the run except hidden ones; with `whole`, remove the whole directory."""
        if whole:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for path in self.path.iterdir():
            if path.is_dir() and not path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)
            elif not path.name.startswith("."):
                path.unlink(missing_ok=True)

    def _record(self, inputs: Sequence[Path]) -> None:
        self.manifest.write("data.json", _json({"files": [fingerprint(path) for path in inputs]}))

    def check_inputs(self, inputs: Sequence[Path], advice: str) -> None:
        """Raise `RunError` if data files have changed since the run was started.

        Runs of older releases have no data.json; for such a run only a missing file is an error.
        """
        if (self.path / "data.json").is_file():
            recorded = self._read_json("data.json").get("files")
            try:
                problems = changes(list(recorded or []), inputs)
            except (KeyError, TypeError, AttributeError) as error:
                raise RunError(f"{self.path / 'data.json'} is damaged: {error!r}") from error
        else:
            self.manifest.check("data.json")
            problems = [f"{path} is missing" for path in inputs if not path.is_file()]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise RunError(f"{problems[0]}{more}: {advice}")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Run":
        """Open an existing run."""
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
    def manifest(self) -> Manifest:
        return Manifest(self.path)

    @property
    def model_path(self) -> Path:
        return self.path / "model.safetensors"

    def config(self) -> dict[str, Any]:
        """Return the configuration of the run, config.json, as a dictionary."""
        return self._read_json("config.json")

    def config_as(self, kind: type[Config]) -> Config:
        """Return the configuration as a pydantic model of type `kind`; a `RunError` names an invalid setting."""
        stored = self.config()
        try:
            return kind.model_validate(stored)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            raise RunError(f"{self.path / 'config.json'}: {place + ': ' if place else ''}{message}") from error

    @contextmanager
    def reading(self, *names: str) -> Generator[None, None, None]:
        """A context for reading named files of the run, whose checksums are verified first.

        Any error inside the context is converted to a `RunError` that names the files.
        """
        for name in names:
            self.manifest.check(name)
        try:
            yield
        except RunError:
            raise
        except Exception as error:  # the tokenizers library raises a plain Exception if a file is invalid
            first = str(error).partition("\n")[0]
            files = " or ".join(str(self.path / name) for name in names if (self.path / name).exists())
            raise RunError(f"{files or self.path / names[0]} cannot be read: {first}") from error

    def save_model(self, model: nn.Module) -> None:
        """Save the final weights."""
        self.manifest.keep(lambda folder: save_model(model, folder / self.model_path.name))

    def load_model(self, model: nn.Module) -> str:
        """Load the final weights into a model, or the best of an interrupted run; return a text that says which."""
        if not self.model_path.is_file():
            return self._load_best(model)
        with self.reading(self.model_path.name):
            load_model(model, self.model_path)
        return "final weights"

    def _load_best(self, model: nn.Module) -> str:
        newest = self.checkpoints.newest(lambda _: None)
        if newest is None:
            raise RunError(f"{self.path} has no model.safetensors and no good checkpoint: its training has not begun")
        with self.reading("config.json"):
            best = newest.state()["course"]["best_step"]
            checkpoint = newest if best is None or best == newest.step else self.checkpoints.at(best)
            put_weights(model, *checkpoint.model())
            for name, tensor in checkpoint.average().items():
                model.get_parameter(name).data.copy_(tensor)
        return f"weights of step {checkpoint.step}: training was interrupted after step {newest.step}"

    def save_result(self, result: Mapping[str, Any]) -> None:
        """Save the final metrics in result.json."""
        self.manifest.write("result.json", _json(result))

    def result(self) -> dict[str, Any]:
        """Return the final metrics, which result.json holds."""
        if not (self.path / "result.json").is_file():
            raise RunError(f"{self.path} has no result.json: its training has not ended")
        return self._read_json("result.json")

    def save_card(self, card: Mapping[str, Any]) -> None:
        """Write the model card, README.md."""
        write_whole(self.path / "README.md", model_card(card))

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """A context in which other processes cannot train in this directory, because this process holds its lock.

        The lock is reentrant: contexts of the same `Run` object may be nested.
        """
        if self._holds:
            yield
            return
        with locked(self.path):
            self._holds.append(None)
            try:
                yield
            finally:
                self._holds.pop()

    def _read_json(self, name: str) -> dict[str, Any]:
        with self.reading(name):
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
            if not isinstance(value, dict):
                raise ValueError(f"expected a JSON object, found {type(value).__name__}")
            return value


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _differences(old: Any, new: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each setting that differs between two configs, by dotted name."""
    if isinstance(old, dict) and isinstance(new, dict):
        differences: dict[str, tuple[Any, Any]] = {}
        for key in {**old, **new}:
            differences |= _differences(old.get(key), new.get(key), f"{name}.{key}" if name else str(key))
        return differences
    return {} if old == new else {name: (old, new)}
