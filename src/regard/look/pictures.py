"""One head of one record as a drawing: SVG, or PNG where a program cannot read SVG."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from regard.look import heatmap
from regard.look.labels import Labels
from regard.look.records import Record
from regard.look.shades import LIGHT, ink, shade

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont
    from torch import Tensor

LARGEST = 64  # rows or columns drawn one by one; more are pooled
_FONTS = ("NotoSansCJK-Regular.ttc", "NotoSansSC-Regular.otf", "wqy-zenhei.ttc", "DejaVuSans.ttf")


def drawn(record: Record, head: int, batch: int) -> "tuple[Tensor, list[str], list[str], str]":
    """The map to draw, names of its rows and columns, and a title."""
    count, record = record.batch, record.sequence(batch)
    title = f"{record.name or 'attention'}, head {head}" + (f", call {record.call}" if record.call else "")
    title += f", sequence {batch + 1} of {count}" if count > 1 else ""
    if max(record.queries, record.keys) <= LARGEST:
        weights = record.weights(head=head)
    else:
        weights = record.overview(LARGEST, head=head)
        title += f" ({record.queries} × {record.keys}, pooled)"
    high, wide = weights.shape
    rows = _names(record.row_labels, record.queries, high)
    return weights, rows, _names(record.column_labels, record.keys, wide), title


def svg(record: Record, *, head: int = 0, batch: int = 0) -> str:
    """The map of a head as an SVG drawing.

    >>> import torch
    >>> from regard.look.records import Given
    >>> svg(Record("layer", "given", Given(torch.eye(3)[None, None]))).count("class='cell'")
    9
    """
    weights, rows, columns, title = drawn(record, head, batch)
    return heatmap.svg(weights, rows, columns, title=title)


def png(record: Record, path: str | Path, *, head: int = 0, batch: int = 0, side: int = 24) -> Path:
    """The map of a head as a PNG picture, cells of `side` pixels."""
    from PIL import Image, ImageDraw

    weights, rows, columns, title = drawn(record, head, batch)
    high, wide = weights.shape
    font = _font(max(9, min(14, side - 6)))
    left = 12 + max((int(font.getlength(name)) for name in rows), default=0)
    top = 40 + max((int(font.getlength(name)) for name in columns), default=0)
    width = max(left + wide * side + 12, int(font.getlength(title)) + 24)
    picture = Image.new("RGB", (width, top + high * side + 12), "#ffffff")
    pen = ImageDraw.Draw(picture)
    pen.text((12, 8), title, fill="#1b1f24", font=font)
    for column, name in enumerate(columns):  # written upwards, so that long names find room
        length = int(font.getlength(name))
        word = Image.new("RGB", (max(1, length), side), "#ffffff")
        ImageDraw.Draw(word).text((0, 2), name, fill="#1b1f24", font=font)
        picture.paste(word.rotate(90, expand=True), (left + column * side, top - 4 - max(1, length)))
    highest = heatmap.largest(weights.flatten().tolist())
    small = _font(9)
    for row, (name, numbers) in enumerate(zip(rows, weights.tolist(), strict=True)):
        y = top + row * side
        pen.text((left - 6 - font.getlength(name), y + 2), name, fill="#1b1f24", font=font)
        for column, number in enumerate(numbers):
            x, share = left + column * side, heatmap.share_of(number, highest)
            pen.rectangle((x, y, x + side - 2, y + side - 2), fill=shade(share, LIGHT))
            if side >= 36 or (side >= 20 and not math.isfinite(number)):
                words, face = heatmap.number(number), font if side >= 36 else small
                pen.text((x + side // 2 - 1, y + side // 2 - 1), words, fill=ink(share, LIGHT), font=face, anchor="mm")
    target = Path(path)
    picture.save(target, format="PNG")
    return target


def _names(labels: Labels | None, length: int, cells: int) -> list[str]:
    items = labels.items if labels is not None else tuple(map(str, range(length)))
    if cells == length:
        return [item if item.strip() else repr(item) for item in items]
    return [str(cell * length // cells) for cell in range(cells)]  # the position each pooled cell starts at


def _font(size: int) -> "FreeTypeFont | ImageFont":
    from PIL import ImageFont

    for name in _FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)
