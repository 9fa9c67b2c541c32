"""The example input of a run: its text is in `result.json`, its image or sound in a file of the run directory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.tasks.image_inputs import png_of
from regard.tasks.task import Input
from regard.train.run_directory import Run

# the name of the file that holds an example input in a run directory, for each kind of input
FILES = {"image": "example.png", "sound": "example.wav"}


def example_parts(inputs: Sequence[Input], example: Any) -> dict[str, Any]:
    """Return an example input as a mapping by the names of the task's inputs.

    The example is given as the value of a single input, as a list of the values of all inputs, or as a mapping from
    names to values.

    >>> example_parts((Input("passage", "text", "Passage"), Input("question", "text", "Question")), ["Tom.", "Who?"])
    {'passage': 'Tom.', 'question': 'Who?'}
    """
    if isinstance(example, Mapping):
        return {one.name: example[one.name] for one in inputs if one.name in example}
    values = list(example) if isinstance(example, (list, tuple)) else [example]
    return {one.name: value for one, value in zip(inputs, values, strict=False) if value is not None}


def store_example(inputs: Sequence[Input], example: Any, run: Run) -> Any:
    """Return the example input as the JSON value that `result.json` contains.

    Pixels or bytes of an image or a sound are written to a file in the run directory, and replaced by the file's name.
    """
    parts = example_parts(inputs, example)
    files = {}
    for one in inputs:
        value = parts.get(one.name)
        if one.kind in FILES and isinstance(value, (bytes, np.ndarray, Tensor)):
            files[FILES[one.kind]] = value if isinstance(value, bytes) else png_of(value)
            parts[one.name] = FILES[one.kind]
    if not files:
        return example
    run.manifest.keep(lambda folder: _write(folder, files))
    return parts


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def example_arguments(inputs: Sequence[Input], example: Any, run: Path) -> list[str]:
    """Return the example input of a `result.json` as arguments of `regard predict`: text, or the path of a file.

    The list is empty if the example lacks one of the task's inputs.
    """
    parts = example_parts(inputs, example)
    arguments = []
    for one in inputs:
        value = parts.get(one.name)
        if value is None:
            return []
        if FILES.get(one.kind) == value:
            arguments.append(str(run / value))
        else:
            arguments.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return arguments


def example_file(one: Input, example: Any, run: Path) -> Path | None:
    """Return the path of an example's image or sound in the run directory; None if there is no such file.

    Only the file names in `FILES` are accepted, so an edited `result.json` cannot name another file.
    """
    name = FILES.get(one.kind)
    if name is None or not isinstance(example, Mapping) or example.get(one.name) != name:
        return None
    return run / name if (run / name).is_file() else None
