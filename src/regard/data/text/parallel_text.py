"""Readers of parallel text, pairs of a sentence and its translation: two line-aligned files, TSV or JSONL.

Each file may be gzipped. An invalid line in a file raises an error that names the file and the line. Empty lines and
sentences that are too long are skipped and counted in a report.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from regard.data.data_files import DataError
from regard.data.json_records import json_object
from regard.data.text.lines import LONGEST_LINE, Line, fault_of, lines

Couple = tuple[str, str]

# A Chinese or Japanese character counts as a word, because these languages have no spaces between words. The ranges are
# written as escapes: an editor easily normalises the character U+F900 to U+8C48, and the range that begins with it
# would then include Korean, which has spaces.
_UNSPACED = r"\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
UNSPACED = re.compile(f"[{_UNSPACED}]")
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


class Row(NamedTuple):
    """One line of parallel text: its file and line number, and its two sentences, or an error message."""

    file: Path
    line: int
    source: str = ""
    target: str = ""
    fault: str = ""
    ignored: str = ""  # a description of the line's other columns, which are ignored


@runtime_checkable
class Rows(Protocol):
    """The protocol of the readers of sentence pairs."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the paths of all files that are read."""

    def rows(self) -> Iterator[Row]:
        """Yield the lines of parallel text in order, in constant memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the lengths of the two sentences of a pair, in words; a Chinese character is a word.

    `ratio` is the largest ratio of the longer to the shorter sentence. With `longest`, a sentence may also have at most
    100 characters for each allowed word, because a megabyte without a space is not a sentence of one word.

    >>> Limits(longest=4, ratio=2.0).refuses("a b c d", "汤姆追")
    ''
    >>> Limits(longest=4, ratio=2.0).refuses("a b c d e", "a b c d"), Limits(ratio=2.0).refuses("a b c", "a")
    ('too long', 'ratio')
    """

    shortest: int = 1
    longest: int | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.shortest < 1 or (self.longest is not None and self.longest < self.shortest):
            raise ValueError(f"limits must be 1 ≤ shortest ≤ longest, not {self.shortest} and {self.longest}")
        if self.ratio is not None and self.ratio < 1:
            raise ValueError(f"ratio is of the longer to the shorter side, at least 1, not {self.ratio}")

    def refuses(self, source: str, target: str) -> str:
        """Return the reason why a pair is outside the limits; the empty string if it is within them."""
        if not source or not target:
            return "empty"
        if self == EVERYTHING:
            return ""
        if self.longest is not None and max(len(source), len(target)) > _CHARACTERS * self.longest:
            return "too long"
        short, long = sorted((count_words(source), count_words(target)))
        if short < self.shortest:
            return "too short"
        if self.longest is not None and long > self.longest:
            return "too long"
        if self.ratio is not None and long > self.ratio * short:
            return "ratio"
        return ""


EVERYTHING = Limits()
_TOO_LONG = f"a line of more than {LONGEST_LINE:,} bytes"
_CHARACTERS = 100  # the largest number of characters of a sentence, for each word that `Limits.longest` allows
_IGNORED = "ignored: "  # the prefix of the names under which a tally counts ignored columns


@dataclass(frozen=True, slots=True)
class Report:
    """The numbers of lines read, of pairs kept, of pairs skipped for each reason, and of lines with ignored columns.

    >>> print(Report(read=10, kept=7, skipped={"empty": 2, "too long": 1}))
    10 lines read, 7 pairs kept; skipped: 2 empty, 1 too long
    >>> print(Report(read=10, kept=10, ignored={"column 3": 10}))
    10 lines read, 10 pairs kept; ignored: column 3 of 10 lines
    """

    read: int
    kept: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.items())
        others = ", ".join(f"{what} of {count:,} lines" for what, count in self.ignored.items())
        facts = (("skipped", reasons), ("ignored", others))
        listed = "".join(f"; {name}: {text}" for name, text in facts if text)
        return f"{self.read:,} lines read, {self.kept:,} pairs kept{listed}"


@dataclass(frozen=True, slots=True)
class TwoFiles:
    """Two files in which line n of one translates line n of the other."""

    source: Path
    target: Path

    @property
    def files(self) -> tuple[Path, ...]:
        return self.source, self.target

    def rows(self) -> Iterator[Row]:
        """Yield line n of the source with line n of the target; one file may have extra blank lines at its end."""
        blank = Line(0, "")
        # how many lines at its end only the source file has, and how many only the target file has
        rest: list[int] = [0, 0]
        number = 0
        for number, (left, right) in enumerate(zip_longest(lines(self.source), lines(self.target)), start=1):
            if left is None or right is None:
                side = 0 if right is None else 1
                extra = left or right or blank
                rest[side] += 1
                if extra.text or extra.fault:
                    self._disagree(side, number - rest[side])
                continue
            if left.fault or right.fault:
                file, fault = (self.source, left.fault) if left.fault else (self.target, right.fault)
                yield Row(file, number, fault=fault)
            else:
                yield Row(self.source, number, left.text, right.text)

    def _disagree(self, side: int, shared: int) -> None:
        longer, shorter = (self.source, self.target) if side == 0 else (self.target, self.source)
        count = sum(1 for _ in lines(longer))
        raise DataError(
            f"{shorter}:{shared}: the file ends here, but {longer} goes on to line {count}: "
            f"the two must correspond line by line"
        )


@dataclass(frozen=True, slots=True)
class Tsv:
    """A table whose cells are separated by tabs; `columns` are the indices of the source and the target column.

    Every row must have as many cells as the first row. Columns other than the source's and the target's are ignored,
    and reported as ignored.
    """

    path: Path
    columns: tuple[int, int] = (0, 1)
    header: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def rows(self) -> Iterator[Row]:
        """Yield each row of the table as a pair of sentences."""
        first: tuple[int, int] | None = None  # the line number and the number of cells of the first row
        for line in lines(self.path):
            cells = line.text.split("\t")
            if line.fault:
                yield Row(self.path, line.number, fault=line.fault)
                continue
            if not line.text.strip():
                yield Row(self.path, line.number)
                continue
            first = first or (line.number, len(cells))
            if self.header and line.number == 1:
                continue
            fault = self._fault(len(cells), first)
            if fault:
                yield Row(self.path, line.number, fault=fault)
            else:
                source, target = (cells[column].strip() for column in self.columns)
                yield Row(self.path, line.number, source, target, ignored=self._others(len(cells)))

    def _fault(self, count: int, first: tuple[int, int]) -> str:
        """Return an error message if `count`, a row's number of cells, is wrong, else "".

        `first` is the line number and the number of cells of the first row.
        """
        line, expected = first
        if count <= max(self.columns):
            return f"expected at least {max(self.columns) + 1} columns parted by tabs, found {count}"
        if count != expected:
            return f"expected {expected} columns parted by tabs as in line {line}, found {count}"
        return ""

    def _others(self, count: int) -> str:
        """Return a text that lists the ignored columns of a row of `count` cells; the text counts columns from 1."""
        others = [str(column + 1) for column in range(count) if column not in self.columns]
        if len(others) > 8:
            others = [*others[:7], f"{len(others) - 7} others"]
        return f"column{'s' if len(others) > 1 else ''} {' and '.join(others)}" if others else ""


@dataclass(frozen=True, slots=True)
class Jsonl:
    """A file with one JSON object per line; `fields` are the names of the fields of the source and the target."""

    path: Path
    fields: tuple[str, str] = ("source", "target")

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def rows(self) -> Iterator[Row]:
        """Yield each JSON object as a pair of sentences; fields that are not in `fields` are ignored."""
        for line in lines(self.path):
            if line.fault:
                yield Row(self.path, line.number, fault=line.fault)
            elif not line.text:
                yield Row(self.path, line.number)
            else:
                yield self._row(line.number, line.text)

    def _row(self, number: int, text: str) -> Row:
        record, fault = json_object(text, "a pair")
        if fault:
            return Row(self.path, number, fault=fault)
        for name in self.fields:
            if not isinstance(record.get(name), str):
                names = ", ".join(sorted(record)[:8]) or "no fields"
                return Row(self.path, number, fault=f"expected a text in the field {name!r}; the object has {names}")
        source, target = (record[name].strip() for name in self.fields)
        return Row(self.path, number, source, target, fault_of(source + target))


def find_rows(paths: tuple[Path, ...] | list[Path]) -> TwoFiles | Tsv | Jsonl:
    """Return the reader for these paths: two line-aligned files, or one .tsv or .jsonl; each may also end in .gz.

    >>> find_rows([Path("train.en.gz"), Path("train.zh.gz")])
    TwoFiles(source=...Path('train.en.gz'), target=...Path('train.zh.gz'))
    """
    if len(paths) == 2:
        return TwoFiles(Path(paths[0]), Path(paths[1]))
    if len(paths) == 1:
        path = Path(paths[0])
        suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
        if suffixes and suffixes[-1] in (".jsonl", ".json", ".ndjson"):
            return Jsonl(path)
        if suffixes and suffixes[-1] in (".tsv", ".tab", ".txt"):
            return Tsv(path)
        raise DataError(f"{path}: one file must be .tsv or .jsonl (or .gz of them); or give two files, line by line")
    raise DataError(f"expected two files or one, found {len(paths)}: {', '.join(map(str, paths))}")


def read_pairs(rows: Rows, tally: Counter[str], *, limits: Limits = EVERYTHING) -> Iterator[Couple]:
    """Yield the pairs of sentences within the limits, in order and in constant memory.

    An invalid line (not UTF-8, not JSON, a missing column) raises `DataError`. A line of more than a mebibyte raises it
    too, except with `limits.longest`, which skips the line. The counts of lines read, of pairs kept, of pairs skipped
    for each reason, and of ignored columns are added to `tally`, which `report` converts to a `Report`.
    """
    for row in rows.rows():
        tally["read"] += 1
        too_long = row.fault == _TOO_LONG and limits.longest is not None
        if row.fault and not too_long:
            raise DataError(f"{row.file}:{row.line}: {row.fault}")
        reason = "too long" if too_long else limits.refuses(row.source, row.target)
        tally[reason or "kept"] += 1
        if row.ignored:
            tally[_IGNORED + row.ignored] += 1
        if not reason:
            yield row.source, row.target
    _check_some(rows, tally)


def load_pairs(rows: Rows, *, limits: Limits = EVERYTHING) -> tuple[list[Couple], Report]:
    """Return all pairs within the limits as a list, and the report; for files that fit in memory."""
    tally: Counter[str] = Counter()
    pairs = list(read_pairs(rows, tally, limits=limits))
    return pairs, report(tally)


def report(tally: Counter[str]) -> Report:
    """Return the counts of a tally as a `Report`, with the reasons in alphabetical order."""
    ignored = {name.removeprefix(_IGNORED): tally[name] for name in sorted(tally) if name.startswith(_IGNORED)}
    others = {"read", "kept", *(_IGNORED + name for name in ignored)}
    skipped = {reason: tally[reason] for reason in sorted(tally) if reason not in others}
    return Report(read=tally["read"], kept=tally["kept"], skipped=skipped, ignored=ignored)


def _check_some(rows: Rows, tally: Counter[str]) -> None:
    names = " and ".join(map(str, rows.files))
    if not tally["read"]:
        raise DataError(f"{names}: the file is empty" if len(rows.files) == 1 else f"{names}: the files are empty")
    if not tally["kept"]:
        raise DataError(f"{names}: no pair is left ({report(tally)})")


def count_words(text: str) -> int:
    """Return the number of words in a text; each Chinese or Japanese character counts as a word.

    >>> count_words("Tom chases Jerry ."), count_words("汤姆追逐Jerry 。")
    (4, 6)
    """
    return len(text.split()) if text.isascii() else len(_WORD.findall(text))
