"""Opens data files, gzipped or not; defines `DataError`, the error raised for an invalid file."""

import gzip
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """Raised if a user's data file is invalid; the message begins with the file and, where known, the line."""


def only_path(paths: Sequence[Path], what: str = "file or folder", *, listed: bool = True) -> Path:
    """Return the single element of `paths`; raise `DataError` if there are none or several."""
    if len(paths) != 1:
        given = f"found {len(paths)}: {', '.join(map(str, paths))}" if listed else f"got {len(paths)}"
        raise DataError(f"expected one {what}, {given}")
    return Path(paths[0])


@contextmanager
def opened(path: Path, place: Any = None) -> Generator[Any, None, None]:
    """Open a file as bytes and decompress gzip, which is recognised by the first two bytes, not by the name.

    A file that cannot be read raises `DataError`. If a gzip file is damaged, the error message begins with the text
    that `place()` returns, such as the file and the line; without `place` the message begins with the path.
    """
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path if place is None else place()}: the gzip file is damaged: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
