"""The schema of the description inside a trace file: every field, and its limits."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_HEADER, LONGEST = 2**25, 2**24  # largest header in bytes, and largest description in characters
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
    """Names of positions, with their numbers and pictures."""

    kind: Literal["tokens", "patches", "frames", "objects", "glimpses", "list"]
    items: Annotated[list[Item], Field(max_length=2**20)]
    numbers: Annotated[dict[Item, Finite | Annotated[list[Finite], Field(max_length=2**20)]], Field(max_length=16)] = {}
    pictures: Annotated[dict[Item, Item], Field(max_length=4)] = {}  # name of a picture → name of its tensor
    shown: Annotated[list[Count], Field(max_length=2**20)] | None = None  # positions that are not padding


class RecordDocument(_Strict):
    """One call; the names of its tensors contain its index in the list."""

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
    # Labels by their index in the list: of the single sequence, or of each. Older files have one entry for all
    # sequences.
    rows: int | Places | None = None
    columns: int | Places | None = None


class TraceDocument(_Strict):
    """A whole trace."""

    format: Literal[1]
    title: Text
    dropped: Annotated[list[Text], Field(max_length=2**16)]
    labels: Annotated[list[LabelsDocument], Field(max_length=2**16)]
    records: Annotated[list[RecordDocument], Field(max_length=2**16)]


def check(path: Path) -> TraceDocument:
    """Return the description in a trace file, without loading the tensors; ValueError if there is none."""
    with path.open("rb") as file:
        start = file.read(8)
        length = min(int.from_bytes(start, "little"), _HEADER + 1)
        start += file.read(length)
    try:
        return description(start, path.stat().st_size)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a trace: {error}") from None


def description(data: bytes, size: int) -> TraceDocument:
    """Return the description in the header of a safetensors file of `size` bytes, of which `data` is the beginning."""
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
