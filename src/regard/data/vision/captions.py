"""Readers of pictures with captions: a folder of pictures with a TSV or JSONL table, or the files of Flickr8k.

A caption whose picture is missing raises an error that names the file and the line, or is skipped and counted; so does
a picture in a list of Flickr8k that has no caption. Any other picture without a caption is skipped and counted.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.data_files import DataError
from regard.data.json_records import Record, records
from regard.data.packed import Distinct, Lazy, Texts, picked
from regard.data.text.lines import lines
from regard.data.text.parallel_text import Report, Tsv, report
from regard.data.vision.image_folders import PARTS, ImageFolders, part_files

_HEADERS = ("image", "file", "filename", "path")
_NUMBER = re.compile(r"#\d+$")
_SUFFIXES = (".tsv", ".jsonl")
# The ends of the names of Flickr8k's files that list the pictures of each split.
_LISTS = {"train": "trainImages.txt", "valid": "devImages.txt", "test": "testImages.txt"}


@dataclass(frozen=True, slots=True)
class CaptionedImage:
    """The path of a picture, and all captions of the picture."""

    image: Path
    captions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CaptionFiles:
    """Captioned pictures for training, validation and test; all are in `train` if the files define no such split.

    Each split stores its texts in packed buffers and creates a `CaptionedImage` at each access. `report` counts the
    captions read, kept and skipped, and the pictures without a caption.
    """

    train: Sequence[CaptionedImage]
    valid: Sequence[CaptionedImage]
    test: Sequence[CaptionedImage]
    report: Report


def load_captions(path: Path, *, skip_faults: bool = False) -> CaptionFiles:
    """Return the captions at `path` with the paths of their pictures; the layout of the files is recognised.

    A folder holds Flickr8k's files (`*.token.txt`, `*trainImages.txt` …), or `train.tsv`, `valid.tsv` and `test.tsv`,
    or `captions.tsv`; any table may be `.jsonl`. `path` may also be a single TSV or JSONL file. A TSV has the columns
    picture and caption; a JSONL record has the fields `image` and `caption` (or `captions`, a list). The pictures are
    in the same folder as the table or in its subfolder `images`.
    """
    path = Path(path)
    tally: Counter[str] = Counter()
    tokens = sorted(path.glob("*.token.txt")) if path.is_dir() else []
    if tokens:
        parts = _flickr(tokens[0], tally, skip_faults)
    else:
        files = part_files(path, "captions", _SUFFIXES)
        folders = ImageFolders.beside(path if path.is_dir() else path.parent)
        parts = {part: _collected(_rows(file), folders, tally, skip_faults) for part, file in files.items()}
        _count_silent(folders, parts.values(), tally)
    if not tally["kept"]:
        raise DataError(f"{path}: no caption is left ({report(tally)})")
    return CaptionFiles(*(parts.get(part, ()) for part in PARTS), report=report(tally))


Found = Sequence[CaptionedImage]


class _Caption(NamedTuple):
    """A caption in a file: its position ("file:line"), the name of its picture and its text, or an error message."""

    where: str
    image: str = ""
    text: str = ""
    fault: str = ""


class _Collection:
    """Collects captions and groups them by picture; the pictures are in the order of their first occurrence."""

    def __init__(self) -> None:
        # The paths of the pictures and the digests of these paths. Captions of one picture that are added one after
        # another share one entry.
        self._paths, self._digests = Texts(), Distinct()
        self._captions, self._path_of = Texts(), array("q")
        self._last: Path | None = None

    def add(self, image: Path, text: str) -> None:
        """Add one caption of the picture with this path."""
        if image != self._last:
            self._paths.append(str(image))
            self._digests.append(str(image))
            self._last = image
        self._captions.append(text)
        self._path_of.append(len(self._paths) - 1)

    def images(self) -> Found:
        """Return the collected pictures, each with all of its captions."""
        first, number = self._digests.numbered()
        picture_of = number[np.array(self._path_of, np.int64)]
        order = np.argsort(picture_of, kind="stable")
        begins = np.searchsorted(picture_of[order], np.arange(len(first) + 1))
        paths, captions = self._paths, self._captions

        def image_at(place: int) -> CaptionedImage:
            texts = tuple(captions[int(index)] for index in order[begins[place] : begins[place + 1]])
            return CaptionedImage(Path(paths[int(first[place])]), texts)

        return Lazy(len(first), image_at)


def _collected(rows: Iterable[_Caption], folders: ImageFolders, tally: Counter[str], skip_faults: bool) -> Found:
    collection = _Collection()
    for row in rows:
        tally["read"] += 1
        image = None if row.fault or not row.text else folders.find(row.image)
        reason, fault = "faulty", row.fault
        if image is not None:
            reason = "kept"
            collection.add(image, row.text)
        elif not fault and not row.text:
            reason = "empty"
        elif not fault:
            reason, fault = "caption without image", f"no picture {row.image!r} in {folders}"
        if fault and not skip_faults:
            raise DataError(f"{row.where}: {fault}")
        tally[reason] += 1
    return collection.images()


def _count_silent(folders: ImageFolders, parts: Iterable[Found], tally: Counter[str]) -> None:
    """Add to `tally` the number of pictures in the folders that have no caption."""
    spoken, there = Distinct(), Distinct()
    for item in chain.from_iterable(parts):
        spoken.append(str(item.image))
    for image in folders.images():
        there.append(str(image))
    silent = int(np.isin(there.digests, spoken.digests, invert=True).sum())
    if silent:
        tally["image without caption"] += silent


def _rows(path: Path) -> Iterator[_Caption]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return chain.from_iterable(map(_of_record, records(path)))
    return _of_table(path)


def _of_table(path: Path) -> Iterator[_Caption]:
    for row in Tsv(path).rows():
        if row.line > 1 or row.source.lower() not in _HEADERS:
            yield _Caption(f"{path}:{row.line}", row.source, row.target, row.fault)


def _of_record(record: Record) -> Iterator[_Caption]:
    """Yield the captions of one JSON object; all have the position of this object in the file."""
    value = record.value
    if record.fault:
        yield _Caption(record.where, fault=record.fault)
        return
    if not isinstance(value, dict) or not isinstance(value.get("image"), str):
        yield _Caption(record.where, fault="expected an object with a text in the field 'image'")
        return
    texts = value.get("captions", [value.get("caption")])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        fault = "expected a text in the field 'caption', or a list of texts in 'captions'"
        yield _Caption(record.where, fault=fault)
        return
    yield from (_Caption(record.where, value["image"], text.strip()) for text in texts)


def _flickr(tokens: Path, tally: Counter[str], skip_faults: bool) -> Mapping[str, Found]:
    """Return the captioned pictures of each split of Flickr8k.

    A line of the file `tokens` is "name.jpg#0", a tab and a caption. Three other files list the pictures of the
    training, validation and test splits; pictures in none of these lists are skipped.
    """
    folders = ImageFolders.beside(tokens.parent)
    listed = {part: _list(tokens.parent, end) for part, end in _LISTS.items()}
    if not any(listed.values()):
        raise DataError(f"{tokens.parent}: no list of pictures whose name ends in {', '.join(_LISTS.values())}")
    named = set(chain.from_iterable(listed.values()))

    def wanted() -> Iterator[_Caption]:
        for row in _of_table(tokens):
            name = _NUMBER.sub("", row.image)
            if row.fault or name in named:
                yield row._replace(image=name)
            else:
                tally["read"] += 1
                tally["in no list"] += 1

    images = _collected(wanted(), folders, tally, skip_faults)
    places = {item.image.name: place for place, item in enumerate(images)}
    for where in (where for part in listed.values() for name, where in part.items() if name not in places):
        if not skip_faults:
            raise DataError(f"{where}: the picture has no caption in {tokens}")
        tally["image without caption"] += 1
    return {part: picked(images, [places[name] for name in names if name in places]) for part, names in listed.items()}


def _list(folder: Path, end: str) -> dict[str, str]:
    """Return the names of the pictures in a list of Flickr8k, each with its position ("file:line")."""
    names: dict[str, str] = {}
    for path in sorted(folder.glob(f"*{end}")):
        for line in lines(path):
            if line.fault:
                raise DataError(f"{path}:{line.number}: {line.fault}")
            if line.text:
                names[line.text] = f"{path}:{line.number}"
    return names
