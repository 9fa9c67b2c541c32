"""Who else may hear the figures of a run: TensorBoard and Trackio, where they are installed."""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

# Gets every line of `metrics.jsonl` as it is written.
Listener = Callable[[Mapping[str, Any]], None]

_COUNTED = ("kind", "step", "epoch", "tokens", "seconds")


def tensorboard(folder: str | os.PathLike[str]) -> Listener:
    """Writes each figure as a TensorBoard scalar: `train/loss`, `validation/bleu` and so on."""
    writer = _load("torch.utils.tensorboard", "tensorboard").SummaryWriter(os.fspath(folder))

    def listen(record: Mapping[str, Any]) -> None:
        for name, value in _scalars(record).items():
            writer.add_scalar(name, value, record["step"])
        writer.flush()

    return listen


def trackio(project: str, name: str) -> Listener:
    """Sends each record to a local Trackio dashboard."""
    module = _load("trackio", "trackio")
    module.init(project=project, name=name)

    def listen(record: Mapping[str, Any]) -> None:
        module.log(_scalars(record), step=record["step"])

    return listen


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    figures = {name: value for name, value in record.items() if name not in _COUNTED}
    return {f"{record['kind']}/{name}": float(value) for name, value in figures.items() if value is not None}


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this needs the package {package}: pip install {package}") from error
