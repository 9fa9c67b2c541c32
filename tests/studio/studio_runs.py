"""Runs for the studio's tests: a translator after a few training steps, a run before its first checkpoint, and runs of
a task that only predicts."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jaxtyping
import torch
from PIL import Image

from regard.look.trace import Trace
from regard.tasks.catalog import TASKS
from regard.tasks.config import TaskConfig
from regard.tasks.config_overrides import configure
from regard.tasks.task import Figure, Input, InputError, Task, View
from regard.tasks.training import train
from regard.train.progress_display import Silent
from regard.train.run_directory import Run, RunError

SETTINGS = {
    "steps": "4", "validate_every": "2", "log_every": "1", "warmup": "2", "data.train": "60", "data.valid": "6",
    "data.test": "6", "longer": "2", "lengths": "[3, 8]", "model.size": "8", "embedding": "8",
}  # fmt: skip


def translator(out: Path, **settings: str) -> Path:
    """Return the run directory of a translator, trained without jaxtyping's checks of shapes and types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        task = TASKS["translation"]
        train(task, configure(task, "tiny", [], {**SETTINGS, **settings}), out, progress=Silent())
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    return out


def beginning(finished: Path, out: Path) -> Path:
    """Return a run directory before its first checkpoint: it has a configuration and the metrics of three steps."""
    run = Run.create(out, Run.open(finished).config())
    for step in range(1, 4):
        run.metrics.add(
            {"kind": "train", "step": step, "epoch": 0, "tokens": 9 * step, "loss": 4.0 / step, "seconds": 1.0}
        )
    return out


@dataclass(frozen=True)
class Seen:
    """A prediction for an input with a picture of `size`; its trace has a column for each column of pixels."""

    answer: str
    size: tuple[int, int]

    def record(self) -> dict[str, Any]:
        return {"answer": self.answer, "probability": 0.875, "size": self.size, "odd": float("nan")}

    def trace(self) -> Trace | None:
        width, height = self.size
        if width == height:
            return None
        weights = {"attention": torch.full((1, 1, width), 1 / width)}
        return Trace.from_weights(weights, title=self.answer, rows=["answer"], columns=[f"x{n}" for n in range(width)])


def task_of(*inputs: Input, name: str = "picture") -> Task:
    """Return a `Task` record with these inputs whose functions for training and evaluation raise an error."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("only asked")

    return Task(
        name=name, title="A picture", about="Questions about pictures", data="", world="", view=View("", unit="column"),
        config=TaskConfig, presets={}, inputs=inputs, figures=(Figure("accuracy", "accuracy", percent=True),),
        material=never, files=never, codec=never, codec_files=(), network=never, encode=never, sizes=never,
        collate=never, outcome=never, predictor=never, validate=never, judge=never, examples=never, asked=never,
    )  # fmt: skip


PICTURE = task_of(Input("image", "image", "Image"), Input("question", "text", "Question"))
SCENE = task_of(Input("scene", "scene", "Scene"), name="road")


@dataclass
class Stub:
    """A stand-in for a trained run, which appends the inputs of each prediction to the list `asked`."""

    name: str = "stub"
    task: Task = PICTURE
    ready: bool = True
    more: Any = None
    asked: list[Mapping[str, Any]] = field(default_factory=list)

    def ask(self, inputs: Mapping[str, Any]) -> Seen:
        if not self.ready:
            raise RunError(f"{self.name} cannot answer yet: its training has written no checkpoint")
        self.asked.append(dict(inputs))
        if inputs.get("question") == "?":
            raise InputError("question has no words")
        if "scene" in inputs:
            return Seen(json.dumps(inputs["scene"]), (2, 2))
        with Image.open(io.BytesIO(inputs["image"])) as picture:
            return Seen(f"{self.name}: {picture.width} pixels wide", picture.size)


def png(width: int = 3, height: int = 2) -> bytes:
    """Return the bytes of a PNG file of a red picture."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()
