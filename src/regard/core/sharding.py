"""Are the sequences of a call spread over a process group? `regard.parallel.context` says so here, for its block."""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.core.attention import Attended


@runtime_checkable
class Sharding(Protocol):
    """How calls are computed whose tensors hold this process's part of the sequences."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> "Attended":
        """`regard.attention` over the sequences of all processes."""
        ...

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The positions, in the whole sequence, of this process's part of that length."""
        ...


current: Sharding | None = None


def refuse(what: str) -> None:
    """Raise inside `regard.parallel.context`, for what would compute on this process's part alone."""
    if current is not None:
        raise NotImplementedError(f"{what} is not computed over a process group: leave regard.parallel.context first")


def shifted(offset: int | Tensor, length: int, device: torch.device) -> int | Tensor:
    """What to add to 0, 1, … for the positions of a sequence, of which this process may hold a part only."""
    if current is None:
        return offset
    return current.positions(length, device) - torch.arange(length, device=device) + offset
