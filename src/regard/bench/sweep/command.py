"""`regard bench sweep`: sample cases, measure each, print and write the results."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from regard.bench.command_output import chosen_device, header, machine, quiet
from regard.bench.sweep import report
from regard.bench.sweep.cases import Case
from regard.bench.sweep.compile_ahead import compile_ahead
from regard.bench.sweep.drawing import draw
from regard.bench.sweep.ordinary import ordinary
from regard.bench.sweep.timing import Measured, measure


def sweep(
    *,
    seed: int,
    cases: int,
    only: int | None,
    fixed: bool,
    device: str | None,
    minutes: float | None,
    to: str | None,
    processes: int = 0,
) -> None:
    """Measure, then print the distribution. `fixed` measures the ordinary calls in place of random ones; `only` is the
    index of the only case to measure; `to` is a file for JSON, or - for standard output; `processes` is the number of
    processes that compile all cases before the first measurement."""
    device = chosen_device(device)
    if to not in (None, "-"):
        if Path(to).is_dir():
            raise typer.BadParameter(f"{to} is a folder", param_hint="--json")
        try:  # arguments are checked before measurements that take minutes
            Path(to).parent.mkdir(parents=True, exist_ok=True)
            Path(to).touch()
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {to}: {error.strerror}", param_hint="--json") from error
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if to == "-" else lambda text: print(text, flush=True)
    about = {"bench": "sweep", "quick": False, **machine(device, ("triton",)), "seed": seed}
    say(header(about))

    def done(sweep: Sequence[Measured], numbers: dict[str, Any]) -> None:
        """Write the record after each case, so that an interrupted sweep keeps its results."""
        if to not in (None, "-"):
            Path(to).write_text(_json(about, sweep, numbers), encoding="utf-8")

    if fixed:
        chosen = [case for case in ordinary(device) if only in (None, case.index)]
    else:
        chosen = [draw(seed, index, device) for index in (range(cases) if only is None else [only])]
    with quiet():
        if processes:
            compile_ahead(chosen, processes, say)
        measured, ended = run(chosen, minutes=minutes, say=say, done=done)
    numbers = report.distribution(measured)
    done(measured, numbers)
    if ended:
        say(f"ended after {minutes:g} minutes: {len(measured)} of {len(chosen)} cases")
    say(report.summary(measured, numbers))
    if to == "-":
        print(_json(about, measured, numbers))


def run(
    cases: Sequence[Case],
    *,
    minutes: float | None = None,
    say: Callable[[str], None],
    done: Callable[[Sequence[Measured], dict[str, Any]], None] = lambda *_: None,
) -> tuple[list[Measured], bool]:
    """Return the measured cases, and whether the time limit ended the sweep."""
    begin = time.monotonic()
    measured: list[Measured] = []
    for case in cases:
        if minutes is not None and time.monotonic() - begin > 60 * minutes:
            return measured, True
        measured.append(measure(case))
        say(report.line(measured[-1]))
        done(measured, report.distribution(measured))
    return measured, False


def _json(about: dict[str, Any], sweep: Sequence[Measured], numbers: dict[str, Any]) -> str:
    cases = [report.record(measured) for measured in sweep]
    return json.dumps({**about, "distribution": numbers, "cases": cases}, indent=2, ensure_ascii=False, allow_nan=False)
