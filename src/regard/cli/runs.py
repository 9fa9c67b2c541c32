"""`regard tasks`, `train`, `evaluate`, `predict`: runs from the command line."""

import contextlib
import datetime
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from regard.cli.pages import write_page
from regard.data.alignment import links_from_weights
from regard.data.parallel import DataError
from regard.tasks.catalog import TASKS
from regard.tasks.settings import parsed
from regard.tasks.task import SettingError, Task
from regard.tasks.translation.translator import Translation
from regard.train.run import Run, RunError
from regard.train.stops import Interrupted, Stopped


def list_tasks() -> None:
    """Every task with its data and presets."""
    console = Console(highlight=False)
    for task in TASKS.values():
        console.print(f"[bold]{task.name}[/]  {task.about}", soft_wrap=True)
        console.print(f"  data: {task.data}", soft_wrap=True, markup=False)
        for name, preset in task.presets.items():
            console.print(f"  {name:16s} {preset.about}", soft_wrap=True, markup=False)


def train(
    name: str, *, preset: str, data: list[Path], settings: list[str], out: Path | None, resume: bool
) -> dict[str, Any]:
    """Train, and say what came out."""
    task = _task(name)
    place = out or Path("runs") / f"{name}-{datetime.datetime.now(datetime.UTC).strftime('%Y%m%d-%H%M%S')}"
    with told():
        if resume and not (place / "config.json").is_file():
            raise RunError(f"there is no run to resume in {place}")
        config = task.configure(preset, data, parsed(settings))
        result = task.train(config, place, resume=resume)
    show_result(result, Console(highlight=False))
    print(f"\nThe run is in {place}; try: regard predict {place} 'Tom chases Jerry'")
    return result


def evaluate(run: Path, *, data: list[Path], as_json: bool) -> None:
    """Judge a run."""
    with told():
        opened = Run.open(run)
        result = _task(opened.config()["task"]).evaluate(opened, data)
    if as_json:
        print(json.dumps(result, ensure_ascii=False, indent=2))
    else:
        show_result(result, Console(highlight=False))


def predict(run: Path, *, inputs: list[str], beam: int | None, as_json: bool, look: Path | None) -> None:
    """Answer each input; lines of standard input where none is given, one by one at a terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with told():
        opened = Run.open(run)
        predictor = _task(opened.config()["task"]).predictor(opened)
    seen: list[Translation] = []
    with told():
        for batch in _batches(inputs):
            for found in predictor.translate(batch, width=beam):
                seen.append(found)
                print(json.dumps(as_record(found), ensure_ascii=False) if as_json else found.text, flush=True)
    if look is not None:
        write_page(seen, look)
        print(f"wrote {look}", file=sys.stderr)


def as_record(found: Translation) -> dict[str, Any]:
    """A translation as `--json` prints it: alignment pairs are (source piece, target piece)."""
    weights = None if found.weights is None else found.weights.tolist()
    links = [] if found.weights is None else sorted(links_from_weights(found.weights[:, : len(found.source.labels)]))
    return {
        "source": " ".join(found.source.words),
        "translation": found.text,
        "score": round(found.score, 5),
        "source_pieces": found.columns,
        "target_pieces": found.labels,
        "alignment": links,
        "weights": None if weights is None else [[round(number, 5) for number in row] for row in weights],
    }


def show_result(result: dict[str, Any], console: Console) -> None:
    """The figures of a result as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("figure")
    table.add_column("value", justify="right")
    parts = {"": result, "longer than trained: ": result.get("longer", {})}
    for prefix, part in parts.items():
        figures = {**part.get("metrics", {}), **part.get("attention", {})}
        for name, value in figures.items():
            if isinstance(value, float):
                shown = f"{value:.1%}" if name in ("aer", "exact") else f"{value:.1f}"
                table.add_row(prefix + name, shown)
    for name, value in result.get("faithfulness", {}).items():
        what = "the source word attended most" if name == "attended" else "another source word"
        table.add_row(f"log-probability lost without {what}", f"{value:.2f}")
    console.print(table)


def _task(name: str) -> Task:
    if name not in TASKS:
        raise typer.BadParameter(f"no task is called {name!r}: there are {', '.join(TASKS)}", param_hint="TASK")
    return TASKS[name]


def _batches(inputs: list[str]) -> Iterator[list[str]]:
    """The inputs at once; or standard input, line by line at a terminal and 64 lines at a time from a pipe."""
    if inputs:
        yield inputs
        return
    if sys.stdin.isatty():
        print("Type a sentence; Ctrl-D ends.", file=sys.stderr)
    waiting: list[str] = []
    for number, line in enumerate(sys.stdin, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in line):
            raise DataError(f"standard input:{number}: not UTF-8")
        waiting.append(line.rstrip("\n"))
        if sys.stdin.isatty() or len(waiting) == 64:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What a user can put right is said in one line, without a traceback; an interruption has its own exit code."""
    try:
        yield
    except (SettingError, DataError, RunError, FileNotFoundError) as error:
        print(f"regard: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except Interrupted as stop:
        print(f"regard: {stop}", file=sys.stderr)
        raise typer.Exit(stop.code) from stop
    except Stopped as stop:
        print(f"regard: {stop}", file=sys.stderr)
        raise typer.Exit(1) from stop
