"""Progress output of training: a bar on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_KNOWN_STEPS = 20  # the duration of a run is estimated after this many steps, or after `_KNOWN_SECONDS` seconds
_KNOWN_SECONDS = 3.0
_LONG = 1200.0  # in seconds; if a run is expected to take longer, a faster alternative is suggested


@dataclass(frozen=True)
class Standing:
    """The state of training after an update, as a progress display shows it."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    best: str  # the best score so far, such as "bleu 31.2 at step 400"


@runtime_checkable
class Progress(Protocol):
    """The interface of a progress display, whose methods the training loop calls."""

    def begin(self, step: int, steps: int) -> None: ...

    def step(self, standing: Standing) -> None:
        """Display the state after an update; the loop calls this after every update."""

    def logged(self, standing: Standing) -> None:
        """Display the state when metrics are logged; the loop calls this after every line of metrics.jsonl."""

    def validated(self, step: int, figures: Mapping[str, float], best: str) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self) -> None: ...


class Silent:
    """A progress display that shows nothing."""

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


class Forecast:
    """The expected duration of a run, estimated from its first steps.

    `quicker` is a hint, such as a faster command, that is added to the message if the run will take long.
    """

    def __init__(self, quicker: str = "") -> None:
        self._quicker = quicker
        self._began = (0.0, 0)
        self._given = False

    def begin(self, step: int) -> None:
        self._began, self._given = (time.monotonic(), step), False

    def left(self, standing: Standing) -> float:
        """Return the expected number of seconds until the last step, at the mean pace so far."""
        since, first = self._began
        return (time.monotonic() - since) / max(1, standing.step - first) * (standing.steps - standing.step)

    def message(self, standing: Standing) -> str | None:
        """Return a message with the expected duration, once, as soon as it can be estimated; otherwise None."""
        since, first = self._began
        early = standing.step - first < _KNOWN_STEPS and time.monotonic() - since < _KNOWN_SECONDS
        if self._given or early or standing.step >= standing.steps:
            return None
        self._given = True
        left = self.left(standing)
        more = f"; {self._quicker}" if self._quicker and left > _LONG else ""
        return f"{standing.steps:,} steps take about {_duration(left)}{more}"


class Lines:
    """A progress display for logs and pipes: it prints a line when metrics are logged and after a validation.

    After the first steps, the expected duration of the run is also printed.
    """

    def __init__(self, console: Console, quicker: str = "") -> None:
        self._console = console
        self._forecast = Forecast(quicker)

    def begin(self, step: int, steps: int) -> None:
        self._forecast.begin(step)

    def step(self, standing: Standing) -> None:
        message = self._forecast.message(standing)
        if message:
            self.say(message)
            self.logged(standing)

    def logged(self, standing: Standing) -> None:
        left = _clock(self._forecast.left(standing))
        self.say(f"step {standing.step}/{standing.steps}  {_figures(standing)}  left {left}{_tail(standing.best)}")

    def validated(self, step: int, figures: Mapping[str, float], best: str) -> None:
        self.say(f"step {step}  validation  {_list(figures)}{_tail(best)}")

    def say(self, text: str) -> None:
        # Lines of output are not wrapped, because a log file has no width.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        pass


class Bar:
    """A progress display for terminals: a bar with loss, learning rate, tokens per second and remaining time.

    The result of the best validation is displayed after the bar, and the results of earlier validations remain above.
    """

    def __init__(self, console: Console, quicker: str = "") -> None:
        self._forecast = Forecast(quicker)
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
        self._forecast.begin(step)

    def step(self, standing: Standing) -> None:
        message = self._forecast.message(standing)
        if message:
            self.say(message)
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


def default_progress(quicker: str = "") -> Progress:
    """Return a progress bar if standard error is a terminal, else a display that prints lines.

    `quicker` is a hint, such as a faster command, that is displayed if the run will take long.
    """
    console = Console(file=sys.stderr)
    return Bar(console, quicker) if console.is_terminal else Lines(console, quicker)


def _figures(standing: Standing) -> str:
    return f"loss {standing.loss:.4f}  lr {standing.learning_rate:.2e}  {standing.tokens_per_second:,.0f} tokens/s"


def _list(figures: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in figures.items())


def _tail(best: str) -> str:
    return f"  best {best}" if best else ""


def _duration(seconds: float) -> str:
    """Return a duration as text in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
