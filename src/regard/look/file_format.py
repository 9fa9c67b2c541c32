"""The description inside a trace file: every field, and how large it may be. What does not fit it is no trace."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_LONGEST_NAME, _LONGEST_TEXT = 1000, 4000

Count = Annotated[int, Field(ge=0, le=2**20)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Item = Annotated[str, Field(max_length=_LONGEST_NAME)]
Text = Annotated[str, Field(max_length=_LONGEST_TEXT)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LabelsDocument(_Strict):
    """Names of positions; numbers and pictures that go with them."""

    kind: Literal["tokens", "patches", "frames", "objects", "list"]
    items: Annotated[list[Item], Field(max_length=2**20)]
    numbers: Annotated[dict[Item, Finite | Annotated[list[Finite], Field(max_length=2**20)]], Field(max_length=16)] = {}
    pictures: Annotated[dict[Item, Item], Field(max_length=4)] = {}  # name → tensor of bytes


class RecordDocument(_Strict):
    """One call; its tensors are named after its place in the list."""

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
    rows: int | None = None
    columns: int | None = None


class TraceDocument(_Strict):
    """A whole trace."""

    format: Literal[1]
    title: Text
    dropped: Annotated[list[Text], Field(max_length=2**16)]
    labels: Annotated[list[LabelsDocument], Field(max_length=2**12)]
    records: Annotated[list[RecordDocument], Field(max_length=2**16)]
