"""The overhead of a process group of one worker: updates of `regard train` with and without it, interleaved.

    torchrun --standalone --nproc-per-node=1 benchmarks/one_worker.py [--turns 12] [--steps 20]

Each variant is a separate training loop over the same batches, in one process. Blocks of updates of the variants are
interleaved, so that other load affects all of them. The time of a block relative to that of "plain" is printed, as the
median over the turns.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regard.tasks.catalog import TASKS
from regard.tasks.config_overrides import configure, parsed
from regard.tasks.training import TaskLoss, batches, gathered_layers
from regard.train.distributed import ALONE, Workers, joined
from regard.train.loop import _Loop
from regard.train.progress_display import Silent
from regard.train.run_directory import Run

SMALL = ["data.train=6000", "data.valid=8", "data.test=8", "longer=0", "train.average=none"]
MODELS = {
    "Transformer": ("base", []),
    "recurrent": ("small", []),
    "small Transformer, CUDA graphs": (
        "base",
        ["model.size=128", "model.layers=4", "model.heads=4", "batch_tokens=4096", "train.graphs=true"],
    ),
}
# "plain" and "again" have no process group, and their difference is noise; "group" has a process group of one worker,
# as in `torchrun -m regard train`; "DDP" also wraps the model in DDP, which `regard train` does not do for one worker;
# "FSDP2" shards the model.
WAYS: dict[str, list[str]] = {"plain": [], "again": [], "group": [], "DDP": [], "FSDP2": ["train.shard=true"]}


def loop_of(preset: str, settings: Sequence[str], workers: Workers, device: torch.device, folder: Path) -> _Loop:
    """Return a training loop over the built-in sentences, ready for its first update."""
    task = TASKS["translation"]
    config: Any = configure(task, preset, [], parsed([*SMALL, *settings]))
    material = task.material(config, folder / "data", None, lambda _: None)
    torch.manual_seed(1)
    network = task.network(config, material.codec).to(device)
    loss = TaskLoss(task, config, network, device)
    stream = batches(task, config, material, workers)
    run = Run.create(folder / "run", {"task": "translation"})
    parts = (None, None, loss.starting, Silent(), workers, gathered_layers)
    loop = _Loop(network, loss, stream, run, config.train, *parts)
    loop.prepare()
    return loop


def seconds(loop: _Loop, steps: int, device: torch.device) -> float:
    """Return the time of a block of updates."""
    began = time.perf_counter()
    for _ in range(steps):
        loop._update()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=12)
    options.add_argument("--steps", type=int, default=20, help="updates of a block")
    options.add_argument("--warm", type=int, default=60, help="updates of each way before")
    options.add_argument("--only", default="", help="models with this in their name")
    options.add_argument("--set", action="append", default=[], help="further settings of all")
    arguments = options.parse_args()
    with joined() as workers, tempfile.TemporaryDirectory() as folder:
        device = workers.device or torch.device("cpu")
        for name, (preset, settings) in MODELS.items():
            if arguments.only not in name:
                continue
            loops = {}
            for way, more in WAYS.items():
                if "train.graphs=true" in settings and way in ("DDP", "FSDP2"):
                    continue
                place = Path(folder) / name / way
                place.mkdir(parents=True)
                group = ALONE if way in ("plain", "again") else workers
                loops[way] = loop_of(preset, [*settings, *more, *arguments.set], group, device, place)
                seconds(loops[way], 1, device)  # the first update determines which parameters have gradients
                if way == "DDP":
                    shared = loops[way].shared
                    shared._wrapped = shared._ddp()
                seconds(loops[way], arguments.warm, device)
            times: dict[str, list[float]] = {way: [] for way in loops}
            tokens = {way: -loop.state.tokens for way, loop in loops.items()}
            for turn in range(arguments.turns):
                order = list(loops)[turn % len(loops) :] + list(loops)[: turn % len(loops)]
                for way in order:
                    times[way].append(seconds(loops[way], arguments.steps, device))
            for way, durations in times.items():
                ratios = [one / plain for one, plain in zip(durations, times["plain"], strict=True)]
                pace = (tokens[way] + loops[way].state.tokens) / sum(durations)
                record = {
                    "model": name,
                    "way": way,
                    "ms a step": round(1e3 * statistics.median(durations) / arguments.steps, 3),
                    "tokens a second": round(pace),
                    "of plain's time": round(statistics.median(ratios), 4),
                    "quartiles": [round(one, 4) for one in statistics.quantiles(ratios, n=4)[::2]],
                }
                print(json.dumps(record), flush=True)
            del loops
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
