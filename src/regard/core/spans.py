"""Spans: rows or columns of the score matrix, as a contiguous range or a tensor of positions."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from regard.core.transforms import transformed
from regard.kernels.availability import capturing

_MOST = 128  # the largest number of constants
_NUMBERS = 2**20  # the largest number of entries of a constant
_constants: dict[Hashable, Tensor] = {}


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


def constant(key: Hashable, device: torch.device, compute: Callable[[], Tensor], numbers: int = 1) -> Tensor:
    """Return compute(), or its earlier result for this key and device; callers must not modify it in place.

    The key must determine the result, which has this number of entries. A large one is not stored, and none while
    graphs are captured or compiled, because their replays would outlive the cache.
    """
    if numbers > _NUMBERS or device.type not in ("cpu", "cuda") or torch.compiler.is_compiling() or transformed():
        return compute()
    if capturing(device) or torch._C._len_torch_dispatch_stack():
        return compute()
    # A result belongs to one stream: another stream would have to wait for it.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    key = key, device, stream, torch.is_inference_mode_enabled()
    found = _constants.get(key)
    if found is None:
        if len(_constants) >= _MOST:
            _constants.clear()
        found = _constants[key] = compute()
    return found


def positions(span: Span, device: torch.device) -> Tensor:
    """Return the positions of a span as a 1-D integer tensor."""
    if isinstance(span, Tensor):
        return span.to(device)
    return constant(
        ("positions", span.start, span.stop),
        device,
        lambda: torch.arange(span.start, span.stop, device=device),
        span.stop - span.start,
    )


def take(tensor: Tensor, axis: int, span: Span) -> Tensor:
    """Return the part of a broadcastable tensor that a span selects, as a view if the span is a range."""
    if tensor.shape[axis] == 1:
        return tensor
    if isinstance(span, Tensor):
        return tensor.index_select(axis, span.to(tensor.device))
    return tensor.narrow(axis, span.start, span.stop - span.start)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of shapes that broadcast together; `torch.broadcast_shapes` takes ten times as long."""
    if len(shapes) < 2 or torch.compiler.is_compiling():
        return tuple(torch.broadcast_shapes(*shapes)) if len(shapes) != 1 else shapes[0]
    axes = zip_longest(*map(reversed, shapes), fillvalue=1)
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in axes)[::-1]


def cut(length: int, size: int) -> list[Stretch]:
    """Return consecutive ranges of at most `size` that cover 0 … length."""
    if 0 < length <= size:  # one range without a loop: torch.compile would specialise the loop on the length
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
