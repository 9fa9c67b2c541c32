"""Predictions of a trained camera driver: the controls, a gate for each image cell, and a weight for each frame."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.core.requests import full
from regard.data.data_files import DataError
from regard.data.driving.driving_log import CONTROLS
from regard.data.record_batches import padded
from regard.data.vision.image_files import SUFFIXES, Pixels
from regard.look.trace import Trace
from regard.tasks.driving.camera_material import CameraCodec, CameraExample, Footage, Record, log_of, read_footage
from regard.tasks.driving.camera_network import Camera
from regard.tasks.driving.config import DrivingConfig
from regard.tasks.image_inputs import Grid, cell_labels, read_picture
from regard.tasks.inference import answered, evaluating
from regard.tasks.task import InputError

_ROWS = 64  # number of input records per batch; each record holds several frames


@dataclass(frozen=True, eq=False)
class Steered:
    """The predicted controls at a frame.

    `gates` (t, cells) are the gate values of the image cells and `weights` (t,) the attention weights of the t input
    frames, oldest first. `picture` is the last frame, cropped to the rows that the network uses; `logged` are the
    controls in the driving log, if there is one.
    """

    controls: tuple[float, float, float]
    picture: Pixels
    grid: Grid
    gates: Tensor
    weights: Tensor
    attends: bool = True
    logged: tuple[float, float, float] | None = None

    @property
    def answer(self) -> str:
        return ", ".join(f"{name} {_signed(value)}" for name, value in zip(CONTROLS, self.controls, strict=True))

    @property
    def line(self) -> str:
        """Return the controls as text, with the steering of the driving log if there is one."""
        return self.answer if self.logged is None else f"{self.answer} (logged: steering {_signed(self.logged[0])})"

    @property
    def moments(self) -> list[str]:
        """Return names of the input frames: `now` for the last one, `2 before` for the one two frames earlier."""
        count = len(self.weights)
        return ["now" if back == 0 else f"{back} before" for back in range(count - 1, -1, -1)]

    def record(self) -> dict[str, Any]:
        """Return the controls as a JSON record, with the weight of each frame and the gates of its cells."""
        record: dict[str, Any] = {"answer": self.answer}
        record |= {name: round(value, 4) for name, value in zip(CONTROLS, self.controls, strict=True)}
        if self.logged is not None:
            record["logged"] = dict(zip(CONTROLS, self.logged, strict=True))
        if self.attends:
            gates = [[round(value, 4) for value in row] for row in self.gates.tolist()]
            weights = [round(value, 5) for value in self.weights.tolist()]
            record |= {"frames": self.moments, "weights": weights, "grid": self.grid, "gates": gates}
        return record

    def trace(self) -> Trace | None:
        """Return two attention maps: each frame's gates over the image cells, with sum 1, and the frames' weights."""
        if not self.attends:
            return None
        cells = self.gates / self.gates.sum(-1, keepdim=True).clamp_min(1e-9)
        trace = Trace.from_weights({"where": cells[None], "when": self.weights[None, None]}, title=self.line)
        trace.label(rows=self.moments, columns=cell_labels(self.picture, self.grid), of="where")
        trace.label(rows=[self.answer], columns=self.moments, of="when")
        return trace


def _signed(value: float) -> str:
    """Return a number with two decimals and a Unicode minus sign."""
    text = f"{value + 0.0:.2f}".replace("-0.00", "0.00")
    return text.replace("-", "−")


@dataclass(frozen=True)
class CameraPredictor:
    """A trained `Camera` network with its codec and configuration."""

    network: Camera
    codec: CameraCodec
    config: DrivingConfig
    _cache: dict[str, Footage] = field(default_factory=dict, compare=False, repr=False)

    def answers(self, inputs: Sequence[Mapping[str, Any]]) -> list[Steered | InputError]:
        """Return the controls for each input, in the order of the inputs; for an invalid input, an `InputError`.

        An input is the path of a picture, or of a folder whose pictures are the last frames, ordered by name; in Python
        it may also be a list of paths, oldest first. `{"frame": 12}` is frame 12 of the driving log that the run was
        trained on.
        """

        def read(one: Mapping[str, Any]) -> tuple[Record, Any]:
            try:
                return self._read(one["scene"])
            except DataError as error:
                raise InputError(str(error)) from error

        return answered(inputs, read, self.steer)

    def _read(self, given: Any) -> tuple[Record, Any]:
        """Return the record of an input, and the controls in the driving log, or None for other pictures."""
        if isinstance(given, str) and given.lstrip().startswith("{"):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise InputError(f"not JSON: {error}") from None
        if isinstance(given, Mapping):
            return self._of_log(given)
        if self.config.model.angles:
            raise InputError('this driver needs the angles before each frame: give {"frame": number} of its log')
        if isinstance(given, (list, tuple)):
            if not given or not all(isinstance(one, os.PathLike) for one in given):
                raise InputError("expected paths of frames, oldest first")
            paths: list[Any] = [Path(one) for one in given]
        elif isinstance(given, bytes):
            paths = [given]
        else:
            paths = _pictures(Path(given))
        size = self.codec.height, self.codec.width
        pictures = [read_picture(one, size) for one in paths[-self.codec.seen :]]
        return self.codec.record(pictures, [0.0] * len(pictures), [0.0] * 3), None

    def _of_log(self, given: Mapping[str, Any]) -> tuple[Record, Any]:
        number = given.get("frame")
        if len(given) != 1 or not isinstance(number, int) or isinstance(number, bool):
            raise InputError('expected {"frame": number} or the path of a frame')
        count = len(self._footage.frames)
        if not 0 <= number < count:
            raise InputError(f"expected a frame from 0 to {count - 1:,}, got {number}")
        return self._footage.record(number), self._footage.frames[number].controls

    @property
    def _footage(self) -> Footage:
        """Return the driving log of the run; it is read once and cached."""
        if "log" not in self._cache:
            path = log_of(self.config.data.files)
            self._cache["log"] = read_footage(path, self.codec, skip_faults=self.config.data.skip_faults)
        return self._cache["log"]

    def steer(self, records: Sequence[tuple[Record, Any]]) -> list[Steered]:
        """Return controls with weights and gates, given pairs of an input record and its logged controls (or None)."""
        predictions: list[Steered] = []
        attends = self.network.driver.temporal is not None
        for first in range(0, len(records), _ROWS):
            part = records[first : first + _ROWS]
            controls, gates, weights = self._run([record for record, _ in part])
            for row, (record, logged) in enumerate(part):
                there = int(record["known"][-self.network.driver.frames :].sum())
                steering, throttle, brake = controls[row].tolist()
                picture = np.ascontiguousarray(record["frames"][-1][:, self.network.rows])
                own = gates[row, -there:].flatten(1), weights[row, -there:]
                done = (steering, throttle, brake), picture, self.network.grid, *own
                predictions.append(Steered(*done, attends, logged))
        return predictions

    def controls(self, examples: Sequence[CameraExample]) -> NDArray[np.float32]:
        """Return the predicted controls (n, 3) of examples."""
        parts = []
        for first in range(0, len(examples), _ROWS):
            parts.append(self._run([one.record() for one in examples[first : first + _ROWS]])[0])
        return torch.cat(parts).numpy()

    def _run(self, records: Sequence[Record]) -> tuple[Tensor, Tensor, Tensor]:
        batch = padded(records, {}).to(next(self.network.parameters()).device)
        with evaluating(self.network):
            driven = self.network(batch.frames, batch.known, batch.angles, weights=full())
        assert driven.gates is not None
        assert driven.weights is not None
        return driven.controls.float().cpu(), driven.gates.float().cpu(), driven.weights.float().cpu()


def _pictures(path: Path) -> list[Path]:
    """Return the picture files of a path: the path itself, or the pictures of a folder in the order of their names."""
    if not path.is_dir():
        return [path]
    pictures = sorted(one for one in path.iterdir() if one.suffix.lower() in SUFFIXES)
    if not pictures:
        raise InputError(f"{path}: the folder has no pictures")
    return pictures
