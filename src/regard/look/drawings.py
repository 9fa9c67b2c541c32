"""The attention map of one head of a record as an SVG drawing or a PNG picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from regard.look import heatmap, heatmap_png, image_overlays
from regard.look.attention_records import Record
from regard.look.head_mean import with_mean
from regard.look.labels import Labels

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 64  # largest number of rows or columns of a drawing; larger maps are pooled to this size


Head = int | Literal["mean"]


def map_to_draw(record: Record, head: Head, batch: int, name: str | None) -> "tuple[Tensor, list[str], list[str], str]":
    """Return the attention map to draw, the names of its rows and of its columns, and the title of the drawing."""
    title = titled(record, head, batch, name)
    record, head = _of_one(record, head, batch)
    if max(record.queries, record.keys) <= LARGEST:
        weights = record.weights(head=head)
    else:
        weights = record.overview(LARGEST, head=head)
        title += f" ({record.queries} × {record.keys}, pooled)"
    high, wide = weights.shape
    rows = _names(record.row_labels, record.queries, high)
    return weights, rows, _names(record.column_labels, record.keys, wide), title


def _of_one(record: Record, head: Head, batch: int) -> tuple[Record, int]:
    """Return the record of one sequence and the index of `head` in this record; the mean is an additional last head."""
    sequence = record.sequence(batch)
    if head != "mean":
        return sequence, head
    return with_mean(sequence), sequence.heads if sequence.heads > 1 else 0


def titled(record: Record, head: Head, batch: int, name: str | None = None) -> str:
    """Return the title of a drawing, as on the viewer's page; the head is omitted if the record has one head."""
    which = f"mean of {record.heads} heads" if head == "mean" else f"head {head}"
    parts = [name or record.name or "attention", which if record.heads > 1 else ""]
    parts += [f"call {record.call}" if record.call else "", f"sequence {batch}" if record.batch > 1 else ""]
    return " · ".join(filter(None, parts))


def checked(error: float | None) -> str:
    """Return the error of `Record.check` as text, formatted as on the viewer's page.

    >>> checked(2.3e-07), checked(0.0123), checked(None)
    ('Check 2.3e−7', 'Check 0.0123', 'No check')
    """
    if error is None:
        return "No check"
    if error == 0 or 0.001 <= error < 10_000:
        return f"Check {error:.3g}"
    digits, power = f"{error:.1e}".split("e")
    return f"Check {digits}e{int(power)}".replace("-", "−")


def _overlaid(record: Record, batch: int, view: str) -> bool:
    """Return whether `view` draws the rows of this record over a picture whose cells are its columns.

    ValueError if `view` is unknown, or requires a picture that the labels of the columns do not have.
    """
    if view not in image_overlays.VIEWS:
        raise ValueError(f"view must be one of {', '.join(image_overlays.VIEWS)}, got {view!r}")
    if view in ("auto", "heatmap"):
        return view == "auto" and image_overlays.fits(record, batch)
    if not image_overlays.fits(record, batch):
        raise ValueError(f"view={view!r} needs columns that are cells of a picture: label them with patches(…)")
    return True


def svg(record: Record, *, head: Head = 0, batch: int = 0, view: str = "auto", name: str | None = None) -> str:
    """Return the attention map of a head as an SVG drawing.

    If the columns are cells of a picture, each row is drawn over a copy of that picture. `name` replaces the record's
    own name in the title; `head="mean"` is the mean over all heads.

    >>> import torch
    >>> from regard.look.attention_records import Given
    >>> svg(Record("layer", "given", Given(torch.eye(3)[None, None]))).count("class='cell'")
    9
    """
    if _overlaid(record, batch, view):
        title, (sequence, at) = titled(record, head, batch, name), _of_one(record, head, batch)
        return image_overlays.svg(sequence, title=title, head=at, cells=view == "cells")
    weights, rows, columns, title = map_to_draw(record, head, batch, name)
    return heatmap.svg(weights, rows, columns, title=title)


def png(
    record: Record,
    path: str | Path,
    *,
    head: Head = 0,
    batch: int = 0,
    view: str = "auto",
    name: str | None = None,
    subtitle: str = "",
) -> Path:
    """Write the attention map of a head as a PNG picture and return its path; the other options are those of `svg`.

    `subtitle` is written below the title, except in drawings over a picture.
    """
    if _overlaid(record, batch, view):
        title, (sequence, at) = titled(record, head, batch, name), _of_one(record, head, batch)
        return image_overlays.png(sequence, path, title=title, head=at, cells=view == "cells")
    weights, rows, columns, title = map_to_draw(record, head, batch, name)
    return heatmap_png.png(weights.tolist(), rows, columns, path, title=title, subtitle=subtitle)


def _names(labels: Labels | None, length: int, cells: int) -> list[str]:
    items = labels.items if labels is not None else tuple(map(str, range(length)))
    if cells == length:
        return [item if item.strip() else repr(item) for item in items]
    # each label is the first position that the pooled cell covers
    return [str(cell * length // cells) for cell in range(cells)]
