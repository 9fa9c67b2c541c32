"""Reader of JSON records: one object a line, or one array of entries; plain or gzipped."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.data_files import DataError
from regard.data.text.lines import lines

_LONGEST_ARRAY = 1 << 28  # bytes of a line of an array: programs write all of it on one line


class Record(NamedTuple):
    """One entry: its place ("file:line" or "file: entry n"), and its value or its fault."""

    where: str
    value: Any = None
    fault: str = ""


def records(path: Path) -> Iterator[Record]:
    """The entries of a .json or .jsonl file, in order; blank lines are passed over.

    A file of lines is read in constant memory, and a line that is no JSON is the fault of that line alone. A file that
    is one array is read at once; where it is no JSON, nothing of it can be read: a DataError with the line.
    """
    first = next((line for line in lines(path, longest=_LONGEST_ARRAY) if line.text or line.fault), None)
    if first is None:
        raise DataError(f"{path}: the file is empty")
    if not first.fault and first.text.startswith("["):
        whole = _whole(path)
        if whole is not None:
            yield from (Record(f"{path}: entry {number}", value) for number, value in enumerate(whole, start=1))
            return
    for line in lines(path):
        if line.text or line.fault:
            where = f"{path}:{line.number}"
            yield Record(where, fault=line.fault) if line.fault else _parsed(where, line.text)


def _parsed(where: str, text: str) -> Record:
    try:
        return Record(where, json.loads(text))
    except json.JSONDecodeError as error:
        return Record(where, fault=f"not JSON: {error.msg} at character {error.pos + 1}")
    except RecursionError:
        return Record(where, fault="nested too deeply")


def _whole(path: Path) -> list[Any] | None:
    """The array of the file; None if its first line is a complete array with others below."""
    text = []
    for line in lines(path, longest=_LONGEST_ARRAY):
        if line.fault:
            raise DataError(f"{path}:{line.number}: {line.fault}")
        text.append(line.text)
    try:
        value = json.loads("\n".join(text))
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} at character {error.colno}") from error
    return value
