"""Two small tasks for the tests of pictures as inputs: the brightness of a picture, and a question about it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.record_batches import padded
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.tasks.config import TaskConfig, TaskData
from regard.tasks.image_inputs import cell_labels, read_picture, scaled
from regard.tasks.task import Figure, Input, InputError, Judged, Material, Outcome, Preset, Task, View
from regard.train.train_settings import TrainSettings

ANSWERS = ("dark", "bright")
SIZE = (16, 16)


class BrightConfig(TaskConfig):
    task: Literal["bright", "asked"] = "bright"
    data: TaskData = TaskData(train=12, valid=2, test=2, longer=0, batch_tokens=400)
    train: TrainSettings = TrainSettings(steps=2, validate_every=2, warmup=1)


class Codec:
    def save(self, directory: Path) -> None:
        (directory / "codec.json").write_text(json.dumps(ANSWERS))


class Network(nn.Module):
    """Classifies a picture by the mean brightness of each of its four cells."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 2)

    def forward(self, cells: Tensor) -> Tensor:
        return self.classifier(cells)


@dataclass(frozen=True, eq=False)
class Seen:
    answer: str
    pixels: np.ndarray
    weights: Tensor

    @property
    def line(self) -> str:
        return self.answer

    def record(self) -> dict[str, Any]:
        """Return the answer with the mean colours of the four cells, so that a test can check the input picture."""
        means = self.pixels.reshape(3, 2, 8, 2, 8).mean((2, 4)).round().astype(int)
        return {"answer": self.answer, "cells": means.reshape(3, 4).T.tolist()}

    def trace(self) -> Trace:
        rows = Labels("tokens", (self.answer, "."), {"probability": [0.75, 1.0]})
        weights = self.weights.softmax(-1).expand(1, 2, 4)
        return Trace.from_weights({"map": weights}, rows=rows, columns=cell_labels(self.pixels, (2, 2)))


def _cells(pixels: np.ndarray) -> Tensor:
    return F.adaptive_avg_pool2d(scaled(torch.as_tensor(pixels)[None]).mean(1, keepdim=True), 2).flatten()


@dataclass(frozen=True, eq=False)
class Predictor:
    network: Network

    def answers(self, inputs: Sequence[Mapping[str, Any]]) -> list[Seen | InputError]:
        return [self._answer(**one) for one in inputs]

    @torch.no_grad()
    def _answer(self, image: Any, question: str = "bright?") -> Seen | InputError:
        try:
            pixels = read_picture(image, SIZE)
        except InputError as error:
            return error
        if not question.strip():
            return InputError("question has no words")
        cells = _cells(pixels)
        found = self.network(cells[None])
        return Seen(f"{ANSWERS[int(found.argmax())]} ({question})", pixels, cells)


def picture(level: int) -> np.ndarray:
    """Return pixels (3, 16, 16) whose brightness increases from 0 at the left to `level` at the right."""
    return np.broadcast_to(np.linspace(0, level, 16).astype(np.uint8), (3, *SIZE)).copy()


def _record(example: np.ndarray) -> dict[str, Any]:
    return {"cells": _cells(example).tolist(), "label": int(example.mean() > 64)}


def _material(config: BrightConfig, cache: Path, codec: Codec | None, say: Any) -> Material:
    rows = [picture(15 * n) for n in range(16)]
    begin = {"image": rows[9], "question": "bright?"} if config.task == "asked" else rows[9]
    records = [_record(row) for row in rows[:12]]
    return Material(Codec(), records, [[4] * 12], rows[12:14], rows[14:], [], "pictures", begin)


def _collate(records: Sequence[dict[str, Any]], config: BrightConfig, **shape: Any) -> Any:
    return padded([{**one, "cells": torch.tensor(one["cells"])} for one in records], {"cells": 0.0}, **shape)


def _outcome(network: Network, batch: Any, config: BrightConfig, attention: bool) -> Outcome:
    return Outcome(F.cross_entropy(network(batch.cells[:, :4]), batch.label, reduction="sum"), len(batch.label))


BRIGHT = Task(
    name="bright",
    title="A model of brightness",
    about="Whether a picture is bright",
    data="none",
    world="grey pictures",
    view=View("Which cells decide", unit="cell"),
    config=BrightConfig,
    presets={"small": Preset("The only one.", BrightConfig)},
    inputs=(Input("image", "image", "Picture"),),
    figures=(Figure("accuracy", "accuracy", percent=True),),
    material=_material,
    files=lambda config: [],
    codec=lambda directory, config: Codec(),
    codec_files=("codec.json",),
    network=lambda config, codec: Network(),
    encode=lambda codec, example, config: _record(example),
    sizes=lambda record: (4,),
    collate=_collate,
    outcome=_outcome,
    predictor=lambda network, codec, config: Predictor(network),
    validate=lambda predictor, examples, config: {},
    judge=lambda predictor, examples, config, explain: Judged({"accuracy": 0.5}),
    examples=lambda paths, config, codec: ([], ""),
    asked=lambda example: {"image": b""},
)
ASKED = replace(
    BRIGHT,
    name="asked",
    presets={"small": Preset("The only one.", lambda: BrightConfig(task="asked"))},
    inputs=(*BRIGHT.inputs, Input("question", "text", "Question")),
)
