"""The processes of `regard bench scaling`: each trains a small model for some steps and writes its measurements.

    python -m regard.bench.scaling_measurement PLAN.json RANK SIZE

PLAN.json has the cases, the number of steps, the device and the number of threads. Each process writes its measurements
to RANK-of-SIZE.json in the folder of PLAN.json.
"""

import contextlib
import gc
import json
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from regard import parallel
from regard.bench.measurement import forget_peak, status_bytes, trim
from regard.bench.scaling_costs import WAYS, Model, Work
from regard.core.masks import causal
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHeadAttention
from regard.nn.positions import Rotary
from regard.nn.transformer import TransformerEncoderLayer
from regard.tasks.training import gathered_layers
from regard.train.distributed import ALONE, Workers
from regard.train.gradient_sums import GradientSums, Step
from regard.train.optimizer import make_optimizer, state_bytes
from regard.train.sharded_model import Sharded
from regard.train.train_settings import TrainSettings
from regard.train.updates import Loss, differentiated, gather, settle

HEAD = 64  # size of a head
WARM = 2  # number of untimed steps: the first sums all gradients after the backward pass, the second starts DDP
PROBES = (2**16, 2**20, 2**23)  # bytes whose all-reduce is timed


class LanguageModel(nn.Module):
    """Transformer layers that predict the next token at every position."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        size = model.size
        heads = max(1, size // HEAD)
        self.embedding = nn.Embedding(model.vocabulary, size)
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                MultiHeadAttention(size, heads, positions=Rotary(size // heads)), FeedForward(size, 4 * size)
            )
            for _ in range(model.layers)
        )
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, model.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask=causal()).output
        return self.output(self.norm(x))


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """Return cross-entropy summed over the tokens of a batch (tokens, targets)."""
    tokens, targets = batch
    return Loss(
        F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(), reduction="sum"), targets.numel()
    )


class Trainer:
    """Training steps of one case, with the same code as `regard train`."""

    def __init__(self, way: str, work: Work, workers: Workers, device: torch.device) -> None:
        torch.manual_seed(0)
        self.way, self.device = way, device
        self.workers = ALONE if way == "plain" else workers
        self.precision = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model: nn.Module = LanguageModel(work.model).to(device)
        sharded = Sharded(self.model, workers, gathered_layers, token_loss) if way == "fsdp2" else None
        if sharded is not None:
            self.model = sharded.model
        step = Step(self.model, token_loss) if sharded is None else sharded.step
        self.optimizer = make_optimizer(self.model, TrainSettings())
        summed = way in ("ddp", "fsdp2")
        self.sums = GradientSums(workers, step, self.precision, device, sharded=sharded is not None) if summed else None
        self.batch = self._share(work)

    def _share(self, work: Work) -> tuple[Tensor, Tensor]:
        """Return this worker's rows of the batch; with context parallelism, its part of every row."""
        rows = max(1, work.tokens // work.length)
        numbers = torch.Generator().manual_seed(1)
        text = torch.randint(work.model.vocabulary, (rows, work.length + 1), generator=numbers).to(self.device)
        both = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if self.way == "context":
            return parallel.shard(both[0]), parallel.shard(both[1])
        rank, size = self.workers.rank, self.workers.size
        return both[0][rank::size], both[1][rank::size]

    def _gradients(self, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        if self.sums is not None:
            yield from self.sums.of(batches)
            return
        for batch in batches:
            with parallel.context() if self.way == "context" else contextlib.nullcontext():
                yield differentiated(token_loss, self.model, batch, self.precision, self.device)
        if self.way == "context":
            parallel.reduce_gradients(self.model)

    def update(self) -> None:
        """Run one update of the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        gradients = gather(self.model, [self.batch], self.device, self._gradients, self.workers.reduce)
        assert gradients is not None
        settle(self.model, gradients, 1.0)
        self.optimizer.step()

    def states(self) -> dict[str, int]:
        """Return the number of bytes of this worker's parameters, gradients and optimiser state."""
        return state_bytes(self.model, self.optimizer)


def measured(way: str, work: Work, workers: Workers, device: torch.device, steps: int) -> dict[str, Any]:
    """Return the shortest time of a step, the bytes sent in a step, and the memory.

    On a CPU the time is processor time, which excludes the time of other programs.
    """
    start = memory_now(device)
    trainer = Trainer(way, work, workers, device)
    for _ in range(WARM):
        trainer.update()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forget_peak()
    sent = sent_bytes()
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = []
    for _ in range(steps):
        synchronize(device, workers)
        began = clock()
        trainer.update()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - began)
    after, peak = sent_bytes(), torch.cuda.max_memory_allocated() if device.type == "cuda" else status_bytes("VmHWM")
    return {
        "seconds": min(seconds),
        "sent": None if after is None or sent is None else (after - sent) / steps,
        "states": trainer.states(),
        "peak": peak - start if peak else None,
    }


def probes(workers: Workers, device: torch.device) -> dict[str, float]:
    """Return the shortest time of several all-reduces in seconds, by number of bytes; on a CPU, processor time."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds: dict[str, float] = {}
    for size in PROBES:
        numbers = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(6):
            synchronize(device, workers)
            began = clock()
            workers.reduce(numbers)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(clock() - began)
        seconds[str(size)] = min(times)
    return seconds


def synchronize(device: torch.device, workers: Workers) -> None:
    """Wait until all processes are ready."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    workers.wait()


def sent_bytes() -> int | None:
    """Return the number of bytes that the TCP sockets of this process have sent, which is gloo's traffic.

    Return None if the system does not count the bytes that a socket sends.
    """
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) < 216:  # tcpi_bytes_sent and tcpi_bytes_retrans are in Linux 4.19 and later
                    return None
                sent, again = struct.unpack_from("<QQ", info, 200)
                total += sent - again  # without segments that TCP retransmits if a busy machine acknowledges them late
    return total


def memory_now(device: torch.device) -> int:
    """Return the number of bytes of memory in use: allocated on a GPU, resident on a CPU."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    trim()
    return status_bytes("VmRSS")


def main(plan: Path, rank: int, size: int) -> None:
    """Run one process of a process group: measure all cases of the plan's file and write the results."""
    wanted = json.loads(plan.read_text())
    torch.set_num_threads(wanted["threads"])
    device = torch.device("cpu")
    if wanted["device"] == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{plan.parent}/meeting-{size}", rank=rank, world_size=size)
    workers = Workers(rank, size, device, grouped=True)
    for way in WAYS:  # a small step of each kind of parallelism runs first, to load libraries
        measured(way, Work(Model(64, 1, 50), 8 * size * size, 8 * size), workers, device, 1)
    results: dict[str, Any] = {"probes": probes(workers, device), "cases": []}
    for case in wanted["cases"]:
        if case["way"] != "plain" or size == 1:
            work = Work(Model(**case["model"]), case["tokens"], case["length"])
            record = measured(case["way"], work, workers, device, wanted["steps"])
            gc.collect()
            results["cases"].append({**case, **record})
    (plan.parent / f"{rank}-of-{size}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
