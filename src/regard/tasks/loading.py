"""`regard.load`: a trained run, ready to answer."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from regard.tasks.inputs import named
from regard.tasks.task import InputError, Prediction, Task
from regard.train.run import Run, RunError


@dataclass(frozen=True, eq=False)
class Loaded:
    """A trained run that answers inputs of the kind its task takes.

    `predictor` is the task's own object, such as a `Translator`; `weights` says which weights it has.
    """

    task: Task
    name: str
    config: Any
    predictor: Any
    weights: str

    def predict(self, inputs: Any, **options: Any) -> list[Prediction]:
        """An answer for each input, in their order. Options are the task's own, such as `beam` of a translator.

        An input is text, the path of a file, a pair, or a mapping, as `task.inputs` says. An input that cannot be
        answered is an `InputError` which names it.
        """
        found: list[Prediction] = []
        for place, answer in enumerate(self.answers(inputs, **options)):
            if isinstance(answer, InputError):
                raise InputError(f"input {place}: {answer}") from answer
            found.append(answer)
        return found

    def answers(self, inputs: Any, **options: Any) -> list[Prediction | InputError]:
        """The same, with the error itself in the place of an answer that could not be given."""
        given = [inputs] if isinstance(inputs, (str, bytes, os.PathLike, dict)) else list(_iterable(inputs))
        found: dict[int, Prediction | InputError] = {}
        good: dict[int, dict[str, Any]] = {}
        for place, one in enumerate(given):
            try:
                good[place] = named(self.task.inputs, one)
            except InputError as error:
                found[place] = error
        answered = self.predictor.answers(list(good.values()), **options)
        found |= dict(zip(good, answered, strict=True))
        return [found[place] for place in range(len(given))]


def load(run: str | os.PathLike[str] | Run, *, device: torch.device | str | None = None, **options: Any) -> Loaded:
    """The predictor of a run: of its directory, or of an open `Run`.

    It is on the GPU where there is one, unless `device` names another. Options are the task's own, such as
    `precision` of a translator. A run whose training was interrupted answers with its best checkpoint, and
    `Loaded.weights` says so.
    """
    from regard.tasks.catalog import TASKS

    opened = run if isinstance(run, Run) else Run.open(run)
    name = opened.config().get("task")
    if name not in TASKS:
        raise RunError(f"{opened.path} is a run of the task {name!r}, and there are {', '.join(TASKS)}")
    task = TASKS[name]
    config = task.config.model_validate(opened.config())
    codec = task.codec(opened.path, config)
    network = task.network(config, codec)
    weights = opened.load_model(network)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network.to(place)
    predictor = task.predictor(network.eval(), codec, config, **options)
    return Loaded(task, opened.path.resolve().name, config, predictor, weights)


def _iterable(inputs: Any) -> Iterable[Any]:
    if not isinstance(inputs, Iterable):
        raise TypeError(f"inputs must be a list of inputs, got {type(inputs).__name__}")
    return inputs
