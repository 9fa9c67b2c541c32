"""Early ends of training: an exception for each reason, and the handlers of SIGINT and SIGTERM."""

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
    """Raised when training ends early; it can be resumed from `checkpoint`."""

    def __init__(self, message: str, checkpoint: Path) -> None:
        super().__init__(f"{message}. The checkpoint is {checkpoint}")
        self.checkpoint = checkpoint


class Interrupted(Stopped):
    """Raised when Ctrl-C or SIGTERM ends training; `code` is the exit status by shell convention, 130 or 143."""

    def __init__(self, number: int, step: int, checkpoint: Path) -> None:
        name = signal.Signals(number).name
        super().__init__(f"{name} ended training after step {step}; resume to go on", checkpoint)
        self.signal = number
        self.code = 128 + number


class Diverged(Stopped):
    """Raised before an update if the loss or gradient is NaN or infinite, and before validation if a weight is."""


class OutOfMemory(Stopped):
    """Raised when the device or the machine has too little memory for a batch."""


def memory_ran_out(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


class _Asked(BaseException):
    """Raised by the signal handler to interrupt work that runs inside `Signals.breakable`."""


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Handles Ctrl-C and SIGTERM; a second Ctrl-C ends the process with KeyboardInterrupt.

    A training step is short, and a signal never interrupts it. A validation may be long and has no side effects, so
    the loop runs it inside `breakable`, which a signal interrupts at once. With several workers (`shared`), a signal
    interrupts nothing, because all workers must stop at the same step. With several workers, a second Ctrl-C does not
    end the process either, because the terminal and torchrun may each send a SIGINT for a single Ctrl-C.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.received: int | None = None
        self._breaks = False
        self._shared = shared

    @contextmanager
    def handled(self) -> Generator[None, None, None]:
        """A context in which the signal handlers are installed; outside the main thread no handler is installed.

        Python allows signal handlers only in the main thread.
        """
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
        """Return a number for each signal in `SIGNALS`: 1 for the signal received last, 0 for the others."""
        return [float(self.received == number) for number in SIGNALS]

    def breakable(self, work: Callable[[], Result]) -> Result | None:
        """Run `work` and return its result, or None if a signal was received before `work` or interrupted it."""
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
