"""What the rows and columns of a map stand for: tokens, patches of an image, frames of sound, objects, or any list."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = ("tokens", "patches", "frames", "objects", "list")


@dataclass(frozen=True, eq=False)
class Labels:
    """Names for the positions of one axis, with what a picture needs to show them in their place.

    `extra` may hold, for patches, `image` (PNG bytes), `grid` (rows, columns) and `special` (how many items before the
    patches are none of the image: a class token, registers); for frames, `spectrogram` (PNG bytes) and `seconds` (of
    one frame); for objects, lists `x`, `y`, `heading`, `speed`.

    >>> len(Labels("tokens", ("the", "cat")))
    2
    """

    kind: str
    items: tuple[str, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind of labels must be one of {', '.join(KINDS)}, got {self.kind!r}")
        wrong = [item for item in self.items if not isinstance(item, str)]
        if wrong:
            raise TypeError(f"labels must be strings, got {type(wrong[0]).__name__} {wrong[0]!r}")
        special = self.extra.get("special", 0)
        if not isinstance(special, int) or special < 0:
            raise ValueError(f"special of the labels is a number of items, 0 or more, got {special!r}")
        grid = self.extra.get("grid")
        if grid is None:
            return
        if len(grid) != 2 or grid[0] * grid[1] + special != len(self.items):
            beside = f" and {special} special items" if special else ""
            over = len(self.items) - special - (grid[0] * grid[1] if len(grid) == 2 else len(self.items))
            hint = f"; if the first {over} are no patches, say special={special + over}" if 0 < over < 17 else ""
            raise ValueError(f"grid {tuple(grid)} of the labels does not hold {len(self.items)} patches{beside}{hint}")

    def __len__(self) -> int:
        return len(self.items)


def patches(image: "bytes | str | Path | Image", grid: tuple[int, int], *, special: Sequence[str] = ()) -> Labels:
    """Names for the patches of an image, (rows, columns) of them, row by row; `special` tokens stand before them.

    `image` is a picture as Pillow has it, a file, or the bytes of one.

    >>> from PIL import Image
    >>> labels = patches(Image.new("RGB", (8, 8)), (2, 2), special=["[CLS]"])
    >>> labels.items
    ('[CLS]', '1,1', '1,2', '2,1', '2,2')
    """
    high, wide = grid
    names = [f"{row},{column}" for row in range(1, high + 1) for column in range(1, wide + 1)]
    extra = {"image": _png(image), "grid": (high, wide), "special": len(special)}
    return Labels("patches", (*special, *names), extra)


def _png(image: "bytes | str | Path | Image") -> bytes:
    from PIL import Image, UnidentifiedImageError

    try:
        opened = image if isinstance(image, Image.Image) else None
        opened = opened or Image.open(io.BytesIO(image) if isinstance(image, bytes) else str(image))
        file = io.BytesIO()
        opened.convert("RGB").save(file, "PNG", optimize=True)
    except UnidentifiedImageError:
        what = "these bytes" if isinstance(image, bytes) else str(image)
        raise ValueError(f"{what}: not a picture that can be read") from None
    return file.getvalue()


@runtime_checkable
class NamesTokens(Protocol):
    """A tokenizer of transformers, as far as labels need one."""

    def convert_ids_to_tokens(self, ids: list[int], /) -> list[str]: ...


@runtime_checkable
class NamesToken(Protocol):
    """A tokenizer of tokenizers, as far as labels need one."""

    def id_to_token(self, id: int, /) -> str | None: ...


Labelling = Labels | Sequence[str] | tuple[Any, Any]


def as_labels(given: Labelling) -> Labels:
    """Labels as they are, a list of strings, or (tokenizer, ids).

    >>> as_labels(["Tom", "runs"]).kind
    'list'
    """
    if isinstance(given, Labels):
        return given
    if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], str):
        return Labels("tokens", tuple(_named(*given)))
    if isinstance(given, str):
        raise TypeError(f"labels must be a list of strings, one for each position, got the one string {given!r}")
    return Labels("list", tuple(given))


def _named(tokenizer: object, ids: Any) -> list[str]:
    """What a tokenizer calls each id; a space or the mark of a word's start is kept as the tokenizer writes it."""
    numbers = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    while len(numbers) == 1 and isinstance(numbers[0], list):  # a batch of one
        [numbers] = numbers
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError("ids of the tokens must be one list of whole numbers: choose one sequence of the batch")
    if isinstance(tokenizer, NamesTokens):
        return [str(token) for token in tokenizer.convert_ids_to_tokens(numbers)]
    if isinstance(tokenizer, NamesToken):
        return [tokenizer.id_to_token(number) or f"<{number}>" for number in numbers]
    decode = getattr(tokenizer, "decode", None)
    if decode is None:
        raise TypeError(f"a tokenizer must have convert_ids_to_tokens, id_to_token or decode, got {type(tokenizer)}")
    return [str(decode([number])) for number in numbers]
