"""What training says while it runs: a bar on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


@dataclass(frozen=True)
class Standing:
    """Where training stands, for a reader."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    best: str  # "bleu 31.2 at step 400", or nothing yet


@runtime_checkable
class Progress(Protocol):
    """Anything that can tell a person how far training has come."""

    def begin(self, step: int, steps: int) -> None: ...

    def step(self, standing: Standing) -> None:
        """After every update."""
        ...

    def logged(self, standing: Standing) -> None:
        """After every line of metrics."""
        ...

    def validated(self, step: int, figures: Mapping[str, float], best: str) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self) -> None: ...


class Silent:
    """Says nothing."""

    def begin(self, step: int, steps: int) -> None:
        pass

    def step(self, standing: Standing) -> None:
        pass

    def logged(self, standing: Standing) -> None:
        pass

    def validated(self, step: int, figures: Mapping[str, float], best: str) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def end(self) -> None:
        pass


class Lines:
    """A line for each entry of the metrics: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = (0.0, 0)

    def begin(self, step: int, steps: int) -> None:
        self._began = (time.monotonic(), step)

    def step(self, standing: Standing) -> None:
        pass

    def logged(self, standing: Standing) -> None:
        since, first = self._began
        pace = (time.monotonic() - since) / max(1, standing.step - first)
        left = _clock(pace * (standing.steps - standing.step))
        self.say(f"step {standing.step}/{standing.steps}  {_figures(standing)}  left {left}{_tail(standing.best)}")

    def validated(self, step: int, figures: Mapping[str, float], best: str) -> None:
        self.say(f"step {step}  validation  {_list(figures)}{_tail(best)}")

    def say(self, text: str) -> None:
        # The width of a log is nobody's business: a line stays one line.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        pass


class Bar:
    """A bar with the loss, tokens per second, time left and the best score; validations stay above it."""

    def __init__(self, console: Console) -> None:
        self._bar = RichProgress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[best]}"),
            console=console,
            refresh_per_second=4,
        )
        self._task: TaskID | None = None

    def begin(self, step: int, steps: int) -> None:
        self._task = self._bar.add_task("training", total=steps, completed=step, figures="", best="")
        self._bar.start()

    def step(self, standing: Standing) -> None:
        if self._task is not None:
            figures = _figures(standing)
            self._bar.update(self._task, completed=standing.step, figures=figures, best=standing.best)

    def logged(self, standing: Standing) -> None:
        self.step(standing)

    def validated(self, step: int, figures: Mapping[str, float], best: str) -> None:
        self.say(f"step {step}  validation  {_list(figures)}{_tail(best)}")

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def end(self) -> None:
        self._bar.stop()


def default_progress() -> Progress:
    """A bar where standard error is a terminal, lines where it is not."""
    console = Console(file=sys.stderr)
    return Bar(console) if console.is_terminal else Lines(console)


def _figures(standing: Standing) -> str:
    return f"loss {standing.loss:.4f}  lr {standing.learning_rate:.2e}  {standing.tokens_per_second:,.0f} tokens/s"


def _list(figures: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in figures.items())


def _tail(best: str) -> str:
    return f"  best {best}" if best else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
