"""Labels of the rows and columns of an attention map: tokens, image patches, frames of sound, objects, or any list."""

import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.look.token_labels import Named, is_encoding, of_encodings, of_texts, of_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = ("tokens", "patches", "frames", "objects", "glimpses", "list")


@dataclass(frozen=True, eq=False)
class Labels:
    """Names for the positions along one axis of an attention map, with the data that drawings of these positions need.

    `items` has one name for each position. `shown` are the positions that are not padding, in ascending order; None if
    there is no padding. The entries of `extra` depend on `kind`:

    - patches: `image` (PNG bytes), `grid` (rows, columns) and `special` (the number of items before the patches that
      are not part of the image, such as a class token or registers)
    - frames: `spectrogram` (PNG bytes), `seconds` (the length of one frame) and `sound` (the bytes of a WAV file)
    - objects: lists `x`, `y`, `heading`, `speed`. Objects of a driving scene also have `length`, `width`, `present`
      (1 or 0), `ego` (x, y, heading and speed of the ego vehicle), `lanes` (y of the lane lines), and `crossings`,
      `zebras` and `ramps` (x of each). With `ego`, each row of the map has its own scene, and the numbers of all
      scenes are concatenated.
    - tokens that a model generated: `probability`, a list with one number for each item
    - glimpses: see the function `glimpses`

    >>> len(Labels("tokens", ("the", "cat")))
    2
    """

    kind: str
    items: tuple[str, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    shown: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind of labels must be one of {', '.join(KINDS)}, got {self.kind!r}")
        wrong = [item for item in self.items if not isinstance(item, str)]
        if wrong:
            raise TypeError(f"labels must be strings, got {type(wrong[0]).__name__} {wrong[0]!r}")
        if self.shown is not None:
            self._check_shown(self.shown)
        places = [name for name in ("x", "y") if self.kind == "glimpses" and len(self.extra.get(name, ())) != len(self)]
        if places:
            raise ValueError(f"{places[0]} of the glimpses must be a number for each of the {len(self)}")
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

    def _check_shown(self, shown: tuple[int, ...]) -> None:
        if not shown or list(shown) != sorted(set(shown)) or not 0 <= shown[0] <= shown[-1] < len(self.items):
            raise ValueError(
                f"shown positions of the labels must be at least one, ascending, from 0 to {len(self.items) - 1}"
            )
        if self.extra:
            raise ValueError("labels with pictures or places have no padding: shown must be None")

    def __len__(self) -> int:
        return len(self.items)

    def trimmed(self) -> "Labels":
        """Return the labels of the positions that are not padding.

        >>> Labels("tokens", ("a", "b", "[PAD]"), shown=(0, 1)).trimmed().items
        ('a', 'b')
        """
        return self._trimmed

    @functools.cached_property
    # the result is cached, so that records that share labels also share the labels without padding
    def _trimmed(self) -> "Labels":
        return self if self.shown is None else Labels(self.kind, tuple(self.items[n] for n in self.shown))


def patches(image: "bytes | str | Path | Image", grid: tuple[int, int], *, special: Sequence[str] = ()) -> Labels:
    """Return labels for the patches of an image, row by row, after those of the `special` tokens.

    `grid` is (rows, columns). The name of a patch is its row and column, counted from 0. `image` is a Pillow image, the
    path of an image file, or the bytes of an image file.

    >>> from PIL import Image
    >>> labels = patches(Image.new("RGB", (8, 8)), (2, 2), special=["[CLS]"])
    >>> labels.items
    ('[CLS]', '0,0', '0,1', '1,0', '1,1')
    """
    high, wide = grid
    names = [f"{row},{column}" for row in range(high) for column in range(wide)]
    extra = {"image": _png(image), "grid": (high, wide), "special": len(special)}
    return Labels("patches", (*special, *names), extra)


def glimpses(
    items: Sequence[str], places: Sequence[tuple[float, float]], seen: "Sequence[Sequence[Any]]", sides: Sequence[float]
) -> Labels:
    """Return labels for the glimpses of an image; the labels hold the location and the patches of each glimpse.

    `places` are the locations (x, y) as fractions of the image's width and height, from its upper left corner. `seen`
    has, for each glimpse, one patch (height, width) of numbers from 0 to 1 for each scale. `sides` has, for each scale,
    the width of the part of the image that a patch covers, as a fraction of the image's width.

    >>> labels = glimpses(["3", "8"], [(0.5, 0.5), (0.2, 0.7)], [[[[0.0, 1.0]]], [[[1.0, 1.0]]]], [0.1])
    >>> labels.extra["x"]
    (0.5, 0.2)
    """
    import numpy as np
    from PIL import Image

    # All patches are stored in one image: one column for each glimpse, with the patches of its scales below each other.
    columns = [np.concatenate([np.asarray(patch, np.float32) for patch in patches]) for patches in seen]
    sheet = np.clip(np.rint(np.concatenate(columns, 1) * 255), 0, 255).astype(np.uint8)
    x, y = (tuple(float(place[axis]) for place in places) for axis in (0, 1))
    extra = {"image": _png(Image.fromarray(sheet)), "x": x, "y": y, "sides": tuple(map(float, sides))}
    return Labels("glimpses", tuple(items), extra)


def _png(image: "bytes | str | Path | Image") -> bytes:
    from PIL import Image, UnidentifiedImageError

    try:
        opened = image if isinstance(image, Image.Image) else None
        opened = opened or Image.open(io.BytesIO(image) if isinstance(image, bytes) else str(image))
        return png_bytes(opened.convert("RGB"))
    except UnidentifiedImageError:
        what = "these bytes" if isinstance(image, bytes) else str(image)
        raise ValueError(f"{what}: not a picture that can be read") from None


def png_bytes(picture: "Image") -> bytes:
    """Return a picture as the bytes of a PNG file."""
    with io.BytesIO() as file:
        picture.save(file, "PNG", optimize=True)
        return file.getvalue()


# The forms in which a user may give labels: a Labels object; a list of strings; a list with one of these for each
# sequence; (tokenizer, ids); (tokenizer, encoding); (text, encoding); or an encoding.
Labelling = Labels | Sequence[Any] | Mapping[str, Any] | Any


def as_labels(given: Labelling) -> Labels:
    """Return the labels of one sequence, from labels, a list of strings, (tokenizer, ids), or an encoding.

    ValueError if labels of several sequences are given.

    >>> as_labels(["Tom", "runs"]).kind
    'list'
    """
    labels = labels_of(given)
    if len(labels) != 1:
        raise ValueError(f"labels of {len(labels)} sequences were given: choose one sequence of the batch")
    return labels[0]


def labels_of(given: Labelling) -> list[Labels]:
    """Return the labels of each sequence, from any form of labels that `Trace.label` accepts.

    >>> [labels.items for labels in labels_of([["Tom", "runs"], ["It", "rains"]])]
    [('Tom', 'runs'), ('It', 'rains')]
    """
    if isinstance(given, Labels):
        return [given]
    if isinstance(given, str):
        raise TypeError(f"labels must be a list of strings, one for each position, got the one string {given!r}")
    if is_encoding(given):
        return _tokens(of_encodings(given))
    if isinstance(given, Sequence) and given and all(isinstance(item, Labels) for item in given):
        return list(given)
    if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[1], (str, Labels)):
        first, second = given
        if is_encoding(second) and isinstance(first, (str, list, tuple)):
            return _tokens(of_texts(first, second))
        if not isinstance(first, (str, list, tuple)):
            return _tokens(of_tokenizer(first, second))
    if isinstance(given, Sequence) and given and all(_is_list(item) for item in given):
        if any(is_encoding(item) for item in given):
            return [as_labels(item) for item in given]
        return [Labels("list", tuple(item)) for item in given]
    return [Labels("list", tuple(given))]


def _is_list(item: object) -> bool:
    return is_encoding(item) or (isinstance(item, Sequence) and not isinstance(item, str))


def _tokens(named: Sequence[Named]) -> list[Labels]:
    return [Labels("tokens", tuple(sequence.names), shown=sequence.shown) for sequence in named]
