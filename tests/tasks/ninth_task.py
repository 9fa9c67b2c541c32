"""A task in one file: is the sum of some numbers even? Its attention pools the numbers of a row."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.requests import full
from regard.data.records import padded
from regard.look.trace import Trace
from regard.models.classifier import Classifier
from regard.models.recurrent_encoder import RecurrentEncoder
from regard.tasks.config import Settings, TaskConfig, TaskData
from regard.tasks.task import Figure, Input, InputError, Judged, Material, Outcome, Preset, Task, View
from regard.train.settings import TrainSettings

ANSWERS = ("even", "odd")


class Model(Settings):
    size: int = 8
    """Of the states."""


class SumsConfig(TaskConfig):
    task: Literal["sums"] = "sums"
    data: TaskData = TaskData(train=60, valid=6, test=6, longer=0, batch_tokens=60)
    model: Model = Model()
    train: TrainSettings = TrainSettings(steps=4, validate_every=2, warmup=1)


class Codec:
    def save(self, directory: Path) -> None:
        (directory / "codec.json").write_text(json.dumps(ANSWERS))


class Network(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.encoder = RecurrentEncoder(14, size)
        self.classifier = Classifier(2, memory_size=2 * size)

    def forward(self, numbers: Tensor, lengths: Tensor) -> Any:
        return self.classifier(self.encoder(numbers, lengths), weights=full())


@dataclass(frozen=True, eq=False)
class Said:
    answer: str
    digits: str
    weights: Tensor

    @property
    def line(self) -> str:
        return self.answer

    def record(self) -> dict[str, Any]:
        return {"digits": self.digits, "answer": self.answer}

    def trace(self) -> Trace:
        return Trace.from_weights({"attention": self.weights[None]}, rows=[self.answer], columns=list(self.digits))


@dataclass(frozen=True, eq=False)
class Predictor:
    network: Network

    def answers(self, inputs: Sequence[Mapping[str, Any]]) -> list[Said | InputError]:
        return [self._answer(one["digits"]) for one in inputs]

    @torch.no_grad()
    def _answer(self, digits: str) -> Said | InputError:
        if not digits.isdigit():
            return InputError("expected digits")
        batch = padded([_record(digits)], {"digits": 0})
        found = self.network(batch.digits, batch.digits_lengths)
        return Said(ANSWERS[int(found.logits.argmax())], digits, found.weights[0])


def _record(digits: str) -> dict[str, Any]:
    return {"digits": [4 + int(digit) for digit in digits], "label": sum(map(int, digits)) % 2}


def _material(config: SumsConfig, cache: Path, codec: Codec | None, say: Any) -> Material:
    draw = random.Random(config.data.seed)
    rows = ["".join(draw.choices("0123456789", k=draw.randint(1, 5))) for _ in range(72)]
    records = [_record(row) for row in rows[:60]]
    return Material(Codec(), records, [[len(row) for row in rows[:60]]], rows[60:66], rows[66:], [], "digits", rows[0])


def _outcome(network: Network, batch: Any, config: SumsConfig, attention: bool) -> Outcome:
    found = network(batch.digits, batch.digits_lengths)
    weights = [found.weights] if attention else []
    return Outcome(F.cross_entropy(found.logits, batch.label, reduction="sum"), len(batch.label), weights)


def _judge(predictor: Predictor, examples: Sequence[str], config: SumsConfig, explain: bool) -> Judged:
    found = predictor.answers([{"digits": row} for row in examples])
    right = sum(one.answer == ANSWERS[_record(row)["label"]] for one, row in zip(found, examples, strict=True))
    return Judged({"accuracy": right / len(examples)})


SUMS = Task(
    name="sums",
    title="A model of sums",
    about="Whether a sum is even",
    data="none",
    world="rows of digits",
    view=View("Which digits decide", unit="digit"),
    config=SumsConfig,
    presets={"small": Preset("The only one.", SumsConfig)},
    inputs=(Input("digits", "text", "Digits"),),
    figures=(Figure("accuracy", "accuracy", percent=True),),
    material=_material,
    files=lambda config: [],
    codec=lambda directory, config: Codec(),
    codec_files=("codec.json",),
    network=lambda config, codec: Network(config.model.size),
    encode=lambda codec, example, config: _record(example),
    sizes=lambda record: (len(record["digits"]),),
    collate=lambda records, config, **shape: padded(records, {"digits": 0}, **shape),
    outcome=_outcome,
    predictor=lambda network, codec, config: Predictor(network),
    validate=lambda predictor, examples, config: {},
    judge=_judge,
    examples=lambda paths, config, codec: ([], ""),
    asked=lambda example: {"digits": example},
)
