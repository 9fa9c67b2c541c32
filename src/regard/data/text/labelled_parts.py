"""Training, validation and test splits of labelled texts: separate files, or one file that is split at random."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from regard.data.data_files import DataError, only_path
from regard.data.text.labelled import Asked, Labelled, Reading, class_folders, read_labelled

_PARTS = {"train": "train", "training": "train", "test": "test"} | dict.fromkeys(
    ("dev", "val", "valid", "validation", "develop"), "valid"
)
_MOST_CLASSES = 1000


@dataclass(frozen=True, slots=True)
class Parts:
    """Labelled texts for training, validation and test, the classes, and the reports of the files read.

    If there are no validation or no test files, some of the training texts are held out for that split; no text is then
    in two splits.
    """

    train: tuple[Labelled, ...]
    valid: tuple[Labelled, ...]
    test: tuple[Labelled, ...]
    classes: tuple[str, ...]
    readings: tuple[Reading, ...]


def load_parts(
    paths: Sequence[Path], options: Asked | None = None, *, valid: int = 500, test: int = 500, seed: int = 1
) -> Parts:
    """Return the splits of one file, one folder, or a prefix that the splits' files share, such as `sst/stsa.binary`.

    `valid` and `test` are the numbers of texts to hold out for a missing validation or test split; `seed` determines
    which texts these are.
    """
    options = Asked() if options is None else options
    parts = find_parts(only_path(paths))
    readings = {
        name: read_labelled(path, options if name == "train" else replace(options, phrases=False))
        for name, path in parts.items()
    }
    rows = {name: reading.rows for name, reading in readings.items()}
    classes = _classes(parts["train"], rows["train"])
    for name, count in (("valid", valid), ("test", test)):
        if name not in rows:
            rows["train"], rows[name] = _held_out(rows["train"], count, Random(f"{seed} {name}"))
    for name in ("valid", "test"):
        _check_labels(rows[name], classes)
    return Parts(rows["train"], rows["valid"], rows["test"], classes, tuple(readings.values()))


def parts_of_test(paths: Sequence[Path], options: Asked, classes: tuple[str, ...]) -> Reading:
    """Return the test texts of other data than the training data: a whole file, or the test split of a folder.

    Of a folder without a test split the training split is returned. Raises `DataError` if a label is not one of
    `classes`.
    """
    path = only_path(paths)
    if not path.is_file():
        parts = find_parts(path)
        path = parts.get("test", parts["train"])
    reading = read_labelled(path, replace(options, phrases=False))
    _check_labels(reading.rows, classes)
    return reading


def find_parts(path: Path) -> dict[str, Path]:
    """Return the file or folder of each split: "train", and "valid" and "test" if they exist."""
    if path.is_file():
        return {"train": path}
    if path.is_dir():
        entries, prefix = sorted(path.iterdir()), ""
    elif path.parent.is_dir():
        entries, prefix = (
            sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(path.name)),
            path.name,
        )
    else:
        raise DataError(f"{path}: no such file or folder")
    sets: dict[str, dict[str, Path]] = {}
    for entry in entries:
        part = _part_of(entry.name.removeprefix(prefix))
        if part is not None and (entry.is_file() or class_folders(entry)):
            name, role = part
            if role in sets.setdefault(name, {}):
                raise DataError(f"{path}: {sets[name][role].name} and {entry.name} are both the {role} part")
            sets[name][role] = entry
    sets = {name: parts for name, parts in sets.items() if "train" in parts}
    if len(sets) == 1:
        return next(iter(sets.values()))
    if sets:
        names = ", ".join(str(path / name) for name in sorted(sets))
        raise DataError(f"{path}: there are several data sets, name one: {names}")
    if path.is_dir() and len(class_folders(path)) > 1:
        return {"train": path}
    inner = [entry for entry in entries if entry.is_dir()]
    hint = f"; it has the folders {', '.join(folder.name for folder in inner[:8])}" if inner else ""
    raise DataError(f"{path}: no file is named train, and no folders of text files are classes{hint}")


def _part_of(name: str) -> tuple[str, str] | None:
    """Return the data set and the split that a file name denotes, or None if the name contains no split's name.

    "stsa.binary.train" gives ("stsa.binary", "train").
    """
    pieces = re.split(r"([._-]+)", name)
    for place in range(0, len(pieces), 2):
        if pieces[place].lower() in _PARTS:
            return "".join(pieces[:place]).strip("._-"), _PARTS[pieces[place].lower()]
    return None


def _held_out(
    rows: tuple[Labelled, ...], count: int, random: Random
) -> tuple[tuple[Labelled, ...], tuple[Labelled, ...]]:
    """Return the rows to train on, and the held-out rows of `count` distinct texts, at most a tenth of all texts."""
    texts = list(dict.fromkeys(row.text for row in rows))
    count = min(count, max(1, len(texts) // 10))
    if len(texts) < 3:
        raise DataError(f"{rows[0].place}: too few texts to hold some out: {len(texts)}")
    chosen = set(random.sample(texts, count))
    return tuple(row for row in rows if row.text not in chosen), tuple(row for row in rows if row.text in chosen)


def _classes(path: Path, rows: tuple[Labelled, ...]) -> tuple[str, ...]:
    labels = {row.label for row in rows}
    if not 2 <= len(labels) <= _MOST_CLASSES:
        shown = ", ".join(repr(label[:40]) for label in sorted(labels)[:4])
        raise DataError(f"{path}: expected 2 to {_MOST_CLASSES} labels in training, found {len(labels)}: {shown}")
    return tuple(sorted(labels, key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label)))


def _check_labels(rows: tuple[Labelled, ...], classes: tuple[str, ...]) -> None:
    known = set(classes)
    for row in rows:
        if row.label not in known:
            shown = ", ".join(classes[:12])
            raise DataError(f"{row.place}: the label {row.label[:40]!r} does not stand in training, which has {shown}")
