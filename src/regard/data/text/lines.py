"""Reader of the lines of a text file, gzipped or not; the length of a line is bounded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.data_files import DataError, opened

LONGEST = 1_000_000  # the largest length of a line in bytes that `text_lines` reads by default
LONGEST_LINE = 1 << 20  # the largest length of a line in bytes that `lines` reads by default
# Characters that `lines` strips from both ends of a line. A tab is not stripped, because it separates the cells of a
# TSV.
_BLANKS = " \r\n\f\v\u00a0\u3000\ufeff"


class Line(NamedTuple):
    """One line of a file: its number, counted from 1, and its text without the line end, or an error message."""

    number: int
    text: str
    fault: str = ""


def lines(path: Path, *, longest: int = LONGEST_LINE) -> Iterator[Line]:
    """Yield the lines of a text file without surrounding blanks; a line of more than `longest` bytes is invalid."""
    for number, text, fault in text_lines(path, longest=longest, too_long="a line of more than {:,} bytes"):
        yield Line(number, text.strip(_BLANKS), fault)


def text_lines(
    path: Path, *, longest: int = LONGEST, too_long: str = "the line is longer than {:,} bytes"
) -> Iterator[Line]:
    """Yield the lines of a UTF-8 file; a line that is too long or not UTF-8 has an error text, and reading continues.

    Only a line feed ends a line, because the other line breaks of Unicode occur inside sentences. A byte order mark is
    removed.
    """
    number = 0
    with opened(path, lambda: f"{path}:{number + 1}") as stream:
        while raw := stream.readline(longest + 1):
            number += 1
            if number == 1:
                if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise DataError(f"{path}:1: the file is UTF-16; expected UTF-8")
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            yield _line(number, raw, stream, longest, too_long)


def fault_of(text: str) -> str:
    """Return an error message if a text from JSON cannot be encoded as UTF-8; the empty string if it can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no character"
    return ""


def _line(number: int, raw: bytes, stream: Any, longest: int, too_long: str) -> Line:
    if len(raw) > longest:
        # skip the rest of the line in steps of at most `longest` bytes, to limit the memory
        while raw and not raw.endswith(b"\n"):
            raw = stream.readline(longest)
        return Line(number, "", too_long.format(longest))
    try:
        return Line(number, raw.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return Line(number, "", f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start + 1}")
