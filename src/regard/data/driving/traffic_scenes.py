"""Reader and writer of traffic scenes as JSON: one scene per line, with the driver's action.

A scene is `{"ego": {"speed": 10, "limit": 12}, "objects": [{"kind": "car", "x": 20, "y": 0, "heading": 0, "speed": 4}],
"action": "brake", "steering": 0.0, "forced": [0]}`: the ego vehicle, the other objects, the driver's action and
steering, and the indices of the objects that force this action. docs/driving.md explains the fields.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.data_files import DataError
from regard.data.json_records import records
from regard.data.text.parallel_text import Report, report
from regard.data.vision.image_folders import PARTS, part_files
from regard.data.worlds.traffic import Recorded
from regard.data.worlds.traffic_expert import ACTIONS, Decisions, Scenes
from regard.data.worlds.traffic_roads import KINDS, SIZES

SUFFIXES = (".jsonl", ".json")
# The fields of the ego vehicle with their default values; None marks a required field.
_EGO = {"x": 0.0, "y": 0.0, "heading": 0.0, "speed": None, "limit": None}
_OBJECT = ("x", "y", "heading", "speed")
_LARGEST = 1e5  # the largest absolute value that a number in a scene may have
_MOST = 1000  # the largest number of objects that a scene may have


class SceneError(ValueError):
    """Raised if a traffic scene in JSON is invalid; the message names the field."""


def parse_scene(value: Any) -> Scenes:
    """Return a batch of one scene, with all of its objects, from parsed JSON; an invalid scene raises `SceneError`.

    >>> scene = parse_scene({"ego": {"speed": 9, "limit": 12}, "objects": []})
    >>> scene.ego.tolist(), scene.present.shape
    ([[0.0, 0.0, 0.0, 9.0, 12.0]], (1, 0))
    """
    if not isinstance(value, Mapping):
        raise SceneError(f"expected a scene with ego and objects, got {type(value).__name__}")
    ego, objects = value.get("ego"), value.get("objects")
    if not isinstance(ego, Mapping) or not isinstance(objects, list):
        raise SceneError(f"expected the fields ego and objects; the scene has {_names(value)}")
    if len(objects) > _MOST:
        raise SceneError(f"{len(objects):,} objects: at most {_MOST:,} are read")
    own = [_number(ego, name, "ego", default) for name, default in _EGO.items()]
    if own[3] < 0 or own[4] <= 0:
        raise SceneError(f"ego: speed must be at least 0 and limit above 0, got {own[3]:g} and {own[4]:g}")
    rows = [_object(item, number) for number, item in enumerate(objects)]
    kind = np.array([[row[0] for row in rows]], np.int64).reshape(1, -1)
    numbers = np.array([row[1:] for row in rows], float).reshape(1, len(rows), 6)
    x, y, heading, speed, length, width = np.moveaxis(numbers, -1, 0)
    velocity = np.stack([speed * np.cos(heading), speed * np.sin(heading)], -1)
    size, place = np.stack([length, width], -1), np.stack([x, y], -1)
    return Scenes(np.array([own]), kind, size, place, velocity, heading, np.ones_like(kind, bool))


def parse_decision(value: Mapping[str, Any], objects: int) -> tuple[int, float, list[int]]:
    """Return the driver's decision: the action's index, the steering, and the indices of the objects that force it.

    `value` is a scene as parsed JSON, `objects` its number of objects. The fields `steering` (0 by default) and
    `forced` (none by default) are optional. An invalid field raises `SceneError`.
    """
    action = value.get("action")
    if action not in ACTIONS:
        raise SceneError(f"action must be one of {', '.join(ACTIONS)}, got {action!r}")
    steering = _number(value, "steering", "the scene", 0.0)
    if not -1 <= steering <= 1:
        raise SceneError(f"steering must be from -1 (left) to 1, got {steering:g}")
    forced = value.get("forced", [])
    numbers = [n for n in forced if isinstance(n, int) and 0 <= n < objects] if isinstance(forced, list) else None
    if numbers is None or len(numbers) != len(forced):
        raise SceneError(f"forced must be a list of numbers of objects, from 0 to {objects - 1}, got {forced!r}")
    return ACTIONS.index(action), steering, numbers


def _object(value: Any, number: int) -> list[float]:
    name = f"object {number}"
    if not isinstance(value, Mapping):
        raise SceneError(f"{name}: expected kind, {', '.join(_OBJECT)}, got {type(value).__name__}")
    kind = value.get("kind")
    if kind not in KINDS:
        raise SceneError(f"{name}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    numbers = [_number(value, field, name, None) for field in _OBJECT]
    sizes = [_number(value, *one) for one in zip(("length", "width"), (name, name), SIZES[kind], strict=True)]
    if min(sizes) <= 0 or numbers[3] < 0:
        raise SceneError(f"{name}: length and width must be above 0, speed at least 0")
    return [float(KINDS.index(kind)), *numbers, *sizes]


def _number(fields: Mapping[str, Any], name: str, where: str, default: float | None) -> float:
    value = fields.get(name, default)
    if value is None:
        raise SceneError(f"{where}: the field {name} is missing; the fields are {_names(fields)}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SceneError(f"{where}: {name} must be a number, got {value!r}")
    if not math.isfinite(value) or abs(value) > _LARGEST:
        raise SceneError(f"{where}: {name} must be a finite number of at most {_LARGEST:g}, got {value}")
    return float(value)


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(map(str, list(fields)[:8])) or "no fields"


def scene_json(scenes: Scenes, row: int) -> dict[str, Any]:
    """Return one scene of a batch as a dictionary that can be written as JSON."""
    names = ("x", "y", "heading", "speed", "limit")
    record: dict[str, Any] = {"ego": {name: _short(value) for name, value in zip(names, scenes.ego[row], strict=True)}}
    record["objects"] = [
        {
            "kind": KINDS[scenes.kind[row, n]],
            "x": _short(scenes.place[row, n, 0]),
            "y": _short(scenes.place[row, n, 1]),
            "heading": _short(scenes.heading[row, n]),
            "speed": _short(np.hypot(*scenes.velocity[row, n])),
        }
        for n in np.flatnonzero(scenes.present[row])
    ]
    return record


def _short(value: float) -> float:
    return round(float(value), 3) + 0.0  # adding 0.0 turns −0.0 into 0.0


def decided_json(recorded: Recorded, row: int) -> dict[str, Any]:
    """Return one scene of a batch with its decision as a dictionary that can be written as JSON."""
    decisions = recorded.decisions
    there = np.flatnonzero(recorded.scenes.present[row])
    return {
        **scene_json(recorded.scenes, row),
        "action": ACTIONS[decisions.action[row]],
        "steering": _short(decisions.steering[row]),
        "forced": np.flatnonzero(decisions.forced[row][there]).tolist(),
    }


def write_scenes(path: Path, recorded: Recorded) -> None:
    """Write scenes with their decisions to a JSONL file that `load_scenes` can read."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(decided_json(recorded, row)) + "\n" for row in range(len(recorded.roads)))


def nearest(scenes: Scenes, most: int) -> tuple[Scenes, np.ndarray]:
    """Return the scenes with only the `most` objects nearest to the ego vehicle, and the indices of these objects.

    A scene with fewer than `most` objects is padded with absent ones.
    """
    apart = scenes.place - scenes.ego[:, None, :2]
    far = np.where(scenes.present, np.hypot(apart[..., 0], apart[..., 1]), np.inf)
    order = np.argsort(far, 1, kind="stable")[:, :most]
    rows = np.arange(len(scenes))[:, None]
    parts = (scenes.kind, scenes.size, scenes.place, scenes.velocity, scenes.heading, scenes.present)
    selected = [_wide(part[rows, order], most) for part in parts]
    return Scenes(scenes.ego, *selected), order


def _wide(values: np.ndarray, most: int) -> np.ndarray:
    """Return an array (scenes, objects, …) padded with zeros to at least `most` objects."""
    missing = most - values.shape[1]
    return np.pad(values, [(0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)]) if missing > 0 else values


def stacked(scenes: Sequence[Scenes]) -> Scenes:
    """Return batches of scenes concatenated to one batch; all must be padded to the same number of objects."""
    names = ("ego", "kind", "size", "place", "velocity", "heading", "present")
    return Scenes(*(np.concatenate([getattr(one, name) for one in scenes]) for name in names))


@dataclass(frozen=True, slots=True)
class SceneFiles:
    """Scenes for training, validation and test; all are in `train` if the files define no such split.

    `report` counts the scenes read and kept.
    """

    train: Recorded | None
    valid: Recorded | None
    test: Recorded | None
    report: Report


def scene_files(path: Path) -> dict[str, Path]:
    """Return the data file of each split ("train", "valid", "test"); a single file is the split "train"."""
    return part_files(Path(path), "scenes", SUFFIXES)


def load_scenes(path: Path, *, seen: int) -> SceneFiles:
    """Return the scenes with their decisions from a JSON or JSONL file, or a folder with train, valid and test files.

    Each scene is returned with only the `seen` objects (a number) nearest to the ego vehicle. A scene that cannot be
    read raises an error that names the file and the line.
    """
    tally: Counter[str] = Counter()
    parts = {part: _read(file, seen, tally) for part, file in scene_files(path).items()}
    if not tally["kept"]:
        raise DataError(f"{path}: no scene is left ({report(tally)})")
    return SceneFiles(*(parts.get(part) for part in PARTS), report=report(tally))


def _read(path: Path, seen: int, tally: Counter[str]) -> Recorded | None:
    scenes: list[Scenes] = []
    decided: list[tuple[int, float, np.ndarray]] = []
    for record in records(path):
        tally["read"] += 1
        if record.fault:
            raise DataError(f"{record.where}: {record.fault}")
        try:
            whole = parse_scene(record.value)
            action, steering, forced = parse_decision(record.value, whole.present.shape[1])
        except SceneError as error:
            raise DataError(f"{record.where}: {error}") from error
        scene, order = nearest(whole, seen)
        gold = _wide(np.isin(order, forced), seen)
        scenes.append(scene)
        decided.append((action, steering, gold[0]))
        tally["kept"] += 1
    if not scenes:
        return None
    return joined_decisions(stacked(scenes), decided)


def joined_decisions(scenes: Scenes, decided: Iterable[tuple[int, float, np.ndarray]]) -> Recorded:
    """Return scenes together with their decisions, given as (action, steering, forced objects) for each scene."""
    actions, steering, forced = zip(*decided, strict=True)
    decisions = Decisions(np.array(actions), np.array(steering, float), np.stack(forced))
    nowhere = np.full(len(scenes), -1)
    return Recorded(scenes, decisions, nowhere, nowhere)
