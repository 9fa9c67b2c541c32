"""Predictions of a trained driving model: the action in a traffic scene with weights of its objects, or a drive."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.core.requests import full
from regard.data.driving.traffic_scenes import SceneError, nearest, parse_scene, stacked
from regard.data.worlds.traffic_expert import ACTIONS, Scenes
from regard.data.worlds.traffic_roads import KINDS
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.tasks.deletion_test import Score
from regard.tasks.driving.codec import DrivingCodec
from regard.tasks.driving.config import DrivingConfig
from regard.tasks.driving.network import Driver
from regard.tasks.driving.replay import Replay, replay, road_of, scene_labels
from regard.tasks.inference import evaluating
from regard.tasks.task import InputError

_ROWS = 2048  # number of scenes per batch
_NAMED = 3  # the largest number of objects that a printed line lists with their weights
_FAINT = 0.05  # printed lines leave out objects with an attention weight below this
_BYTES = 1 << 22  # the largest size of a scene file in bytes


@dataclass(frozen=True, eq=False)
class Decided:
    """The decision in one scene: probabilities of the actions, the steering, and a weight for each object."""

    scene: Scenes  # a batch of one scene
    probabilities: dict[str, float]
    steering: float
    weights: Tensor | None  # shape (objects,), in the order of the scene's objects

    @property
    def answer(self) -> str:
        return next(iter(self.probabilities))

    @property
    def line(self) -> str:
        """Return the action with its probability, and the objects with the largest weights."""
        text = f"{self.answer} {self.probabilities[self.answer]:.2f}"
        if self.weights is None:
            return text
        order = sorted(zip(self.weights.tolist(), self.names, strict=True), key=lambda one: -one[0])
        named = ", ".join(f"{name} {weight:.2f}" for weight, name in order[:_NAMED] if weight >= _FAINT)
        return f"{text}: {named}" if named else text

    @property
    def names(self) -> list[str]:
        """Return the names of the objects: their kind, with a number if there are several objects of that kind."""
        return object_names(self.scene.kind[0])

    def record(self) -> dict[str, Any]:
        """Return the decision as a JSON record, with a weight for each object in the order of the scene."""
        record: dict[str, Any] = {
            "answer": self.answer,
            "probability": self.probabilities[self.answer],
            "actions": self.probabilities,
            "steering": self.steering,
        }
        if self.weights is not None:
            record |= {"objects": self.names, "weights": self.weights.tolist()}
        return record

    def trace(self) -> Trace | None:
        """Return the weights of the objects as a trace with one row; None without attention or without objects."""
        if self.weights is None or not len(self.weights):
            return None
        trace = Trace.from_weights({"objects": self.weights[None, None]}, title=self.line)
        columns = Labels("objects", tuple(self.names), scene_labels([self.scene]))
        trace.label(rows=[self.answer], columns=columns, of="objects")
        return trace


def object_names(kinds: NDArray[np.int64]) -> list[str]:
    """Return the names of objects, given their kinds as indices into `KINDS`.

    >>> object_names(np.array([0, 3, 0]))
    ['car 1', 'pedestrian', 'car 2']
    """
    counts = np.bincount(kinds, minlength=len(KINDS))
    seen = [0] * len(KINDS)
    names = []
    for kind in kinds.tolist():
        seen[kind] += 1
        names.append(f"{KINDS[kind]} {seen[kind]}" if counts[kind] > 1 else KINDS[kind])
    return names


@dataclass(frozen=True, eq=False)
class DrivingPredictor:
    """A trained driving model with its codec and configuration."""

    network: Driver
    codec: DrivingCodec
    config: DrivingConfig

    def answers(self, inputs: Sequence[Mapping[str, Any]]) -> list[Decided | Replay | InputError]:
        """Return one decision for each input, in order; for a scene that cannot be read, an `InputError`.

        An input is a scene, given as a path, JSON text or a mapping. For `{"road": 7}`, the model drives on simulated
        road 7.
        """
        predictions: dict[int, Decided | Replay | InputError] = {}
        scenes: dict[int, Scenes] = {}
        for place, one in enumerate(inputs):
            try:
                value = _read(one["scene"])
                number = road_of(value)
                if number is None:
                    scenes[place] = parse_scene(value)
                else:
                    predictions[place] = replay(self.decide, self.config.data.seed, number, seen=self.codec.objects)
            except (InputError, SceneError) as error:
                predictions[place] = error if isinstance(error, InputError) else InputError(str(error))
        predictions |= dict(zip(scenes, self.ask(list(scenes.values())), strict=True))
        return [predictions[place] for place in range(len(inputs))]

    def ask(self, scenes: Sequence[Scenes]) -> list[Decided]:
        """Return the decision for each scene; each item of `scenes` is a batch of one scene.

        The network's input holds only the nearest objects, at most `codec.objects`; all other objects have weight 0.
        """
        if not scenes:
            return []
        near, orders = zip(*(nearest(one, self.codec.objects) for one in scenes), strict=True)
        chances, steering, weights = self.decide(stacked(near))
        decisions = []
        for row, (scene, order) in enumerate(zip(scenes, orders, strict=True)):
            best = np.argsort(-chances[row], kind="stable")
            named = {ACTIONS[number]: float(chances[row, number]) for number in best}
            own = None
            if weights is not None:
                own = torch.zeros(scene.present.shape[1])
                own[torch.from_numpy(order[0])] = torch.from_numpy(weights[row, : order.shape[1]])
            decisions.append(Decided(scene, named, float(steering[row]), own))
        return decisions

    def decide(self, scenes: Scenes, *, weights: bool = True) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
        """Return probabilities of the actions (n, 3), steering (n,), and weights (n, s) of the s objects in n scenes.

        The weights are None if `weights` is false, or if the network has no attention.
        """
        device = next(self.network.parameters()).device
        objects, present = (torch.from_numpy(part) for part in self.codec.encode(scenes))
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        request = full() if weights else None
        with evaluating(self.network):
            for rows in (slice(first, first + _ROWS) for first in range(0, len(objects), _ROWS)):
                output = self.network(objects[rows].to(device), present[rows].to(device), weights=request)
                maps = output.weights[:, 0, 1:].float().cpu() if isinstance(output.weights, Tensor) else None
                parts.append((output.logits.float().softmax(-1).cpu(), output.controls[:, 0].float().cpu(), maps))
        chances, steering = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        maps = [part[2] for part in parts if part[2] is not None]
        return chances.numpy(), steering.numpy(), torch.cat(maps).numpy() if maps else None

    def policy(self, scenes: Scenes) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the most probable actions (n,) and the steering (n,) in n scenes, as the simulator's policies do."""
        chances, steering, _ = self.decide(scenes, weights=False)
        return chances.argmax(1), steering

    def score_of(self, scene: Scenes, action: int) -> Score:
        """Return a function that computes the log-probability of `action` after objects of the scene are removed."""
        there = np.flatnonzero(scene.present[0])

        def score(mask: Tensor) -> Tensor:
            many = scene.take(np.zeros(len(mask), np.int64))
            present = many.present.copy()
            present[:, there] = mask.numpy()
            parts = (many.ego, many.kind, many.size, many.place, many.velocity, many.heading)
            chances, _, _ = self.decide(Scenes(*parts, present), weights=False)
            return torch.from_numpy(np.log(np.maximum(chances[:, action], 1e-30)))

        return score


def _read(given: Any) -> Any:
    """Return the JSON value of a scene: a mapping unchanged, or parsed from JSON text or a file."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, bytes):
        return _parsed(given.decode("utf-8", "replace"), "the scene")
    text = str(given)
    if text.lstrip().startswith("{"):
        return _parsed(text, "the scene")
    path = Path(text)
    try:
        if path.stat().st_size > _BYTES:
            raise InputError(f"{path} has {path.stat().st_size:,} bytes, at most {_BYTES:,} can be read")
        return _parsed(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # `stat` raises ValueError, for example, if the path contains a null byte
        raise error if isinstance(error, InputError) else InputError(f"{text[:80]!r}: {error}") from None


def _parsed(text: str, name: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}: not JSON: {error.msg} at character {error.colno}") from None
    except RecursionError:
        raise InputError(f"{name}: nested too deeply") from None
    try:
        if road_of(value) is None:
            parse_scene(value)
    except (SceneError, InputError) as error:
        raise InputError(f"{name}: {error}") from None
    return value
