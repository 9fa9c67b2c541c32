"""The data of a trace for the viewer: a JSON description, and the weights in a compact binary format.

`assets/source.js`, which reads the data, documents the format. Indices count from 0.
"""

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.look.attention_records import ROUNDING, Record, shares
from regard.look.head_mean import with_mean
from regard.look.labels import Labels
from regard.look.layer_names import Words, layer_names
from regard.look.rollout_records import KIND as ROLLOUT
from regard.look.trace import Trace

THUMBNAIL = 32  # largest number of cells per side of a thumbnail
WHOLE = 512  # largest number of queries or keys of a map that is stored whole; larger maps are pooled
KEPT = 8  # number of the largest weights of each row that are stored in 16 bits if the map is stored whole
# Weights in 8 bits are multiples of a step. If the maps that a page stores whole have more than FINE weights together,
# the step of each row is at least COARSE; otherwise 255 steps reach exactly the row's largest weight in 8 bits.
FINE = 4_000_000
COARSE = 2e-4
POOLED_CELLS = 3_000_000  # largest number of cells in all pooled maps of a page
# largest number of single weights (the largest of each row) that are stored for all pooled maps of a page
KEPT_WEIGHTS = 1_200_000
SOUND = 2**20  # largest size in bytes of a sound in a page; a larger one is omitted
BLOCK = 2**22  # largest number of attention weights that are in memory at a time
NUMBERS = (  # the entries of `Labels.extra` that are lists of numbers
    *("x", "y", "heading", "speed", "sides", "probability", "length", "width", "present", "ego"),
    *("lanes", "crossings", "zebras", "ramps"),
)

# `BETWEEN` separates the two parts of a record's name: the group, such as the title of one of several predictions, and
# the path of the layer.
BETWEEN = " · "

Json = dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """The resolution of the maps of a page, which `of` chooses from the total number of weights."""

    step: float  # smallest step between the 8-bit weights of a row of a whole map
    side: int  # largest number of cells per side of a pooled map
    kept: int  # number of the largest weights that are stored for a row of a pooled map
    stride: int  # the largest weights of a pooled map are stored only for every `stride`-th row

    @classmethod
    def of(cls, traces: Sequence[Trace], sequences: int = 1) -> "Budget":
        """Return the resolution for a page that contains `sequences` sequences of each trace."""
        records = [record for trace in traces for record in trace.records for _ in range(sequences)]
        # The mean over the heads of a record with several heads is stored as an additional head.
        maps = [(record, record.heads + (record.heads > 1)) for record in records]
        weights = sum(heads * record.queries * record.keys for record, heads in maps if is_whole(record))
        rows = sum(heads * record.queries for record, heads in maps if not is_whole(record))
        heads = sum(heads for record, heads in maps if not is_whole(record))
        return cls(
            step=0.0 if weights <= FINE else COARSE,
            side=min(256, max(64, math.isqrt(POOLED_CELLS // max(1, heads)))),
            kept=min(32, max(4, KEPT_WEIGHTS // max(1, rows))),
            stride=max(1, -(-4 * rows // KEPT_WEIGHTS)),
        )


class Odd(NamedTuple):
    """The counts of NaN, infinite and negative weights in a map."""

    nan: int
    infinite: int
    negative: int

    @classmethod
    def of(cls, weights: Tensor) -> "Odd":
        nan, infinite = int(weights.isnan().sum()), int(weights.isinf().sum())
        return cls(nan, infinite, int((weights < -ROUNDING).sum() - weights.isneginf().sum()))

    def plus(self, other: "Odd") -> "Odd":
        return Odd(self.nan + other.nan, self.infinite + other.infinite, self.negative + other.negative)

    def sentence(self) -> str | None:
        """Return a sentence with the counts of NaN, infinite and negative weights; None if all three are 0.

        >>> Odd(3, 0, 1).sentence()
        'Of the weights 3 are NaN, 1 negative.'
        """
        counts = {"NaN": self.nan, "infinite": self.infinite, "negative": self.negative}
        parts = [f"{count} {name}" for name, count in counts.items() if count]
        return f"Of the weights {', '.join(parts).replace(' ', ' are ', 1)}." if parts else None


class _Swept(NamedTuple):
    """Statistics of the weights of one sequence of a record, which `_swept` computes in one pass."""

    sums: Tensor  # the sum of each row of weights, (heads, queries)
    received: Tensor  # the sum of each column of weights, (heads, keys)
    entropy: Tensor  # the mean entropy of the rows of each head, (heads,)
    # For each head, the mean distance between query and key; None if rows and columns are not the same positions, or
    # some weights are unknown.
    distance: list[float | None] | None
    odd: Odd
    # Thumbnails of the heads, (heads, rows, columns): each cell has the weight of the largest magnitude in it.
    small: Tensor


@dataclass(frozen=True)
class Packed:
    """The data of one sequence of a trace for a page: a description, gzip data of each record, and PNG pictures."""

    about: Json
    records: list[bytes]
    pictures: dict[str, bytes] = field(default_factory=dict)


def is_whole(record: Record) -> bool:
    """Return whether a page stores every weight of a record, instead of pooling it."""
    return max(record.queries, record.keys) <= WHOLE


def one_of(record: Record, batch: int) -> tuple[int, Record]:
    """Return a sequence's index in the batch, and a record of only this sequence, without its padding.

    If the record has no sequence `batch`, its last sequence is returned.
    """
    item = max(0, min(batch, record.batch - 1))
    return item, record.sequence(item) if record.batch else record


def about(trace: Trace, *, batch: int = 0, sequences: Sequence[int] | None = None) -> Json:
    """Return the JSON description of one sequence of a trace, without its attention maps and their statistics.

    `sequences` are the indices of the sequences in the page's menu.

    >>> trace = Trace.from_weights({"cross": torch.eye(2)[None]}, rows=["le", "chat"])
    >>> about(trace)["records"][0]["rows"], about(trace)["labels"][0]["items"]
    (0, ['le', 'chat'])
    """
    labels: list[Labels] = []
    records = []
    for record, (group, layer) in zip(trace.records, _spoken(trace.records), strict=True):
        item, sequence = one_of(record, batch)
        # If the page has a menu of sequences, the menu already names the displayed sequence.
        alone = record.batch > 1 and len(sequences or [batch]) == 1
        which = f"Sequence {item} of a batch of {record.batch} is shown." if alone else None
        if item != batch:
            which = f"This call has no sequence {batch}: sequence {item} of its batch of {record.batch} is shown."
        records.append(
            {
                "group": group,
                "layer": layer,
                **{name: getattr(sequence, name) for name in ("name", "call", "kind", "heads", "queries", "keys")},
                "scale": None if record.scale is None else _finite(float(record.scale)),
                "note": sentences(record.note, which),
                "check": _finite(sequence.check()) if record.batch else None,
                "rows": _place(sequence.row_labels, labels),
                "columns": _place(sequence.column_labels, labels),
                "entropy": None,
                "distance": None,
            }
        )
    return {
        "title": trace.title,
        "parts": None if trace.parts is None else dict(trace.parts),
        "dropped": list(trace.dropped),
        "labels": [_described(label) for label in labels],
        "records": records,
        "sequence": batch,
        "sequences": [{"number": n, "text": beginning(trace, n)} for n in sequences or [batch]],
    }


def _spoken(records: Sequence[Record]) -> list[tuple[str, Words | None]]:
    """Return for each record its group and the words of its layer's readable name.

    The group is the part of the name before `BETWEEN`, or "". If the words are None, the page displays the record's
    name.
    """
    split = [record.name.rpartition(BETWEEN) for record in records]
    words = dict(zip(paths := list(dict.fromkeys(path for _, _, path in split)), layer_names(paths), strict=True))
    return [
        (group, tuple(path.split(" ")) if record.kind == ROLLOUT else words[path])
        for record, (group, _, path) in zip(records, split, strict=True)
    ]


def beginning(trace: Trace, batch: int, longest: int = 40) -> str:
    """Return the first words of a sequence, for a menu; an empty string if no record has labels for it."""
    for record in trace.records:
        axes = record.labels(batch=batch) if batch < record.batch else ()
        for labels in axes:
            if labels is not None and labels.kind in ("tokens", "list"):
                text = " ".join(labels.trimmed().items[:longest])
                return text if len(text) <= longest else text[: longest - 1] + "…"
    return ""


def sentences(*parts: str | None) -> str | None:
    """Return the texts `parts` joined as sentences, with capital letters and full stops; None if all texts are empty.

    >>> sentences("dropout was active", None, "Sequence 1 of 2 is shown.")
    'Dropout was active. Sequence 1 of 2 is shown.'
    """
    said = [part.strip() for part in parts if part and part.strip()]
    return " ".join(part[0].upper() + part[1:].rstrip(".") + "." for part in said) or None


def pictures(trace: Trace, *, batch: int = 0) -> dict[str, bytes]:
    """Return the PNG files of labels with pictures, by the index of the labels in the description (`about`)."""
    labels: list[Labels] = []
    for record in trace.records:
        _, sequence = one_of(record, batch)
        _place(sequence.row_labels, labels)
        _place(sequence.column_labels, labels)
    files = {str(place): _picture(label) for place, label in enumerate(labels)}
    return {place: data for place, data in files.items() if data is not None}


def pack(
    trace: Trace, *, batch: int = 0, budget: Budget | None = None, sequences: Sequence[int] | None = None
) -> Packed:
    """Return the complete data of one sequence of a trace for a page."""
    budget = budget or Budget.of([trace])
    description = about(trace, batch=batch, sequences=sequences)
    thumbnails: list[bytes] = []
    files: list[bytes] = []
    start = 0
    for record, entry in zip(trace.records, description["records"], strict=True):
        sequence = with_mean(one_of(record, batch)[1])
        swept = _swept(sequence, record.heads)
        warning = swept.odd.sentence()
        clean = (lambda weights: weights) if warning else _sane
        side = THUMBNAIL if is_whole(sequence) else budget.side
        cells = clean(torch.stack([sequence.overview(side, head=head) for head in range(sequence.heads)]).float())
        small, peaks = _thumbnails(swept.small if warning else _sane(swept.small), odd=warning is not None)
        entry["thumbnails"] = {"start": start, "shape": list(swept.small.shape[1:]), "half": warning is not None}
        entry["thumbnails"]["peaks"] = peaks
        thumbnails.append(small + b"\0" * (-len(small) % 4))
        start += len(thumbnails[-1])
        entry["entropy"], entry["distance"] = _rounded(swept.entropy), swept.distance
        entry["note"] = sentences(entry["note"], warning)
        packer = _pack_odd if warning else _pack_whole if is_whole(sequence) else _pack_long
        entry["pack"], data = packer(sequence, budget, swept, cells)
        files.append(_zipped(data))
    description["thumbnails"] = base64.b64encode(_zipped(b"".join(thumbnails))).decode()
    return Packed(description, files, pictures(trace, batch=batch))


def as_json(value: Mapping[str, Any]) -> str:
    """Return the value as JSON that JavaScript can parse; ValueError if it contains NaN or infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _thumbnails(small: Tensor, *, odd: bool) -> tuple[bytes, list[float]]:
    """Return the bytes of the heads' thumbnails, and the largest |weight| of each head.

    A thumbnail stores √(weight / largest |weight|), because 8 bits distinguish small weights better by their square
    roots. If the map has NaN, infinite or negative weights (`odd`), its thumbnail stores signed half floats instead.
    """
    peaks = [_peak(head) for head in small]
    part = small / torch.tensor(peaks)[:, None, None]
    data = (small.sign() * part.abs().sqrt()).half() if odd else (255 * part.sqrt()).round().to(torch.uint8)
    return _bytes(data), [float(f"{peak:.5g}") for peak in peaks]


def _pack_odd(record: Record, budget: Budget, swept: _Swept, cells: Tensor) -> tuple[Json, bytes]:
    """Return the entry (JSON) and the bytes of a map with NaN, infinite or negative weights, in half precision.

    Weights are stored relative to the largest |weight|.
    """
    whole = is_whole(record)
    stride = 1 if whole else budget.stride
    count = 0 if whole else min(budget.kept, record.keys)
    numbers = record.weights() if whole else cells
    largest = indices = torch.zeros(record.heads, -(-record.queries // stride), 0)
    rests = torch.zeros(largest.shape[:2])
    if count:
        best = record.top(count, magnitude=True)
        largest, indices = best.values[:, ::stride], best.indices[:, ::stride]
        rests = swept.sums[:, ::stride] - largest.sum(-1)
    peak = max(_peak(numbers), _peak(largest))
    rows, columns = numbers.shape[1:]
    blocks = {"rowBlock": record.queries / max(1, rows), "columnBlock": record.keys / max(1, columns)}
    entry = {"mapRows": rows, "mapColumns": columns, **blocks, "whole": whole, "kept": count}
    entry |= {"rowsKept": largest.shape[1], "stride": stride, "half": True}
    steps = torch.zeros(record.heads, rows)
    halves = [(part / peak).half() for part in (largest, numbers)]
    return _written(record, entry, peak, peak / 4096, [steps, rests, swept.received], indices, *halves)


def _peak(values: Tensor) -> float:
    """Return the largest finite |value|, or 1 if there is none above 0."""
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).amax()) or 1.0 if values.numel() else 1.0


def _pack_whole(record: Record, budget: Budget, swept: _Swept, cells: Tensor) -> tuple[Json, bytes]:
    """Return the entry (JSON) and the bytes of a map that is stored whole.

    The largest weights of each row are stored in 16 bits. All other weights are stored in 8 bits: 255 steps from 0 to
    the largest of these other weights.
    """
    weights = _sane(record.weights())
    count = min(KEPT, record.keys)
    best = weights.topk(min(count + 1, record.keys), -1)
    largest, indices = best.values[..., :count], best.indices[..., :count]
    # The `count` largest weights of a row are stored separately, so the 8-bit steps need to reach only the next
    # largest.
    after = best.values[..., count:].sum(-1, keepdim=True)
    steps = (after / 255).clamp_min(budget.step if record.keys > count else 0.0)
    codes = (weights / steps.clamp_min(1e-30)).round().clamp_max(255)
    codes.scatter_(-1, indices, 0)
    peak = float(weights.amax()) if weights.numel() else 0.0
    error = max(float(steps.amax()) / 2 if steps.numel() else 0.0, peak / 131070)
    shape = {"mapRows": record.queries, "mapColumns": record.keys, "rowBlock": 1.0, "columnBlock": 1.0}
    entry = {**shape, "whole": True, "kept": count, "rowsKept": record.queries, "stride": 1}
    rows = [steps, torch.zeros_like(swept.sums), swept.received]
    small = (largest / (peak or 1.0) * 65535).round().to(torch.int32).to(torch.uint16)
    return _written(record, entry, peak, error, rows, indices, small, codes.to(torch.uint8))


def _pack_long(record: Record, budget: Budget, swept: _Swept, cells: Tensor) -> tuple[Json, bytes]:
    """Return the entry (JSON) and the bytes of a large map: a pooled map of means, and the largest weights of rows."""
    steps = (cells.amax(-1) / 255).clamp_min(1e-30)
    codes = (cells / steps[..., None]).round()
    count = min(budget.kept, record.keys)
    best = record.top(count)
    largest, indices = _sane(best.values[:, :: budget.stride]), best.indices[:, :: budget.stride]
    peak = float(largest.amax()) if largest.numel() else 0.0
    rests = (swept.sums[:, :: budget.stride] - largest.sum(-1)).clamp_min(0)
    rows, columns = cells.shape[1:]
    blocks = {"rowBlock": record.queries / max(1, rows), "columnBlock": record.keys / max(1, columns)}
    entry = {"mapRows": rows, "mapColumns": columns, **blocks, "whole": False, "kept": count}
    entry |= {"rowsKept": largest.shape[1], "stride": budget.stride}
    error = float(steps.amax()) / 2 if steps.numel() else 0.0
    small = (largest / (peak or 1.0) * 65535).round().to(torch.int32).to(torch.uint16)
    rows_ = [steps, rests, swept.received]
    return _written(record, entry, peak, error, rows_, indices, small, codes.to(torch.uint8))


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
    """Return the completed entry, and the bytes of all arrays in the order in which `source.js` reads them.

    Each array is padded to a multiple of four bytes.
    """
    *steps, received = rows
    places = indices.to(torch.uint32 if record.keys > 65536 else torch.uint16)
    arrays = [*(row.float() for row in steps), received.float() / max(1, record.queries), places, largest, codes]
    data = b"".join(part + b"\0" * (-len(part) % 4) for part in map(_bytes, arrays))
    return {
        **entry,
        "heads": record.heads,
        "queries": record.queries,
        "keys": record.keys,
        "peak": peak,
        "error": error,
    }, data


def _swept(record: Record, heads: int) -> _Swept:
    """Return statistics of a record of one sequence, in one pass over its rows.

    NaN, infinite and negative weights are counted in the first `heads` heads only. The distance of a head is the mean
    over its rows of Σ w·|i − j|, where i and j are the positions of query and key. With a key-value cache there are
    more keys than queries: the last query is at the position of the last key.
    """
    place = torch.arange(record.keys) + record.queries - record.keys
    sums, entropy = torch.zeros(2, record.heads, record.queries)
    received, apart = torch.zeros(record.heads, record.keys), torch.zeros(record.heads)
    step = max(1, BLOCK // max(1, record.heads * record.keys))
    small = _Largest(record)
    odd = Odd(0, 0, 0)
    for start in range(0, record.queries, step):
        rows = slice(start, min(start + step, record.queries))
        weights = record.weights(queries=rows).float()
        odd = odd.plus(Odd.of(weights[:heads]))
        part = shares(weights)
        sums[:, rows] = weights.sum(-1)
        entropy[:, rows] = -torch.xlogy(part, part).sum(-1)
        received += weights.sum(-2)
        small.add(start, weights)
        apart += (part * (torch.arange(record.queries)[rows, None] - place).abs()).sum((-2, -1))
    rest = getattr(record.source, "rest", None)
    # the record is from a trace file that stores only the largest weights of a row and the sum of all other weights
    if rest is not None:
        known = record.received(), record.entropy().mean(-1)
        return _Swept(sums + rest[0].float(), *known, None, odd, small.cells)
    rows, columns = ((label.items if label else ()) for label in (record.row_labels, record.column_labels))
    aligned = rows == columns[-len(rows) :] if rows else not columns and record.queries == record.keys
    distance = _rounded(apart / record.queries) if aligned and record.queries > 1 else None
    return _Swept(sums, received, entropy.mean(-1), distance, odd, small.cells)


class _Largest:
    """Thumbnails of all heads; each cell has the weight of the largest magnitude among those that it covers.

    With the mean of the weights in a cell, a few large weights among small ones would be invisible.
    """

    def __init__(self, record: Record) -> None:
        high, wide = min(THUMBNAIL, record.queries), min(THUMBNAIL, record.keys)
        self.cells = torch.zeros(record.heads, high, wide)
        self._rows = torch.arange(record.queries) * high // max(1, record.queries)
        self._columns = torch.arange(record.keys) * wide // max(1, record.keys)

    def add(self, start: int, weights: Tensor) -> None:
        """Add to the thumbnails the weights (heads, rows, keys) of consecutive rows, beginning with row `start`."""
        heads, count, _ = weights.shape
        if not weights.numel():
            return
        columns = self._columns.expand(heads, count, -1)
        rows = self._rows[start : start + count, None].expand(heads, count, self.cells.shape[-1])
        high, low = self.cells.clamp_min(0), self.cells.clamp_max(0)
        for cells, way in ((high, "amax"), (low, "amin")) if bool((weights < 0).any()) else ((high, "amax"),):
            wide = torch.zeros(heads, count, self.cells.shape[-1]).scatter_reduce_(2, columns, weights, way)
            cells.scatter_reduce_(1, rows, wide, way)
        self.cells = torch.where(-low > high, low, high)


def _place(label: Labels | None, labels: list[Labels]) -> int | None:
    """Return the index of `label` in `labels`, after appending it if it is new; None if `label` is None."""
    if label is None:
        return None
    for place, known in enumerate(labels):
        if known is label:
            return place
    labels.append(label)
    return len(labels) - 1


def _described(label: Labels) -> Json:
    entry: Json = {"kind": label.kind, "items": list(label.items), "picture": _picture(label) is not None}
    if "grid" in label.extra:
        entry["grid"] = [int(side) for side in label.extra["grid"]]
    if "seconds" in label.extra:
        entry["seconds"] = float(label.extra["seconds"])
    if len(label.extra.get("sound", b"")) in range(1, SOUND + 1):
        entry["sound"] = base64.b64encode(label.extra["sound"]).decode()
    entry |= {name: [float(n) for n in label.extra[name]] for name in NUMBERS if name in label.extra}
    return entry


def _picture(label: Labels) -> bytes | None:
    data = label.extra.get("image", label.extra.get("spectrogram"))
    return bytes(data) if data is not None else None


def _sane(weights: Tensor) -> Tensor:
    """Return the weights as float32, with negative rounding errors set to 0."""
    return weights.float().clamp_min(0)


def _rounded(values: Tensor) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values.tolist()]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _zipped(data: bytes) -> bytes:
    return gzip.compress(data, 9, mtime=0)


def _bytes(values: Tensor) -> bytes:
    array = values.contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
