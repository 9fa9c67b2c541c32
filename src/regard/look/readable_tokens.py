"""Readable text of a tokenizer's pieces, without the letters that represent bytes, `▁` and `##`.

- A piece is shown as its own text, without the blank before a word: `Ġquick` and `▁quick` are `quick`.
- A piece that continues a word has a dot before it: `##ing`, and `ing` after `Ġjump`, are `·ing`. Scripts that
  are written without blanks between words have no such mark.
- A character that is spread over several pieces of bytes is named in each of them, with the part: `汤⟨1/3⟩`.
- A byte that is not part of a character is `<E6>`. A piece of blanks is unchanged.
"""

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte in a SentencePiece vocabulary
_METASPACE = "▁"


@functools.cache
def byte_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level BPE (GPT-2): printable bytes are themselves, others start at 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def readable(
    pieces: Sequence[str], literal: Sequence[bool] | None = None, *, byte_level: bool | None = None
) -> list[str]:
    """Return the pieces of one sequence as text; those that are `literal` (special tokens) are unchanged.

    `byte_level` is whether letters represent bytes; if None, this is inferred from the pieces.

    >>> readable(["The", "Ġqu", "ick", "Ġæ", "±", "¤"])
    ['The', 'qu', '·ick', '汤⟨1/3⟩', '汤⟨2/3⟩', '汤⟨3/3⟩']
    >>> readable(["[CLS]", "jump", "##ing"], [True, False, False])
    ['[CLS]', 'jump', '·ing']
    >>> readable(["▁Tom", "▁chas", "es", "▁", "<0xE6>", "<0xB1>", "<0xA4>"])
    ['Tom', 'chas', '·es', ' ', '汤⟨1/3⟩', '汤⟨2/3⟩', '汤⟨3/3⟩']
    """
    kept = list(literal) if literal is not None else [False] * len(pieces)
    plain = [piece for piece, alone in zip(pieces, kept, strict=True) if not alone]
    by_bytes = _is_byte_level(plain) if byte_level is None else byte_level
    by_words = not by_bytes and not any(_METASPACE in piece or _FALLBACK.fullmatch(piece) for piece in plain)
    raw = [None if alone else _bytes_of(piece, by_bytes, by_words) for piece, alone in zip(pieces, kept, strict=True)]
    return [label or piece for label, piece in zip(from_bytes(raw), pieces, strict=True)]


def from_bytes(raw: Sequence[bytes | None]) -> list[str]:
    r"""Return the labels of pieces by the bytes of each; empty if there are none.

    >>> from_bytes([b"To", b"m \xe6\xb1", b"\xa4"])
    ['To', '·m 汤⟨1/2⟩', '汤⟨2/2⟩']
    """
    labels = [""] * len(raw)
    for run in _runs(raw):
        data = b"".join(raw[n] or b"" for n in run)
        text = data.decode("utf-8", "surrogateescape")  # an invalid byte n becomes the character DC00 + n
        widths = [1 if "\udc80" <= c <= "\udcff" else len(c.encode()) for c in text]
        owners = [n for n, width in enumerate(widths) for _ in range(width)]
        spans: list[tuple[int, int]] = []
        start = 0
        for n in run:
            stop = start + len(raw[n] or b"")
            spans.append((owners[start], owners[stop - 1] + 1) if stop > start else (0, 0))
            start = stop
        for n, label in zip(run, _labelled(text, spans), strict=True):
            labels[n] = label
    return labels


def from_offsets(text: str, offsets: Sequence[tuple[int, int]], names: Sequence[str]) -> list[str]:
    """Return the part of a text for each piece; an empty piece, such as a special token, keeps its name.

    >>> from_offsets("Jumping 汤", [(0, 0), (0, 4), (4, 7), (8, 9), (8, 9)], ["[CLS]", "jump", "##ing", "æ±", "¤"])
    ['[CLS]', 'Jump', '·ing', '汤⟨1/2⟩', '汤⟨2/2⟩']
    """
    spans = [(max(0, start), min(stop, len(text))) for start, stop in offsets]
    return [label or name for label, name in zip(_labelled(text, spans), names, strict=True)]


class _Cover(NamedTuple):
    first: int  # the first piece that contains bytes of the character
    last: int


def _labelled(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Return the label of each piece from the characters it has a part of; empty for a piece without characters."""
    covers: dict[int, _Cover] = {}
    for n, span in enumerate(spans):
        for place in range(*span):
            covers[place] = _Cover(covers.get(place, _Cover(n, n)).first, n)
    found = []
    for n, (start, stop) in enumerate(spans):
        parts = [_part(text[place], n, covers[place]) for place in range(start, stop)]
        label = "".join(parts)
        if len(parts) > 1 and parts[0] == " " and label.strip():
            label = label[1:]
        elif start and parts and len(parts[0]) == 1 and _in_word(text[start - 1]) and _in_word(text[start]):
            label = f"·{label}"
        found.append(label)
    return found


def _part(character: str, piece: int, cover: _Cover) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"<{ord(character) - 0xDC00:02X}>"
    count = cover.last - cover.first + 1
    return character if count == 1 else f"{character}⟨{piece - cover.first + 1}/{count}⟩"


def _in_word(character: str) -> bool:
    """Return whether a character is a letter or digit of a script with blanks between words."""
    return character.isalnum() and unicodedata.east_asian_width(character) not in "WF"


def _bytes_of(piece: str, by_bytes: bool, by_words: bool) -> bytes | None:
    """Return the bytes of a piece as UTF-8, with the blank before a word; None if it must be shown unchanged."""
    if by_bytes:
        letters = byte_letters()
        return bytes(letters[c] for c in piece) if all(c in letters for c in piece) else None
    if by_words:  # WordPiece, or whole words: only ## continues a word
        inside = piece.startswith("##") and len(piece) > 2
        return piece[2:].encode("utf-8", "replace") if inside else f" {piece}".encode("utf-8", "replace")
    byte = _FALLBACK.fullmatch(piece)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return piece.replace(_METASPACE, " ").encode("utf-8", "replace")


def _is_byte_level(pieces: Sequence[str]) -> bool:
    """Return whether letters represent bytes: all are of that alphabet, and the bytes decode to another text."""
    letters, whole = byte_letters(), "".join(pieces)
    if whole.isascii() or not all(c in letters for c in whole):
        return False
    try:
        bytes(letters[c] for c in whole).decode()
    except UnicodeDecodeError:
        return "Ġ" in whole
    return True


def _runs(raw: Sequence[bytes | None]) -> list[list[int]]:
    """Return groups of adjacent pieces that form one text."""
    runs: list[list[int]] = [[]]
    for n, data in enumerate(raw):
        if data is not None:
            runs[-1].append(n)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
