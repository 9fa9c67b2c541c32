"""Predictions of a network: in evaluation mode, with an error in place of an answer to an invalid input."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.tasks.task import InputError


@contextmanager
def evaluating(network: nn.Module) -> Generator[None, None, None]:
    """Put the network into evaluation mode, without gradients, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def answered(inputs: Sequence[Any], read: Callable[[Any], Any], answer: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Return the answers to inputs, in order; for an input that `read` refuses, its `InputError`.

    `read` converts one input, and `answer` answers all that were accepted together.
    """
    found: dict[int, Any] = {}
    good: dict[int, Any] = {}
    for place, one in enumerate(inputs):
        try:
            good[place] = read(one)
        except InputError as error:
            found[place] = error
    found |= dict(zip(good, answer(list(good.values())), strict=True))
    return [found[place] for place in range(len(inputs))]
