"""A heat map as a PNG picture in the style of the viewer's page: labels, values, a colour bar and a title."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.look.color_scale import LIGHT, ink, shade
from regard.look.fonts import font_of
from regard.look.heatmap import largest, number, share_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

# Sizes in logical pixels, the same as in viewer/assets/heatmap.js and save.js. A logical pixel is RATIO × RATIO pixels
# of the file, for sharp text.
RATIO = 2
EDGE = 24.0
LABEL, LONGEST = 12, 140  # font size and largest width of a label
READABLE = 34  # smallest width of a cell that shows its weight as a number
BAR = 160  # width of the colour bar
# Chinese fonts lack these brackets, which mark the parts of a character that is split over several tokens: `汤⟨1/3⟩`.
_BRACKETS = str.maketrans("⟨⟩", "()")
_TEXT, _QUIET = "#1b1f24", "#626b78"


class _Layout(NamedTuple):
    """The positions and sizes of the parts of a heat map, in logical pixels."""

    cell: float
    left: float
    top: float
    slanted: bool  # whether column labels are slanted, because one of them is wider than its column
    width: float
    height: float


def png(
    weights: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    path: str | Path,
    *,
    title: str,
    subtitle: str = "",
) -> Path:
    """Write the weights as a PNG picture and return its path; the largest weight has the darkest colour.

    A colour bar below the cells shows which weight each colour represents.
    """
    from PIL import Image, ImageDraw

    highest = largest(value for row in weights for value in row)
    names = [_fitted(name) for name in rows], [_fitted(name) for name in columns]
    place = _layout(*names, title, subtitle)
    paper = Image.new("RGB", (math.ceil(place.width * RATIO), math.ceil(place.height * RATIO)), "#ffffff")
    pen = ImageDraw.Draw(paper)
    _write(pen, title, EDGE, EDGE + 6, 17, anchor="lm")
    _write(pen, subtitle, EDGE, EDGE + 30, 12, color=_QUIET, anchor="lm")
    for column, name in enumerate(names[1]):
        x = place.left + place.cell * (column + 0.5)
        if place.slanted:
            _slanted(paper, name, x, place.top - 8)
        else:
            _write(pen, name, x, place.top - 12, LABEL, color=_QUIET, anchor="mm")
    for row, (name, values) in enumerate(zip(names[0], weights, strict=True)):
        y = place.top + place.cell * row
        _write(pen, name, place.left - 8, y + place.cell / 2, LABEL, color=_QUIET, anchor="rm")
        for column, value in enumerate(values):
            _cell(pen, place.left + place.cell * column, y, place.cell, value, share_of(value, highest))
    _bar(pen, weights, highest, place.height - EDGE - 24)
    target = Path(path)
    paper.save(target, format="PNG")
    return target


def _layout(rows: Sequence[str], columns: Sequence[str], title: str, subtitle: str) -> _Layout:
    cell = max(14.0, min(64.0 if len(columns) <= 8 else 44.0, 900 / max(1, len(columns))))
    left = EDGE + 14 + max((_length(name) for name in rows), default=0.0)
    widest = max((_length(name) for name in columns), default=0.0)
    slanted = widest > cell - 6
    top = EDGE + 52 + (14 + widest * math.sqrt(0.5) if slanted else 24)
    reach = [  # how far, in pixels, each slanted label extends to the right of the last column
        (_length(name) + LABEL) * math.sqrt(0.5) - cell * (len(columns) - n - 0.5) for n, name in enumerate(columns)
    ]
    after = max(12.0, *reach) if slanted else 12.0
    words = max(_length(title, 17), _length(subtitle, 12), BAR + 90)
    width = max(left + cell * len(columns) + after, EDGE + words) + EDGE
    return _Layout(cell, left, top, slanted, width, top + cell * len(rows) + 44 + EDGE)


def _written(value: float) -> str:
    """Return a weight as text, without the zero before the decimal point.

    >>> [_written(value) for value in (0.25, -0.25, 1.0, 10.25, float("nan"))]
    ['.25', '−.25', '1.00', '10.25', 'NaN']
    """
    return re.sub(r"^(−?)0\.", r"\1.", number(value))


def _cell(pen: "ImageDraw", x: float, y: float, side: float, value: float, share: float) -> None:
    gap = 0.75 if side >= 12 else 0.0
    box = [round(RATIO * place) for place in (x + gap, y + gap, x + side - gap, y + side - gap)]
    pen.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=shade(share, LIGHT))
    odd = not math.isfinite(value)
    if (side < READABLE and not (odd and side >= 20)) or (not odd and abs(value) < 0.005):
        return
    _write(
        pen,
        _written(value),
        x + side / 2,
        y + side / 2,
        11 if side >= READABLE else 8,
        color=ink(share, LIGHT),
        anchor="mm",
    )


def _bar(pen: "ImageDraw", weights: Sequence[Sequence[float]], highest: float, y: float) -> None:
    """Draw the colour bar from 0 (from −`highest` if a weight is negative) to `highest`, and label its two ends."""
    start = -1 if any(value < 0 for row in weights for value in row) else 0
    steps = BAR * RATIO
    for step in range(steps):
        x = round(EDGE * RATIO) + step
        fill = shade(start + (1 - start) * step / (steps - 1), LIGHT)
        pen.line((x, y * RATIO, x, (y + 8) * RATIO - 1), fill=fill)
    low = number(-highest, ".3g") if start else "0"
    _write(pen, low, EDGE, y + 18, 11, color=_QUIET, anchor="lm")
    _write(pen, f"{highest:.3g}", EDGE + BAR, y + 18, 11, color=_QUIET, anchor="rm")
    if any(not math.isfinite(value) for row in weights for value in row):
        box = [round(RATIO * place) for place in (EDGE + BAR + 20, y, EDGE + BAR + 34, y + 8)]
        pen.rectangle((box[0], box[1], box[2], box[3]), fill=shade(math.nan, LIGHT))
        _write(pen, "NaN, ±∞", EDGE + BAR + 40, y + 4, 11, color=_QUIET, anchor="lm")


def _slanted(paper: "Image", text: str, x: float, y: float) -> None:
    """Draw a text that begins at (x, y) and rises to the right at 45 degrees."""
    from PIL import Image, ImageDraw
    from PIL.Image import Resampling

    side = math.ceil(RATIO * (_length(text) + LABEL)) + 2
    mask = Image.new("L", (2 * side, 2 * side))
    ImageDraw.Draw(mask).text((side, side), text, fill=255, font=font_of(LABEL * RATIO), anchor="lm")
    turned = mask.rotate(45, resample=Resampling.BICUBIC)
    paper.paste(Image.new("RGB", turned.size, _QUIET), (round(RATIO * x) - side, round(RATIO * y) - side), turned)


def _write(pen: "ImageDraw", text: str, x: float, y: float, size: int, *, color: Any = _TEXT, anchor: str) -> None:
    pen.text((RATIO * x, RATIO * y), text, fill=color, font=font_of(size * RATIO), anchor=anchor)


def _length(text: str, size: int = LABEL) -> float:
    return font_of(size * RATIO).getlength(text) / RATIO


def _fitted(name: str) -> str:
    name = name.translate(_BRACKETS)
    text = name if len(name) <= LABEL * 2 else name[: LABEL * 2 - 1] + "…"
    while _length(text) > LONGEST and len(text) > 2:
        text = f"{text[:-2]}…"
    return text
