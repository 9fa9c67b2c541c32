"""Trace files: safetensors files with a JSON description of the trace in their metadata.

The format does not use pickle, and everything in a file is validated when it is loaded. The weights of a small record
are all written, in half precision. Of a large record, a file stores the largest weights of each row, the sum of the
other weights of the row, and summaries that were computed from all weights: received weights, entropy, and a pooled
overview.
"""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from regard.look.attention_records import Given, Record
from regard.look.labels import Labels
from regard.look.trace_format import LONGEST, LabelsDocument, RecordDocument, TraceDocument, description

WHOLE = 2**21  # largest number of weights of a record whose weights are all written
LARGEST_FILE = 2**31  # largest size in bytes of a file that is read
_LARGEST_MAP = 2**40  # largest number of weights of a record, which limits the computation that a file can cause


class Largest:
    """A `Source` with only the largest weights of each row; `rest` (batch, heads, queries) is the sum of the others."""

    def __init__(self, shape: tuple[int, int, int, int], parts: Mapping[str, Tensor]) -> None:
        self._shape = shape
        self._parts = dict(parts)
        self.rest = parts["rest"]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    def holds(self) -> list[Tensor]:
        return list(self._parts.values())

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        values, indices = (
            self._parts[name][batch, heads.start : heads.stop].index_select(-2, rows) for name in ("values", "indices")
        )
        # NaN counts as the largest weight. If the sum of the weights that are not stored is NaN, all stored weights of
        # that row are NaN too, so the whole row is shown as NaN.
        rest = self.rest[batch, heads.start : heads.stop].index_select(-1, rows).float()
        weights = torch.where(rest.isnan(), math.nan, 0.0)[..., None].expand(-1, -1, self._shape[3]).contiguous()
        return weights.scatter_(-1, indices.long(), values.float())

    def received(self, batch: int) -> Tensor:
        return self._parts["received"][batch].float()

    def entropy(self, batch: int) -> Tensor:
        return self._parts["entropy"][batch].float()

    def overview(self, batch: int, head: int) -> Tensor:
        return self._parts["overview"][batch, head].float()


class _Known:
    """The error of `Record.check` for each sequence, as a trace file stores it."""

    def __init__(self, errors: list[float | None]) -> None:
        self._errors = errors

    def of(self, batch: int) -> float:
        error = self._errors[batch]
        return float("nan") if error is None else error

    def holds(self) -> list[Tensor]:
        return []


def write(
    path: str | Path,
    title: str,
    records: Sequence[Record],
    dropped: Sequence[str],
    *,
    whole: int = WHOLE,
    top: int = 32,
    overview: int = 128,
) -> Path:
    """Write the records of a trace to a file and return its path; the file appears only when it is complete.

    Records with more than `whole` weights and more than 2 · `top` keys are stored as the `top` largest weights of each
    row and an overview of `overview` × `overview` cells of each head. `dropped` are the trace's remarks about calls
    without a record.
    """
    if top < 1 or whole < 0 or overview < 1:
        raise ValueError(f"top and overview must be at least 1, whole 0 or more, got {top}, {overview}, {whole}")
    tensors: dict[str, Tensor] = {}
    # the index of each Labels object, by its identity, because records of one sentence share one object
    labels: dict[Labels, int] = {}

    def number(axis: Labels | None) -> int | None:
        return None if axis is None else labels.setdefault(axis, len(labels))

    def places(axes: list[Labels | None]) -> int | list[int | None] | None:
        if all(axis is None for axis in axes):
            return None
        numbers = [number(axis) for axis in axes]
        return numbers[0] if len(numbers) == 1 else numbers

    described: list[RecordDocument] = []
    left_out = list(dropped)
    for record in records:
        index = len(described)
        if 0 in record.source.shape:
            left_out.append(f"{record.name!r}, call {record.call}: a map of {record.source.shape} has nothing to save")
            continue
        large = record.batch * record.heads * record.queries * record.keys > whole and record.keys > 2 * top
        parts = _largest(record, top, overview) if large else {"weights": _whole(record)}
        tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in parts.items()}
        described.append(
            RecordDocument(
                name=record.name,
                call=record.call,
                kind=record.kind,
                batch=record.batch,
                heads=record.heads,
                queries=record.queries,
                keys=record.keys,
                form="top" if large else "whole",
                scale=record.scale,
                note=_note(record, top) if large else record.note,
                check=[record.check(batch=item) for item in range(record.batch)],
                rows=places([record.labels(batch=item).rows for item in range(record.batch)]),
                columns=places([record.labels(batch=item).columns for item in range(record.batch)]),
            )
        )
    named = [_described(place, given, tensors) for place, given in enumerate(labels)]
    document = TraceDocument(format=1, title=title, dropped=left_out, labels=named, records=described)
    text = document.model_dump_json(exclude_defaults=True)
    if len(text) > LONGEST:
        raise ValueError(
            f"names and labels of the trace have {len(text)} characters: at most {LONGEST} can be saved; "
            "leave out sequences or records"
        )
    return _replace(Path(path), save(tensors, {"regard": text}))


def _note(record: Record, top: int) -> str:
    said = f"{record.note}; " if record.note and "largest weights" not in record.note else ""
    return f"{said}of each row only the {top} largest weights were saved, others are shown as 0"


def _whole(record: Record) -> Tensor:
    maps = (record.weights(head=head, batch=item) for item in range(record.batch) for head in range(record.heads))
    return _narrow([_halved(map_) for map_ in maps]).reshape(record.source.shape)


def _halved(values: Tensor) -> Tensor:
    """Return the values in half precision; if a finite value would become infinite, return all values unchanged."""
    half = values.half()
    return half if torch.equal(half.isinf(), values.isinf()) else values


def _narrow(parts: list[Tensor]) -> Tensor:
    """Return the parts stacked into one tensor, in half precision if all parts are, else in float32."""
    wide = any(part.dtype == torch.float32 for part in parts)
    return torch.stack([part.float() for part in parts] if wide else parts)


def _largest(record: Record, top: int, overview: int) -> dict[str, Tensor]:
    """Return the tensors that a file stores of a large record, by name; indices are int16 if they fit, else int32."""
    narrow = torch.int16 if record.keys < 2**15 else torch.int32
    parts: dict[str, list[Tensor]] = {name: [] for name in _PARTS}
    for item in range(record.batch):
        largest = record.top(top, batch=item, magnitude=True)
        parts["values"].append(_halved(largest.values))
        parts["indices"].append(largest.indices.to(narrow))
        parts["received"].append(record.received(batch=item))
        parts["entropy"].append(record.entropy(batch=item))
        rest = torch.stack([_rest(record, head, item, largest.indices[head]) for head in range(record.heads)])
        parts["rest"].append(_halved(rest))
        maps = [record.overview(overview, head=head, batch=item) for head in range(record.heads)]
        parts["overview"].append(_halved(torch.stack(maps)))
    return {
        name: _narrow(tensors) if tensors[0].is_floating_point() else torch.stack(tensors)
        for name, tensors in parts.items()
    }


_PARTS = ("values", "indices", "rest", "received", "entropy", "overview")


def _rest(record: Record, head: int, item: int, indices: Tensor) -> Tensor:
    """Return, for each row of a head, the sum of the weights at all keys except the stored keys `indices`."""
    known = getattr(record.source, "rest", None)
    step = max(1, 2**22 // max(1, record.keys))
    parts = []
    for start in range(0, record.queries, step):
        rows = slice(start, start + step)
        weights = record.weights(head=head, queries=rows, batch=item)
        parts.append(weights.scatter(-1, indices[rows], 0.0).sum(-1))
    rest = torch.cat(parts)
    return rest if known is None else rest + known[item, head].float()


def _described(place: int, labels: Labels, tensors: dict[str, Tensor]) -> LabelsDocument:
    numbers: dict[str, float | list[float]] = {}
    pictures: dict[str, str] = {}
    for name, thing in labels.extra.items():
        if isinstance(thing, (bytes, bytearray)):
            pictures[name] = f"labels.{place}.{name}"
            tensors[pictures[name]] = torch.frombuffer(bytearray(thing), dtype=torch.uint8)
        elif isinstance(thing, (int, float)):
            numbers[name] = float(thing)
        else:
            numbers[name] = [float(number) for number in thing]
    shown = None if labels.shown is None else list(labels.shown)
    return LabelsDocument(
        kind=labels.kind,  # type: ignore[arg-type]
        items=list(labels.items),
        numbers=numbers,
        pictures=pictures,
        shown=shown,
    )


def _replace(path: Path, data: bytes) -> Path:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def read(path: str | Path, *, limit: int = LARGEST_FILE) -> tuple[str, list[Record], list[str]]:
    """Return the title, the records and the dropped calls of a trace file.

    ValueError if the file is not a valid trace, or has more than `limit` bytes.
    """
    path = Path(path)
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"{path.name} has {size} bytes: at most {limit} are read")
    data = path.read_bytes()
    try:
        document = description(data, size)
        return document.title, _records(document, load(data)), list(document.dropped)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a trace: {error}") from None


def _records(document: TraceDocument, tensors: Mapping[str, Tensor]) -> list[Record]:
    labels = [_labels(described, tensors) for described in document.labels]
    records = []
    for index, described in enumerate(document.records):
        shape = (described.batch, described.heads, described.queries, described.keys)
        if math.prod(shape) > _LARGEST_MAP:
            raise ValueError(f"record {index} has {shape} weights: at most 2^40 are read")
        if described.form == "whole":
            source: Given | Largest = Given(_tensor(tensors, f"{index}.weights", torch.float16, shape))
        else:
            source = Largest(shape, _parts(tensors, index, shape))
        if len(described.check) != described.batch:
            raise ValueError(f"record {index} has {len(described.check)} checks for {described.batch} sequences")
        known = None if None in described.check else _Known(described.check)
        record = Record(
            described.name,
            described.kind,
            source,
            call=described.call,
            scale=described.scale,
            note=described.note,
            checked=known,
            row_labels=_label(labels, described.rows, described.batch, described.queries, index),
            column_labels=_label(labels, described.columns, described.batch, described.keys, index),
        )
        if described.batch > 1 and (isinstance(described.rows, int) or isinstance(described.columns, int)):
            record.note = f"{record.note}; {_SHARED}" if record.note else _SHARED
        records.append(record)
    return records


_SHARED = "an older file: one list of labels for all sequences, which may be the words of another sequence"


def _label(
    labels: list[Labels], place: int | list[int | None] | None, batch: int, length: int, index: int
) -> list[Labels | None]:
    """Return the labels of one axis of a record for each sequence of its batch, from their indices in the file."""
    if isinstance(place, list):
        if len(place) != batch:
            raise ValueError(f"record {index} has labels for {len(place)} of {batch} sequences")
        return [None if number is None else _labels_at(labels, number, length, index) for number in place]
    return [None if place is None else _labels_at(labels, place, length, index)] * batch


def _labels_at(labels: list[Labels], place: int, length: int, index: int) -> Labels:
    if not 0 <= place < len(labels):
        raise ValueError(f"record {index} names labels {place} of {len(labels)}")
    if len(labels[place]) != length:
        raise ValueError(f"record {index} has {length} positions and {len(labels[place])} labels")
    return labels[place]


def _labels(described: LabelsDocument, tensors: Mapping[str, Tensor]) -> Labels:
    extra: dict[str, Any] = dict(described.numbers)
    if "grid" in extra:
        grid = extra["grid"]
        if not isinstance(grid, list) or len(grid) != 2 or any(side < 1 or side != int(side) for side in grid):
            raise ValueError("the grid of the labels must be two whole numbers")
        extra["grid"] = (int(grid[0]), int(grid[1]))
    if "special" in extra:
        special = extra["special"]
        if not isinstance(special, float) or special != int(special):
            raise ValueError("special of the labels must be a whole number")
        extra["special"] = int(special)
    for name, place in described.pictures.items():
        tensor = tensors.get(place)
        if tensor is None or tensor.dtype != torch.uint8 or tensor.ndim != 1:
            raise ValueError(f"the picture {name!r} of the labels is missing or not bytes")
        extra[name] = tensor.numpy().tobytes()
    shown = None if described.shown is None else tuple(described.shown)
    return Labels(described.kind, tuple(described.items), extra, shown)


def _tensor(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of the file; ValueError if its shape or dtype is not as expected.

    Where float16 is expected, float32 is also accepted.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(f"tensor {name} is missing")
    wide = dtype == torch.float16 and tensor.dtype == torch.float32
    if (tensor.dtype != dtype and not wide) or tuple(tensor.shape) != shape:
        raise ValueError(f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")
    return tensor


def _parts(tensors: Mapping[str, Tensor], index: int, shape: tuple[int, int, int, int]) -> dict[str, Tensor]:
    b, h, q, k = shape
    narrow = torch.int16 if k < 2**15 else torch.int32
    values = tensors.get(f"{index}.values")
    count = values.shape[-1] if values is not None and values.ndim == 4 else 0
    small = tensors.get(f"{index}.overview")
    high, wide = small.shape[-2:] if small is not None and small.ndim == 4 else (0, 0)
    if not 1 <= count <= k or not (1 <= high <= q and 1 <= wide <= k):
        raise ValueError(f"record {index} keeps {count} of {k} weights and an overview of {high} × {wide}")
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "values": (torch.float16, (b, h, q, count)),
        "indices": (narrow, (b, h, q, count)),
        "rest": (torch.float16, (b, h, q)),
        "received": (torch.float32, (b, h, k)),
        "entropy": (torch.float32, (b, h, q)),
        "overview": (torch.float16, (b, h, high, wide)),
    }
    parts = {name: _tensor(tensors, f"{index}.{name}", *spec) for name, spec in expected.items()}
    low, most = (int(bound) for bound in parts["indices"].aminmax())
    if not 0 <= low <= most < k:
        raise ValueError(f"record {index} names key {most if most >= k else low} of {k}")
    return parts
