"""Attention maps drawn over the picture that they attend to: one small picture for each row of the map.

Figure 3 of Xu et al. (2015) is drawn in the same way. A translucent overlay (a veil) covers each picture: it is
transparent where the row's weight is largest, and nearly opaque where the weight is 0.
"""

import base64
import io
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from regard.look import heatmap
from regard.look.attention_records import Record
from regard.look.color_scale import LIGHT
from regard.look.fonts import font_of
from regard.look.labels import Labels, png_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

VIEWS = ("auto", "heatmap", "smooth", "cells")
ROWS = 64  # the largest number of rows of a map that are drawn, each over its own copy of the picture
_THICK = 190 / 255  # opacity of the overlay at weight 0, the same as in viewer/assets/veil.js
# a picture with a mean lightness below this gets a light overlay, because a dark overlay would be invisible
_DARK = 0.3
_SMALL = 96  # a picture with sides of at most this many pixels is enlarged by a whole factor, without interpolation
_SIDE, _ACROSS, _GAP, _EDGE, _UNDER = 150, 6, 16, 16, 52
_TEXT, _QUIET = "#1b1f24", "#626b78"


@dataclass(frozen=True, eq=False)
class _Tile:
    """One row of the map as it is drawn: its name, its caption, and its overlay as RGBA pixels."""

    name: str
    facts: str
    veil: "Image"


@dataclass(frozen=True, eq=False)
class _Sheet:
    """All parts of a drawing of a map over its picture, and their positions."""

    title: str
    picture: "Image"
    tiles: list[_Tile]
    width: int  # width of a tile in pixels
    height: int
    legend: str
    shadow: NDArray[np.uint8]

    @property
    def across(self) -> int:
        return min(_ACROSS, len(self.tiles))

    def place(self, number: int) -> tuple[int, int]:
        """Return the upper left corner (x, y), in pixels, of the n-th tile of the drawing."""
        down, right = divmod(number, self.across)
        return _EDGE + right * (self.width + _GAP), 44 + down * (self.height + _UNDER)

    @property
    def size(self) -> tuple[int, int]:
        tiles = 2 * _EDGE + self.across * (self.width + _GAP) - _GAP
        words = 2 * _EDGE + max(font_of(14).getlength(self.title), 150 + font_of(11).getlength(self.legend))
        return max(tiles, math.ceil(words)), self.place(len(self.tiles) - 1)[1] + self.height + _UNDER + 24


def fits(record: Record, batch: int = 0) -> bool:
    """Return whether the keys of a record are the cells of a picture, and its queries are not."""
    rows, columns = record.labels(batch=batch)
    if columns is None or columns.kind != "patches" or not {"image", "grid"} <= columns.extra.keys():
        return False
    return rows is None or rows.kind != "patches"


def svg(record: Record, *, title: str, head: int = 0, batch: int = 0, cells: bool = False) -> str:
    """Return an SVG drawing of the picture once for each row of the map, under that row's translucent overlay.

    With `cells` each cell of the map is a square; otherwise weights are interpolated between the cells.
    """
    sheet = _sheet(record, title, head, batch, cells)
    width, height = sheet.size
    scale = f"scale({sheet.width / sheet.picture.width:.6g} {sheet.height / sheet.picture.height:.6g})"
    crisp = " style='image-rendering:pixelated'" if _is_small(sheet.picture) else ""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' width='{width}' height='{height}' "
        f'viewBox=\'0 0 {width} {height}\' font-family="{heatmap.FONTS}" font-size="13" fill="{_TEXT}">',
        f"<title>{escape(sheet.title)}</title><rect width='100%' height='100%' fill='#ffffff'/>",
        f"<defs><image id='picture' width='{sheet.picture.width}' height='{sheet.picture.height}' "
        f"href='{_address(sheet.picture)}'/></defs>",
        f"<text x='{_EDGE}' y='27' font-size='14' font-weight='600'>{escape(sheet.title)}</text>",
    ]
    sharp = " style='image-rendering:pixelated'" if cells else ""
    for number, tile in enumerate(sheet.tiles):
        x, y = sheet.place(number)
        below = y + sheet.height
        parts += [
            f"<use href='#picture' transform='translate({x} {y}) {scale}'{crisp}/>",
            f"<image class='map' x='{x}' y='{y}' width='{sheet.width}' height='{sheet.height}' "
            f"preserveAspectRatio='none'{sharp} href='{_address(tile.veil)}'/>",
            f"<text x='{x}' y='{below + 15}'>{escape(tile.name)}</text>",
            f"<text x='{x}' y='{below + 29}' font-size='11' fill='{_QUIET}'>{escape(tile.facts)}</text>",
        ]
    y = height - 28
    parts += [
        f"<text x='{_EDGE}' y='{y + 8}' font-size='11' fill='{_QUIET}'>0</text>",
        f"<image x='{_EDGE + 14}' y='{y}' width='120' height='8' href='{_address(_bar(sheet))}'/>",
        f"<text x='{_EDGE + 142}' y='{y + 8}' font-size='11' fill='{_QUIET}'>{escape(sheet.legend)}</text>",
    ]
    return "\n".join([*parts, "</svg>\n"])


def png(record: Record, path: str | Path, *, title: str, head: int = 0, batch: int = 0, cells: bool = False) -> Path:
    """Write a PNG file that shows the picture once for each row of the map, as `svg` does, and return its path."""
    from PIL import Image, ImageDraw
    from PIL.Image import Resampling

    sheet = _sheet(record, title, head, batch, cells)
    size = sheet.width, sheet.height
    below = sheet.picture.resize(size, Resampling.NEAREST if _is_small(sheet.picture) else Resampling.BICUBIC)
    paper = Image.new("RGB", sheet.size, "#ffffff")
    pen = ImageDraw.Draw(paper)
    pen.text((_EDGE, 12), sheet.title, fill=_TEXT, font=font_of(14))
    for number, tile in enumerate(sheet.tiles):
        x, y = sheet.place(number)
        veil = tile.veil.resize(size, Resampling.NEAREST if cells else Resampling.BICUBIC)
        paper.paste(Image.alpha_composite(below.convert("RGBA"), veil).convert("RGB"), (x, y))
        pen.text((x, y + sheet.height + 4), tile.name, fill=_TEXT, font=font_of(13))
        pen.text((x, y + sheet.height + 21), tile.facts, fill=_QUIET, font=font_of(11))
    y = paper.height - 28
    paper.paste(_bar(sheet), (_EDGE + 14, y))
    pen.text((_EDGE, y + 9), "0", fill=_QUIET, font=font_of(11), anchor="ls")
    pen.text((_EDGE + 142, y + 9), sheet.legend, fill=_QUIET, font=font_of(11), anchor="ls")
    target = Path(path)
    paper.save(target, format="PNG")
    return target


def _sheet(record: Record, title: str, head: int, batch: int, cells: bool) -> _Sheet:
    from PIL import Image

    sequence = record.sequence(batch)
    columns = sequence.column_labels
    assert columns is not None
    high, wide = columns.extra["grid"]
    first = len(columns) - high * wide
    with Image.open(io.BytesIO(columns.extra["image"])) as file:
        picture = file.convert("RGB")
    weights = sequence.weights(head=head, queries=slice(0, min(ROWS, sequence.queries))).float().numpy()
    shadow = _shadow(picture)
    width = _enlarged(picture)
    tiles = []
    for row, values in enumerate(weights):
        name, facts = _said(sequence.row_labels, row, values, width)
        tiles.append(_Tile(name, facts, _veil(values[first:].reshape(high, wide), shadow, cells)))
    if sequence.queries > ROWS:
        title += f" (the first {ROWS} of {sequence.queries} rows)"
    height = round(width * picture.height / picture.width)
    return _Sheet(title, picture, tiles, width, height, "the largest weight of each picture", shadow)


def _said(rows: Labels | None, row: int, values: NDArray[np.float32], width: int) -> tuple[str, str]:
    """Return a row's name, shortened to `width` pixels, and its caption: largest weight and, if known, probability."""
    item = rows.items[row] if rows is not None else str(row)
    name = item if item.strip() else repr(item)
    while font_of(13).getlength(name) > width and len(name) > 2:
        name = f"{name[:-2]}…"
    largest = heatmap.number(heatmap.largest(values.tolist()), ".3f")
    sure = rows.extra.get("probability", ()) if rows is not None else ()
    return name, f"largest {largest}" + (f" · p {sure[row]:.2f}" if row < len(sure) else "")


def _veil(weights: NDArray[np.float32], shadow: NDArray[np.uint8], cells: bool) -> "Image":
    """Return the translucent overlay of a row as an RGBA image, from its weights (high, wide).

    With `cells` each cell is a square of one opacity; otherwise weights are interpolated between the cells' centres.
    """
    from PIL import Image
    from PIL.Image import Resampling

    high, wide = weights.shape
    times = max(1, 144 // max(high, wide))
    finite = np.isfinite(weights)
    known = np.where(finite, np.abs(weights), 0).astype(np.float32)
    most = float(known.max()) or 1.0
    how = Resampling.NEAREST if cells or times == 1 else Resampling.BICUBIC
    spread = np.asarray(Image.fromarray(known).resize((wide * times, high * times), how)).clip(0, most)
    veil = np.empty((*spread.shape, 4), dtype=np.uint8)
    veil[..., :3] = shadow
    veil[..., 3] = (255 * _THICK * (1 - spread / most)).round()
    veil[~finite.repeat(times, 0).repeat(times, 1)] = (*LIGHT.odd, 220)
    return Image.fromarray(veil)


def _bar(sheet: _Sheet) -> "Image":
    """Return a bar that shows the overlay over the picture's mean colour, from weight 0 to the largest weight."""
    from PIL import Image

    mean = np.asarray(sheet.picture, dtype=np.float64).mean((0, 1))
    thick = _THICK * (1 - np.linspace(0, 1, 120))[:, None]
    row = mean + (sheet.shadow - mean) * thick
    return Image.fromarray(row.round().astype(np.uint8)[None].repeat(8, 0))


def _shadow(picture: "Image") -> NDArray[np.uint8]:
    mean = np.asarray(picture, dtype=np.float64).mean((0, 1)) / 255
    light = float(mean @ (0.2126, 0.7152, 0.0722))
    return np.array((226, 230, 238) if light < _DARK else (18, 21, 28), dtype=np.uint8)


def _is_small(picture: "Image") -> bool:
    return max(picture.size) <= _SMALL


def _enlarged(picture: "Image") -> int:
    """Return a tile's width in pixels; a small picture is enlarged by a whole factor, so that pixels stay squares."""
    times = _SIDE // picture.width
    return times * picture.width if _is_small(picture) and times > 1 else _SIDE


def _address(picture: "Image") -> str:
    """Return a picture as a `data:` URL, which embeds it in a document."""
    return f"data:image/png;base64,{base64.b64encode(png_bytes(picture)).decode()}"
