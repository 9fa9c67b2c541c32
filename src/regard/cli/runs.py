"""`regard tasks`, `train`, `evaluate`, `predict`: runs from the command line."""

import contextlib
import datetime
import io
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.cli.input_lines import InputText, input_batches
from regard.cli.pages import write_page
from regard.data.alignment import Link, links_from_weights
from regard.data.parallel import DataError
from regard.tasks.catalog import TASKS
from regard.tasks.settings import listed, parsed
from regard.tasks.task import SettingError, Task
from regard.tasks.translation.coding import Reading
from regard.tasks.translation.translator import Translation, Translator
from regard.train.run import Run, RunError
from regard.train.stops import Interrupted, Stopped, memory_ran_out

_CHARACTERS = 64  # a text of more characters for each token it may have is refused unread
_NAMES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "exact": "exactly as the reference",
    "aer": "alignment error rate",
    "aer_posterior": "alignment error rate, the word known",
}


def list_tasks() -> None:
    """Every task with its data and presets."""
    console = Console(highlight=False)
    for task in TASKS.values():
        console.print(f"[bold]{task.name}[/]  {task.about}", soft_wrap=True)
        console.print(f"  data: {task.data}", soft_wrap=True, markup=False)
        for name, preset in task.presets.items():
            console.print(f"  {name:16s} {preset.about}", soft_wrap=True, markup=False)


def train(
    name: str,
    *,
    preset: str,
    data: list[Path],
    settings: list[str],
    out: Path | None,
    resume: bool,
    accept_changed_data: bool = False,
) -> dict[str, Any]:
    """Train, and say what came out; `--set help` only says what can be set."""
    task = _task(name)
    if "help" in settings:
        with told():
            show_settings(task.configure(preset, [], {}), Console(highlight=False))
        return {}
    place = out or Path("runs") / f"{name}-{datetime.datetime.now(datetime.UTC).strftime('%Y%m%d-%H%M%S')}"
    with told():
        if resume and not (place / "config.json").is_file():
            raise RunError(f"there is no run to resume in {place}")
        config = task.configure(preset, data, parsed(settings))
        result = task.train(config, place, resume=resume, accept_changed_data=accept_changed_data)
    show_result(result, Console(highlight=False))
    print(f"\nThe run is in {place}; try")
    for command in _next(place, result.get("example")):
        print(f"  {command}")
    return result


def _next(place: Path, example: str | None) -> list[str]:
    """What can be done with a run: a sentence of its own data to begin with."""
    where = shlex.quote(str(place))
    begin = f"regard predict {where} {shlex.quote(example)}" if example else f"regard predict {where}"
    return [begin, f"regard look {where}", f"regard studio {where}"]


def show_settings(config: BaseModel, console: Console) -> None:
    """What can be set, what it is now, and what it means."""
    part = None
    table = Table.grid(padding=(0, 2))
    for setting in listed(config):
        group, _, name = setting.name.rpartition(".")
        if group != part:
            part = group
            table.add_row(Text(f"\n{group}" if group else "", style="bold"))
        value = json.dumps(setting.value, ensure_ascii=False, default=str).strip('"')
        about = f"{setting.about} One of {', '.join(setting.choices)}." if setting.choices else setting.about
        table.add_row(Text(f"  {name}"), Text(value.replace("null", "none"), style="cyan"), Text(about))
    console.print(table)
    console.print("\nSay the name, or its end where that is enough: --set size=128 --set train.seed=7", markup=False)


def evaluate(run: Path, *, data: list[Path], as_json: bool) -> None:
    """Judge a run."""
    with told():
        opened = Run.open(run)
        missing = [str(path) for path in data if not path.exists()]
        if missing:
            raise DataError(f"no such file: {', '.join(missing)}")
        result = _task_of(opened).evaluate(opened, data)
    if as_json:
        print(json.dumps(result, ensure_ascii=False, indent=2))
    else:
        show_result(result, Console(highlight=False))


def predict(
    run: Path,
    *,
    inputs: list[str],
    beam: int | None,
    as_json: bool,
    look: Path | None,
    precision: str | None = None,
    longest: int | None = None,
) -> None:
    """Answer each input; lines of standard input where none is given, one by one at a terminal.

    An input that cannot be answered is reported on standard error and leaves an empty line, or a record with "error".
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with told():
        opened = Run.open(run)
        predictor = _task_of(opened).predictor(opened)
        predictor = predictor.in_precision(precision or predictor.settings.precision)
    limit = predictor.longest(width=beam, tokens=longest)
    seen: list[Translation] = []
    failed = 0
    with told():
        for batch in input_batches(inputs, characters=_CHARACTERS * limit):
            for one, found in zip(batch, _answers(predictor, batch, width=beam, longest=limit), strict=True):
                if isinstance(found, str):
                    failed += 1
                    print(f"regard: {one.place}: {found}: not translated", file=sys.stderr, flush=True)
                    print(json.dumps({"error": f"{one.place}: {found}"}) if as_json else "", flush=True)
                    continue
                if look is not None:
                    seen.append(found)
                print(json.dumps(as_record(found), ensure_ascii=False) if as_json else _line(found.text), flush=True)
    if look is not None:
        _write_look(seen, look)
    if failed:
        raise typer.Exit(1)


def _answers(
    predictor: Translator, batch: Sequence[InputText], *, width: int | None, longest: int
) -> Iterator[Translation | str]:
    """The translation of each text, or why there is none; those that can be translated are searched together."""
    sources = [None if one.fault else predictor.coder.read(one.text) for one in batch]
    faults = [
        one.fault if source is None else _too_long(source, longest) for one, source in zip(batch, sources, strict=True)
    ]
    good = [source for source, fault in zip(sources, faults, strict=True) if source is not None and not fault]
    found = iter(predictor.search(good, width=width))
    yield from (fault or next(found) for fault in faults)


def _too_long(source: Reading, longest: int) -> str:
    count = len(source.numbers)
    return f"{count:,} tokens, at most {longest:,}" if count > longest else ""


def _line(text: str) -> str:
    """A text as one line: the line breaks that a model may write would shift the lines after it."""
    return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")


def _write_look(seen: list[Translation], look: Path) -> None:
    with told():
        if not any(found.weights is not None for found in seen):
            why = "this run has no attention" if any(found.text for found in seen) else "there was nothing to translate"
            raise RunError(f"{why}: {look} was not written")
        write_page(seen, look)
    print(f"wrote {look}", file=sys.stderr)


def as_record(found: Translation) -> dict[str, Any]:
    """A translation as `--json` prints it: pairs of an alignment are (source, target), counted from 0."""
    words: list[Link] = []
    pieces: list[Link] = []
    if found.weights is not None:
        owners = {"source": found.source_words.owners, "target": found.words.owners}
        words = sorted(links_from_weights(found.weights, **owners))
        pieces = sorted(links_from_weights(found.weights[:, : len(found.source.labels)]))
    rows = None if found.weights is None else found.weights.tolist()
    return {
        "source": " ".join(found.source.words),
        "translation": found.text,
        "score": round(found.score, 5),
        "source_words": found.source_words.words,
        "target_words": found.words.words,
        "alignment": words,
        "source_pieces": found.columns,
        "target_pieces": found.labels,
        "piece_alignment": pieces,
        "weights": None if rows is None else [[round(number, 5) for number in row] for row in rows],
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
                shown = f"{value:.1%}" if name in ("aer", "aer_posterior", "exact") else f"{value:.1f}"
                table.add_row(prefix + _NAMES.get(name, name), shown)
    for name, value in result.get("faithfulness", {}).items():
        what = "the source word attended most" if name == "attended" else "another source word"
        table.add_row(f"log-probability lost without {what}", f"{round(value, 2) + 0.0:.2f}")  # no −0.00
    console.print(table)


def _task(name: str) -> Task:
    if name not in TASKS:
        raise typer.BadParameter(f"no task is called {name!r}: there are {', '.join(TASKS)}", param_hint="TASK")
    return TASKS[name]


def _task_of(run: Run) -> Task:
    name = run.config().get("task")
    if not isinstance(name, str) or name not in TASKS:
        raise RunError(f"{run.path / 'config.json'}: no task is called {name!r}: there are {', '.join(TASKS)}")
    return TASKS[name]


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What a user can put right is said in one line, without a traceback; an interruption has its own exit code."""
    try:
        yield
    except BrokenPipeError:  # whoever read has gone: typer ends it quietly
        raise
    except OSError as error:
        print(f"regard: {error.filename}: {error.strerror}" if error.filename else f"regard: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except (SettingError, DataError, RunError) as error:
        print(f"regard: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except Interrupted as stop:
        print(f"regard: {stop}", file=sys.stderr)
        raise typer.Exit(stop.code) from stop
    except Stopped as stop:
        print(f"regard: {stop}", file=sys.stderr)
        raise typer.Exit(1) from stop
    except (RuntimeError, MemoryError) as error:
        if not memory_ran_out(error):
            raise
        first = str(error).partition("\n")[0]
        print(f"regard: out of memory{f' ({first})' if first else ''}: choose smaller sizes", file=sys.stderr)
        raise typer.Exit(2) from error
