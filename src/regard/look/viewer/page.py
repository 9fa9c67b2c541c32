"""A trace as one standalone HTML file, which contains the viewer's code and the data and needs no network access."""

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
# Unless the caller selects sequences by `batch`, a page has at most MOST sequences, with at most WEIGHTS attention
# weights in total.
MOST, WEIGHTS = 64, 2**25

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const|let) (\w+))", re.MULTILINE)


def page(
    traces: Trace | Sequence[Trace],
    *,
    title: str | None = None,
    language: str = "en",
    batch: int | Sequence[int] | None = None,
) -> str:
    """Return a standalone HTML page of one trace, or of two traces side by side.

    The page contains every sequence of a batch, or the first ones if the page would become too large, and a menu to
    choose one of them; `batch` selects the sequences. It also shows the mean over the heads of each layer, and the
    rollout of each stack of layers (`Trace.rollout`).

    The page stores the eight largest weights of each row in 16 bits and the others in 8 bits, so that three decimals
    are correct. Maps of more than 512 queries or keys are pooled, and the largest weights of each row are stored
    separately; a note on the page states this.

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
        for block in _blocks(place, trace, sequences, budget, say_omitted=batch is None)
    ]
    fields = {
        "LANGUAGE": "zh-CN" if language == "zh" else "en",
        "TITLE": html.escape(heading),
        "STYLE": (FOLDER / "style.css").read_text(encoding="utf-8"),
        "DATA": "\n".join(blocks),
        "SCRIPT": bundle(),
    }
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)


def _blocks(place: int, trace: Trace, sequences: list[int], budget: Budget, *, say_omitted: bool) -> Iterator[str]:
    """Yield script elements with the data of a trace: for each sequence its description, its records, its pictures.

    Records and pictures are numbered continuously over all sequences. With `say_omitted`, the description states which
    sequences of the batch the page omits.
    """
    records = pictures = 0
    for number, item in enumerate(sequences):
        packed = pack(trace, batch=item, budget=budget, sequences=sequences)
        if say_omitted and len(sequences) < trace.sequences:
            omitted = f"sequences {len(sequences)} to {trace.sequences - 1} of the batch: choose them with batch="
            packed.about["dropped"].append(omitted)
        where = {label: pictures + n for n, label in enumerate(packed.pictures)}
        blocks = {"records": records, "pictures": where}
        yield _block("about", place, number, as_json({**packed.about, "blocks": blocks}).encode())
        yield from (_block("record", place, records + n, data) for n, data in enumerate(packed.records))
        yield from (_block("picture", place, where[label], data) for label, data in packed.pictures.items())
        records, pictures = records + len(packed.records), pictures + len(packed.pictures)


def _sequences(trace: Trace, batch: int | Sequence[int] | None) -> list[int]:
    """Return the indices of the sequences that a page contains: those of `batch`, or as many as the limits allow."""
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
    """Return the trace with the steps of text generation (calls with one row each) joined into one map per layer.

    A trace with labelled records is returned unchanged.
    """
    steps = any(record.call > 0 and record.queries == 1 for record in trace.records)
    named = any(
        labels is not None for record in trace.records for n in range(record.batch) for labels in record.labels(batch=n)
    )
    return trace.joined() if steps and not named else trace


def _with_rollouts(trace: Trace) -> Trace:
    return Trace(trace.title, with_rollouts(trace.records), trace.dropped, parts=trace.parts)


def bundle() -> str:
    """Return the viewer's JavaScript modules as one script.

    Each module becomes a function that is called after those of the modules that it imports. Only named imports from
    the same folder and named exports, one per line, are supported.
    """
    parts = ["const modules = {};"]
    for name in _in_order(ENTRY, []):
        text = (FOLDER / name).read_text(encoding="utf-8")
        exported = ", ".join(_EXPORT.findall(text))
        text = _EXPORT.sub("", _IMPORT.sub(r'const {\1} = modules["\2"];', text))
        parts.append(f'modules["{name}"] = (() => {{\n{text}return {{ {exported} }};\n}})();')
    # "</script" would end the script element even inside a JavaScript string.
    return "\n".join(parts).replace("</script", "<\\/script")


def _in_order(name: str, known: list[str]) -> Iterator[str]:
    """Yield the names of a JavaScript module and of its imports, recursively, each once and after its own imports."""
    known.append(name)
    for needed in _IMPORT.findall((FOLDER / name).read_text(encoding="utf-8")):
        if needed[1] not in known:
            yield from _in_order(needed[1], known)
    yield name


def _block(kind: str, trace: int, index: int, data: bytes) -> str:
    """Return data in a script element that browsers do not run, as base64, which cannot contain an end tag."""
    text = base64.b64encode(data).decode()
    return f'<script type="text/plain" data-{kind}="{trace}-{index}">{text}</script>'
