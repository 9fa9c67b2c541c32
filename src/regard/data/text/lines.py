"""Lines of a text file, plain or gzipped, of a length that is bounded."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.text.parallel_text import DataError

LONGEST = 1_000_000  # bytes of a line


class Line(NamedTuple):
    """One line of a file: its number from 1, and its text without the line end, or what is wrong with it."""

    number: int
    text: str
    fault: str = ""


def text_lines(path: Path, *, longest: int = LONGEST) -> Iterator[Line]:
    """The lines of a UTF-8 file; one that is too long or no UTF-8 comes with its fault, and reading goes on."""
    number = 0
    try:
        with _opened(path) as stream:
            while raw := stream.readline(longest + 1):
                number += 1
                if number == 1:
                    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                        raise DataError(f"{path}:1: the file is UTF-16; expected UTF-8")
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                yield _line(number, raw, stream, longest)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}:{number + 1}: the gzip file is damaged: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _line(number: int, raw: bytes, stream: Any, longest: int) -> Line:
    if len(raw) > longest:
        while raw and not raw.endswith(b"\n"):  # the rest of the line is passed over, a piece at a time
            raw = stream.readline(longest)
        return Line(number, "", f"the line is longer than {longest:,} bytes")
    try:
        return Line(number, raw.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return Line(number, "", f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start + 1}")


def _opened(path: Path) -> Any:
    """The file as bytes; gzip is known by its first two bytes, whatever the name says."""
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")
