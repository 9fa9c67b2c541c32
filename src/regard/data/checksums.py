"""SHA-256 checksums of a folder's files, so that a damaged file raises an error instead of yielding wrong data."""

import hashlib
import json
from pathlib import Path

from regard.data.data_files import DataError

NAME = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every file of the folder to checksums.json in the same folder."""
    sums = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != NAME}
    (folder / NAME).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


def check(folder: Path) -> None:
    """Raise `DataError` if a file listed in the folder's checksums.json is damaged or missing.

    A folder without checksums.json, written by an earlier version of regard, is not checked.
    """
    if not (folder / NAME).is_file():
        return
    advice = f"remove {folder}, and it is made again from the data files"
    try:
        sums = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if not isinstance(sums, dict) or not sums:
            raise ValueError("expected a table of names and sums")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{folder / NAME} is damaged: {advice}") from error
    for name, digest in sums.items():
        path = folder / Path(name).name
        if not path.is_file():
            raise DataError(f"{path} is missing: {advice}")
        if _sha256(path) != digest:
            raise DataError(f"{path} is damaged: {advice}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
