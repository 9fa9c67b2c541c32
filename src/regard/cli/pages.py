"""Translations as a page that shows where each word came from."""

from pathlib import Path

from torch import Tensor

from regard.look.page import page
from regard.look.trace import Trace
from regard.tasks.translation.translator import Translation


def trace_of(found: list[Translation], *, title: str = "Where each word came from") -> Trace:
    """One record for each translation, with its words at the rows and the source's at the columns."""
    maps: dict[str, Tensor] = {}
    named: dict[str, Translation] = {}
    for number, one in enumerate(found, 1):
        if one.weights is not None and one.labels:
            maps[f"{number}. {one.text}"] = one.weights[None].float()
            named[f"{number}. {one.text}"] = one
    trace = Trace.from_weights(maps, title=title)
    for name, one in named.items():
        trace.label(rows=list(one.labels), columns=list(one.columns), of=name)
    return trace


def write_page(found: list[Translation], path: Path) -> None:
    """A standalone page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(trace_of(found)), encoding="utf-8")
