"""The schema of the JSON description inside a trace file: all fields and their limits."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_HEADER, LONGEST = 2**25, 2**24  # largest file header in bytes, and largest description in characters
_LONGEST_NAME, _LONGEST_TEXT = 1000, 4000

Count = Annotated[int, Field(ge=0, le=2**20)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Item = Annotated[str, Field(max_length=_LONGEST_NAME)]
Text = Annotated[str, Field(max_length=_LONGEST_TEXT)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


Places = Annotated[list[int | None], Field(max_length=2**20)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LabelsDocument(_Strict):
    """The `Labels` of one axis: names of positions, with numbers and pictures from `Labels.extra`."""

    kind: Literal["tokens", "patches", "frames", "objects", "glimpses", "list"]
    items: Annotated[list[Item], Field(max_length=2**20)]
    numbers: Annotated[dict[Item, Finite | Annotated[list[Finite], Field(max_length=2**20)]], Field(max_length=16)] = {}
    # `pictures` maps the name of a picture, or of other bytes such as a sound, to the name of the tensor that holds
    # these bytes.
    pictures: Annotated[dict[Item, Item], Field(max_length=4)] = {}
    # the indices of the positions that are not padding; None if there is no padding
    shown: Annotated[list[Count], Field(max_length=2**20)] | None = None


class RecordDocument(_Strict):
    """The `Record` of one attention call; its tensors in the file are named by its index in the list of records."""

    name: Item
    call: Count
    kind: Item
    batch: Size
    heads: Size
    queries: Size
    keys: Size
    form: Literal["whole", "top"]
    scale: Finite | None = None
    note: Text | None = None
    check: Annotated[list[float | None], Field(max_length=2**20)]
    # Labels of rows and columns, as indices into the document's list of labels: one index for a batch of one sequence,
    # a list with an index for each sequence otherwise. Older files have one index for all sequences of a batch.
    rows: int | Places | None = None
    columns: int | Places | None = None


class TraceDocument(_Strict):
    """The description of a `Trace` in its file."""

    format: Literal[1]
    title: Text
    dropped: Annotated[list[Text], Field(max_length=2**16)]
    labels: Annotated[list[LabelsDocument], Field(max_length=2**16)]
    records: Annotated[list[RecordDocument], Field(max_length=2**16)]


def check(path: Path) -> TraceDocument:
    """Return the description in a trace file, without loading the tensors; ValueError if the file is not a trace."""
    with path.open("rb") as file:
        start = file.read(8)
        length = min(int.from_bytes(start, "little"), _HEADER + 1)
        start += file.read(length)
    try:
        return description(start, path.stat().st_size)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a trace: {error}") from None


def description(data: bytes, size: int) -> TraceDocument:
    """Return the description in the header of a safetensors file; `data` is the beginning of its `size` bytes."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_HEADER, size - 8, len(data) - 8):
        raise ValueError("its header does not fit the file")
    try:
        header: Any = json.loads(data[8 : 8 + length])
    except UnicodeDecodeError:
        raise ValueError("its header is not text") from None
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get("regard") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ValueError("it has no description of a trace")
    if len(text) > LONGEST:
        raise ValueError(f"its description has {len(text)} characters: at most {LONGEST} are read")
    try:
        return TraceDocument.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
