"""Training of any task, from its configuration to a complete run directory."""

import functools
import hashlib
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from regard import __version__
from regard.data.record_batches import RecordBatches
from regard.nn.transformer import Layered, TransformerDecoderLayer, TransformerEncoderLayer
from regard.tasks.attention_learning import asks_attention, loss_of, softened
from regard.tasks.config import TaskConfig
from regard.tasks.config_overrides import recorded
from regard.tasks.evaluation import judged
from regard.tasks.example_files import store_example
from regard.tasks.loading import codec_of
from regard.tasks.task import Material, Task
from regard.train.atomic_files import sha256
from regard.train.distributed import ALONE, Workers
from regard.train.gradient_sums import Uncounted
from regard.train.loop import Fitted, fit
from regard.train.memory_check import check_capacity, count_parameters
from regard.train.progress_display import Progress, Silent, default_progress
from regard.train.run_directory import Run, RunError
from regard.train.updates import Loss

_GRID = 8  # padded lengths are multiples of this number if training steps are captured as CUDA graphs
_HELD_OUT_ROWS = 64
# Settings that may differ from those of the interrupted run when a run of any task is resumed.
CHANGEABLE = ("train.steps", "train.epochs", "train.patience", "train.shard", "train.pieces")


def train(
    task: Task,
    config: TaskConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    accept_changed_data: bool = False,
    workers: Workers = ALONE,
) -> dict[str, Any]:
    """Train a model into the run directory `out`, evaluate it on the test examples, and return its `result.json`.

    The data files of a resumed run must be unchanged, unless `accept_changed_data` is true. With several workers
    (processes), all call this function, with the same configuration and files; the first worker writes the run
    directory, which must be on a file system that all workers share.
    """
    # config.json omits settings without effect, so that a resumed run would have their default values. Therefore the
    # default values are used from the start.
    config = task.config.model_validate(recorded(task, config))
    with ExitStack() as stack:
        with workers.agreed():
            files = [path.absolute() for path in task.files(config)]
            digests = [sha256(path) for path in files] if workers.size > 1 else []
        workers.same("the configuration", recorded(task, config))
        workers.same("the contents of the data files", digests)
        run = Run(out, accept_changed_data)
        with workers.agreed():
            if workers.is_first:
                writing = Run.training(
                    out,
                    recorded(task, config),
                    resume=resume,
                    changeable=(*CHANGEABLE, *task.changeable),
                    renewed=lambda stored: _renewed(task, stored),
                    inputs=files,
                    accept_changed_data=accept_changed_data,
                )
                run = stack.enter_context(writing)
        with workers.agreed():
            if not (out / "config.json").is_file():
                raise RunError(f"{out} is not there: the run must be on a file system that all workers share")
        default = default_progress(_quicker(task, config)) if workers.is_first else Silent()
        return _train(task, config, run, default if progress is None else progress, workers)


def _train(task: Task, config: TaskConfig, run: Run, progress: Progress, workers: Workers) -> dict[str, Any]:
    began = time.monotonic()
    material = _material(task, config, run, progress, workers)
    device = workers.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards = workers.size if config.train.shard else 1
    check_capacity(lambda: task.network(config, material.codec), device, shards=shards)
    torch.manual_seed(config.train.seed)
    network = task.network(config, material.codec).to(device)
    predictor = task.predictor(network, material.codec, config)
    loss = TaskLoss(task, config, network, device)
    fitted = fit(
        network,
        loss,
        batches(task, config, material, workers),
        run=run,
        settings=config.train,
        held_out=_held_out(task, config, material),
        validate=lambda _: task.validate(predictor, material.valid[: task.validated], config),
        starting=loss.starting,
        progress=progress,
        workers=workers,
        layers=gathered_layers,
    )
    with workers.sharing():
        result = judged(task, config, predictor, material.test, material.longer)
    result |= facts(config, material, network, fitted, time.monotonic() - began)
    if workers.grouped:
        result |= {"workers": workers.size, "memory": fitted.memory}
    with workers.agreed():
        if workers.is_first:
            result["example"] = store_example(task.inputs, material.example, run)
            run.save_result(result)
            run.save_card({"title": task.title, "about": material.about, **result})
    return result


def _material(task: Task, config: TaskConfig, run: Run, progress: Progress, workers: Workers) -> Material:
    """Return the training and evaluation data of the run.

    If the data are files, the first worker builds the codec and writes an index; the other workers load codec and
    index.
    """
    # Trained weights need the codec that they were trained with. A run without weights builds its codec again.
    trained = bool(run.checkpoints.steps()) or run.model_path.is_file()

    def make() -> Material:
        written = trained or (bool(config.data.files) and not workers.is_first)
        known = codec_of(task, config, run) if written else None
        material = task.material(config, run.path / "data", known, progress.say)
        if known is None and workers.is_first:
            run.manifest.keep(material.codec.save)
        return material

    material = workers.in_turn(make) if config.data.files else workers.at_once(make)
    if workers.size > 1:
        lengths = [np.ascontiguousarray(column, np.int64) for column in material.lengths]
        workers.same("the training data", [hashlib.sha256(column.data).hexdigest() for column in lengths])
    return material


@functools.cache
def _in_trees() -> None:
    """Register `Layered`, the output of a Transformer layer, as a pytree, so that FSDP2 finds the tensors in it."""
    from torch.export import register_dataclass

    register_dataclass(Layered)


def gathered_layers(network: nn.Module) -> Iterator[nn.Module]:
    """Return the layers that FSDP2 gathers one at a time; all other parameters stay gathered for the whole step."""
    _in_trees()
    return (one for one in network.modules() if isinstance(one, TransformerEncoderLayer | TransformerDecoderLayer))


def _quicker(task: Task, config: TaskConfig) -> str:
    """Return a hint that `--preset tiny` trains in minutes, if this run uses another preset on a CPU; else ""."""
    tiny = task.presets.get("tiny")
    if tiny is None or config.preset == "tiny" or torch.cuda.is_available():
        return ""
    return f"--preset tiny takes {tiny.time or 'minutes'} on a CPU"


class TaskLoss:
    """Computes the task's loss, with the configured penalty on attention weights and estimator of hard attention."""

    def __init__(self, task: Task, config: TaskConfig, network: nn.Module, device: torch.device) -> None:
        self._task, self._config, self._device = task, config, device
        self._attention = asks_attention(network, config.learning)
        self._acts = torch.ones((), device=device)
        self._expected = torch.ones((), device=device)
        if config.learning.hard_after:
            softened(network, self._expected)

    def starting(self, step: int) -> None:
        """Activate the penalty and the sampling of hard attention if `step` has reached their configured steps.

        The training loop calls this before each update.
        """
        learning, steps = self._config.learning, self._config.train.steps
        self._acts.fill_(step >= learning.penalty_after * steps)
        if learning.hard_after:
            expected = learning.expected if learning.estimator == "reinforce" else 0.0
            self._expected.fill_(expected if step >= learning.hard_after * steps else 1.0)

    def __call__(self, model: nn.Module, batch: Any) -> Loss:
        outcome = self._task.outcome(model, batch.to(self._device), self._config, self._attention)
        # The validation loss always includes the penalty, so that the losses of all checkpoints are comparable.
        later = model.training and self._config.learning.penalty_after > 0
        return loss_of(outcome, model, self._config.learning, acts=self._acts if later else True)


def batches(task: Task, config: TaskConfig, material: Material, workers: Workers = ALONE) -> RecordBatches:
    """Return the training batches, in an order that `config.data.seed` determines.

    With several workers (processes), each worker gets a share of the rows of each batch.
    """
    # Records whose inputs have a fixed size, such as images, have length 1. With a `grid` of 8, lengths are rounded up
    # to 8, so that each of these records would count as 8 tokens.
    longest = max(int(np.max(column)) for column in material.lengths)
    return RecordBatches(
        material.records,
        material.lengths,
        collate=lambda records, **shape: task.collate(records, config, **shape),
        tokens=config.data.batch_tokens,
        seed=config.data.seed,
        grid=min(_GRID, longest) if config.train.graphs else 1,
        rank=workers.rank,
        ranks=workers.size,
        idle=Uncounted,
    )


def _held_out(task: Task, config: TaskConfig, material: Material) -> list[Any]:
    records = [task.encode(material.codec, example, config) for example in material.valid]
    records.sort(key=lambda record: task.sizes(record)[-1])
    parts = (records[first : first + _HELD_OUT_ROWS] for first in range(0, len(records), _HELD_OUT_ROWS))
    return [task.collate(part, config) for part in parts]


def _renewed(task: Task, stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored configuration in the current format, with defaults for missing settings."""
    try:
        return recorded(task, task.config.model_validate(stored))
    except ValueError:  # `stored` is of another task or was edited by hand: it is returned unchanged
        return stored


def facts(config: TaskConfig, material: Material, network: nn.Module, fitted: Fitted, seconds: float) -> dict[str, Any]:
    """Return the entries of `result.json` that describe the run, such as its duration, versions, device and seed."""
    return {
        "task": config.task,
        "data": material.about,
        "seconds": round(seconds, 1),
        "training_seconds": round(fitted.seconds, 1),
        "steps": fitted.step,
        "ended": fitted.ended,
        "parameters": count_parameters(network),
        "command": " ".join(sys.argv),
        "versions": {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "seed": config.train.seed,
    }
