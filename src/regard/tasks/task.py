"""What a task is: a record of functions, from which the command line does everything."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from regard.train.run import Run


class SettingError(ValueError):
    """A setting that does not exist or cannot have that value."""


@dataclass(frozen=True)
class Preset:
    """A named configuration: what it is for, and how it is made."""

    about: str
    make: Callable[[], BaseModel]


@dataclass(frozen=True)
class Task:
    """One use of attention.

    `configure(preset, data, settings)` gives the configuration; `train(config, out, resume, accept_changed_data)`
    trains into a run directory and gives its result; `evaluate(run, data)` gives the same record for other data;
    `predictor(run)` gives something with `predict(texts)`.
    """

    name: str
    about: str
    data: str
    presets: Mapping[str, Preset]
    configure: Callable[[str, Sequence[Path], Mapping[str, str]], Any]
    train: Callable[..., dict[str, Any]]
    evaluate: Callable[[Run, Sequence[Path]], dict[str, Any]]
    predictor: Callable[[Run], Any]
