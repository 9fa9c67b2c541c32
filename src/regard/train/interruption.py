"""How a run ends early: an exception for each reason, and the handling of SIGINT and SIGTERM."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Stopped(Exception):  # noqa: N818
    """Training ended early; it can be resumed from `checkpoint`."""

    def __init__(self, message: str, checkpoint: Path) -> None:
        super().__init__(f"{message}. The checkpoint is {checkpoint}")
        self.checkpoint = checkpoint


class Interrupted(Stopped):
    """Ctrl-C or SIGTERM. `code` is the exit status by shell convention: 130 or 143."""

    def __init__(self, number: int, step: int, checkpoint: Path) -> None:
        name = signal.Signals(number).name
        super().__init__(f"{name} ended training after step {step}; resume to go on", checkpoint)
        self.signal = number
        self.code = 128 + number


class Diverged(Stopped):
    """The loss or the gradient was NaN or infinite. The update was not made."""


class OutOfMemory(Stopped):
    """The device, or the machine, has too little memory for a batch."""


def memory_ran_out(error: BaseException) -> bool:
    """Return whether an error of torch means that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


class _Asked(BaseException):
    """Raised by the signal handler inside `breakable` work."""


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Handles Ctrl-C and SIGTERM; the second Ctrl-C ends the process with KeyboardInterrupt.

    A step is short and runs to its end. A validation may be long and has no side effects: a signal interrupts such
    `breakable` work at once, but not with several workers (`shared`), which must stop at the same step. With several
    workers a second Ctrl-C does not end the process either, because the terminal and torchrun may both send the first
    one.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.received: int | None = None
        self._breaks = False
        self._shared = shared

    @contextmanager
    def handled(self) -> Generator[None, None, None]:
        """Install the handlers, in the main thread only: signals do not arrive in other threads."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in before:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def flags(self) -> list[float]:
        """Return 1 for each of `SIGNALS` that was received, else 0."""
        return [float(self.received == number) for number in SIGNALS]

    def breakable(self, work: Callable[[], Result]) -> Result | None:
        """Return the result of the work, or None if a signal came before or during it."""
        try:
            self._breaks = not self._shared
            if self.received is not None and not self._shared:
                return None
            result = work()
            self._breaks = False
            return result
        except _Asked:
            return None
        finally:
            self._breaks = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if not self._shared:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._breaks:
            self._breaks = False
            raise _Asked
