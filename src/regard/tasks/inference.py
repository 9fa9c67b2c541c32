"""Predictions of a network: in evaluation mode, with an error in place of an answer to an invalid input."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.tasks.task import InputError


@contextmanager
def evaluating(network: nn.Module) -> Generator[None, None, None]:
    """A context: the network in evaluation mode, without gradients. Its mode is restored afterwards."""
    training = network.training
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        network.train(training)


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
