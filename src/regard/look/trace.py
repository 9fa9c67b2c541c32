"""A trace: the records of a model's attention calls, indexed by (module name, call number), with their labels."""

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
    """The records of a model's attention calls, in the order of the calls.

    `dropped` lists calls that were not stored or could not be captured, with the reason. `parts` is the heading above
    the list of records on the viewer's page, in English ("en") and Chinese ("zh"); by default it says that the records
    are layers and heads.

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
        """Return a trace with one record for each tensor in `weights`; the keys of `weights` are the records' names.

        A tensor is (heads, queries, keys) or (batch, heads, queries, keys). `rows`, `columns` and `batch` are the
        arguments of the method `label`.
        """
        records = []
        for name, tensor in weights.items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim not in (3, 4):
                what = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(
                    f"weights of {name!r} must be a float tensor (heads, q, k) or (b, heads, q, k), got {what}"
                )
            detached = tensor.detach()
            records.append(Record(name, "given", Given(detached if detached.ndim == 4 else detached[None])))
        trace = cls(title, records)
        return trace if rows is None and columns is None else trace.label(rows=rows, columns=columns, batch=batch)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __getitem__(self, place: str | tuple[str, int]) -> Record:
        """Return the record of a module's first attention call, by name, or of another call, by (name, call number)."""
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
        """Return each module name once, in the order of the modules' first calls."""
        return list(dict.fromkeys(record.name for record in self.records))

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory of the tensors that all records hold."""
        return nbytes(tensor for record in self.records for tensor in record.holds())

    def select(self, pattern: str) -> "Trace":
        """Return a trace of the records named `pattern`; if there are none, of those whose names match this pattern.

        For example, the pattern `encoder.*` selects all layers of an encoder.
        """
        return Trace(self.title, named(self.records, pattern), self.dropped, parts=self.parts)

    def label(
        self,
        *,
        rows: Labelling | None = None,
        columns: Labelling | None = None,
        of: "str | tuple[str, int] | Record | None" = None,
        batch: int | Sequence[int] | None = None,
    ) -> "Trace":
        """Assign labels to the rows and columns of records, and return this trace.

        Labels of one sequence are a list of strings, a `Labels` object, or (tokenizer, ids). Labels of each sequence of
        a batch are a list of lists, (tokenizer, 2-D ids), or an encoding of the texts, given as (tokenizer, encoding),
        (texts, encoding) or the encoding alone. The attention mask of an encoding marks the padding, which is not
        displayed. `batch` is the index of the sequence to label, or several indices; with `batch=range(n)` and labels
        of one sequence, n sequences get the same labels.

        Without `of`, every record whose rows or columns are as many as the labels is labelled. `of` selects records by
        a name, (name, call), a record, or a pattern such as `decoder.*`: ValueError if the labels do not fit one of
        them.
        """
        chosen = self._chosen(of)
        strictly = of is not None
        # The labels of rows and of columns are both checked before any record is changed.
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
        """Return a trace in which all calls of a module, such as the steps of text generation, are joined into one map.

        Each call adds its rows to the map. The calls of a name are joined if they have the same batch size and number
        of heads, and the number of keys never decreases. The order of the beams in a beam search is not recorded: each
        row of a sequence is that of the beam which had the sequence's index in the batch at that step. Labels of rows
        are concatenated if each call has them; labels of columns are those of the last call.
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
                    row_labels=[in_a_row([labels.rows for labels in steps]) for steps in axes],
                    column_labels=[steps[-1].columns for steps in axes],
                )
            )
        return Trace(self.title, records, self.dropped, parts=self.parts)

    @property
    def sequences(self) -> int:
        """Return the largest batch size of the records."""
        return max((record.batch for record in self.records), default=0)

    def rollout(
        self, *, of: str | None = None, batch: int = 0, residual: float = 0.5, gradients: bool = False
    ) -> Tensor:
        """Return the attention rollout (queries, keys) through all layers, for one sequence without its padding.

        `regard.look.rollout` defines the rollout and its options. `of` selects layers by a name or a pattern. The
        selected records must be the self-attention of one stack of layers: in an encoder-decoder model
        `of="encoder.*"`, for example.
        """
        chosen = self._chosen(of)
        check_one_stack([record.name for record in chosen], self.names)
        return rollout(chosen, batch=batch, residual=residual, gradients=gradients)

    def save(self, path: str | Path, **options: int) -> Path:
        """Write the trace to one safetensors file and return its path; weights are stored in half precision.

        Of a record with more than `whole` weights (2²¹ by default) and more than 2 · `top` keys, the file stores only
        the `top` largest weights of each row (32 by default), and a pooled map of `overview` × `overview` cells (128 by
        default) of each head.
        """
        return write(path, self.title, self.records, self.dropped, **options)

    @classmethod
    def load(cls, path: str | Path, *, limit: int = LARGEST_FILE) -> "Trace":
        """Return the trace in a file that `save` wrote; ValueError if it is invalid or has more than `limit` bytes."""
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
        """Write a standalone HTML page of the trace, one file without network access, and return its path.

        `language` is "en" or "zh". `batch` selects the sequences that the page contains, as one index or several; by
        default these are all sequences, or the first ones if the page would become too large.
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
        """Write the attention map of a head as an SVG drawing, and return its path.

        `record` is a name or (name, call); by default it is the first record. `head="mean"` is the mean over all heads.

        If the columns are cells of a picture, each row of the map is drawn over a copy of that picture, with weights
        interpolated between the cells (`view="smooth"`) or each cell as a square ("cells"). With `view="heatmap"` the
        drawing is a matrix of rows and columns instead.
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
        """Write the attention map of a head as a PNG picture, and return its path; the options are those of `svg`.

        A heat map includes the labels, the values of cells that are large enough, the colour scale, and the error of
        `Record.check`.
        """
        chosen = self._record(record)
        subtitle = f"{self.title} · {drawings.checked(chosen.check(batch=batch))}"
        name, target = self._named(chosen), _named_as(path, ".png")
        return drawings.png(chosen, target, head=head, batch=batch, view=view, name=name, subtitle=subtitle)

    def _named(self, record: Record) -> str | None:
        """Return the name of a record for the title of a drawing: its layer; None if the record's own name is used.

        If the drawing shows the whole trace (one record, head and sequence), the name is the title of the trace.
        """
        whole = len(self.records) == 1 and record.heads == record.batch == 1 and self.title != _UNTITLED
        return self.title if whole else self._said(record)

    def show(self, *, title: str | None = None, language: str = "en", batch: int | Sequence[int] | None = None) -> None:
        """Display the page of the trace: below the cell in a notebook, otherwise in the browser.

        The options are those of `html`. A notebook also displays a trace that is the last expression of a cell.
        """
        options: dict[str, Any] = {"title": title, "language": language, "batch": batch}
        if in_notebook():
            import_module("IPython.display").display(Displayed(self._repr_html_(**options)))
            return
        folder = tempfile.mkdtemp(prefix="regard-")
        webbrowser.open(self.html(Path(folder) / "trace.html", **options).as_uri())

    def _repr_html_(self, **options: Any) -> str:
        """Return the HTML that a notebook displays: the page in an iframe, which keeps its style separate."""
        return framed(self._page(**options), height=860)

    def _page(self, **options: Any) -> str:
        from regard.look.viewer.page import page

        return page(self, **options)

    def _chosen(self, of: "str | tuple[str, int] | Record | None") -> list[Record]:
        """Return the records that `of` selects: all, one record, those of a name, or those that match a pattern."""
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
        """Return the readable name of a record's layer; None if the record's name is not the path of a layer."""
        words = dict(zip(self.names, layer_names(self.names), strict=True))[record.name]
        return None if words is None else " ".join(words)

    def _record(self, place: str | tuple[str, int] | None) -> Record:
        if place is not None:
            return self[place]
        if not self.records:
            raise ValueError("the trace has no records to draw")
        return self.records[0]


def _named_as(path: str | Path, suffix: str) -> Path:
    """Return the path; ValueError if it has a suffix other than `suffix`."""
    target = Path(path)
    if target.suffix.lower() not in ("", suffix):
        raise ValueError(f"{suffix[1:]} writes a {suffix} file, got {str(path)!r}")
    return target
