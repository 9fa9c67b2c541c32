"""Tensors sent between processes during computation, and the count of bytes sent."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from regard.core.spans import Stretch
from regard.parallel.sequences import Group


@dataclass
class Traffic:
    """Bytes that this process has sent: keys and values forward; keys, values and gradients backward; ids of masks."""

    forward: int = 0
    backward: int = 0
    masks: int = 0

    @property
    def total(self) -> int:
        """Return the total number of bytes that this process has sent."""
        return self.forward + self.backward + self.masks


_counting: list[Traffic] = []
_lock = threading.Lock()  # the backward pass of CUDA tensors runs in a separate thread


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the bytes that attention over process groups sends from this process.

    >>> with traffic() as sent:
    ...     pass
    >>> sent
    Traffic(forward=0, backward=0, masks=0)
    """
    counter = Traffic()
    _counting.append(counter)
    try:
        yield counter
    finally:
        _counting.remove(counter)


def count(kind: str, size: int) -> None:
    """Add a number of bytes to the counter of every open `traffic` context."""
    with _lock:
        for counter in _counting:
            setattr(counter, kind, getattr(counter, kind) + size)


@dataclass(frozen=True, eq=False)
class Exchange:
    """A pair of transfers in progress: one tensor to a process and one from another."""

    works: Sequence[dist.Work]
    sent: Tensor | None  # the sent tensor, held until the other process has received it
    received: Tensor | None

    def wait(self) -> Tensor | None:
        """Wait for the received tensor and return it."""
        for work in self.works:
            work.wait()
        return self.received


def start(group: Group, to: int, sent: Tensor | None, source: int, received: Tensor | None, kind: str) -> Exchange:
    """Send a tensor to process `to` and receive one from process `source`; None means no transfer."""
    operations = []
    if sent is not None:
        operations.append(dist.P2POp(dist.isend, sent, _peer(group, to), group))
        count(kind, sent.numel() * sent.element_size())
    if received is not None:
        operations.append(dist.P2POp(dist.irecv, received, _peer(group, source), group))
    return Exchange(dist.batch_isend_irecv(operations) if operations else (), sent, received)


def _peer(group: Group, rank: int) -> int:
    """Return the global rank of a rank in the group."""
    return rank if group is None else dist.get_global_rank(group, rank)


def packed(tensors: Sequence[Tensor], stretches: Sequence[Stretch]) -> Tensor | None:
    """Return ranges of positions of several tensors (…, n, size), concatenated in one flat tensor; None if that is
    empty."""
    pieces = [t.narrow(-2, s.start, len(s)).reshape(-1) for s in stretches for t in tensors]
    return torch.cat(pieces) if sum(piece.numel() for piece in pieces) else None


def room(tensors: Sequence[Tensor], stretches: Sequence[Stretch]) -> Tensor | None:
    """Return an empty flat tensor to receive what another process sends by `packed`; None if it sends nothing.

    The other process sends the ranges `stretches` of tensors with the shapes of `tensors`.
    """
    length = sum(len(s) for s in stretches)
    numbers = sum(t.numel() // max(1, t.shape[-2]) for t in tensors) * length
    return tensors[0].new_empty(numbers) if numbers else None


def unpacked(flat: Tensor, tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Split a flat tensor of `packed` into the tensors of each range, shaped like `tensors` except for the length."""
    shapes = [(*like.shape[:-2], length, like.shape[-1]) for length in lengths for like in tensors]
    pieces = flat.split([torch.Size(shape).numel() for shape in shapes])
    parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    return [tuple(parts[first : first + len(tensors)]) for first in range(0, len(parts), len(tensors))]
