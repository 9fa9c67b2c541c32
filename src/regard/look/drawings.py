"""One head of one record as a drawing: SVG, or PNG where a program cannot read SVG."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from regard.look import heatmap, image_overlays
from regard.look.attention_records import Record
from regard.look.color_scale import LIGHT, ink, shade
from regard.look.fonts import font_of
from regard.look.labels import Labels

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 64  # rows or columns drawn one by one; more are pooled


def drawn(record: Record, head: int, batch: int) -> "tuple[Tensor, list[str], list[str], str]":
    """The map to draw, names of its rows and columns, and a title."""
    title, record = _titled(record, head, batch), record.sequence(batch)
    if max(record.queries, record.keys) <= LARGEST:
        weights = record.weights(head=head)
    else:
        weights = record.overview(LARGEST, head=head)
        title += f" ({record.queries} × {record.keys}, pooled)"
    high, wide = weights.shape
    rows = _names(record.row_labels, record.queries, high)
    return weights, rows, _names(record.column_labels, record.keys, wide), title


def _titled(record: Record, head: int, batch: int) -> str:
    title = f"{record.name or 'attention'}, head {head}" + (f", call {record.call}" if record.call else "")
    return title + (f", sequence {batch + 1} of {record.batch}" if record.batch > 1 else "")


def _overlaid(record: Record, batch: int, view: str) -> bool:
    """Whether a record is drawn over the picture that its columns are the cells of."""
    if view not in image_overlays.VIEWS:
        raise ValueError(f"view must be one of {', '.join(image_overlays.VIEWS)}, got {view!r}")
    if view in ("auto", "heatmap"):
        return view == "auto" and image_overlays.fits(record, batch)
    if not image_overlays.fits(record, batch):
        raise ValueError(f"view={view!r} needs columns that are cells of a picture: label them with patches(…)")
    return True


def svg(record: Record, *, head: int = 0, batch: int = 0, view: str = "auto") -> str:
    """The map of a head as an SVG drawing; where columns are cells of a picture, each row over that picture.

    >>> import torch
    >>> from regard.look.attention_records import Given
    >>> svg(Record("layer", "given", Given(torch.eye(3)[None, None]))).count("class='cell'")
    9
    """
    if _overlaid(record, batch, view):
        title = _titled(record, head, batch)
        return image_overlays.svg(record, title=title, head=head, batch=batch, cells=view == "cells")
    weights, rows, columns, title = drawn(record, head, batch)
    return heatmap.svg(weights, rows, columns, title=title)


def png(record: Record, path: str | Path, *, head: int = 0, batch: int = 0, side: int = 24, view: str = "auto") -> Path:
    """The map of a head as a PNG picture, cells of `side` pixels, or over the picture as in `svg`."""
    if _overlaid(record, batch, view):
        title = _titled(record, head, batch)
        return image_overlays.png(record, path, title=title, head=head, batch=batch, cells=view == "cells")
    return _heatmap_png(record, path, head, batch, side)


def _heatmap_png(record: Record, path: str | Path, head: int, batch: int, side: int) -> Path:
    from PIL import Image, ImageDraw

    weights, rows, columns, title = drawn(record, head, batch)
    high, wide = weights.shape
    font = font_of(max(9, min(14, side - 6)))
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
    small = font_of(9)
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
