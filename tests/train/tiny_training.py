"""A small training set-up for tests: random tokens, shuffled batches, and a model with dropout."""

import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.train.interruption import Interrupted
from regard.train.loop import fit
from regard.train.run_directory import Run
from regard.train.train_settings import TrainSettings
from regard.train.updates import Loss

WORDS = 13


class Shuffled:
    """Batches of different sizes, in an order that depends on the seed and the epoch."""

    def __init__(self, count: int = 7, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batches = [torch.randint(1, WORDS, (2 + i % 3, 3 + i % 5), generator=generator) for i in range(count)]
        self.seed, self.epoch, self.index = seed, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(len(self.batches)))
        random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        while self.index < len(order):
            self.index += 1
            yield self.batches[order[self.index - 1]]
        self.epoch, self.index = self.epoch + 1, 0

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def resume(self, state: dict[str, int]) -> None:
        self.epoch, self.index = state["epoch"], state["index"]


class Tied(nn.Module):
    """A model of an embedding, dropout and a hidden layer, whose output matrix is the embedding (tied weights)."""

    def __init__(self, size: int = 8, dropout: float = 0.3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, size)
        self.hidden = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, WORDS)
        self.output.weight = self.embedding.weight
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), self.dropout, self.training)
        return self.output(self.norm(torch.tanh(self.hidden(x))))


def make(seed: int = 5, **options: Any) -> Tied:
    torch.manual_seed(seed)
    return Tied(**options)


def summed(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    logits = model(batch[:, :-1])
    target = (batch[:, :-1] * 5) % WORDS
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def same_weights(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def main(folder: str, steps: int, slow_after: int) -> None:
    """Train in a separate process, for tests to kill; its output goes to `folder`.log.

    Each of the first `slow_after` steps pauses for a moment, each later step for a second, so that a test on a busy
    machine can kill the process before training ends.
    """
    sys.stdout = sys.stderr = Path(f"{folder}.log").open("a", buffering=1)  # noqa: SIM115

    batches = itertools.count()

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        if model.training and slow_after:
            time.sleep(0.02 if next(batches) < 2 * slow_after else 1.0)
        return Loss(*summed(model, batch))

    torch.set_num_threads(1)
    run = Run.create(Path(folder), {"task": "copy"}, resume=True)
    model = make()
    options = {"steps": steps, "warmup": 5, "accumulate": 2, "average": "ema", "log_every": 3, "keep_last": 2}
    settings = TrainSettings(**options, validate_every=6, checkpoint_every=4)
    try:
        fitted = fit(model, loss, Shuffled(), run=run, settings=settings, held_out=Shuffled(2, seed=9).batches)
    except Interrupted as end:
        print(end, flush=True)
        sys.exit(end.code)
    run.save_result({"step": fitted.step, "best": fitted.best})
