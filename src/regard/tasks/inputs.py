"""Checks of a predictor's inputs; an input is a text, the path of a file, a tuple of texts and paths, or a mapping."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.tasks.task import Input, InputError

_TEXT_BYTES = 1 << 20  # largest size in bytes of a text file that is given as an input


def named(inputs: Sequence[Input], given: Any) -> dict[str, Any]:
    """Return one input as a mapping from the names of its parts to their values.

    If the input is invalid, the message of the `InputError` states the expected and the given values.

    >>> question = (Input("passage", "text", "Passage"), Input("question", "text", "Question"))
    >>> named(question, ("Tom is in the garden.", "Where is Tom?"))
    {'passage': 'Tom is in the garden.', 'question': 'Where is Tom?'}
    >>> named(question, "Where is Tom?")
    Traceback (most recent call last):
    regard.tasks.task.InputError: expected passage and question, got 1 value
    """
    names = [one.name for one in inputs]
    if isinstance(given, Mapping):
        unknown = [str(name) for name in given if name not in names]
        missing = [name for name in names if name not in given]
        if unknown or missing:
            received = ", ".join(map(str, given)) or "nothing"
            raise InputError(f"expected {' and '.join(names)}, got {received}")
        values = [given[name] for name in names]
    elif isinstance(given, (str, bytes, os.PathLike)) or not isinstance(given, Sequence):
        values = [given]
    else:
        values = list(given)
    if len(values) != len(names):
        raise InputError(f"expected {' and '.join(names)}, got {_counted(len(values))}")
    return {one.name: _checked(one, value) for one, value in zip(inputs, values, strict=True)}


def from_arguments(inputs: Sequence[Input], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return command-line arguments as inputs; each input takes as many arguments as the task has parts of an input.

    For a part with `from_file`, an argument that is the path of a text file is replaced by the text of the file.
    """
    size = len(inputs)
    if len(arguments) % size:
        names = " ".join(one.name.upper() for one in inputs)
        raise InputError(f"expected {names} for each input, got {_counted(len(arguments))}")
    groups = [arguments[first : first + size] for first in range(0, len(arguments), size)]
    return [
        {
            one.name: _read(Path(value)) if _is_file(one, value) else value
            for one, value in zip(inputs, group, strict=True)
        }
        for group in groups
    ]


def _checked(one: Input, value: Any) -> Any:
    if one.kind == "text" and not isinstance(value, str):
        raise InputError(f"{one.name} must be text, got {type(value).__name__}")
    if one.kind in ("image", "sound") and not isinstance(value, (str, bytes, os.PathLike)):
        raise InputError(f"{one.name} must be the path or the bytes of a file, got {type(value).__name__}")
    if one.kind in ("image", "sound") and value in ("", b""):
        raise InputError(f"{one.name} is empty: expected the path or the bytes of a file")
    return value


def _is_file(one: Input, value: str) -> bool:
    if one.kind != "text" or not one.from_file or len(value) > 1000 or "\n" in value:
        return False
    return Path(value).is_file()


def _read(path: Path) -> str:
    if path.stat().st_size > _TEXT_BYTES:
        raise InputError(f"{path} has {path.stat().st_size:,} bytes, at most {_TEXT_BYTES:,} can be read")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None


def _counted(count: int) -> str:
    return f"{count} value{'' if count == 1 else 's'}"
