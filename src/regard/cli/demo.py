"""`regard demo`: trains a small model on this machine, evaluates it and draws its attention."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.cli.page_commands import write_page
from regard.cli.run_commands import show_result
from regard.look import heatmap
from regard.look.viewer.page import page
from regard.tasks.config_overrides import configure
from regard.tasks.demonstration import DEMO
from regard.tasks.joined_traces import joined_trace
from regard.tasks.loading import load
from regard.tasks.task import Prediction
from regard.tasks.training import train


def demo(out: Path, *, steps: int | None = None) -> None:
    """Train the model of the demonstration, evaluate it, and draw the attention of its predictions into `out`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal whose encoding has no Chinese characters shows ? instead of raising an error.
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    console.width = min(console.width, 88)
    place = _free(out)
    task = DEMO.task
    fewer = {} if steps is None else {"steps": str(steps), "validate_every": str(max(1, steps // 2))}
    config = configure(task, DEMO.preset, [], fewer)
    _heading(console, DEMO.heading, "learned here and now")
    _say(console, DEMO.about.format(train=config.data.train))
    console.print()
    result = train(task, config, place)
    _heading(console, "How good is it?", "on examples it has never seen")
    show_result(task, result, console)
    predictions = load(place).predict(DEMO.inputs)
    _heading(console, DEMO.answers)
    _answers(console, predictions)
    _heading(console, *DEMO.attention)
    _attention(console, predictions, out)
    _next(console, place, out)


def _free(out: Path) -> Path:
    """Return the path of a run directory in `out` that does not exist yet, so that no earlier run is overwritten."""
    out.mkdir(parents=True, exist_ok=True)
    names = ["run", *(f"run-{number}" for number in range(2, 1000))]
    return next(out / name for name in names if not (out / name).exists())


def _answers(console: Console, predictions: Sequence[Prediction]) -> None:
    table = Table.grid("", "", padding=(0, 3))
    for text, prediction in zip(DEMO.inputs, predictions, strict=True):
        table.add_row(Text(text, style="dim"), Text(prediction.answer))
    console.print(Padding(table, (1, 0, 0, 2), expand=False))


def _attention(console: Console, predictions: Sequence[Prediction], out: Path) -> None:
    first = predictions[0].trace()
    whole = joined_trace(predictions, DEMO.task.view, DEMO.attention[0])
    if first is None or whole is None:
        raise RuntimeError("the demonstration's model must have attention")
    [record] = first.records
    rows, columns = (list(labels.items) for labels in record.labels(batch=0) if labels is not None)
    weights = record.weights(head=0)
    color = console.color_system is not None
    drawing = heatmap.terminal(weights, rows, columns, color=color, highest=1.0)
    console.print(Padding(Text.from_ansi(drawing), (1, 0, 0, 2), expand=False))
    title = f"{DEMO.inputs[0]} → {predictions[0].answer}"
    picture = heatmap.svg(weights, rows, columns, title=title, highest=1.0)
    (out / "alignment.svg").write_text(picture, encoding="utf-8")
    write_page(out / "alignment.html", page(whole))
    console.print()
    for name in ("alignment.svg", "alignment.html"):
        console.print(Text(f"  wrote {out / name}"), soft_wrap=True)


def _next(console: Console, place: Path, out: Path) -> None:
    _heading(console, "Try next")
    table = Table.grid("", "", padding=(0, 3))
    for name, value in (
        ("open the page", str(out / "alignment.html")),
        *((name, command.format(run=place)) for name, command in DEMO.more.items()),
        ("how attention works", "regard demo --stages"),
    ):
        table.add_row(Text(name, style="dim"), Text(value))
    console.print(Padding(table, (1, 0, 0, 2), expand=False))


def _heading(console: Console, name: str, meaning: str = "") -> None:
    console.print(f"\n[bold blue]{name}[/]" + (f"  [dim]{meaning}[/]" if meaning else ""))


def _say(console: Console, text: str) -> None:
    console.print(Padding(Text(text), (1, 0, 0, 2), expand=False))
