"""Readable text of a tokenizer's pieces, without the marks `▁` and `##` and the letters that represent bytes (`Ġ`).

- A piece that begins a word is shown without the space before the word: `Ġquick` and `▁quick` are shown as `quick`.
- A piece that continues a word is shown with a dot before it: `##ing`, and `ing` after `Ġjump`, are shown as `·ing`.
  Pieces of scripts that are written without spaces between words get no dot.
- A character whose bytes are spread over several pieces is shown in each of them, with the number of the part:
  `汤⟨1/3⟩`.
- A byte that is not part of a valid character is shown as `<E6>`. A piece of spaces is unchanged.
"""

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

# the pattern of the name of a single byte in a SentencePiece vocabulary, such as <0xE6>
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "▁"  # the character that represents a space in a SentencePiece vocabulary


@functools.cache
def byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level BPE vocabulary (GPT-2) represents.

    A printable byte is represented by the letter of the same code; other bytes by the letters from code 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def readable(
    pieces: Sequence[str], literal: Sequence[bool] | None = None, *, byte_level: bool | None = None
) -> list[str]:
    """Return the sub-word pieces of one sequence as readable text; special tokens (`literal`) are unchanged.

    `byte_level` states whether the letters of the vocabulary represent bytes; if None, this is inferred from the
    pieces.

    >>> readable(["The", "Ġqu", "ick", "Ġæ", "±", "¤"])
    ['The', 'qu', '·ick', '汤⟨1/3⟩', '汤⟨2/3⟩', '汤⟨3/3⟩']
    >>> readable(["[CLS]", "jump", "##ing"], [True, False, False])
    ['[CLS]', 'jump', '·ing']
    >>> readable(["▁Tom", "▁chas", "es", "▁", "<0xE6>", "<0xB1>", "<0xA4>"])
    ['Tom', 'chas', '·es', ' ', '汤⟨1/3⟩', '汤⟨2/3⟩', '汤⟨3/3⟩']
    """
    unchanged = list(literal) if literal is not None else [False] * len(pieces)
    plain = [piece for piece, alone in zip(pieces, unchanged, strict=True) if not alone]
    by_bytes = _is_byte_level(plain) if byte_level is None else byte_level
    by_words = not by_bytes and not any(_METASPACE in piece or _FALLBACK.fullmatch(piece) for piece in plain)
    raw = [
        None if alone else _bytes_of(piece, by_bytes, by_words) for piece, alone in zip(pieces, unchanged, strict=True)
    ]
    return [label or piece for label, piece in zip(from_bytes(raw), pieces, strict=True)]


def from_bytes(raw: Sequence[bytes | None]) -> list[str]:
    r"""Return a readable label for each sub-word piece, from its bytes; an empty label for None and for no bytes.

    >>> from_bytes([b"To", b"m \xe6\xb1", b"\xa4"])
    ['To', '·m 汤⟨1/2⟩', '汤⟨2/2⟩']
    """
    labels = [""] * len(raw)
    for run in _runs(raw):
        data = b"".join(raw[n] or b"" for n in run)
        text = data.decode("utf-8", "surrogateescape")  # an invalid byte n becomes the code point U+DC00 + n
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
    """Return a readable label for each sub-word piece: the part of the text between its (start, stop) offsets.

    A piece whose part of the text is empty, such as a special token, is labelled with its entry of `names`.

    >>> from_offsets("Jumping 汤", [(0, 0), (0, 4), (4, 7), (8, 9), (8, 9)], ["[CLS]", "jump", "##ing", "æ±", "¤"])
    ['[CLS]', 'Jump', '·ing', '汤⟨1/2⟩', '汤⟨2/2⟩']
    """
    spans = [(max(0, start), min(stop, len(text))) for start, stop in offsets]
    return [label or name for label, name in zip(_labelled(text, spans), names, strict=True)]


class _Cover(NamedTuple):
    first: int  # index of the first sub-word piece that contains bytes of the character
    last: int  # index of the last sub-word piece that contains bytes of the character


def _labelled(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Return a label for each sub-word piece, from the range of characters that it covers; empty if it covers none."""
    covers: dict[int, _Cover] = {}
    for n, span in enumerate(spans):
        for place in range(*span):
            covers[place] = _Cover(covers.get(place, _Cover(n, n)).first, n)
    labels = []
    for n, (start, stop) in enumerate(spans):
        parts = [_part(text[place], n, covers[place]) for place in range(start, stop)]
        label = "".join(parts)
        if len(parts) > 1 and parts[0] == " " and label.strip():
            label = label[1:]
        elif start and parts and len(parts[0]) == 1 and _in_word(text[start - 1]) and _in_word(text[start]):
            label = f"·{label}"
        labels.append(label)
    return labels


def _part(character: str, piece: int, cover: _Cover) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"<{ord(character) - 0xDC00:02X}>"
    count = cover.last - cover.first + 1
    return character if count == 1 else f"{character}⟨{piece - cover.first + 1}/{count}⟩"


def _in_word(character: str) -> bool:
    """Return whether a character is a letter or a digit of a script that separates words by spaces."""
    return character.isalnum() and unicodedata.east_asian_width(character) not in "WF"


def _bytes_of(piece: str, by_bytes: bool, by_words: bool) -> bytes | None:
    """Return the UTF-8 bytes of a sub-word piece, with a space if it begins a word; None if it is shown unchanged."""
    if by_bytes:
        letters = byte_letters()
        return bytes(letters[c] for c in piece) if all(c in letters for c in piece) else None
    if by_words:  # a vocabulary of WordPiece or of whole words: every piece without ## begins a word
        inside = piece.startswith("##") and len(piece) > 2
        return piece[2:].encode("utf-8", "replace") if inside else f" {piece}".encode("utf-8", "replace")
    byte = _FALLBACK.fullmatch(piece)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return piece.replace(_METASPACE, " ").encode("utf-8", "replace")


def _is_byte_level(pieces: Sequence[str]) -> bool:
    """Return whether the letters of sub-word pieces represent bytes, as in byte-level BPE.

    The letters represent bytes if all of them are in the alphabet of byte-level BPE, some are not ASCII, and the bytes
    are valid UTF-8 or a letter is `Ġ`.
    """
    letters, whole = byte_letters(), "".join(pieces)
    if whole.isascii() or not all(c in letters for c in whole):
        return False
    try:
        bytes(letters[c] for c in whole).decode()
    except UnicodeDecodeError:
        return "Ġ" in whole
    return True


def _runs(raw: Sequence[bytes | None]) -> list[list[int]]:
    """Return the runs of adjacent pieces that are not None, as lists of indices; a None separates two runs."""
    runs: list[list[int]] = [[]]
    for n, data in enumerate(raw):
        if data is not None:
            runs[-1].append(n)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
