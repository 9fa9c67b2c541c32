"""The input texts of `regard predict`, from arguments or from standard input.

Each input is a text, or the reason why the text is invalid. Memory is bounded: of a line that is too long, at most a
fixed number of bytes is in memory.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

_TOGETHER = 64  # number of lines of a pipe that the model receives as one batch
_SKIPPED = 1 << 16  # number of bytes that are read at a time to skip the end of a line that is too long


class InputText(NamedTuple):
    """One text with its origin, such as "line 3"; `fault` is empty, or the reason why the text is invalid."""

    place: str
    text: str
    fault: str = ""


@runtime_checkable
class ByteLines(Protocol):
    """The interface of a stream of bytes that can be read line by line."""

    def readline(self, size: int, /) -> bytes:
        """Return the next line with its line feed, or at most `size` bytes of it; b"" at the end of the stream."""


def input_batches(inputs: Sequence[str], *, characters: int) -> Iterator[list[InputText]]:
    """Yield `inputs` as one list if there are any; otherwise yield the lines of standard input.

    At a terminal, each line is yielded by itself; from a pipe, 64 lines are yielded at a time. If a line has more than
    `characters` characters or is not UTF-8, its `InputText` has a `fault` and an empty text.
    """
    if inputs:
        yield [_from_argument(number, text, characters) for number, text in enumerate(inputs)]
        return
    together = _TOGETHER
    if sys.stdin.isatty():
        print("Type a sentence; Ctrl-D ends.", file=sys.stderr)
        together = 1
    waiting: list[InputText] = []
    for line in read_lines(sys.stdin.buffer, characters=characters):
        waiting.append(line)
        if len(waiting) == together:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def read_lines(stream: ByteLines, *, characters: int) -> Iterator[InputText]:
    r"""Yield the lines of a UTF-8 stream, without line feeds and without a byte order mark; only "\n" ends a line.

    >>> import io
    >>> [(line.text, line.fault) for line in read_lines(io.BytesIO(b"Tom\nabcdef\n\xff\n"), characters=4)]
    [('Tom', ''), ('', 'more than 4 characters'), ('', 'not UTF-8: byte 0xff at byte 1')]
    """
    # The largest valid line has four bytes for each character, three for a byte order mark, and two for "\r\n".
    most = 4 * characters + 3 + 2
    number = 0
    while raw := stream.readline(most):
        number += 1
        whole = raw.endswith(b"\n") or len(raw) < most
        if not whole:
            _skip_line(stream)
        raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        yield _from_bytes(f"line {number}", raw, whole, characters)


def _skip_line(stream: ByteLines) -> None:
    """Read and discard the stream up to the end of the current line, in chunks of bounded size."""
    while part := stream.readline(_SKIPPED):
        if part.endswith(b"\n"):
            return


def _from_bytes(place: str, raw: bytes, whole: bool, characters: int) -> InputText:
    if not whole:
        return InputText(place, "", _beyond(characters))
    try:
        text = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        return InputText(place, "", f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start + 1}")
    return _bounded(place, text, characters)


def _from_argument(number: int, text: str, characters: int) -> InputText:
    """Return the `InputText` of a command line argument, with a `fault` if the argument has bytes that are not UTF-8.

    Python decodes bytes that are not UTF-8 as surrogate code points, which this function detects.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return InputText(f"input {number}", "", "not UTF-8")
    return _bounded(f"input {number}", text, characters)


def _bounded(place: str, text: str, characters: int) -> InputText:
    return InputText(place, text) if len(text) <= characters else InputText(place, "", _beyond(characters))


def _beyond(characters: int) -> str:
    return f"more than {characters:,} characters"
