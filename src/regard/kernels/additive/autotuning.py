"""Tile sizes of the additive kernels: defaults, or measured on the device on request and cached in a file.

With `REGARD_AUTOTUNE=1` in the environment, the first call of each class of shapes measures the time of a few tile
sizes and logs this, because compiling each takes some seconds. The fastest is written to a small JSON file,
`regard/additive.json` in the user's cache folder, which later processes read.
"""

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

_log = logging.getLogger("regard")
_EDITION = 1  # version of the kernels: measurements of another version are ignored
_MOST = 512  # the largest number of entries in the file; the oldest entries are deleted


def wanted() -> bool:
    """Return whether the environment requests measurements by `REGARD_AUTOTUNE`."""
    return os.environ.get("REGARD_AUTOTUNE", "") not in ("", "0")


def path() -> Path:
    """Return the path of the file of tile sizes; if the environment sets `REGARD_CACHE`, the file is in that folder."""
    if chosen := os.environ.get("REGARD_CACHE"):
        return Path(chosen) / "additive.json"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "regard" / "additive.json"


def stored() -> dict[str, Any]:
    """Return the contents of the file; {} if it does not exist, or, with a warning in the log, cannot be read."""
    try:
        entries = json.loads(path().read_text())
        if not isinstance(entries, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RuntimeError) as problem:  # RuntimeError: the user has no home directory
        _log.warning("ignoring the file of tiles, which cannot be read: %s", problem)
        return {}
    return entries


def store(name: str, value: Any) -> None:
    """Add one entry to the file and replace it atomically, so that no reader sees a partial file."""
    entries = {**stored(), name: value}
    entries = dict(list(entries.items())[-_MOST:])
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path().parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(entries, file, indent=1)
            os.replace(temporary, path())
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, RuntimeError) as problem:
        _log.warning("could not write the file of tiles: %s", problem)


class Tiles:
    """The tile size for each class of shapes: from memory, else from the file, else measured or the default."""

    def __init__(self) -> None:
        self._chosen: dict[Hashable, int] = {}
        self._file: dict[str, Any] | None = None

    def known(self, where: Hashable) -> int | None:
        """Return the index of the tile size stored in memory for a class of shapes, or None if none is stored."""
        return self._chosen.get(where)

    def choose(self, where: Hashable, device: str, choices: Sequence[str], measure: Callable[[int], float]) -> int:
        """Return the index in `choices` of the tile size for a new class of shapes, `where`.

        `measure(index)` returns the seconds that a tile size takes. The first tile size is the default.
        """
        if self._file is None:
            self._file = stored()
        name = f"{device}, kernels {_EDITION}: {where}"
        choice = self._file.get(name)
        if choice not in choices and wanted():
            _log.warning("measuring %d tile sizes for %s, each compiled first: some seconds, once", len(choices), name)
            times = [self._seconds(measure, number) for number in range(len(choices))]
            choice = choices[times.index(min(times))]
            self._file[name] = choice
            store(name, choice)
        self._chosen[where] = number = choices.index(choice) if choice in choices else 0
        return number

    @staticmethod
    def _seconds(measure: Callable[[int], float], number: int) -> float:
        try:
            return measure(number)
        except Exception as problem:  # a tile that does not fit this device is skipped
            _log.info("tile choice %d does not run here: %s", number, problem)
            return float("inf")
