"""Spans: rows or columns of the score matrix, as a contiguous range or a tensor of positions; and cached constants."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from regard.core.transforms import transformed
from regard.kernels.availability import capturing

_MOST = 128  # the largest number of cached constants
_NUMBERS = 2**20  # the largest number of entries of a constant that is cached
_constants: dict[Hashable, Tensor] = {}


@dataclass(frozen=True)
class Stretch:
    """A range of positions, start ≤ i < stop.

    This class replaces `range`, because torch.compile treats the bounds of a `range` as constants and compiles a new
    graph for each length.
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Contiguous = range | Stretch
Span = Contiguous | Tensor


def all_of(length: int) -> Stretch:
    """Return the range of all positions of an axis of this length."""
    return Stretch(0, length)


def constant(key: Hashable, device: torch.device, compute: Callable[[], Tensor], numbers: int = 1) -> Tensor:
    """Return compute(), or its cached result for this key and device; callers must not modify the result in place.

    The key must determine the result, which has `numbers` entries. Large results are not cached. Nothing is cached
    while a graph is captured or compiled, because the graph could be replayed after the cache has freed the tensor.
    """
    if numbers > _NUMBERS or device.type not in ("cpu", "cuda") or torch.compiler.is_compiling() or transformed():
        return compute()
    if capturing(device) or torch._C._len_torch_dispatch_stack():
        return compute()
    # Each CUDA stream has results of its own: another stream would have to wait until a result is computed.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    key = key, device, stream, torch.is_inference_mode_enabled()
    result = _constants.get(key)
    if result is None:
        if len(_constants) >= _MOST:
            _constants.clear()
        result = _constants[key] = compute()
    return result


def positions(span: Span, device: torch.device) -> Tensor:
    """Return positions given as a range or a tensor as a 1-D integer tensor."""
    if isinstance(span, Tensor):
        return span.to(device)
    return constant(
        ("positions", span.start, span.stop),
        device,
        lambda: torch.arange(span.start, span.stop, device=device),
        span.stop - span.start,
    )


def take(tensor: Tensor, axis: int, span: Span) -> Tensor:
    """Return the entries of a tensor at the positions `span` of an axis, as a view if the positions are a range.

    If the axis has size 1, the tensor is returned unchanged, because it broadcasts.
    """
    if tensor.shape[axis] == 1:
        return tensor
    if isinstance(span, Tensor):
        return tensor.index_select(axis, span.to(tensor.device))
    return tensor.narrow(axis, span.start, span.stop - span.start)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which these shapes broadcast, ten times as fast as `torch.broadcast_shapes`.

    This function does not check that the shapes broadcast.
    """
    if len(shapes) < 2 or torch.compiler.is_compiling():
        return tuple(torch.broadcast_shapes(*shapes)) if len(shapes) != 1 else shapes[0]
    axes = zip_longest(*map(reversed, shapes), fillvalue=1)
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in axes)[::-1]


def cut(length: int, size: int) -> list[Stretch]:
    """Return consecutive ranges of at most `size` positions that cover 0 … length − 1."""
    if 0 < length <= size:  # one range without a loop: torch.compile would specialise the loop on the length
        return [all_of(length)]
    return [Stretch(start, min(start + size, length)) for start in range(0, length, size)]


def align_first(tensor: Tensor, axes: int, shape: tuple[int, ...], name: str) -> Tensor:
    """Return the tensor with axes of size 1 inserted before its last `axes` axes, so that it broadcasts to the scores.

    The other axes must match the first axes of the scores' `shape`: (b, q) becomes (b, 1, q) for scores (b, h, q, k).
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
