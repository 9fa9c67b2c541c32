"""Training and evaluation data of the network that drives from camera frames: the frames of a driving log."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.data_files import DataError, only_path
from regard.data.driving.driving_log import DrivingLog, Frame, history, load_driving_log, log_file, split_blocks
from regard.data.packed import Lazy
from regard.data.vision.image_files import Pixels, decode
from regard.data.vision.image_store import store_images
from regard.tasks.driving.codec import FILE
from regard.tasks.driving.config import DrivingConfig
from regard.tasks.task import Material, SettingError

_REPORT_EVERY = 1024  # number of pictures between two progress messages
Record = dict[str, Any]
Say = Callable[[str], Any]


@dataclass(frozen=True)
class CameraCodec:
    """The size of the camera frames and the number of frames in one input; stored in the run's directory."""

    height: int
    width: int
    seen: int

    @classmethod
    def of(cls, config: DrivingConfig) -> "CameraCodec":
        return cls(*config.data.picture, config.model.frames + config.model.motion)

    def save(self, directory: Path) -> None:
        (directory / FILE).write_text(json.dumps({"input": "camera", **asdict(self)}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "CameraCodec":
        facts = json.loads((directory / FILE).read_text(encoding="utf-8"))
        return cls(int(facts["height"]), int(facts["width"]), int(facts["seen"]))

    def record(self, pictures: Sequence[Pixels], angles: Sequence[float], controls: Sequence[float]) -> Record:
        """Return an input record: frames, oldest first, the steering before each, and the controls at the last frame.

        If there are fewer frames than the network needs, the oldest are zeros; the mask `known` is False for these
        added frames.
        """
        missing = self.seen - len(pictures)
        frames = np.zeros((self.seen, 3, self.height, self.width), np.uint8)
        frames[missing:] = pictures
        steering = np.zeros(self.seen, np.float32)
        steering[missing:] = angles
        known = np.arange(self.seen) >= missing
        return {"frames": frames, "known": known, "angles": steering, "controls": np.asarray(controls, np.float32)}


@dataclass(frozen=True, eq=False)
class Footage:
    """The frames of a driving log; `picture(place)` returns the picture of frame `place`, resized as `codec` states."""

    log: DrivingLog
    picture: Callable[[int], Pixels]
    codec: CameraCodec

    @property
    def frames(self) -> tuple[Frame, ...]:
        return self.log.frames

    def before(self, place: int) -> float:
        """Return the steering of the frame before frame `place`; 0 for the first frame of a sequence."""
        first = place == self.frames[place].first
        return 0.0 if first else self.frames[place - 1].controls[0]

    def record(self, place: int, *, mirrored: bool = False) -> Record:
        """Return the record of a frame and its previous frames; `mirrored` flips images and negates the steering."""
        places = history(self.frames, place, self.codec.seen)
        steering, *pedals = self.frames[place].controls
        sign = -1.0 if mirrored else 1.0
        pictures = [self.picture(one)[..., ::-1] if mirrored else self.picture(one) for one in places]
        angles = [sign * self.before(one) for one in places]
        return self.codec.record(pictures, angles, [sign * steering, *pedals])


@dataclass(frozen=True)
class CameraExample:
    """An example: frame number `place` of the driving log in `footage`."""

    footage: Footage = field(repr=False, compare=False)
    place: int

    @property
    def controls(self) -> tuple[float, float, float]:
        return self.footage.frames[self.place].controls

    @property
    def last_angle(self) -> float:
        """Return the steering at the frame before this example's frame."""
        return self.footage.before(self.place)

    @property
    def inputs(self) -> dict[str, Any]:
        return {"scene": {"frame": self.place}}

    def record(self) -> Record:
        return self.footage.record(self.place)


def camera_material(config: DrivingConfig, cache: Path, codec: CameraCodec | None, say: Say) -> Material:
    """Return the frames of a driving log, in contiguous blocks for training, validation and test."""
    data = config.data
    codec = codec or CameraCodec.of(config)
    log = load_driving_log(log_of(data.files), skip_faults=data.skip_faults)
    say(log.about)
    footage = _stored(log, codec, Path(cache), say, skip_faults=data.skip_faults)
    log = footage.log
    count = len(log.frames)
    parts = split_blocks(count, block=data.block, gap=data.gap, valid=data.valid, test=data.test, seed=data.seed)

    def record(number: int) -> Record:
        """Return training record `number`; the mirrored frames follow after all original frames."""
        mirrored, place = divmod(number, len(parts.train))
        return footage.record(parts.train[place], mirrored=bool(mirrored))

    records = Lazy(len(parts.train) * (2 if data.flip else 1), record)
    valid, test = ([CameraExample(footage, place) for place in part] for part in (parts.valid, parts.test))
    about = f"{len(parts.train):,} frames of {data.files[0]} in blocks of {data.block}"
    skipped = sum(log.skipped.values())
    if skipped:
        about += f", {skipped:,} lines skipped"
    example = max(test, key=lambda one: abs(one.controls[0])).inputs
    return Material(codec, records, [np.ones(len(records), np.int32)], valid, test, [], about, example)


def log_of(files: Sequence[Path]) -> Path:
    """Return the only path of `files`, a driving log or its folder; raise an error if there is not exactly one."""
    if not files:
        raise SettingError("input=camera learns from a driving log, and there is no built-in one: give --data DIR")
    return only_path(files, "driving log or folder", listed=False)


def _stored(log: DrivingLog, codec: CameraCodec, cache: Path, say: Say, *, skip_faults: bool) -> Footage:
    """Decode all frames at the size of the codec into the cache; damaged pictures raise an error or are skipped."""

    def progress(done: int, total: int) -> None:
        if done % _REPORT_EVERY < 64:
            say(f"frames: {done:,} of {total:,}")

    paths = [frame.image for frame in log.frames]
    try:
        size = codec.height, codec.width
        store = store_images(paths, cache, size=size, skip_faults=skip_faults, progress=progress)
    except DataError as error:
        bad = next((frame for frame in log.frames if str(error).startswith(f"{frame.image}:")), None)
        raise DataError(f"{log.path}:{bad.line}: {error}" if bad else str(error)) from error
    if store.faults:
        log = log.without(set(store.faults), "damaged picture")
        say(log.about)
        return _stored(log, codec, cache, say, skip_faults=skip_faults)
    return Footage(log, store.__getitem__, codec)


def read_footage(path: Path, codec: CameraCodec, *, skip_faults: bool = False) -> Footage:
    """Return the frames of a driving log; each access to a picture decodes its file."""
    log = load_driving_log(path, skip_faults=skip_faults)
    size = codec.height, codec.width
    return Footage(log, lambda place: decode(log.frames[place].image, size), codec)


def camera_files(config: DrivingConfig) -> list[Path]:
    """Return every data file that a run uses: the driving log and its pictures."""
    path = log_of(config.data.files)
    log = load_driving_log(path, skip_faults=config.data.skip_faults)
    return [log_file(path), *(frame.image for frame in log.frames)]


def camera_examples(
    paths: Sequence[Path], config: DrivingConfig, codec: CameraCodec
) -> tuple[list[CameraExample], str]:
    """Return all frames of another driving log as examples, and a description of the log."""
    footage = read_footage(log_of(paths), codec, skip_faults=config.data.skip_faults)
    return [CameraExample(footage, place) for place in range(len(footage.frames))], f"{paths[0]}: {footage.log.about}"
