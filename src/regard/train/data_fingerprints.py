"""Fingerprints of a run's data files, which show whether the data has changed when a run is resumed."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from regard.train.atomic_files import sha256


def fingerprint(path: Path) -> dict[str, Any]:
    """Return a file's path, size in bytes, modification time in nanoseconds and SHA-256."""
    status = path.stat()
    return {
        "path": str(path),
        "bytes": status.st_size,
        "modified": status.st_mtime_ns,
        "sha256": sha256(path),
    }


def changes(recorded: Iterable[dict[str, Any]], paths: Sequence[Path]) -> list[str]:
    """Return a sentence for each data file added, removed or changed since the fingerprints `recorded`; empty if none.

    A file of the same size and modification time counts as unchanged. If only the modification time differs, the
    SHA-256 of the file decides.
    """
    known = {record["path"]: record for record in recorded}
    messages = [f"{name} is no longer among the data files" for name in known if Path(name) not in paths]
    for path in paths:
        record = known.get(str(path))
        if record is None:
            messages.append(f"{path} was not among the data files when the run was started")
        elif not path.is_file():
            messages.append(f"{path} is missing")
        elif _differs(path, record):
            messages.append(f"the contents of {path} have changed since the run was started")
    return messages


def _differs(path: Path, recorded: dict[str, Any]) -> bool:
    status = path.stat()
    if status.st_size != recorded["bytes"]:
        return True
    return status.st_mtime_ns != recorded["modified"] and sha256(path) != recorded["sha256"]
