"""Predictions of a network in evaluation mode; for an invalid input, an `InputError` instead of a prediction."""

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
    """Return one answer for each input, in order; for an invalid input, an `InputError` instead.

    `read` converts one input, or raises an `InputError` if it is invalid; `answer` computes the answers to all valid
    inputs in one call.
    """
    answers: dict[int, Any] = {}
    good: dict[int, Any] = {}
    for place, one in enumerate(inputs):
        try:
            good[place] = read(one)
        except InputError as error:
            answers[place] = error
    answers |= dict(zip(good, answer(list(good.values())), strict=True))
    return [answers[place] for place in range(len(inputs))]
