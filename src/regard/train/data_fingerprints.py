"""Fingerprints of a run's data files: a resumed run must find the same contents."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from regard.train.atomic_files import sha256


def fingerprint(path: Path) -> dict[str, Any]:
    """Return path, size, modification time and SHA-256 of a file."""
    status = path.stat()
    return {
        "path": str(path),
        "bytes": status.st_size,
        "modified": status.st_mtime_ns,
        "sha256": sha256(path),
    }


def changes(recorded: Iterable[dict[str, Any]], paths: Sequence[Path]) -> list[str]:
    """Return differences between recorded fingerprints and the current files, one sentence for each file.

    A file of the same size and modification time counts as unchanged; if only the time differs, the file is read.
    """
    known = {one["path"]: one for one in recorded}
    found = [f"{name} is no longer among the data files" for name in known if Path(name) not in paths]
    for path in paths:
        one = known.get(str(path))
        if one is None:
            found.append(f"{path} was not among the data files when the run was started")
        elif not path.is_file():
            found.append(f"{path} is missing")
        elif _differs(path, one):
            found.append(f"the contents of {path} have changed since the run was started")
    return found


def _differs(path: Path, recorded: dict[str, Any]) -> bool:
    status = path.stat()
    if status.st_size != recorded["bytes"]:
        return True
    return status.st_mtime_ns != recorded["modified"] and sha256(path) != recorded["sha256"]
