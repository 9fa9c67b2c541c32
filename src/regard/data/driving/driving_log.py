"""Reader of a driving log: a CSV of camera frames with steering, throttle and brake, split into contiguous blocks.

Adjacent frames are nearly equal, so single frames sampled at random for the test would leak into the training data.
Therefore whole blocks of frames are held out, with a gap between blocks of different splits. A line with a missing
picture or an invalid number raises an error that names the file and the line, or is skipped and counted.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from regard.data.data_files import DataError
from regard.data.vision.image_files import SUFFIXES

CONTROLS = ("steering", "throttle", "brake")
NAME = "driving_log.csv"
_IMAGES = ("center", "image", "frame", "file", "path")  # the accepted names of the column with the pictures' paths
# the columns of a CSV file without a header, in the order of the Udacity simulator
_PLAIN = ("center", "left", "right", *CONTROLS, "speed")
_FOLDERS = ("", "IMG", "center", "images", "frames")


@dataclass(frozen=True, slots=True)
class Frame:
    """A camera picture, the controls (steering, throttle, brake) at that moment, and the frame's line in the log.

    `first` is the index of the first frame of the uninterrupted sequence that contains this frame; a model's input
    history does not reach back beyond it.
    """

    image: Path
    controls: tuple[float, float, float]
    line: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class DrivingLog:
    """The frames of a log in order, the number of lines read, and the number skipped for each reason.

    >>> print(DrivingLog(Path("log.csv"), (), 12, {"missing picture": 2}).about)
    12 lines read, 0 frames kept; skipped: 2 missing picture
    """

    path: Path
    frames: tuple[Frame, ...]
    read: int
    skipped: dict[str, int]

    @property
    def about(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.skipped.items()))
        return f"{self.read:,} lines read, {len(self.frames):,} frames kept" + (reasons and f"; skipped: {reasons}")

    def without(self, places: Collection[int], reason: str) -> "DrivingLog":
        """Return the log without the frames at the indices `places`, which are counted as skipped for `reason`.

        The frame after a removed one starts a new sequence.
        """
        frames: list[Frame] = []
        first = before = 0
        for place, frame in enumerate(self.frames):
            if place in places or frame.first != before:
                first, before = len(frames), frame.first
            if place not in places:
                frames.append(replace(frame, first=first))
        skipped = {**self.skipped, reason: self.skipped.get(reason, 0) + len(places)}
        return replace(self, frames=tuple(frames), skipped=skipped)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Indices of the frames for training, validation and test; frames in the gaps are in no split."""

    train: tuple[int, ...]
    valid: tuple[int, ...]
    test: tuple[int, ...]


def log_file(path: Path) -> Path:
    """Return the path of a driving log's CSV file, given that file or the folder that contains it."""
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder")
    if (path / NAME).is_file():
        return path / NAME
    paths = sorted(path.glob("*.csv"))
    if len(paths) != 1:
        raise DataError(f"{path}: expected {NAME} or one other .csv file, found {len(paths)}")
    return paths[0]


def load_driving_log(path: Path, *, skip_faults: bool = False) -> DrivingLog:
    """Return the frames of a driving log: a CSV file, or a folder with one.

    The header names the columns: `center` (or `image`, `frame`, `file`, `path`) is the path of the picture;
    `steering`, `throttle` and `brake` are the controls; other columns are ignored. A file without a header has the
    columns of the Udacity simulator. The pictures are in the folder of the CSV file, or in a folder `IMG`, `center`,
    `images` or `frames` there. If a picture's path does not exist, for example because the log was written on another
    machine, its file name is searched in these folders.
    """
    path = log_file(path)
    pictures = _Pictures(path.parent)
    skipped: Counter[str] = Counter()
    frames: list[Frame] = []
    read = first = 0
    columns: dict[str, int] | None = None
    for line, cells in _rows(path):
        if columns is None:
            columns = _columns(path, line, cells)
            if not _is_number(cells[columns["steering"]]):
                continue  # the first line is the header, not a frame
        read += 1
        reason, fault, frame = _frame(cells, columns, pictures, line, first)
        if frame is not None:
            frames.append(frame)
        elif not skip_faults:
            raise DataError(f"{path}:{line}: {fault}")
        else:
            skipped[reason] += 1
            first = len(frames)  # after a skipped line, the next frame starts a new sequence
    if not frames:
        raise DataError(f"{path}: no frame is left ({read:,} lines read, {sum(skipped.values()):,} skipped)")
    return DrivingLog(path, tuple(frames), read, dict(skipped))


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, skipinitialspace=True)
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    yield reader.line_num, cells
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from None
    except csv.Error as error:
        raise DataError(f"{path}: not a CSV file: {error}") from None


def _columns(path: Path, line: int, cells: Sequence[str]) -> dict[str, int]:
    """Return the column indices of the picture and of the controls, given the first line of a driving log.

    If the first line is not a header, the columns are those of the Udacity simulator.
    """
    names = [cell.strip().lower() for cell in cells]
    if "steering" not in names:
        names = list(_PLAIN)
        if len(cells) < len(_PLAIN) - 1 or not _is_number(cells[names.index("steering")]):
            known = ", ".join(_PLAIN)
            raise DataError(f"{path}:{line}: expected a header with 'steering', or the columns {known}")
    image = next((name for name in _IMAGES if name in names), None)
    missing = [name for name in CONTROLS if name not in names]
    if image is None or missing:
        expected = missing[0] if missing else " or ".join(_IMAGES)
        raise DataError(f"{path}:{line}: expected a column {expected}, found {', '.join(names)}")
    return {"image": names.index(image), **{name: names.index(name) for name in CONTROLS}}


def _frame(
    cells: Sequence[str], columns: dict[str, int], pictures: "_Pictures", line: int, first: int
) -> tuple[str, str, Frame | None]:
    """Return ("", "", frame) for a valid line of the log; else (short reason, error message, None)."""
    if len(cells) <= max(columns.values()):
        return "short line", f"expected at least {max(columns.values()) + 1} columns, found {len(cells)}", None
    for name in CONTROLS:
        if not _is_number(cells[columns[name]]):
            return "bad number", f"{name} must be a finite number, got {cells[columns[name]].strip()!r}", None
    steering, throttle, brake = (float(cells[columns[name]]) for name in CONTROLS)
    written = cells[columns["image"]].strip()
    image = pictures.find(written)
    if image is None:
        return "missing picture", f"no picture {written!r} in {pictures}", None
    return "", "", Frame(image, (steering, throttle, brake), line, first)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


class _Pictures:
    """Finds the pictures of a driving log. Each folder is listed only once, because a log has thousands of lines."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / name for name in _FOLDERS if (folder / name).is_dir()]
        self._root = folder
        self._names = {
            file.name: file
            for place in reversed(self.folders)
            for file in place.iterdir()
            if file.suffix.lower() in SUFFIXES
        }

    def find(self, written: str) -> Path | None:
        """Return the path of the picture that a line of the log names as `written`; None if no picture has this name.

        If no file exists at the path `written`, for example because it is a path of another machine, the picture with
        the file name in `written` is returned.
        """
        path = self._root / written
        if "/" in written and path.is_file():
            return path
        return self._names.get(re.split(r"[/\\]", written)[-1])

    def __str__(self) -> str:
        return " or ".join(map(str, self.folders))


def split_blocks(count: int, *, block: int, gap: int, valid: int, test: int, seed: int) -> Blocks:
    """Split `count` frames into contiguous blocks of `block` frames; the seed assigns blocks to splits.

    Whole blocks are held out until the validation split has `valid` frames and the test split `test` frames; each of
    these two splits has at most a fifth of all blocks (of fewer than five blocks, at most one). Where two adjacent
    blocks belong to different splits (training, validation, test), the first `gap` frames of the second block are in no
    split; they are used only as the input history of later frames.

    >>> parts = split_blocks(12, block=4, gap=1, valid=3, test=3, seed=1)
    >>> parts.train, parts.valid, parts.test
    ((9, 10, 11), (5, 6, 7), (0, 1, 2, 3))
    """
    if not 0 <= gap < block:
        raise ValueError(f"gap must be at least 0 and below block, got {gap} and {block}")
    starts = list(range(0, count, block))
    if len(starts) > 1 and count - starts[-1] <= gap:
        starts.pop()  # a last block that is no longer than the gap is merged into the block before it
    most = max(1, len(starts) // 5)
    wanted = {"valid": min(most, math.ceil(valid / block)), "test": min(most, math.ceil(test / block))}
    if len(starts) < 3:
        raise DataError(f"{count:,} frames are too few for three blocks of {block}: choose smaller blocks (data.block)")
    order = list(range(len(starts)))
    Random(f"{seed} blocks").shuffle(order)
    names = ["train"] * len(starts)
    for name, number in (("valid", wanted["valid"]), ("test", wanted["test"])):
        for _ in range(number):
            names[order.pop()] = name
    parts: dict[str, list[int]] = {"train": [], "valid": [], "test": []}
    for place, (start, name) in enumerate(zip(starts, names, strict=True)):
        end = starts[place + 1] if place + 1 < len(starts) else count
        changes = place > 0 and names[place - 1] != name
        parts[name] += range(start + (gap if changes else 0), end)
    return Blocks(*(tuple(parts[name]) for name in ("train", "valid", "test")))


def history(frames: Sequence[Frame], place: int, length: int) -> list[int]:
    """Return the indices of the last `length` frames up to and including the frame with index `place`, oldest first.

    Only frames of the uninterrupted sequence that contains frame `place` are returned, so near its start there are
    fewer than `length`.
    """
    return list(range(max(frames[place].first, place + 1 - length), place + 1))
