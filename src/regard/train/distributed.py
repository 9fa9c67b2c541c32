"""Workers: the processes that torchrun starts to train one model together, and their collectives."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.train.errors import RunError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Timeout of one collective operation. The timeout is long because the first worker may index large files while the
# others wait.
_TIMEOUT = timedelta(minutes=30)
_MEETING = timedelta(minutes=10)  # time limit within which all workers of a torchrun command must start and connect
# Environment variables that torchrun sets and init_process_group needs.
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorkerFailed(Exception):  # noqa: N818
    """Raised on a worker because another worker failed: that worker reports the reason, and this worker only exits."""


class WorkerLost(RunError):  # noqa: N818
    """Raised when the connection to another worker breaks: its process ended, or its machine cannot be reached."""


@dataclass(frozen=True)
class Workers:
    """The processes (workers) that train together: the rank and device of this process, and the number of processes.

    Almost every method is a collective: all workers must call it, in the same order. Without a process group there is
    one worker, and a method communicates with no other process.

    >>> ALONE.is_first, ALONE.gather("a"), ALONE.size
    (True, ['a'], 1)
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None  # `device` is None without a process group; the caller then chooses a device
    grouped: bool = False  # whether there is a process group: torchrun may also start a single worker

    @property
    def is_first(self) -> bool:
        """Return whether this is the worker of rank 0, which writes the files and reports to the user."""
        return self.rank == 0

    def reduce(self, numbers: Tensor) -> Tensor:
        """Replace the tensor's values by their sums over all workers, in place, and return the tensor."""
        if self.grouped:
            import torch.distributed as dist

            dist.all_reduce(numbers)
        return numbers

    def gather(self, value: Item) -> list[Item]:
        """Return the value of every worker, in the order of their ranks."""
        if not self.grouped:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Item) -> Item:
        """Return on every worker the value that the first worker passed (a broadcast)."""
        if not self.grouped:
            return value
        import torch.distributed as dist

        held: list[Any] = [value if self.is_first else None]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def wait(self) -> None:
        """Wait until every worker has called this method (a barrier)."""
        self.gather(None)

    @contextmanager
    def agreed(self) -> Generator[None, None, None]:
        """A context for work without collectives that every worker must finish: if one worker fails, all raise.

        The failed worker with the lowest rank raises its own error, all other workers raise `WorkerFailed`.
        """
        if not self.grouped:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = [rank for rank, has_failed in enumerate(self.gather(failure is not None)) if has_failed]
        if failed and failure is not None and failed[0] == self.rank:
            raise failure
        if failed:
            raise WorkerFailed(f"worker {failed[0]} failed")

    def same(self, what: str, value: Any) -> None:
        """Raise an error on all workers if their values differ, compared by SHA-256.

        The first worker raises `RunError`, all others raise `WorkerFailed`.
        """
        if not self.grouped:
            return
        digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
        digests = self.gather(digest)
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        with self.agreed():
            if others and self.is_first:
                named = ", ".join(map(str, others[:8])) + (" …" if len(others) > 8 else "")
                raise RunError(f"{what} of worker {named} is not that of worker 0: all workers must have the same")

    def at_once(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, which all workers run at the same time; if one fails, all raise an error."""
        results: list[Result] = []
        with self.agreed():
            results.append(work())
        return results[0]

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, run by the first worker alone and then by all others.

        The other workers can read files that the first worker wrote during its `work`.
        """
        results: list[Result] = []
        for first in (True, False) if self.grouped else (True,):
            with self.agreed():
                if self.is_first is first:
                    results.append(work())
        return results[0]

    def read_by_first(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the same items on every worker; only the first worker reads `items`, for example its standard input."""
        if not self.grouped:
            yield from items
            return
        source = iter(items) if self.is_first else iter(())
        while received := self.from_first([item for item in [next(source, None)] if item is not None]):
            yield received[0]

    @contextmanager
    def sharing(self) -> Generator[None, None, None]:
        """A context in which each worker processes a share of the items of every method marked `shareable`."""
        token = _sharing.set(self if self.size > 1 else None)
        try:
            yield
        finally:
            _sharing.reset(token)


ALONE = Workers()
_sharing: ContextVar[Workers | None] = ContextVar("sharing", default=None)


@contextmanager
def joined() -> Generator[Workers, None, None]:
    """A context that yields the workers defined by torchrun's environment variables, or one worker without them.

    CPUs communicate by gloo, GPUs by NCCL. If a connection breaks, `WorkerLost` is raised.
    """
    if not all(name in os.environ for name in _ENVIRONMENT):
        yield ALONE
        return
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=_store(size), rank=rank, world_size=size, timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise RunError(_no_meeting(error, size)) from error
    try:
        yield Workers(rank, size, device, grouped=True)
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        # A message of gloo has its location in gloo's source before the reason, and advice after the reason.
        why = _first_line(error).rpartition("] ")[2].partition(". ")[0]
        raise WorkerLost(f"the connection to another worker broke ({why})") from error
    # The process group is destroyed only on success: after a failure other workers may have exited, and destroying the
    # group would wait for them forever.
    dist.destroy_process_group()


def _store(size: int) -> Any:
    """Return the store in which the workers exchange their addresses, with a key prefix for each restart.

    torchrun keeps the addresses of earlier attempts in the store. Without a prefix, restarted workers would try to
    connect to processes that have exited, and wait until the time limit.
    """
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, *_ = next(rendezvous("env://", timeout=_MEETING))
    return PrefixStore(f"regard-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{size}", store)


def _no_meeting(error: Exception, size: int) -> str:
    """Return an error message with the reason why this worker could not connect to the others."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if "EADDRINUSE" in str(error):
        return f"port {port} is in use on {host}, where workers meet: choose another as MASTER_PORT"
    return f"cannot join the other {size - 1} of {size} workers at {host}:{port}: {_first_line(error)}"


def may_restart() -> bool:
    """Return whether torchrun is configured to restart the workers after a failure (`--max-restarts` above 0)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def in_shares(items: Sequence[Any], work: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """Return `work(items)`, one result for each item; inside `Workers.sharing` each worker computes a share of them.

    All results, in the order of the items, are returned on every worker.
    """
    workers = _sharing.get()
    if workers is None:
        return work(items)
    token = _sharing.set(None)  # a call nested in this one must not divide the items among the workers again
    try:
        mine = work(items[workers.rank :: workers.size])
    finally:
        _sharing.reset(token)
    results: list[Any] = [None] * len(items)
    for rank, part in enumerate(workers.gather(mine)):
        results[rank :: workers.size] = part
    return results


def shareable(method: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Decorate a method `(self, items, **options)` that returns a list with a result for each item.

    Inside `Workers.sharing`, each worker runs the method on a share of the items, and every worker gets all results.
    """

    @functools.wraps(method)
    def call(self: Any, items: Sequence[Any], **options: Any) -> list[Any]:
        return in_shares(items, lambda part: method(self, part, **options))

    return call


def _device(local: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    present = torch.cuda.device_count()
    if local >= present:
        raise RunError(f"worker {local} of this machine has no GPU: there are {present}, so --nproc-per-node={present}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
