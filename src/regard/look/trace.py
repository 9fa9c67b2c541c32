"""A trace: the recorded attention calls, by (module name, call number), with labels for rows and columns."""

import tempfile
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.look import drawings
from regard.look.attention_records import Given, Record, nbytes
from regard.look.labelling import in_a_row, named, plans
from regard.look.labels import Labelling, labels_of
from regard.look.layer_names import layer_names
from regard.look.notebook import Displayed, framed, in_notebook
from regard.look.recomputed_weights import Joined, Worst
from regard.look.rollout import check_one_stack, rollout
from regard.look.trace_files import LARGEST_FILE, read, write

_UNTITLED = "Attention"


class Trace:
    """Records of attention, in the order of the calls.

    `dropped` lists calls that were not stored or could not be captured, with the reason. `parts` is the heading of the
    list of records in a page, in English ("en") and Chinese ("zh"); by default records are layers and heads.

    >>> import torch
    >>> trace = Trace.from_weights({"cross": torch.eye(2)[None]}, rows=["le", "chat"], columns=["the", "cat"])
    >>> trace["cross"].weights(head=0)
    tensor([[1., 0.],
            [0., 1.]])
    >>> trace["cross"].column_labels.items
    ('the', 'cat')
    """

    def __init__(
        self,
        title: str = "Attention",
        records: Sequence[Record] = (),
        dropped: Sequence[str] = (),
        *,
        parts: Mapping[str, str] | None = None,
    ) -> None:
        self.title = title
        self.records = list(records)
        self.dropped = list(dropped)
        self.parts = parts

    @classmethod
    def from_weights(
        cls,
        weights: Mapping[str, Tensor],
        *,
        title: str = "Attention",
        rows: Labelling | None = None,
        columns: Labelling | None = None,
        batch: int | Sequence[int] | None = None,
    ) -> "Trace":
        """Return a trace of given weights: for each name a tensor (heads, q, k) or (b, heads, q, k); labels as in
        `label`."""
        records = []
        for name, tensor in weights.items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim not in (3, 4):
                what = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(
                    f"weights of {name!r} must be a float tensor (heads, q, k) or (b, heads, q, k), got {what}"
                )
            kept = tensor.detach()
            records.append(Record(name, "given", Given(kept if kept.ndim == 4 else kept[None])))
        trace = cls(title, records)
        return trace if rows is None and columns is None else trace.label(rows=rows, columns=columns, batch=batch)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __getitem__(self, place: str | tuple[str, int]) -> Record:
        """Return the record of a name (its first call), or of (name, call)."""
        if not isinstance(place, (str, tuple)):
            hint = f": records by number are in trace.records[{place!r}]" if isinstance(place, (int, slice)) else ""
            raise TypeError(f"a trace is indexed by a name or (name, call), got {place!r}{hint}")
        name, call = (place, None) if isinstance(place, str) else place
        calls = [record for record in self.records if record.name == name]
        for record in calls:
            if call is None or record.call == call:
                return record
        if calls:
            raise KeyError(f"{name!r} has no call {call}: seen were {[record.call for record in calls]}")
        near = get_close_matches(name, self.names, n=3) or self.names[:8]
        raise KeyError(f"no attention was seen under {name!r}; there is {', '.join(map(repr, near)) or 'none at all'}")

    def __repr__(self) -> str:
        count = len(self.records)
        lines = [f"Trace({self.title!r}, {count} {'record' if count == 1 else 'records'})"]
        lines += [f"  {record!r}" for record in self.records[:16]]
        lines += [f"  … and {len(self.records) - 16} more"] if len(self.records) > 16 else []
        return "\n".join([*lines, *(f"  not here: {text}" for text in self.dropped[:8])])

    @property
    def names(self) -> list[str]:
        """Return every module name, once, in the order of the first calls."""
        return list(dict.fromkeys(record.name for record in self.records))

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory of all records."""
        return nbytes(tensor for record in self.records for tensor in record.holds())

    def select(self, pattern: str) -> "Trace":
        """Return the records of a name, or else those whose name matches a pattern such as `encoder.*`."""
        return Trace(self.title, named(self.records, pattern), self.dropped, parts=self.parts)

    def label(
        self,
        *,
        rows: Labelling | None = None,
        columns: Labelling | None = None,
        of: "str | tuple[str, int] | Record | None" = None,
        batch: int | Sequence[int] | None = None,
    ) -> "Trace":
        """Label rows and columns; return the trace itself.

        For one sequence: a list of strings, `Labels`, or (tokenizer, ids). For each sequence of a batch: a list of
        lists, (tokenizer, 2-D ids), or an encoding of the texts, as (tokenizer, encoding), (texts, encoding) or the
        encoding alone; its attention mask marks the padding, which is not displayed. `batch` is the sequence of the
        labels; `batch=range(n)` are all.

        Without `of`, every axis of the right length is labelled; with a name, (name, call), a record, or a pattern such
        as `decoder.*`, those records must fit, or an error is raised.
        """
        chosen = self._chosen(of)
        strictly = of is not None
        # Both are checked before any record is changed.
        by_row = [] if rows is None else plans(chosen, "rows", labels_of(rows), batch=batch, strictly=strictly)
        by_column = (
            [] if columns is None else plans(chosen, "columns", labels_of(columns), batch=batch, strictly=strictly)
        )
        for record, labels in by_row:
            record.row_labels = labels
        for record, labels in by_column:
            record.column_labels = labels
        return self

    def joined(self) -> "Trace":
        """Join the calls of each name into one map, as after generation: one or more rows for each step.

        Names are joined if their calls have one batch size and head count and a number of keys that never decreases.
        The order of beams at each step is unknown: with several sequences, rows are those of the batch at that step.
        Labels of rows are joined if each call has them; those of columns are the last call's.
        """
        records: list[Record] = []
        for name in self.names:
            calls = [record for record in self.records if record.name == name]
            keys = [record.keys for record in calls]
            same = len({(record.batch, record.heads) for record in calls}) == 1
            if len(calls) == 1 or not same or keys != sorted(keys):
                records += calls
                continue
            source = Joined([record.source for record in calls])
            note = next((record.note for record in calls if record.note), None)
            kind = "rows" if all(record.queries == 1 for record in calls) else calls[0].kind
            axes = [[record.labels(batch=item) for record in calls] for item in range(calls[0].batch)]
            records.append(
                Record(
                    name,
                    kind,
                    source,
                    scale=calls[0].scale,
                    note=note,
                    checked=Worst(calls),
                    row_labels=[in_a_row([each.rows for each in steps]) for steps in axes],
                    column_labels=[steps[-1].columns for steps in axes],
                )
            )
        return Trace(self.title, records, self.dropped, parts=self.parts)

    @property
    def sequences(self) -> int:
        """Return the number of sequences of the largest batch."""
        return max((record.batch for record in self.records), default=0)

    def rollout(
        self, *, of: str | None = None, batch: int = 0, residual: float = 0.5, gradients: bool = False
    ) -> Tensor:
        """Return the rollout of attention through all layers, (q, k), of one sequence without padding.

        See `regard.look.rollout`.

        `of` selects layers by a name or a pattern. They must be the self-attention of one stack of layers: in an
        encoder-decoder model `of="encoder.*"`, for example.
        """
        chosen = self._chosen(of)
        check_one_stack([record.name for record in chosen], self.names)
        return rollout(chosen, batch=batch, residual=residual, gradients=gradients)

    def save(self, path: str | Path, **options: int) -> Path:
        """Write the trace to one safetensors file: half precision; large maps by their largest weights.

        A record of more than `whole` weights (2²¹ by default) is large: the file has the `top` largest weights (32) of
        each row, and a map of `overview` × `overview` cells (128) of each head.
        """
        return write(path, self.title, self.records, self.dropped, **options)

    @classmethod
    def load(cls, path: str | Path, *, limit: int = LARGEST_FILE) -> "Trace":
        """Return a trace from a file; ValueError if the file is not valid."""
        title, records, dropped = read(path, limit=limit)
        return cls(title, records, dropped)

    def html(
        self,
        path: str | Path,
        *,
        title: str | None = None,
        language: str = "en",
        batch: int | Sequence[int] | None = None,
    ) -> Path:
        """Write a standalone page: one file without network access.

        `language` is "en" or "zh". `batch` is the sequences that the page contains, a number or several; by default
        all, or the first ones if the page would become too large.
        """
        target = Path(path)
        target.write_text(self._page(title=title, language=language, batch=batch), encoding="utf-8")
        return target

    def svg(
        self,
        path: str | Path,
        *,
        record: str | tuple[str, int] | None = None,
        head: drawings.Head = 0,
        batch: int = 0,
        view: str = "auto",
    ) -> Path:
        """Write the map of a head as an SVG drawing; of the first record unless one is named.

        `head="mean"` is the mean over all heads.

        If the columns are cells of a picture, it is that picture once for each row, under the row's map: "smooth" is
        interpolated, "cells" shows each cell as a square, "heatmap" draws rows and columns instead.
        """
        chosen = self._record(record)
        target = _named_as(path, ".svg")
        drawing = drawings.svg(chosen, head=head, batch=batch, view=view, name=self._named(chosen))
        target.write_text(drawing, encoding="utf-8")
        return target

    def png(
        self,
        path: str | Path,
        *,
        record: str | tuple[str, int] | None = None,
        head: drawings.Head = 0,
        batch: int = 0,
        view: str = "auto",
    ) -> Path:
        """Write the map of a head as a PNG picture; the content is as in `svg`.

        It includes the tokens, the values of cells with enough room, the colour scale and the check.
        """
        chosen = self._record(record)
        subtitle = f"{self.title} · {drawings.checked(chosen.check(batch=batch))}"
        name, target = self._named(chosen), _named_as(path, ".png")
        return drawings.png(chosen, target, head=head, batch=batch, view=view, name=name, subtitle=subtitle)

    def _named(self, record: Record) -> str | None:
        """Return the name of the record in a drawing: the trace's title if the drawing shows everything, else the
        layer."""
        whole = len(self.records) == 1 and record.heads == record.batch == 1 and self.title != _UNTITLED
        return self.title if whole else self._said(record)

    def show(self, *, title: str | None = None, language: str = "en", batch: int | Sequence[int] | None = None) -> None:
        """Display the page: in a notebook below the cell, elsewhere in the browser.

        Options are those of `html`. A trace as the last line of a cell is displayed without this call.
        """
        options: dict[str, Any] = {"title": title, "language": language, "batch": batch}
        if in_notebook():
            import_module("IPython.display").display(Displayed(self._repr_html_(**options)))
            return
        folder = tempfile.mkdtemp(prefix="regard-")
        webbrowser.open(self.html(Path(folder) / "trace.html", **options).as_uri())

    def _repr_html_(self, **options: Any) -> str:
        """Return the page in a notebook, in an iframe that separates its style from the notebook's."""
        return framed(self._page(**options), height=860)

    def _page(self, **options: Any) -> str:
        from regard.look.viewer.page import page

        return page(self, **options)

    def _chosen(self, of: "str | tuple[str, int] | Record | None") -> list[Record]:
        """Return the selected records: all, one, those of a name, or those that match a pattern."""
        if of is None:
            chosen = list(self.records)
        elif isinstance(of, str):
            chosen = named(self.records, of)
        else:
            chosen = [of if isinstance(of, Record) else self[of]]
        if not chosen:
            raise ValueError(f"no record fits of={of!r}: there is {', '.join(self.names[:8]) or 'none at all'}")
        return chosen

    def _said(self, record: Record) -> str | None:
        """Return a readable name of a record's layer; None if its name is not that of a layer."""
        words = dict(zip(self.names, layer_names(self.names), strict=True))[record.name]
        return None if words is None else " ".join(words)

    def _record(self, place: str | tuple[str, int] | None) -> Record:
        if place is not None:
            return self[place]
        if not self.records:
            raise ValueError("the trace has no records to draw")
        return self.records[0]


def _named_as(path: str | Path, suffix: str) -> Path:
    """Return the path; raise if it has the suffix of another format."""
    target = Path(path)
    if target.suffix.lower() not in ("", suffix):
        raise ValueError(f"{suffix[1:]} writes a {suffix} file, got {str(path)!r}")
    return target
