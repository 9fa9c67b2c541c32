"""Reader of JSON records: one object per line, or one array of entries; gzipped or not."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.data_files import DataError
from regard.data.text.lines import lines

_SPACE = re.compile(r"[ \t\n\r]*")
_LONGEST_ARRAY = 1 << 28  # the largest length of a line in bytes; some programs write a whole JSON array on one line


class Record(NamedTuple):
    """One entry of a JSON file: its position ("file:line" or "file: entry n"), and its value or an error message."""

    where: str
    value: Any = None
    fault: str = ""


def records(path: Path) -> Iterator[Record]:
    """Yield the entries of a .json or .jsonl file, in order; blank lines are skipped.

    A file with one value on each line is read in constant memory, and a line that is not JSON makes only that entry
    invalid. The text of a file that holds one array is read at once, and its entries are parsed one by one; if the text
    is not JSON, a `DataError` names the line.
    """
    few = list(islice((line for line in lines(path, longest=_LONGEST_ARRAY) if line.text or line.fault), 2))
    if not few:
        raise DataError(f"{path}: the file is empty")
    if not few[0].fault and few[0].text.startswith("[") and not (few[1:] and _is_json(few[0].text)):
        few.clear()
        yield from (Record(f"{path}: entry {number}", value) for number, value in enumerate(_entries(path), start=1))
        return
    for line in lines(path):
        if line.text or line.fault:
            where = f"{path}:{line.number}"
            yield Record(where, fault=line.fault) if line.fault else _parsed(where, line.text)


def json_object(text: str, what: str = "JSON") -> tuple[dict[str, Any], str]:
    """Return (object, "") for a line that is a JSON object, or ({}, error message) for any other line.

    `what` names the expected format in the message about a line that is nested too deeply.

    >>> json_object("[1]")
    ({}, 'expected a JSON object, found list')
    """
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        return {}, f"not JSON: {error.msg} at character {error.pos + 1}"
    except RecursionError:
        return {}, f"not {what}: nested too deeply"
    return (record, "") if isinstance(record, dict) else ({}, f"expected a JSON object, found {type(record).__name__}")


def _parsed(where: str, text: str) -> Record:
    try:
        return Record(where, json.loads(text))
    except json.JSONDecodeError as error:
        return Record(where, fault=f"not JSON: {error.msg} at character {error.pos + 1}")
    except RecursionError:
        return Record(where, fault="nested too deeply")


def _is_json(text: str) -> bool:
    """Return whether a line is a complete JSON value, and the file therefore has one value on each line."""
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return False
    return True


def _entries(path: Path) -> Iterator[Any]:
    """Yield the entries of a file that holds one JSON array."""
    parts = []
    for line in lines(path, longest=_LONGEST_ARRAY):
        if line.fault:
            raise DataError(f"{path}:{line.number}: {line.fault}")
        parts.append(line.text)
    text = "\n".join(parts)
    parts.clear()
    try:
        yield from _parsed_array(text)
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} at character {error.colno}") from error


def _parsed_array(text: str) -> Iterator[Any]:
    """Yield the entries of the JSON array `text` one at a time; `json.loads` would return all of them in one list."""
    decode = json.JSONDecoder().raw_decode
    place = _past_space(text, text.index("[") + 1)
    if text[place : place + 1] == "]":
        place += 1
    else:
        while True:
            value, place = decode(text, place)
            yield value
            place = _past_space(text, place)
            mark = text[place : place + 1]
            if mark not in (",", "]") or not mark:
                raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
            place = _past_space(text, place + 1)
            if mark == "]":
                break
    if _past_space(text, place) != len(text):
        raise json.JSONDecodeError("Extra data", text, place)


def _past_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return place if match is None else match.end()
