"""`regard demo`: a translator learns on this machine, and shows where each word came from."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.cli.pages import write_page
from regard.cli.runs import show_result
from regard.look import heatmap
from regard.tasks.settings import changed
from regard.tasks.translation.presets import tiny
from regard.tasks.translation.training import train
from regard.tasks.translation.translator import Translation, Translator
from regard.train.run import Run

TOM = "Tom chases Jerry"
SENTENCES = (
    TOM,
    "The teacher did not see the black cat.",
    "Where is the doctor's car?",
    "Two students are reading a book in the library.",
    "Tomorrow the girl will buy three apples.",
)


def demo(out: Path, *, steps: int | None = None) -> None:
    """Train the tiny translator, judge it, and draw the alignment of one sentence."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Chinese shows ? instead of failing
    console = Console(highlight=False)
    console.width = min(console.width, 88)
    place = _free(out)
    config = tiny()
    if steps is not None:
        config = changed(config, {"steps": str(steps), "validate_every": str(max(1, steps // 2))})
    _heading(console, "English → Chinese", "learned here and now")
    _say(
        console,
        f"A grammar writes {config.data.train:,} sentence pairs with known word alignments. A recurrent model with "
        "additive attention learns from the pairs alone: nobody tells it which word belongs to which.",
    )
    console.print()
    result = train(config, place)
    _heading(console, "How good is it?", "on sentences it has never seen")
    show_result(result, console)
    translator = Translator.load(Run.open(place))
    found = translator.translate(SENTENCES)
    _heading(console, "Five translations")
    _translations(console, found)
    _heading(console, "Where each word came from", "row: the word written; column: the word it looked at")
    _alignment(console, found, out)
    _next(console, place, out)


def _free(out: Path) -> Path:
    """A run directory that is not there yet: an earlier run is never written over."""
    out.mkdir(parents=True, exist_ok=True)
    names = ["run", *(f"run-{number}" for number in range(2, 1000))]
    return next(out / name for name in names if not (out / name).exists())


def _translations(console: Console, found: Sequence[Translation]) -> None:
    table = Table.grid("", "", padding=(0, 3))
    for text, one in zip(SENTENCES, found, strict=True):
        table.add_row(Text(text, style="dim"), Text(one.text))
    console.print(Padding(table, (1, 0, 0, 2), expand=False))


def _alignment(console: Console, found: Sequence[Translation], out: Path) -> None:
    first = found[0]
    assert first.weights is not None  # the demo's model has attention
    color = console.color_system is not None
    drawn = heatmap.terminal(first.weights, first.labels, first.columns, color=color, highest=1.0)
    console.print(Padding(Text.from_ansi(drawn), (1, 0, 0, 2), expand=False))
    title = f"{TOM} → {first.text}"
    picture = heatmap.svg(first.weights, first.labels, first.columns, title=title, highest=1.0)
    (out / "alignment.svg").write_text(picture, encoding="utf-8")
    write_page(list(found), out / "alignment.html")
    console.print()
    for name in ("alignment.svg", "alignment.html"):
        console.print(Text(f"  wrote {out / name}"), soft_wrap=True)


def _next(console: Console, place: Path, out: Path) -> None:
    _heading(console, "Try next")
    table = Table.grid("", "", padding=(0, 3))
    for name, value in (
        ("open the page", str(out / "alignment.html")),
        ("translate", f"regard predict {place} 'The cat sleeps under the table.'"),
        ("without attention", "regard train translation --preset tiny --set attention=none"),
        ("your own text", "regard train translation --data train.en --data train.de"),
        ("how attention works", "regard demo --stages"),
    ):
        table.add_row(Text(name, style="dim"), Text(value))
    console.print(Padding(table, (1, 0, 0, 2), expand=False))


def _heading(console: Console, name: str, meaning: str = "") -> None:
    console.print(f"\n[bold blue]{name}[/]" + (f"  [dim]{meaning}[/]" if meaning else ""))


def _say(console: Console, text: str) -> None:
    console.print(Padding(Text(text), (1, 0, 0, 2), expand=False))
