"""Averages of weights: a moving average during training, or the mean of several checkpoints."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.train.sharded_tensors import part_of


class MovingAverage:
    """The exponential moving average e of the weights w: e ← d·e + (1 − d)·w after every update.

    The decay after update t is d = min(decay, (1 + t) / (10 + t)), which is small at first, so that the average soon
    forgets early weights.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> average = MovingAverage(layer, decay=0.5)
    >>> before = layer.weight.item()
    >>> _ = layer.weight.data.add_(1.0)
    >>> average.update(layer, 10)  # d = min(0.5, 11/20)
    >>> round(average.tensors()["weight"].item() - before, 4)
    0.5
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self._decay = decay
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._mean = [self._of(model, name).detach().clone() for name in self._names]

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Update the average with the model's weights after update number `step`."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._mean, [self._of(model, name).detach() for name in self._names], 1 - decay)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._mean, strict=True))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if set(tensors) != set(self._names):
            raise ValueError("the checkpoint's moving average is of other parameters: was it trained without one?")
        for name, mean in zip(self._names, self._mean, strict=True):
            mean.copy_(part_of(tensors[name], mean))

    @contextmanager
    def in_place(self, model: nn.Module) -> Generator[None, None, None]:
        """A context in which the model has the averaged weights; its own are restored afterwards, bit for bit."""
        own = [self._of(model, name).detach().clone() for name in self._names]
        self.put(model)
        try:
            yield
        finally:
            self._copy(model, own)

    def put(self, model: nn.Module) -> None:
        self._copy(model, self._mean)

    @torch.no_grad()
    def _copy(self, model: nn.Module, values: list[Tensor]) -> None:
        for name, value in zip(self._names, values, strict=True):
            self._of(model, name).copy_(value)

    @staticmethod
    def _of(model: nn.Module, name: str) -> Tensor:
        return model.get_parameter(name)


def mean_weights(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of several state dicts of a model; non-floating-point tensors are those of the last state dict.

    >>> mean_weights([{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}])
    {'w': tensor([2.5000])}
    """
    if not states:
        raise ValueError("states must have at least one entry; got none")
    last = states[-1]
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in last.items()
    }
