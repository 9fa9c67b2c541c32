"""`regard.load`, which returns the predictor of a trained run."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from regard.tasks.config import TaskConfig
from regard.tasks.inputs import named
from regard.tasks.task import InputError, Material, Prediction, SettingError, Task
from regard.train.distributed import in_shares
from regard.train.run_directory import Run, RunError


@dataclass(frozen=True, eq=False, repr=False)
class Loaded:
    """A trained run with its predictor, which computes predictions for inputs of the run's task.

    `predictor` has a class of the task's own, such as `Translator`; `weights` is the name of the loaded weights, such
    as a checkpoint.
    """

    task: Task
    run: Run
    config: Any
    codec: Any
    predictor: Any
    weights: str

    def __repr__(self) -> str:
        return f"Loaded({self.task.name} of {self.run.path}, {self.weights})"

    @property
    def name(self) -> str:
        return self.run.path.resolve().name

    def predict(self, inputs: Any, **options: Any) -> list[Prediction]:
        """Return one prediction for each input, in the order of the inputs.

        An input is text, the path of a file, a pair, or a mapping, as `task.inputs` declares. `options` depend on the
        task; a translator, for example, has the option `beam`. If no prediction can be computed for an input, an
        `InputError` gives its index and the reason.
        """
        predictions: list[Prediction] = []
        for place, answer in enumerate(self.answers(inputs, **options)):
            if isinstance(answer, InputError):
                raise InputError(f"input {place}: {answer}") from answer
            predictions.append(answer)
        return predictions

    def answers(self, inputs: Any, **options: Any) -> list[Prediction | InputError]:
        """Return one prediction for each input, in order; if it cannot be computed, an `InputError` instead."""
        unknown = [name for name in options if name not in self.task.options]
        if unknown:
            known = ", ".join(self.task.options) or "none"
            raise SettingError(f"{self.task.name} has no option {unknown[0]!r}: there is {known}")
        given = [inputs] if isinstance(inputs, (str, bytes, os.PathLike, dict)) else list(_iterable(inputs))
        predictions: dict[int, Prediction | InputError] = {}
        good: dict[int, dict[str, Any]] = {}
        for place, one in enumerate(given):
            try:
                good[place] = named(self.task.inputs, one)
            except InputError as error:
                predictions[place] = error
        answered = in_shares(list(good.values()), lambda part: self.predictor.answers(part, **options))
        predictions |= dict(zip(good, answered, strict=True))
        return [predictions[place] for place in range(len(given))]


def load(run: str | os.PathLike[str] | Run, *, device: torch.device | str | None = None, **options: Any) -> Loaded:
    """Load a trained run, given as its directory or as an open `Run`, and return its predictor.

    The network is on the GPU if there is one, unless `device` names another device. `options` depend on the task; a
    translator, for example, has the option `precision`. If training was interrupted, the best checkpoint is loaded,
    which `Loaded.weights` names.
    """
    opened = run if isinstance(run, Run) else Run.open(run)
    task = task_of(opened)
    unknown = [name for name in options if name not in task.loading]
    if unknown:
        known = ", ".join(task.loading) or "none"
        raise SettingError(f"{task.name} has no option {unknown[0]!r} when it is loaded: there is {known}")
    config = opened.config_as(task.config)
    codec = codec_of(task, config, opened)
    network = task.network(config, codec)
    weights = opened.load_model(network)
    if task.loaded is not None:
        predictor = task.loaded(network.eval(), codec, config, device, **options)
    else:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        predictor = task.predictor(network.eval().to(place), codec, config)
    return Loaded(task, opened, config, codec, predictor, weights)


def task_of(run: Run) -> Task:
    """Return the task whose name is in the run's config.json."""
    from regard.tasks.catalog import TASKS

    name = run.config().get("task")
    if not isinstance(name, str) or name not in TASKS:
        raise RunError(f"{run.path / 'config.json'}: no task is called {name!r}: the tasks are {', '.join(TASKS)}")
    return TASKS[name]


def codec_of(task: Task, config: TaskConfig, run: Run) -> Any:
    """Return the codec that a run was trained with; the message of an error names the damaged file."""
    with run.reading(*task.codec_files):
        return task.codec(run.path, config)


def material_of(task: Task, config: TaskConfig, run: Run, codec: Any) -> Material:
    """Return the data of a trained run; its data files must be unchanged since training started."""
    files = [path.absolute() for path in task.files(config)]
    run.check_inputs(files, "give the files to evaluate on with --data")
    return task.material(config, run.path / "data", codec, lambda _: None)


def _iterable(inputs: Any) -> Iterable[Any]:
    if not isinstance(inputs, Iterable):
        raise TypeError(f"inputs must be a list of inputs, got {type(inputs).__name__}")
    return inputs
