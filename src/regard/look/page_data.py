"""What the viewer is told of a trace: a description in JSON, and maps of weights small enough to send.

The interface is written down in `page/source.js`. Positions of lists count from 0.
"""

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.look.files import Largest
from regard.look.labels import Labels
from regard.look.records import Record
from regard.look.trace import Trace

THUMBNAIL = 32  # cells a side
WHOLE = 512  # queries or keys; a longer map is pooled, and its rows keep their largest weights only
KEPT = 8  # weights of each row that are kept to 16 bits
FINE = 4_000_000  # weights up to which every map has all 256 steps; above, none is finer than COARSE
COARSE = 2e-4
POOLED_CELLS = 3_000_000  # in all pooled maps of a page
KEPT_WEIGHTS = 1_200_000  # in all rows of the pooled maps
BLOCK = 2**22  # weights that stand in memory at a time
PLACES = ("x", "y", "heading", "speed")

Json = dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """How finely the maps of a page are kept, chosen from how much there is to keep."""

    step: float  # no row of a whole map has finer steps
    side: int  # of a pooled map
    kept: int  # largest weights of each row of a pooled map
    stride: int  # every how-manieth row of a pooled map is kept

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> "Budget":
        records = [record for trace in traces for record in trace.records]
        weights = sum(record.heads * record.queries * record.keys for record in records if is_whole(record))
        heads = sum(record.heads for record in records if not is_whole(record))
        rows = sum(record.heads * record.queries for record in records if not is_whole(record))
        return cls(
            step=0.0 if weights <= FINE else COARSE,
            side=min(256, max(64, math.isqrt(POOLED_CELLS // max(1, heads)))),
            kept=min(32, max(4, KEPT_WEIGHTS // max(1, rows))),
            stride=max(1, -(-4 * rows // KEPT_WEIGHTS)),
        )


class _Swept(NamedTuple):
    """What each row sums to, each key received, the mean entropy of each head, and how far each looks.

    The distance is None where rows and columns are not the same positions, or where not every weight is known.
    """

    sums: Tensor
    received: Tensor
    entropy: Tensor
    distance: list[float] | None


@dataclass(frozen=True)
class Packed:
    """A trace ready for a page: `about` as JSON, a gzip file for each record, a PNG for each picture."""

    about: Json
    records: list[bytes]
    pictures: dict[str, bytes] = field(default_factory=dict)


def is_whole(record: Record) -> bool:
    """Whether every weight of a record is kept."""
    return max(record.queries, record.keys) <= WHOLE


def about(trace: Trace, *, batch: int = 0) -> Json:
    """What can be told of a trace without computing any weights.

    >>> trace = Trace.from_weights({"cross": torch.eye(2)[None]}, rows=["le", "chat"])
    >>> about(trace)["records"][0]["rows"], about(trace)["labels"][0]["items"]
    (0, ['le', 'chat'])
    """
    labels: list[Labels] = []
    records = []
    for record in trace.records:
        item = min(batch, record.batch - 1)
        which = f"Sequence {item + 1} of {record.batch} is shown." if record.batch > 1 else None
        records.append(
            {
                **{name: getattr(record, name) for name in ("name", "call", "kind", "heads", "queries", "keys")},
                "scale": None if record.scale is None else float(record.scale),
                "note": sentences(record.note, which),
                "check": _finite(record.check(batch=item)),
                "rows": _place(record.row_labels, labels),
                "columns": _place(record.column_labels, labels),
                "entropy": None,
                "distance": None,
            }
        )
    return {
        "title": trace.title,
        "dropped": list(trace.dropped),
        "labels": [_described(label) for label in labels],
        "records": records,
    }


def sentences(*parts: str | None) -> str | None:
    """What there is to say, as sentences one after another; None where there is nothing.

    >>> sentences("dropout was active", None, "Sequence 1 of 2 is shown.")
    'Dropout was active. Sequence 1 of 2 is shown.'
    """
    said = [part.strip() for part in parts if part and part.strip()]
    return " ".join(part[0].upper() + part[1:].rstrip(".") + "." for part in said) or None


def pictures(trace: Trace) -> dict[str, bytes]:
    """The PNG files of the labels, by the labels' positions in `about`."""
    labels: list[Labels] = []
    for record in trace.records:
        _place(record.row_labels, labels)
        _place(record.column_labels, labels)
    found = {str(place): _picture(label) for place, label in enumerate(labels)}
    return {place: data for place, data in found.items() if data is not None}


def pack(trace: Trace, *, batch: int = 0, budget: Budget | None = None) -> Packed:
    """Everything a page needs of a trace."""
    budget = budget or Budget.of([trace])
    description = about(trace, batch=batch)
    thumbnails: list[bytes] = []
    files: list[bytes] = []
    start = 0
    for record, entry in zip(trace.records, description["records"], strict=True):
        item = min(batch, record.batch - 1)
        side = THUMBNAIL if is_whole(record) else budget.side
        maps = [record.overview(side, head=head, batch=item) for head in range(record.heads)]
        cells = _sane(torch.stack(maps))
        small, shape = _thumbnails(cells)
        entry["thumbnails"] = {"start": start, "shape": shape}
        thumbnails.append(small)
        start += len(small)
        swept = _swept(record, item)
        entry["entropy"], entry["distance"] = _rounded(swept.entropy), swept.distance
        if is_whole(record):
            entry["pack"], data = _pack_whole(record, item, budget, swept)
        else:
            entry["pack"], data = _pack_long(record, item, budget, swept, cells)
        files.append(_zipped(data))
    description["thumbnails"] = base64.b64encode(_zipped(b"".join(thumbnails))).decode()
    return Packed(description, files, pictures(trace))


def as_json(value: Mapping[str, Any]) -> str:
    """JSON that JavaScript reads: no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _thumbnails(cells: Tensor) -> tuple[bytes, list[int]]:
    """Each head in at most 32 × 32 cells: roots of shares of the largest, so that faint traits are seen."""
    if not cells.numel():
        return b"", [0, 0]
    _, high, wide = cells.shape
    small = F.adaptive_avg_pool2d(cells, (min(THUMBNAIL, high), min(THUMBNAIL, wide)))
    shares = small / small.amax((-2, -1), keepdim=True).clamp_min(1e-12)
    return _bytes((255 * shares.sqrt()).round().to(torch.uint8)), list(small.shape[1:])


def _pack_whole(record: Record, batch: int, budget: Budget, swept: _Swept) -> tuple[Json, bytes]:
    """Every weight: the largest of each row to 16 bits, the others in 255 steps up to the next largest."""
    weights = _sane(record.weights(batch=batch))
    kept = min(KEPT, record.keys)
    best = weights.topk(min(kept + 1, record.keys), -1)
    largest, indices = best.values[..., :kept], best.indices[..., :kept]
    # The largest are written over whatever the steps say, so the steps need to reach the first one after them.
    after = best.values[..., kept:].sum(-1, keepdim=True)
    steps = (after / 255).clamp_min(budget.step if record.keys > kept else 0.0)
    codes = (weights / steps.clamp_min(1e-30)).round().clamp_max(255)
    codes.scatter_(-1, indices, 0)
    peak = float(weights.amax()) if weights.numel() else 0.0
    error = max(float(steps.amax()) / 2 if steps.numel() else 0.0, peak / 131070)
    shape = {"mapRows": record.queries, "mapColumns": record.keys, "rowBlock": 1.0, "columnBlock": 1.0}
    entry = {**shape, "whole": True, "kept": kept, "rowsKept": record.queries, "stride": 1}
    rows = [steps, torch.zeros_like(swept.sums), swept.received]
    return _written(record, entry, peak, error, rows, indices, largest, codes)


def _pack_long(record: Record, batch: int, budget: Budget, swept: _Swept, cells: Tensor) -> tuple[Json, bytes]:
    """The means of blocks of weights, and the largest weights of each row."""
    steps = (cells.amax(-1) / 255).clamp_min(1e-30)
    codes = (cells / steps[..., None]).round()
    kept = min(budget.kept, record.keys)
    best = record.top(kept, batch=batch)
    largest, indices = _sane(best.values[:, :: budget.stride]), best.indices[:, :: budget.stride]
    peak = float(largest.amax()) if largest.numel() else 0.0
    rests = (swept.sums[:, :: budget.stride] - largest.sum(-1)).clamp_min(0)
    rows, columns = cells.shape[1:]
    blocks = {"rowBlock": record.queries / max(1, rows), "columnBlock": record.keys / max(1, columns)}
    entry = {"mapRows": rows, "mapColumns": columns, **blocks, "whole": False, "kept": kept}
    entry |= {"rowsKept": largest.shape[1], "stride": budget.stride}
    error = float(steps.amax()) / 2 if steps.numel() else 0.0
    return _written(record, entry, peak, error, [steps, rests, swept.received], indices, largest, codes)


def _written(
    record: Record,
    entry: Json,
    peak: float,
    error: float,
    rows: list[Tensor],
    indices: Tensor,
    largest: Tensor,
    codes: Tensor,
) -> tuple[Json, bytes]:
    """The arrays one after another, each from a multiple of four bytes, in the order source.js reads them."""
    *steps, received = rows
    shares = _sane(received) / max(1, record.queries)
    small = (largest / (peak or 1.0) * 65535).round().to(torch.int32).to(torch.uint16)
    places = indices.to(torch.uint32 if record.keys > 65536 else torch.uint16)
    arrays = [*(row.float() for row in steps), shares, places, small, codes.to(torch.uint8)]
    data = b"".join(part + b"\0" * (-len(part) % 4) for part in map(_bytes, arrays))
    return {**entry, "queries": record.queries, "keys": record.keys, "peak": peak, "error": error}, data


def _swept(record: Record, batch: int) -> _Swept:
    """One pass over the rows.

    A distance is Σ w·|i − j|, on average over the rows. With a cache there are more keys than queries: the last query
    stands at the last key.
    """
    place = torch.arange(record.keys) + record.queries - record.keys
    sums, entropy = torch.zeros(2, record.heads, record.queries)
    received, apart = torch.zeros(record.heads, record.keys), torch.zeros(record.heads)
    step = max(1, BLOCK // max(1, record.heads * record.keys))
    for start in range(0, record.queries, step):
        rows = slice(start, min(start + step, record.queries))
        weights = _sane(record.weights(queries=rows, batch=batch))
        sums[:, rows] = weights.sum(-1)
        entropy[:, rows] = -torch.xlogy(weights, weights).sum(-1)
        received += weights.sum(-2)
        apart += (weights * (torch.arange(record.queries)[rows, None] - place).abs()).sum((-2, -1))
    if isinstance(record.source, Largest):  # its rows have their largest weights alone, the rest it knows in sum
        sums += _sane(record.source.rest[batch])
        return _Swept(sums, record.received(batch=batch), record.entropy(batch=batch).mean(-1), None)
    rows, columns = ((label.items if label else ()) for label in (record.row_labels, record.column_labels))
    aligned = rows == columns[-len(rows) :] if rows else not columns and record.queries == record.keys
    distance = _rounded(apart / record.queries) if aligned and record.queries > 1 else None
    return _Swept(sums, received, entropy.mean(-1), distance)


def _place(label: Labels | None, labels: list[Labels]) -> int | None:
    """Where a label stands in the list; a new one is put at its end."""
    if label is None:
        return None
    for place, known in enumerate(labels):
        if known is label:
            return place
    labels.append(label)
    return len(labels) - 1


def _described(label: Labels) -> Json:
    found: Json = {"kind": label.kind, "items": list(label.items), "picture": _picture(label) is not None}
    if "grid" in label.extra:
        found["grid"] = [int(side) for side in label.extra["grid"]]
    if "seconds" in label.extra:
        found["seconds"] = float(label.extra["seconds"])
    found |= {name: [float(n) for n in label.extra[name]] for name in PLACES if name in label.extra}
    return found


def _picture(label: Labels) -> bytes | None:
    data = label.extra.get("image", label.extra.get("spectrogram"))
    return bytes(data) if data is not None else None


def _sane(weights: Tensor) -> Tensor:
    """What cannot be drawn, NaN and what is below zero, is drawn as zero."""
    return weights.float().nan_to_num(0.0, 0.0, 0.0).clamp_min(0)


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in _sane(values).tolist()]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _zipped(data: bytes) -> bytes:
    return gzip.compress(data, 9, mtime=0)


def _bytes(values: Tensor) -> bytes:
    array = values.contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
