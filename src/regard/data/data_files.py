"""Data files, gzipped or not, and the error of a fault in one."""

import gzip
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A user's file has a fault; the message begins with the file and the line."""


def only_path(paths: Sequence[Path], what: str = "file or folder", *, listed: bool = True) -> Path:
    """Return the single path of a data set; none or several are an error, which lists them."""
    if len(paths) != 1:
        given = f"found {len(paths)}: {', '.join(map(str, paths))}" if listed else f"got {len(paths)}"
        raise DataError(f"expected one {what}, {given}")
    return Path(paths[0])


@contextmanager
def opened(path: Path, place: Any = None) -> Generator[Any, None, None]:
    """Open the file as bytes; gzip is recognised by its first two bytes, not by the name.

    A file that cannot be read is a `DataError`; if the gzip file is damaged, `place()` returns the position for its
    message, such as the file and a line.
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
