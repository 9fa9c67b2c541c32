"""The process group over which the sequences of a call are sharded, set by `regard.parallel.context`."""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.core.attention import Attended


@runtime_checkable
class Sharding(Protocol):
    """The implementation of calls whose tensors hold this process's part of the sequences."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> "Attended":
        """Compute `regard.attention` over the sequences of all processes."""
        ...

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions, in the whole sequence, of this process's part of the given length."""
        ...


current: Sharding | None = None


def refuse(what: str) -> None:
    """Raise inside `regard.parallel.context`, for functions that would use this process's part alone."""
    if current is not None:
        raise NotImplementedError(f"{what} is not computed over a process group: leave regard.parallel.context first")


def shifted(offset: int | Tensor, length: int, device: torch.device) -> int | Tensor:
    """Return what to add to 0, 1, … to get positions in the whole sequence, of which this process may hold a part."""
    if current is None:
        return offset
    return current.positions(length, device) - torch.arange(length, device=device) + offset
