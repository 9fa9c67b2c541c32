"""Readers of labelled texts: CSV, TSV, JSONL, a folder of text files for each class, parse trees with labels.

An invalid line in a file raises an error that names the file and the line. Rows without a text, or with a label that is
configured to be removed, are skipped and counted in a report; guesses about the file's format are reported too.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.data_files import DataError
from regard.data.json_records import json_object
from regard.data.text.lines import LONGEST, fault_of, text_lines
from regard.data.text.parallel_text import Report, report
from regard.data.text.table_columns import LABEL_NAMES, TEXT_NAMES, find_columns, find_field
from regard.data.text.trees import phrases_of


class Labelled(NamedTuple):
    """A text, its label, and its position in the data ("file:line")."""

    text: str
    label: str
    place: str


class Row(NamedTuple):
    """One row of a file: its line number, and its text and label, or an error message."""

    line: int
    text: str = ""
    label: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """Options for reading labelled texts: which columns to use, and how to rename labels.

    `text` and `label` are the names or the numbers of the columns; None means that they are guessed. `merge` maps
    labels to new names; rows whose new label is empty are skipped. With `phrases`, the phrases inside parse trees are
    read too. `longest` is the largest length of a line in bytes.
    """

    text: str | None = None
    label: str | None = None
    merge: Mapping[str, str] = field(default_factory=dict)
    phrases: bool = False
    longest: int = LONGEST


@dataclass(frozen=True, slots=True)
class Reading:
    """The labelled texts of a file or a folder, the counts of rows read and skipped, and guesses about the format."""

    path: Path
    rows: tuple[Labelled, ...]
    report: Report
    guess: str = ""

    def __str__(self) -> str:
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in self.report.skipped.items())
        summary = f"{self.path}: {self.report.read:,} rows read, {self.report.kept:,} texts kept"
        return summary + (f"; skipped: {skipped}" if skipped else "") + (f"; {self.guess}" if self.guess else "")


def read_labelled(path: Path, options: Asked | None = None) -> Reading:
    """Return the labelled texts of one file, or of one folder that has a folder of text files for each class."""
    options = Asked() if options is None else options
    tally: Counter[str] = Counter()
    guesses: list[str] = []
    texts = []
    for file, row in (
        _folder(path, options) if path.is_dir() else ((path, row) for row in _rows(path, options, guesses))
    ):
        tally["read"] += 1
        place = f"{file}:{row.line}"
        if row.fault:
            raise DataError(f"{place}: {row.fault}")
        label = options.merge.get(row.label, row.label)
        reason = "empty" if not row.text else "" if label else f"labelled {row.label}"
        tally[reason or "kept"] += 1
        if not reason:
            texts.append(Labelled(row.text, label, place))
    counts = report(tally)
    if not texts:
        raise DataError(f"{path}: no text is left" if counts.read else f"{path}: the file is empty")
    return Reading(path, tuple(texts), counts, "; ".join(guesses))


def _rows(path: Path, options: Asked, guesses: list[str]) -> Iterator[Row]:
    kind = _kind(path)
    if kind == "json":
        return _jsonl(path, options, guesses)
    if kind == "trees":
        return _trees(path, options)
    if kind == "blank":
        guesses.append("the label is the first word of a line")
        return _by_blank(path, options)
    return _table(path, options, guesses, _csv_rows if kind == "csv" else _tsv_rows)


_KINDS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "json", ".ndjson": "json", ".json": "json"}


def _kind(path: Path) -> str:
    """Return the format of a file (a value of `_KINDS`, "trees" or "blank"), by its suffix, else by its first line."""
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if suffixes and suffixes[-1].lower() in _KINDS:
        return _KINDS[suffixes[-1].lower()]
    first = next((line.text for line in text_lines(path) if line.text.strip() and not line.fault), "")
    if re.match(r"\(\S+ ", first):
        return "trees"
    if first.lstrip().startswith("{"):
        return "json"
    return "tsv" if "\t" in first else "blank"


class _Cells(NamedTuple):
    line: int
    cells: list[str]
    fault: str = ""


def _tsv_rows(path: Path, longest: int) -> Iterator[_Cells]:
    """Yield the rows of a TSV file, split into cells at tabs; quotation marks have no special meaning."""
    for line in text_lines(path, longest=longest):
        yield _Cells(line.number, line.text.split("\t") if line.text.strip() else [], line.fault)


def _csv_rows(path: Path, longest: int) -> Iterator[_Cells]:
    """Yield the rows of a CSV file, split into cells; cells with commas, quotation marks or line ends are quoted."""
    faults: dict[int, str] = {}

    def fed() -> Iterator[str]:
        for line in text_lines(path, longest=longest):
            if line.fault:
                faults[line.number] = line.fault
            yield f"{line.text}\n"

    reader = csv.reader(fed(), strict=True)
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield _Cells(begin, [], f"not CSV: {error} (the row begins at this line)")
            return
        fault = next((faults.pop(number) for number in sorted(faults) if number <= reader.line_num), "")
        yield _Cells(begin, cells if any(cell.strip() for cell in cells) else [], fault)


def _table(path: Path, options: Asked, guesses: list[str], reader: Any) -> Iterator[Row]:
    sample = [cells.cells for cells in islice(reader(path, options.longest), 200) if cells.cells]
    if not sample:
        fault = next((f":{cells.line}: {cells.fault}" for cells in reader(path, options.longest) if cells.fault), "")
        raise DataError(f"{path}{fault}" if fault else f"{path}: the file is empty")
    columns = find_columns(path, sample, text=options.text, label=options.label)
    if columns.guess:
        guesses.append(columns.guess)
    needed = max(columns.text, columns.label) + 1
    header = columns.header
    for line, cells, fault in reader(path, options.longest):
        if fault:
            yield Row(line, fault=fault)
        elif not cells:
            yield Row(line)
        elif header:
            header = False
        elif len(cells) < needed:
            yield Row(line, fault=f"expected at least {needed} columns, found {len(cells)}")
        else:
            yield _checked(line, cells[columns.text], cells[columns.label])


def _checked(line: int, text: str, label: str) -> Row:
    if text.strip() and not label.strip():
        return Row(line, fault="the label is empty")
    return Row(line, text.strip(), label.strip())


def _by_blank(path: Path, options: Asked) -> Iterator[Row]:
    """Yield the rows of a file whose lines are a label, a blank and a text.

    The Stanford Sentiment Treebank is often distributed in this format.
    """
    for line in text_lines(path, longest=options.longest):
        label, _, text = line.text.strip().partition(" ")
        if line.fault or not label:
            yield Row(line.number, fault=line.fault)
        elif not text.strip():
            yield Row(line.number, fault=f"expected a label, a blank and a text, found one word, {label[:40]!r}")
        else:
            yield Row(line.number, text.strip(), label)


def _trees(path: Path, options: Asked) -> Iterator[Row]:
    for line in text_lines(path, longest=options.longest):
        if line.fault or not line.text.strip():
            yield Row(line.number, fault=line.fault)
            continue
        try:
            phrases = phrases_of(line.text)
        except ValueError as error:
            yield Row(line.number, fault=str(error))
            continue
        for phrase in phrases if options.phrases else phrases[:1]:
            yield Row(line.number, phrase.text, phrase.label)


def _jsonl(path: Path, options: Asked, guesses: list[str]) -> Iterator[Row]:
    names: tuple[str, str] | None = None
    for line in text_lines(path, longest=options.longest):
        if line.fault or not line.text.strip():
            yield Row(line.number, fault=line.fault)
            continue
        record, fault = json_object(line.text, "a record")
        if fault:
            yield Row(line.number, fault=fault)
            continue
        if names is None:
            names = (
                find_field(path, line.number, record, options.text, TEXT_NAMES, "text"),
                find_field(path, line.number, record, options.label, LABEL_NAMES, "label"),
            )
            guessed = [
                f"{role} is the field {name!r}"
                for role, name, given in zip(("text", "label"), names, (options.text, options.label), strict=True)
                if given is None
            ]
            guesses.extend([", ".join(guessed)] if guessed else [])
        yield _of_record(line.number, record, *names)


def _of_record(line: int, record: dict[str, Any], text: str, label: str) -> Row:
    if not isinstance(record.get(text), str):
        return Row(line, fault=f"expected a text in the field {text!r}, found {_sort(record.get(text))}")
    if not isinstance(record.get(label), str | int | float):
        return Row(line, fault=f"expected a label in the field {label!r}, found {_sort(record.get(label))}")
    fault = fault_of(record[text])
    return Row(line, fault=fault) if fault else _checked(line, record[text], str(record[label]))


def _sort(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def class_folders(path: Path) -> list[Path]:
    """Return the subfolders that contain text files; each of them is a class."""
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and any(folder.glob("*.txt")))


def _folder(path: Path, options: Asked) -> Iterator[tuple[Path, Row]]:
    """Yield one row for each text file in the class folders of `path`; the name of the class folder is the label."""
    for folder in class_folders(path):
        for file in sorted(folder.glob("*.txt")):
            lines = list(text_lines(file, longest=options.longest))
            fault = next((line for line in lines if line.fault), None)
            if fault:
                yield file, Row(fault.number, fault=fault.fault)
            else:
                yield file, Row(1, "\n".join(line.text for line in lines).strip(), folder.name)
