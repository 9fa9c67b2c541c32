"""Validation without side effects, so that the results of training do not depend on how often it validates."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from regard.train.distributed import ALONE, Workers
from regard.train.random_state import RandomState
from regard.train.updates import LossFunction
from regard.train.weight_averaging import MovingAverage

# validate(model) returns metrics by name; the model is in eval mode.
Validate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True, eq=False)
class Validation:
    """Validates weights: by the loss on held-out batches, by metrics of the caller's `validate`, or by both."""

    loss: LossFunction
    held_out: Iterable[Any] | None
    validate: Validate | None
    precision: torch.dtype
    workers: Workers = ALONE  # each worker computes the loss of its share of the held-out batches

    @property
    def possible(self) -> bool:
        return self.held_out is not None or self.validate is not None

    def figures(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Return all metrics by name; "loss" is the mean loss on the held-out batches."""
        metrics = {} if self.held_out is None else {"loss": self._held_out_loss(model, self.held_out, device)}
        if self.validate is not None:
            with self.workers.sharing():
                metrics |= {name: float(value) for name, value in self.validate(model).items()}
        # All workers use the first worker's metrics, because all must make the same decisions, even if their own
        # metrics differ in the last bit.
        return self.workers.from_first(metrics)

    def _held_out_loss(self, model: nn.Module, batches: Iterable[Any], device: torch.device) -> float:
        total = count = 0.0
        for batch in islice(batches, self.workers.rank, None, self.workers.size):
            with torch.autocast(device.type, self.precision, enabled=self.precision != torch.float32):
                result = self.loss(model, batch)
            total, count = total + float(result.total), count + float(result.count)
        sums = torch.tensor([total, count], dtype=torch.float64)
        total, count = self.workers.reduce(sums).tolist()
        if not count:
            raise ValueError("held_out gave nothing to validate on: it must be a collection that can be read again")
        return total / count


@contextmanager
def undisturbed(model: nn.Module, average: MovingAverage | None, device: torch.device) -> Generator[None, None, None]:
    """A context in which the model is in eval mode, without gradients, and with averaged weights if there are any.

    Afterwards the model's weights and mode and all random generators are restored.
    """
    numbers, training = RandomState.take(device), model.training
    with nullcontext() if average is None else average.in_place(model), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            model.train(training)
            numbers.put(device)
