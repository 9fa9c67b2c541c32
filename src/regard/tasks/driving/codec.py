"""Converts traffic scenes to input features of the network, with settings that are stored with each model."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.worlds.traffic_expert import Scenes
from regard.data.worlds.traffic_roads import KINDS

FILE = "codec.json"
_NUMBERS = 15


@dataclass(frozen=True)
class DrivingCodec:
    """Encodes scenes as features, with the kinds of objects and the largest number of objects in an input."""

    kinds: tuple[str, ...] = KINDS
    objects: int = 12

    @property
    def features(self) -> int:
        """Return the number of features of an object: its kind, position and motion, and the ego vehicle's state."""
        return 1 + len(self.kinds) + _NUMBERS

    def encode(self, scenes: Scenes) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return n scenes of s objects as features (n, 1 + s, features), the ego vehicle first, with a mask (n, 1 + s).

        The mask is True for rows that hold the ego vehicle or an object, and False for padding.
        """
        count, most = scenes.present.shape
        x, y, heading, speed, limit = scenes.ego.T
        features = np.zeros((count, 1 + most, self.features), np.float32)
        features[:, 0, 0] = 1.0
        for number in range(len(self.kinds)):
            features[:, 1:, 1 + number] = scenes.kind == number
        own = np.stack([speed / 10, y / 2, heading * 8, limit / 10, (speed - limit) / 2], -1)
        features[:, :, -5:] = own[:, None]
        features[:, 1:, 1 + len(self.kinds) : -5] = self._relative(scenes, x[:, None], y[:, None], speed[:, None])
        present = np.concatenate([np.ones((count, 1), bool), scenes.present], 1)
        return np.where(present[..., None], features, 0), present

    def _relative(self, scenes: Scenes, x: NDArray[Any], y: NDArray[Any], speed: NDArray[Any]) -> NDArray[Any]:
        """Return features relative to the ego vehicle: coarse and fine distances, velocities, sizes, lateral gaps."""
        ahead, beside = scenes.place[..., 0] - x, scenes.place[..., 1] - y
        along, across = scenes.velocity[..., 0], scenes.velocity[..., 1]
        extent = scenes.extent
        edge = np.abs(beside) - extent[..., 1] / 2
        numbers = [ahead / 30, np.tanh(ahead / 10), beside / 8, np.tanh(beside / 2), (along - speed) / 10, along / 10]
        numbers += [across / 3, extent[..., 0] / 5, extent[..., 1] / 2, np.tanh(edge)]
        return np.stack(numbers, -1)

    def save(self, directory: Path) -> None:
        (directory / FILE).write_text(json.dumps({"input": "objects", **asdict(self)}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "DrivingCodec":
        facts = json.loads((directory / FILE).read_text(encoding="utf-8"))
        return cls(tuple(map(str, facts["kinds"])), int(facts["objects"]))
