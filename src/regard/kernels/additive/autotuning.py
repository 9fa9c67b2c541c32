"""Which tiles the additive kernels take on a device: measured where asked for, and kept in a file.

Shipped defaults serve unless tiles are measured: with `REGARD_AUTOTUNE=1` in the environment the first call of each
class of shapes times a few choices (a log line says so; each is compiled first, some seconds), and the best one is
written to a small JSON file, `regard/additive.json` in the user's folder of caches, from which later processes take it.
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
_EDITION = 1  # of the kernels: measurements of another one are ignored
_MOST = 512  # entries of the file: the oldest make room


def wanted() -> bool:
    """Are measurements asked for?"""
    return os.environ.get("REGARD_AUTOTUNE", "") not in ("", "0")


def path() -> Path:
    """The file; `REGARD_CACHE` names another folder for it."""
    if chosen := os.environ.get("REGARD_CACHE"):
        return Path(chosen) / "additive.json"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "regard" / "additive.json"


def kept() -> dict[str, Any]:
    """What the file holds; nothing, with a warning in the log, where it cannot be read."""
    try:
        found = json.loads(path().read_text())
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RuntimeError) as problem:  # RuntimeError: this user has no home
        _log.warning("ignoring the file of tiles, which cannot be read: %s", problem)
        return {}
    return found


def keep(name: str, value: Any) -> None:
    """One entry more in the file, which is replaced in one step: no reader ever sees a part of it."""
    entries = {**kept(), name: value}
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
    """The choice for each class of shapes: in memory, else from the file, else measured or the default."""

    def __init__(self) -> None:
        self._chosen: dict[Hashable, int] = {}
        self._file: dict[str, Any] | None = None

    def known(self, where: Hashable) -> int | None:
        """The choice for a class seen before."""
        return self._chosen.get(where)

    def choose(self, where: Hashable, device: str, choices: Sequence[str], measure: Callable[[int], float]) -> int:
        """The number of the choice for a class not seen before; `measure` gives the seconds of one.

        The first choice is the default.
        """
        if self._file is None:
            self._file = kept()
        name = f"{device}, kernels {_EDITION}: {where}"
        found = self._file.get(name)
        if found not in choices and wanted():
            _log.warning("measuring %d tile sizes for %s, each compiled first: some seconds, once", len(choices), name)
            times = [self._seconds(measure, number) for number in range(len(choices))]
            found = choices[times.index(min(times))]
            self._file[name] = found
            keep(name, found)
        self._chosen[where] = number = choices.index(found) if found in choices else 0
        return number

    @staticmethod
    def _seconds(measure: Callable[[int], float], number: int) -> float:
        try:
            return measure(number)
        except Exception as problem:  # a tile that does not fit this device is no choice, and no error
            _log.info("tile choice %d does not run here: %s", number, problem)
            return float("inf")
