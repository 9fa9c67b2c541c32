"""Data-parallel workers as threads of one process, which exchange values at a barrier, not by a process group."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from regard.train.distributed import Workers
from time_limits import HANG_SECONDS


@dataclass
class Meeting:
    """An all-gather: each worker's thread passes a value and receives the values of all workers."""

    size: int
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=HANG_SECONDS)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = [self.values[one] for one in range(self.size)]
        self.barrier.wait()
        return found


def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function `run(size, work)`: the result or error of `work(workers)` on each of `size` workers."""

    def run(size: int, work: Callable[[Workers], Any]) -> list[Any]:
        meeting = Meeting(size)
        monkeypatch.setattr(Workers, "gather", lambda self, value: meeting.gather(self.rank, value))
        monkeypatch.setattr(Workers, "from_first", lambda self, value: meeting.gather(self.rank, value)[0])
        with ThreadPoolExecutor(size) as pool:
            started = [pool.submit(work, Workers(rank, size, grouped=True)) for rank in range(size)]
        return [one.exception() or one.result() for one in started]

    return run
