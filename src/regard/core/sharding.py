"""The process group over which the sequences of a call are sharded, set by `regard.parallel.context`."""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.core.attended import Attended


@runtime_checkable
class Sharding(Protocol):
    """The protocol of an object that computes attention calls in which each process holds a part of the sequences."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> "Attended":
        """Compute `regard.attention` over the sequences of all processes."""
        ...

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions in the whole sequence of this process's part, which has `length` positions."""
        ...


current: Sharding | None = None


def refuse(what: str) -> None:
    """Raise inside `regard.parallel.context`, for functions that would compute only this process's part."""
    if current is not None:
        raise NotImplementedError(f"{what} is not computed over a process group: leave regard.parallel.context first")


def shifted(offset: int | Tensor, length: int, device: torch.device) -> int | Tensor:
    """Return what to add to 0, 1, … length − 1 to get positions in the whole sequence.

    Inside `regard.parallel.context`, where this process holds a part of the sequence, the result is a tensor of
    `length` numbers.
    """
    if current is None:
        return offset
    return current.positions(length, device) - torch.arange(length, device=device) + offset
