"""Reader of recordings with transcripts: a folder of sound files with a TSV or JSONL table, or LibriSpeech's layout.

A transcript whose sound file is missing raises an error that names the file and the line, or is skipped and counted.
A sound file without a transcript is left out and counted.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.audio.sound_files import SUFFIXES
from regard.data.data_files import DataError
from regard.data.json_records import Record, records
from regard.data.text.lines import lines
from regard.data.text.parallel_text import Report, Tsv, report
from regard.data.vision.image_folders import NAMES, PARTS, part_files

Times = tuple[tuple[float, float], ...]

_HEADERS = ("sound", "audio", "file", "filename", "path")
_FOLDERS = ("sounds", "wavs", "wav", "recordings", "clips")
_TABLES = (".tsv", ".jsonl")
_LIBRI = "*.trans.txt"  # LibriSpeech has one file of transcripts for each chapter of a book


@dataclass(frozen=True, slots=True)
class SpokenFile:
    """A recording with its transcript.

    `where` is the position of the transcript ("file:line"). `times` holds the start and the end of each word in
    seconds; it is empty if the times are unknown.
    """

    sound: Path
    text: str
    where: str
    times: Times = ()


@dataclass(frozen=True, slots=True)
class TranscriptFiles:
    """Recordings for training, validation and test; all are in `train` if the files define no such split.

    `report` counts the transcripts read, kept and skipped, and the sound files without a transcript; `files` are the
    paths of the files with the transcripts.
    """

    train: tuple[SpokenFile, ...]
    valid: tuple[SpokenFile, ...]
    test: tuple[SpokenFile, ...]
    report: Report
    files: tuple[Path, ...]


class _Row(NamedTuple):
    """One row of a table of transcripts: its position ("file:line"), sound file, text and word times, or an error."""

    where: str
    sound: str = ""
    text: str = ""
    times: Times = ()
    fault: str = ""


def load_transcripts(path: Path, *, skip_faults: bool = False) -> TranscriptFiles:
    """Return the transcripts at `path` with the paths of their recordings; the layout of the files is recognised.

    A folder has LibriSpeech's layout (`train-clean-100/19/198/19-198.trans.txt` with the sound files beside it), or
    the files `train.tsv`, `valid.tsv` and `test.tsv`, or `transcripts.tsv`; each of these tables may be a `.jsonl` file
    instead. `path` may also be a single TSV or JSONL file. A TSV has the columns sound and text; a JSONL record has the
    fields `sound` and `text`, and optionally `times`, a list with [start, end] in seconds for each word. Sound files
    are in the same folder as the table, or in a folder `sounds`, `wavs`, `wav`, `recordings` or `clips` there.
    """
    path = Path(path)
    tally: Counter[str] = Counter()
    chapters = sorted(path.rglob(_LIBRI)) if path.is_dir() else []
    if chapters:
        files = tuple(chapters)
        parts = _libri(path, chapters, tally, skip_faults)
    else:
        tables = part_files(path, "transcripts", _TABLES)
        files = tuple(tables.values())
        folder = path if path.is_dir() else path.parent
        folders = [*(folder / name for name in _FOLDERS if (folder / name).is_dir()), folder]
        parts = {part: _recordings(_rows(file), folders, tally, skip_faults) for part, file in tables.items()}
        _count_unused(folders[0], parts.values(), tally)
    if not tally["kept"]:
        raise DataError(f"{path}: no transcript is left ({report(tally)})")
    return TranscriptFiles(*(tuple(parts.get(part, ())) for part in PARTS), report=report(tally), files=files)


def _recordings(rows: Iterable[_Row], folders: list[Path], tally: Counter[str], skip_faults: bool) -> list[SpokenFile]:
    """Return the rows that have a sound file and a text; an invalid row raises an error, or is skipped and counted."""
    recordings: list[SpokenFile] = []
    for row in rows:
        tally["read"] += 1
        sound = None if row.fault else _find(row.sound, folders)
        reason, fault = "faulty", row.fault
        if not fault and sound is None:
            reason, fault = "transcript without sound", f"no sound {row.sound!r} in {' or '.join(map(str, folders))}"
        if fault and not skip_faults:
            raise DataError(f"{row.where}: {fault}")
        if not fault and sound is not None and row.text:
            recordings.append(SpokenFile(sound, row.text, row.where, row.times))
            reason = "kept"
        elif not fault:
            reason = "empty"
        tally[reason] += 1
    return recordings


def _find(name: str, folders: list[Path]) -> Path | None:
    """Return the first sound file called `name` in the folders, or None; `name` may lack the suffix."""
    if not name:
        return None
    ends = ("",) if Path(name).suffix.lower() in SUFFIXES else (*sorted(SUFFIXES), "")
    places = (folder / f"{name}{end}" for folder in folders for end in ends)
    return next(filter(Path.is_file, places), None)


def _count_unused(folder: Path, parts: Iterable[list[SpokenFile]], tally: Counter[str]) -> None:
    """Add to `tally` the number of sound files in a folder that no transcript refers to."""
    used = {recording.sound for recording in chain.from_iterable(parts)}
    unused = sum(path.suffix.lower() in SUFFIXES and path not in used for path in folder.iterdir())
    if unused:
        tally["sound without transcript"] += unused


def _rows(path: Path) -> Iterator[_Row]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from map(_of_record, records(path))
        return
    for row in Tsv(path).rows():
        if row.line > 1 or row.source.lower() not in _HEADERS:
            yield _Row(f"{path}:{row.line}", row.source, row.target, fault=row.fault)


def _of_record(entry: Record) -> _Row:
    value = entry.value
    if entry.fault:
        return _Row(entry.where, fault=entry.fault)
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in ("sound", "text")):
        return _Row(entry.where, fault="expected an object with texts in the fields 'sound' and 'text'")
    times = value.get("times", [])
    words = len(value["text"].split())
    if times and not _are_times(times, words):
        return _Row(entry.where, fault=f"expected 'times' to have [start, end] in seconds for each of {words} words")
    return _Row(entry.where, value["sound"], value["text"].strip(), tuple((float(a), float(b)) for a, b in times))


def _are_times(times: Any, words: int) -> bool:
    if not isinstance(times, list) or len(times) != words:
        return False
    pairs = [pair for pair in times if isinstance(pair, list) and len(pair) == 2]
    numbers = [number for pair in pairs for number in pair]
    fit = all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers)
    return len(pairs) == words and fit and all(0 <= begin <= end for begin, end in pairs)


def _libri(path: Path, chapters: list[Path], tally: Counter[str], skip_faults: bool) -> dict[str, list[SpokenFile]]:
    """Return the recordings of a LibriSpeech folder for each split (train, valid, test).

    Each line of a chapter's file is an identifier and a text, such as "19-198-0000 NORTHANGER ABBEY". The folder's
    name, such as dev-clean, determines the split.
    """
    parts: dict[str, list[SpokenFile]] = {part: [] for part in PARTS}
    for chapter in chapters:
        recordings = _recordings(_chapter(chapter), [chapter.parent], tally, skip_faults)
        _count_unused(chapter.parent, [recordings], tally)
        parts[_part(chapter.relative_to(path.parent).parts)] += recordings
    return parts


def _chapter(path: Path) -> Iterator[_Row]:
    for line in lines(path):
        name, _, text = line.text.partition(" ")
        if line.text or line.fault:
            yield _Row(f"{path}:{line.number}", name, text.strip(), fault=line.fault)


def _part(folders: tuple[str, ...]) -> str:
    """Return the split (train, valid or test) that folder names such as dev-clean denote; train by default."""
    for part, names in NAMES.items():
        if any(folder.split("-")[0] in names for folder in folders):
            return part
    return "train"
