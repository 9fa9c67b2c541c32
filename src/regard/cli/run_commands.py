"""`regard tasks`, `regard train` and `regard evaluate`."""

import datetime
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.cli.error_messages import reported
from regard.data.data_files import DataError
from regard.tasks.catalog import TASKS
from regard.tasks.config import TaskConfig
from regard.tasks.config_overrides import changed, configure, listed, parsed
from regard.tasks.evaluation import evaluate as evaluated
from regard.tasks.example_files import example_arguments
from regard.tasks.loading import load, task_of
from regard.tasks.task import Task
from regard.tasks.training import train as trained
from regard.train.distributed import joined, may_restart
from regard.train.run_directory import Run, RunError


def list_tasks() -> None:
    """Print each task: its inputs, its built-in data, its metrics, and its presets with their training time."""
    console = Console(highlight=False)
    for task in TASKS.values():
        console.print(f"[bold]{task.name}[/]  {task.about}", soft_wrap=True)
        table = Table.grid(padding=(0, 2))
        table.add_row("  input", Text(", ".join(f"{spec.name} ({spec.kind})" for spec in task.inputs)))
        table.add_row("  world", Text(task.world))
        table.add_row("  data", Text(task.data))
        table.add_row("  figures", Text(", ".join(figure.name for figure in task.figures)))
        for name, preset in task.presets.items():
            table.add_row(f"  {name}", Text(preset.about + (f" ({preset.time})" if preset.time else "")))
        console.print(table)


def train(
    what: str,
    *,
    preset: str,
    data: list[Path],
    settings: list[str],
    out: Path | None,
    resume: bool,
    accept_changed_data: bool = False,
) -> dict[str, Any]:
    """Train a model for a task, or continue a run with `resume`; with "help" in `settings` only list the settings."""
    with reported(), joined() as workers:
        with workers.agreed():
            task, config, place = _task_and_config(what, preset, data, settings, out, resume=resume)
        # All workers use the path that the first worker chose, because the path may contain the current time.
        place = workers.from_first(place)
        if "help" in settings:
            if workers.is_first:
                show_settings(config, Console(highlight=False))
            return {}
        # torchrun does not report restarts that happen because machines join or leave. Therefore, if torchrun may
        # restart workers, an existing run directory is treated as the sign of a restart.
        resume = resume or (may_restart() and (place / "config.json").is_file())
        given: dict[str, Any] = {"resume": resume, "accept_changed_data": accept_changed_data}
        result = trained(task, config, place, **given, workers=workers)
    if not workers.is_first:
        return result
    show_result(task, result, Console(highlight=False))
    print(f"\nThe run is in {place}; try")
    for command in _next(task, place, result.get("example")):
        print(f"  {command}")
    return result


def _task_and_config(
    what: str, preset: str, data: list[Path], settings: list[str], out: Path | None, *, resume: bool
) -> tuple[Task, TaskConfig, Path]:
    """Return the task, its configuration and the run directory that the command line specifies."""
    if resume and out is None:
        return _resumed(Path(what), data, settings)
    task = _task(what)
    if out is None and may_restart():
        raise RunError("torchrun --max-restarts needs --out DIR: workers that are started again must find their run")
    place = out or Path("runs") / f"{what}-{datetime.datetime.now(datetime.UTC).strftime('%Y%m%d-%H%M%S')}"
    if resume and not (place / "config.json").is_file():
        raise RunError(f"there is no run to resume in {place}")
    changes = {} if "help" in settings else parsed(settings)
    return task, configure(task, preset, data, changes), place


def _resumed(place: Path, data: Sequence[Path], settings: list[str]) -> tuple[Task, TaskConfig, Path]:
    """Return the task, the configuration with the changed settings, and the directory of a run to resume."""
    if not (place / "config.json").is_file():
        raise RunError(f"there is no run to resume in {place}: expected regard train --resume RUN")
    if data:
        raise RunError("--data cannot be given with --resume RUN: a run goes on with its own data")
    run = Run.open(place)
    task = task_of(run)
    config = run.config_as(task.config)
    if "help" in settings:
        return task, config, place
    return task, changed(config, parsed(settings), aliases=task.aliases, needs=task.needs), place


def _next(task: Task, place: Path, example: Any) -> list[str]:
    """Return `regard` commands that the user can try with a finished run, with an example of its data as input."""
    where = shlex.quote(str(place))
    arguments = "".join(f" {shlex.quote(part)}" for part in example_arguments(task.inputs, example, place))
    python = f'python -c "import regard; print(regard.load({str(place)!r}).predict([…])[0].answer)"'
    return [f"regard predict {where}{arguments}", f"regard look {where}", f"regard studio {where}", python]


def show_settings(config: BaseModel, console: Console) -> None:
    """Print all settings of a configuration, their values and their meanings."""
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
    """Evaluate a run and print the result as a table, or as a JSON object with `as_json`."""
    with reported(), joined() as workers:
        with workers.agreed():
            missing = [str(path) for path in data if not path.exists()]
            if missing:
                raise DataError(f"no such file: {', '.join(missing)}")
            loaded = load(run)
        if workers.is_first:
            report_weights(loaded.weights)
        result = evaluated(loaded, data, workers)
    if not workers.is_first:
        return
    if as_json:
        print(json.dumps(result, ensure_ascii=False, indent=2))
    else:
        show_result(loaded.task, result, Console(highlight=False))


def report_weights(weights: str) -> None:
    """Report on standard error which of the run's weights are used, if they are not the final ones."""
    if weights != "final weights":
        typer.echo(f"regard: {weights}", err=True)


def show_result(task: Task, result: dict[str, Any], console: Console) -> None:
    """Print the metrics of a training or evaluation result as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("figure")
    table.add_column("value", justify="right")
    parts = {"": result, "longer than trained: ": result.get("longer", {})}
    for prefix, part in parts.items():
        figures = {**part.get("metrics", {}), **part.get("attention", {})}
        for name, value in figures.items():
            figure = task.figure(name)
            if figure is not None and isinstance(value, (int, float)):
                # A number below 0.1, such as a squared error, gets four decimals.
                plain = f"{value:.4f}" if 0 < abs(value) < 0.1 else f"{value:.1f}"
                table.add_row(prefix + figure.label, f"{value:.1%}" if figure.percent else plain)
    for name, value in result.get("faithfulness", {}).items():
        what = f"the {task.view.unit} attended most" if name == "attended" else f"another {task.view.unit}"
        table.add_row(f"log-probability lost without {what}", f"{round(value, 2) + 0.0:.2f}")  # adding 0.0 avoids −0.00
    console.print(table)


def _task(name: str) -> Task:
    if name not in TASKS:
        raise typer.BadParameter(f"no task is called {name!r}: the tasks are {', '.join(TASKS)}", param_hint="TASK")
    return TASKS[name]
