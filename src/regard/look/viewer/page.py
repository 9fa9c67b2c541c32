"""A trace as one standalone HTML file: the viewer and its data are inlined, without network access."""

import base64
import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from regard.look.rollout_records import with_rollouts
from regard.look.trace import Trace
from regard.look.viewer.page_data import WHOLE, Budget, as_json, pack

FOLDER = Path(__file__).parent / "assets"
ENTRY = "main.js"
LANGUAGES = ("en", "zh")
MOST, WEIGHTS = 64, 2**25  # default limits on the number of sequences, and of their weights, in a page

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const|let) (\w+))", re.MULTILINE)


def page(
    traces: Trace | Sequence[Trace],
    *,
    title: str | None = None,
    language: str = "en",
    batch: int | Sequence[int] | None = None,
) -> str:
    """Return a standalone page of one trace, or of two side by side.

    It contains every sequence of a batch, or the first ones if the page would become too large, and a menu of them;
    `batch` selects others.

    It also shows the mean over the heads of each layer, and the rollout of each stack of layers (`Trace.rollout`).

    Maps are stored in 8 bits, except that the eight largest weights of each row have 16: three decimals are right. Maps
    of more than 512 queries or keys are pooled, with the largest weights of each row stored separately; a note in the
    page states this.

    >>> import torch
    >>> text = page(Trace.from_weights({"cross": torch.eye(2)[None]}, rows=["le", "chat"], columns=["the", "cat"]))
    >>> text.startswith("<!doctype html>"), "https:" in text
    (True, False)
    """
    several = [_with_rollouts(_by_step(trace)) for trace in ([traces] if isinstance(traces, Trace) else traces)]
    if not 1 <= len(several) <= 2:
        raise ValueError(f"a page shows one trace or two side by side, got {len(several)}")
    if language not in LANGUAGES:
        raise ValueError(f"language must be one of {', '.join(LANGUAGES)}, got {language!r}")
    chosen = [_sequences(trace, batch) for trace in several]
    heading = title or " · ".join(dict.fromkeys(trace.title for trace in several))
    budget = Budget.of(several, max(map(len, chosen)))
    blocks = [
        block
        for place, (trace, sequences) in enumerate(zip(several, chosen, strict=True))
        for block in _blocks(place, trace, sequences, budget, told=batch is None)
    ]
    fields = {
        "LANGUAGE": "zh-CN" if language == "zh" else "en",
        "TITLE": html.escape(heading),
        "STYLE": (FOLDER / "style.css").read_text(encoding="utf-8"),
        "DATA": "\n".join(blocks),
        "SCRIPT": bundle(),
    }
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: fields[found[1]], template)


def _blocks(place: int, trace: Trace, sequences: list[int], budget: Budget, *, told: bool) -> Iterator[str]:
    """Yield the data of a trace: for each sequence a description, its records and its pictures, with running
    numbers."""
    records = pictures = 0
    for number, item in enumerate(sequences):
        packed = pack(trace, batch=item, budget=budget, sequences=sequences)
        if told and len(sequences) < trace.sequences:
            left = f"sequences {len(sequences)} to {trace.sequences - 1} of the batch: choose them with batch="
            packed.about["dropped"].append(left)
        where = {label: pictures + n for n, label in enumerate(packed.pictures)}
        blocks = {"records": records, "pictures": where}
        yield _block("about", place, number, as_json({**packed.about, "blocks": blocks}).encode())
        yield from (_block("record", place, records + n, data) for n, data in enumerate(packed.records))
        yield from (_block("picture", place, where[label], data) for label, data in packed.pictures.items())
        records, pictures = records + len(packed.records), pictures + len(packed.pictures)


def _sequences(trace: Trace, batch: int | Sequence[int] | None) -> list[int]:
    """Return the sequences that a page contains."""
    count = max(1, trace.sequences)
    if batch is None:
        cells = sum(record.heads * min(record.queries, WHOLE) * min(record.keys, WHOLE) for record in trace.records)
        return list(range(max(1, min(count, MOST, WEIGHTS // max(1, cells)))))
    chosen = [batch] if isinstance(batch, int) else list(batch)
    if not chosen:
        raise ValueError("batch must name at least one sequence, got none")
    for item in chosen:
        if not 0 <= item < count:
            there = "there is 1 sequence" if count == 1 else f"there are {count} sequences"
            raise ValueError(f"batch must be from 0 to {count - 1}, as {there}, got {item}")
    return chosen


def _by_step(trace: Trace) -> Trace:
    """Return steps of generation, each a call with one row, joined to one map; labelled calls stay separate."""
    steps = any(record.call > 0 and record.queries == 1 for record in trace.records)
    named = any(
        labels is not None for record in trace.records for n in range(record.batch) for labels in record.labels(batch=n)
    )
    return trace.joined() if steps and not named else trace


def _with_rollouts(trace: Trace) -> Trace:
    return Trace(trace.title, with_rollouts(trace.records), trace.dropped, parts=trace.parts)


def bundle() -> str:
    """Return the viewer's modules as one script: each is a function, called in the order of dependencies.

    Only named imports from the same folder and named exports, one per line, are supported.
    """
    parts = ["const modules = {};"]
    for name in _in_order(ENTRY, []):
        text = (FOLDER / name).read_text(encoding="utf-8")
        exported = ", ".join(_EXPORT.findall(text))
        text = _EXPORT.sub("", _IMPORT.sub(r'const {\1} = modules["\2"];', text))
        parts.append(f'modules["{name}"] = (() => {{\n{text}return {{ {exported} }};\n}})();')
    # "</script" ends the element even inside a string.
    return "\n".join(parts).replace("</script", "<\\/script")


def _in_order(name: str, known: list[str]) -> Iterator[str]:
    """Yield a module after those that it imports, each once."""
    known.append(name)
    for needed in _IMPORT.findall((FOLDER / name).read_text(encoding="utf-8")):
        if needed[1] not in known:
            yield from _in_order(needed[1], known)
    yield name


def _block(kind: str, trace: int, index: int, data: bytes) -> str:
    """Return data in an inert script element: base64 cannot contain an end tag."""
    text = base64.b64encode(data).decode()
    return f'<script type="text/plain" data-{kind}="{trace}-{index}">{text}</script>'
