"""`regard bench attention`: measure regard and other libraries in one run; write a table, a chart and JSON."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from regard.bench import bar_chart
from regard.bench.attention_cases import Case, cases
from regard.bench.command_output import duration, header, machine, print_table, quiet, say, size, table_lines
from regard.bench.marked_pages import write_part
from regard.bench.measurement import measure

COLUMNS = ("contender", "time", "× regard", "G/s", "peak memory", "error", "by norm")
NOTE = (
    "Times are the {best} of readings taken in turns{again}; “× regard” is a contender's time divided by regard's in "
    "the same run, so more than 1 is slower than regard; memory is the peak beyond what was there before the call, the "
    "output and gradients included; the error is the largest one against float64, relative to the largest output, and "
    "by norm that of all outputs by theirs (of the last 64 queries)."
)
AGAIN = ", with more readings of the contenders within a tenth of the fastest"


def attention(*, only: list[str], quick: bool, as_json: bool, out: Path | None) -> None:
    """Measure, then print and write the results."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:  # errors in arguments are reported before the measurements, which take minutes
        chosen = select(cases(device, quick), only)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {out}: {error.strerror}", param_hint="--out") from error
    if not as_json:
        Console(highlight=False).print(header({"quick": quick, **machine(device)}), markup=False)

    def done(record: dict[str, Any]) -> None:
        """Write the record after each case, so that an interrupted run keeps its results."""
        if not as_json:
            show(record["cases"][-1])
        if out is not None:
            write(record, out)

    with quiet():
        record = run(chosen, device=device, quick=quick, say=say, done=done)
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        for name, reason in _missing(record):
            print(f"not run: {name}: {reason}")
    if out is not None:
        for path in write(record, out):
            print(f"wrote {path}", file=sys.stderr)


def select(known: list[Case], only: list[str]) -> list[Case]:
    """Return the cases whose name contains one of the words in `only`; all cases if `only` is empty."""
    for word in only:
        if not any(word in case.name for case in known):
            raise ValueError(
                f"no case has {word!r} in its name; the cases are {', '.join(case.name for case in known)}"
            )
    return [case for case in known if not only or any(word in case.name for word in only)]


def run(
    chosen: list[Case],
    *,
    device: str,
    quick: bool,
    say: Callable[[str], None],
    done: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Return the record for `--json`: the machine, and for every case the results of each contender.

    `done` is called with the record after each case.
    """
    record: dict[str, Any] = {"bench": "attention", "quick": quick, **machine(device), "cases": []}
    for number, case in enumerate(chosen, 1):
        measured = measure(
            case, quick=quick, say=lambda what, n=number, c=case: say(f"{n}/{len(chosen)} {c.name}: {what}")
        )
        record["cases"].append(
            {
                "name": case.name,
                "what": case.what,
                "device": case.device,
                "work": case.work,
                "unit": case.unit if case.work else None,
                "contenders": [asdict(measurement) for measurement in measured],
            }
        )
        say("")
        done(record)
    return record


def show(case: dict[str, Any]) -> None:
    """Print one case of a record as a table."""
    print_table(COLUMNS, rows(case), title=f"{case['name']}  {case['what']}", left=COLUMNS[:1])


def rows(case: dict[str, Any]) -> list[list[str]]:
    """Return the cells of a case's table, a row for each contender that ran."""
    return [
        [
            contender["name"],
            duration(contender["seconds"]),
            "–" if contender["ratio"] is None else f"{contender['ratio']:.3g}",
            giga(contender["rate"]),
            size(contender["memory"]),
            *("–" if contender[name] is None else f"{contender[name]:.2e}" for name in ("error", "error_by_norm")),
        ]
        for contender in case["contenders"]
        if contender["seconds"] is not None
    ]


def giga(rate: float | None) -> str:
    """Return a rate of work, given per second, as text in billions per second.

    >>> giga(17.53e12), giga(20.24e9), giga(None)
    ('17,530', '20.2', '–')
    """
    if rate is None:
        return "–"
    return f"{rate / 1e9:,.0f}" if rate >= 1e12 else f"{rate / 1e9:.3g}"


def markdown(record: dict[str, Any]) -> str:
    """Return the record as a section of a documentation page, with its chart."""
    device = record["device"]
    best, again = ("median", AGAIN) if device == "cuda" else ("best", "")
    lines = [f"## {'GPU' if device == 'cuda' else 'CPU'}", "", header(record) + ".", ""]
    lines += [NOTE.format(best=best, again=again), ""]
    lines += [f"![Times relative to regard's](images/bench-{device}.svg)", ""]
    for case in record["cases"]:
        unit = f"; G/s: 10⁹ {case['unit']} a second" if case["unit"] else ""
        lines += [f"**{case['name']}**: {case['what']}{unit}", ""]
        lines += [*table_lines(COLUMNS, rows(case)), ""]
    if missing := _missing(record):
        lines += ["Not run:", "", *(f"- {name}: {reason}" for name, reason in missing), ""]
    return "\n".join(lines)


def drawing(record: dict[str, Any]) -> str:
    """Return the record as a bar chart."""
    groups = [
        bar_chart.Group(
            f"{case['name']}: {case['what']}",
            [
                bar_chart.Bar(contender["name"], None, contender["reason"])
                if contender["seconds"] is None
                else bar_chart.Bar(contender["name"], contender["ratio"], _figures(contender))
                for contender in case["contenders"]
                if not _absent(contender)
            ],
        )
        for case in record["cases"]
    ]
    absent = dict.fromkeys(
        contender["name"] for case in record["cases"] for contender in case["contenders"] if _absent(contender)
    )
    note = f"not installed here: {', '.join(absent)}" if absent else ""
    where = record["machine"]["gpu" if record["device"] == "cuda" else "cpu"]
    return bar_chart.svg(groups, title=f"regard bench attention, {where}", note=note)


def write(record: dict[str, Any], out: Path) -> list[Path]:
    """Write the page and its chart to a folder; an existing page changes only in the section for this device kind."""
    page, image = out / "benchmarks.md", out / "images" / f"bench-{record['device']}.svg"
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_text(drawing(record), encoding="utf-8")
    write_part(page, record["device"], markdown(record), title="Benchmarks")
    return [page, image]


def _figures(contender: dict[str, Any]) -> str:
    times = "" if contender["ratio"] is None else f" · {contender['ratio']:.3g}×"
    return duration(contender["seconds"]) + times


def _missing(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the contenders that did not run, with each reason and the cases for which it was given."""
    skipped: dict[tuple[str, str], list[str]] = {}
    for case in record["cases"]:
        for contender in case["contenders"]:
            if contender["seconds"] is None:
                skipped.setdefault((contender["name"], contender["reason"]), []).append(case["name"])
    return [(f"{name} ({', '.join(where)})", reason) for (name, reason), where in skipped.items()]


def _absent(contender: dict[str, Any]) -> bool:
    return contender["reason"] is not None and contender["reason"].endswith("is not installed")
