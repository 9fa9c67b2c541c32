"""Spans: rows or columns of the score matrix, as a contiguous range or a tensor of positions."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stretch:
    """start ≤ i < stop, like `range`, whose length torch.compile would make a constant, with a graph for each
    length."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Contiguous = range | Stretch
Span = Contiguous | Tensor


def all_of(length: int) -> Stretch:
    """Return the span of a whole axis."""
    return Stretch(0, length)


def positions(span: Span, device: torch.device) -> Tensor:
    """Return the positions of a span as a 1-D integer tensor."""
    if isinstance(span, Tensor):
        return span.to(device)
    return torch.arange(span.start, span.stop, device=device)


def take(tensor: Tensor, axis: int, span: Span) -> Tensor:
    """Return the part of a broadcastable tensor that a span selects, as a view if the span is a range."""
    if tensor.shape[axis] == 1:
        return tensor
    if isinstance(span, Tensor):
        return tensor.index_select(axis, span.to(tensor.device))
    return tensor.narrow(axis, span.start, span.stop - span.start)


def cut(length: int, size: int) -> list[Stretch]:
    """Return consecutive ranges of at most `size` that cover 0 … length."""
    if 0 < length <= size:  # avoids a loop, which torch.compile would specialise on the length
        return [all_of(length)]
    return [Stretch(start, min(start + size, length)) for start in range(0, length, size)]


def align_first(tensor: Tensor, axes: int, shape: tuple[int, ...], name: str) -> Tensor:
    """View a tensor whose leading axes match the FIRST axes of the scores' leading ones as (*leading, *last).

    Axes of size 1 are inserted before its last `axes` axes, so that (b, q) fits scores (b, h, q, k).
    """
    leading, own = shape[:-2], tuple(tensor.shape[: tensor.ndim - axes])
    fits = len(own) <= len(leading) and all(a in (1, b) for a, b in zip(own, leading, strict=False))
    if not fits:
        raise ValueError(
            f"{name} has leading axes {own}: they must match the first of the scores' axes {leading} "
            f"(the scores are {shape})"
        )
    ones = (1,) * (len(leading) - len(own))
    return tensor.reshape(*own, *ones, *tensor.shape[tensor.ndim - axes :])
