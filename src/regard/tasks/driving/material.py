"""Training and evaluation data of driving from objects: simulated drives, or the user's scenes with decisions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.data_files import DataError, only_path
from regard.data.driving.traffic_scenes import load_scenes, scene_files, scene_json
from regard.data.worlds.traffic import Recorded, record
from regard.data.worlds.traffic_expert import Decisions
from regard.tasks.driving.codec import DrivingCodec
from regard.tasks.driving.config import DataSettings, DrivingConfig
from regard.tasks.task import Material

# The first road number of each split. Training roads have the last numbers, because there are most of them.
_TESTED, _VALIDATED, _BUSY, _TRAINED = 0, 200_000, 300_000, 400_000
_REPLAYED = 4  # every fourth test example is displayed as a drive of the model instead of a single scene


@dataclass(frozen=True)
class Example:
    """Scene number `place` of `recorded`; with `road`, a drive of the model on that simulated road.

    `world` is true for scenes of the simulator with normal traffic, for which simulated drives are evaluated too.
    """

    recorded: Recorded = field(repr=False, compare=False)
    place: int
    world: bool = False
    road: int | None = None

    @property
    def forced(self) -> NDArray[np.bool_]:
        """Return the mask of the objects without which the expert's decision would differ."""
        return self.recorded.decisions.forced[self.place]

    @property
    def inputs(self) -> dict[str, Any]:
        if self.road is not None:
            return {"scene": {"road": self.road}}
        return {"scene": scene_json(self.recorded.scenes, self.place)}


def gathered(examples: Sequence[Example]) -> Recorded:
    """Return the scenes and decisions of examples; all examples must be from the same `Recorded`."""
    recorded = examples[0].recorded
    return _part(recorded, np.array([one.place for one in examples]))


class Records(Sequence[dict[str, Any]]):
    """Training records: features of scenes with the decisions."""

    def __init__(self, codec: DrivingCodec, recorded: Recorded) -> None:
        self._features, self._present = codec.encode(recorded.scenes)
        self._decisions = recorded.decisions

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, number: Any) -> Any:
        return {
            "objects": self._features[number],
            "present": self._present[number],
            "action": self._decisions.action[number],
            "steering": self._decisions.steering[number],
        }


def make_material(
    config: DrivingConfig, cache: Path, codec: DrivingCodec | None, say: Callable[[str], None]
) -> Material:
    """Return the training and evaluation data of a run; `cache` is not used."""
    codec = codec or DrivingCodec(objects=config.data.objects)
    return _files(config.data, codec, say) if config.data.files else _world(config.data, codec)


def _world(settings: DataSettings, codec: DrivingCodec) -> Material:
    """Return simulated scenes; in half of the training scenes an object forces the expert's decision."""
    seed, seen = settings.seed, codec.objects
    train = record(seed, settings.train, first=_TRAINED, seen=seen)
    valid = record(seed, settings.valid, first=_VALIDATED, seen=seen, even=False)
    test = record(seed, settings.test, first=_TESTED, seen=seen, even=False)
    longer: list[Example] = []
    if settings.longer:
        busy = record(seed, settings.longer, first=_BUSY, seen=seen, busy=2.0, even=False)
        longer = _examples(busy, world=False)
    about = f"{len(train.roads):,} scenes of drives in the built-in world"
    return _material(codec, train, _examples(valid), _examples(test), longer, about)


def _files(settings: DataSettings, codec: DrivingCodec, say: Callable[[str], None]) -> Material:
    scenes = load_scenes(_path(settings.files), seen=codec.objects)
    say(str(scenes.report))
    if scenes.train is None or len(scenes.train.roads) < 3:
        raise DataError(f"{settings.files[0]}: expected at least 3 scenes to train on")
    train, valid, test = scenes.train, scenes.valid, scenes.test
    order = np.random.Generator(np.random.PCG64([settings.seed])).permutation(len(train.roads))
    most = max(1, len(order) // 5)
    if valid is None:
        valid, order = _held(train, order, min(settings.valid, most))
    if test is None:
        test, order = _held(train, order, min(settings.test, most))
    train = _part(train, np.sort(order))
    about = f"{len(train.roads):,} scenes of {settings.files[0]}"
    return _material(codec, train, _examples(valid, world=False), _examples(test, world=False), [], about)


def _held(recorded: Recorded, order: NDArray[np.int64], count: int) -> tuple[Recorded, NDArray[np.int64]]:
    return _part(recorded, np.sort(order[:count])), order[count:]


def _part(recorded: Recorded, rows: NDArray[np.int64]) -> Recorded:
    decided = recorded.decisions
    decisions = Decisions(decided.action[rows], decided.steering[rows], decided.forced[rows])
    return Recorded(recorded.scenes.take(rows), decisions, recorded.roads[rows], recorded.steps[rows])


def _path(files: Sequence[Path]) -> Path:
    return only_path(files, "file or folder of scenes")


def _examples(recorded: Recorded, *, world: bool = True) -> list[Example]:
    return [Example(recorded, place, world) for place in range(len(recorded.roads))]


def _material(
    codec: DrivingCodec,
    train: Recorded,
    valid: list[Example],
    test: list[Example],
    longer: list[Example],
    about: str,
) -> Material:
    records = Records(codec, train)
    begin = next((one for one in test if one.forced.any()), test[0])
    shown = [
        Example(one.recorded, one.place, True, place // _REPLAYED) if one.world and place % _REPLAYED == 0 else one
        for place, one in enumerate(test)
    ]
    lengths = np.ones(len(records), np.int32)
    return Material(codec, records, [lengths], valid, shown, longer, about, begin.inputs)


def encode(codec: DrivingCodec, example: Example) -> dict[str, Any]:
    return Records(codec, gathered([example]))[0]


def input_files(config: DrivingConfig) -> list[Path]:
    return list(scene_files(_path(config.data.files)).values()) if config.data.files else []


def examples_of(paths: Sequence[Path], config: DrivingConfig, codec: DrivingCodec) -> tuple[list[Example], str]:
    """Return the scenes of other files as examples; for a folder with several parts, the scenes of its test part."""
    scenes = load_scenes(_path(paths), seen=codec.objects)
    part = scenes.test or scenes.valid or scenes.train
    assert part is not None
    return _examples(part, world=False), f"{paths[0]}: {scenes.report}"
