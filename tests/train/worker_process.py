"""Processes that run the `regard` command as under torchrun; they are forked from a server that has imported torch."""

import contextlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import sacrebleu  # noqa: F401  unused imports are for the server: its forked workers share them
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.export
import torch.nn.parallel
from torch.distributed import TCPStore

import regard.cli.predict_command  # noqa: F401
import regard.tasks.training as training
from regard.cli import main
from regard.train import gradient_sums
from regard.train.errors import RunError
from regard.train.updates import Loss
from time_limits import HANG_SECONDS

FAIL_AT = 2  # number of batches after which a worker fails, if its failure is simulated


def run(
    arguments: Sequence[str], environment: dict[str, str], log: Path, lines: str | None, fails: bool = False
) -> None:
    """Run the `regard` command in this process, with standard output in the file `log` and standard input `lines`."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    # With three workers, gradients are summed by DDP; with fewer or more, all at once.
    if environment.get("WORLD_SIZE") == "3":
        gradient_sums.BUCKET = 0
    sys.argv = ["regard", *arguments]
    sys.stdin = io.TextIOWrapper(io.BytesIO((lines or "").encode()))
    if fails:
        fail_in_training()
    with log.open("w", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        main()


def fail_in_training(*, by_signal: bool = False) -> None:
    """Replace the loss by one that fails after FAIL_AT batches, by an error or by SIGKILL."""
    plain = training.TaskLoss.__call__
    seen = []

    def loss(self, model, batch) -> Loss:
        seen.append(batch)
        if len(seen) > FAIL_AT and by_signal:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(seen) > FAIL_AT:
            raise RunError("the loss failed for a test")
        return plain(self, model, batch)

    training.TaskLoss.__call__ = loss


@dataclass
class Started:
    """The worker processes of one command, in the order of their ranks."""

    processes: list[ForkServerProcess]
    logs: list[Path]
    store: TCPStore | None
    codes: list[int | None] = field(default_factory=list)

    def ended(self) -> "Started":
        """Wait until all processes have ended, store their exit codes, and return self."""
        for process in self.processes:
            process.join(HANG_SECONDS)
        self.codes = [process.exitcode for process in self.processes]
        return self

    def printed(self, rank: int = 0) -> str:
        return self.logs[rank].read_text()

    def everything(self) -> str:
        return "\n".join(f"worker {rank}:\n{log.read_text()}" for rank, log in enumerate(self.logs) if log.exists())


def start(
    folder: Path, size: int, *arguments: str | Path, own: dict[int, Sequence[str]] | None = None, **more: object
) -> Started:
    """Start the command on `size` workers (0: one process without torchrun's environment).

    `own` maps the rank of a worker to further arguments for this worker alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_training", "torch._dynamo", "worker_process"])
    # This process owns the store, and no worker does, as under torchrun. With port 0 the store gets a free port, which
    # stays reserved for it.
    store = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=HANG_SECONDS)) if size else None
    processes, logs = [], []
    for rank in range(max(1, size)):
        environment = {"OMP_NUM_THREADS": "1"}
        if store is not None:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        given = [*map(str, arguments), *(own or {}).get(rank, ())]
        logs.append(folder / f"worker-{rank}.log")
        lines = more.get("lines") if rank == 0 else None
        fails = more.get("failing") == rank
        process = context.Process(target=run, args=(given, environment, logs[-1], lines, fails))
        process.start()
        processes.append(process)
    return Started(processes, logs, store)


def killed_once(arguments: Sequence[str], folder: Path) -> None:
    """Run the command as a worker of torchrun's agent; worker 1 kills itself after its first start."""
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fail_in_training(by_signal=True)
    run(arguments, {}, folder / f"{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}.log", None)
