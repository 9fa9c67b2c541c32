"""The contenders of a case, and the reference that their results are compared with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.bench.command_output import size
from regard.bench.sweep.cases import ITEM, Case
from regard.bench.sweep.plain_forms import Outcome
from regard.bench.sweep.tensors import Tensors

Call = Callable[[], Outcome]
ROOM = {"cpu": 4 * 2**30, "cuda": 24 * 2**30}  # bytes that a peer may use


@dataclass(frozen=True)
class Contender:
    """A call, and the tensors whose gradients it must compute."""

    call: Call
    leaves: tuple[Tensor, ...]


Make = Callable[[], Contender]  # a function that prepares a contender, or raises an error if it cannot run


@dataclass(frozen=True)
class Contest:
    """One case: regard's call and its peers, which compute over the same input tensors, and the reference."""

    inputs: Tensors
    ours: Contender
    peers: dict[str, Make]
    reference: Callable[[Tensors, Tensor], Outcome]  # (tensors of one sequence, rows) → results of these rows


def leaves(inputs: Tensors) -> tuple[Tensor, ...]:
    """Return the input tensors whose gradients are computed."""
    return tuple(tensor for tensor in inputs.values() if tensor.requires_grad)


def maker(inputs: Tensors, prepare: Callable[[], Call]) -> Make:
    """Return a function that prepares a contender, whose gradients are those of the tensors in `inputs`."""
    return lambda: Contender(prepare(), leaves(inputs))


def room(case: Case, elements: float) -> None:
    """Raise an error if a peer whose largest tensor has this number of elements would use too much memory."""
    bytes_held = int(elements * ITEM[case.dtype] * (4 if case.gradients else 3))
    if bytes_held > ROOM[case.device]:
        raise ValueError(f"it would take about {size(bytes_held)}")


def compiled(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Return the function compiled by torch.compile for one shape."""
    return torch.compile(function, dynamic=False)
