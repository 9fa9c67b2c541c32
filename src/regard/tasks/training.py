"""Training any task, from its configuration to a run directory that holds everything."""

import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from regard import __version__
from regard.data.records import RecordBatches
from regard.tasks.config import TaskConfig
from regard.tasks.evaluation import judged
from regard.tasks.example_files import store_example
from regard.tasks.learning import asks_attention, loss_of
from regard.tasks.loading import codec_of
from regard.tasks.settings import recorded
from regard.tasks.task import Material, Task
from regard.train.capacity import check_capacity
from regard.train.loop import Fitted, fit
from regard.train.progress import Progress, default_progress
from regard.train.run import Run
from regard.train.updates import Loss

_GRID = 8  # lengths of batches are multiples of it where steps are captured as CUDA graphs
_HELD_OUT_ROWS = 64
CHANGEABLE = ("train.steps", "train.epochs", "train.patience")  # what a run of any task may change when it goes on


def train(
    task: Task,
    config: TaskConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    accept_changed_data: bool = False,
) -> dict[str, Any]:
    """Train into the run directory `out`, evaluate on the test part, and return the result that is written there.

    A run that goes on must find its data files as they were, unless changed data is accepted.
    """
    with Run.training(
        out,
        recorded(task, config),
        resume=resume,
        changeable=(*CHANGEABLE, *task.changeable),
        renewed=lambda stored: _renewed(task, stored),
        inputs=[path.absolute() for path in task.files(config)],
        accept_changed_data=accept_changed_data,
    ) as run:
        return _train(task, config, run, default_progress(_quicker(task, config)) if progress is None else progress)


def _train(task: Task, config: TaskConfig, run: Run, progress: Progress) -> dict[str, Any]:
    began = time.monotonic()
    # Weights belong to the codec they were trained with; without any weights, an interrupted start is begun again.
    known = codec_of(task, config, run) if run.checkpoints.steps() or run.model_path.is_file() else None
    material = task.material(config, run.path / "data", known, progress.say)
    if known is None:
        run.manifest.keep(material.codec.save)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_capacity(lambda: task.network(config, material.codec), device)
    torch.manual_seed(config.train.seed)
    network = task.network(config, material.codec).to(device)
    predictor = task.predictor(network, material.codec, config)
    loss = TaskLoss(task, config, network, device)
    fitted = fit(
        network,
        loss,
        batches(task, config, material),
        run=run,
        settings=config.train,
        held_out=_held_out(task, config, material),
        validate=lambda _: task.validate(predictor, material.valid[: task.validated], config),
        starting=loss.starting,
        progress=progress,
    )
    result = judged(task, config, predictor, material.test, material.longer)
    result |= facts(config, material, network, fitted, time.monotonic() - began)
    result["example"] = store_example(task.inputs, material.example, run)
    run.save_result(result)
    run.save_card({"title": task.title, "about": material.about, **result})
    return result


def _quicker(task: Task, config: TaskConfig) -> str:
    """What takes minutes on a CPU, where the run is on one and is of a larger preset."""
    tiny = task.presets.get("tiny")
    if tiny is None or config.preset == "tiny" or torch.cuda.is_available():
        return ""
    return f"--preset tiny takes {tiny.time or 'minutes'} on a CPU"


class TaskLoss:
    """The task's loss with the penalty and the estimator that the configuration asks for."""

    def __init__(self, task: Task, config: TaskConfig, network: nn.Module, device: torch.device) -> None:
        self._task, self._config, self._device = task, config, device
        self._attention = asks_attention(network, config.learning)
        self._acts = torch.ones((), device=device)

    def starting(self, step: int) -> None:
        """Before an update: after so many steps, does the penalty act?"""
        self._acts.fill_(step >= self._config.learning.penalty_after * self._config.train.steps)

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        outcome = self._task.outcome(model, batch.to(self._device), self._config, self._attention)
        # Validation always counts the penalty: the losses of all checkpoints are then of one kind.
        later = model.training and self._config.learning.penalty_after > 0
        return loss_of(outcome, model, self._config.learning, acts=self._acts if later else True)


def batches(task: Task, config: TaskConfig, material: Material) -> RecordBatches:
    """The training batches, in the order of the configuration's seed."""
    longest = max(int(np.max(column)) for column in material.lengths)  # records of length 1 all have one shape
    return RecordBatches(
        material.records,
        material.lengths,
        collate=lambda records, **shape: task.collate(records, config, **shape),
        tokens=config.data.batch_tokens,
        seed=config.data.seed,
        grid=min(_GRID, longest) if config.train.graphs else 1,
    )


def _held_out(task: Task, config: TaskConfig, material: Material) -> list[Any]:
    records = [task.encode(material.codec, example, config) for example in material.valid]
    records.sort(key=lambda record: task.sizes(record)[-1])
    parts = (records[first : first + _HELD_OUT_ROWS] for first in range(0, len(records), _HELD_OUT_ROWS))
    return [task.collate(part, config) for part in parts]


def _renewed(task: Task, stored: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration as today's version would record it: with the defaults of settings it does not know."""
    try:
        return recorded(task, task.config.model_validate(stored))
    except ValueError:  # of another task, or edited by hand: compared as it is
        return stored


def facts(config: TaskConfig, material: Material, network: nn.Module, fitted: Fitted, seconds: float) -> dict[str, Any]:
    """What a result says about the run beside its figures."""
    return {
        "task": config.task,
        "data": material.about,
        "seconds": round(seconds, 1),
        "training_seconds": round(fitted.seconds, 1),
        "steps": fitted.step,
        "ended": fitted.ended,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "command": " ".join(sys.argv),
        "versions": {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "seed": config.train.seed,
    }
