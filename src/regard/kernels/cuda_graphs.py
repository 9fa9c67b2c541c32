"""CUDA graphs: a sequence of kernel launches recorded once and replayed as one launch.

`capture` records any function; `run` records a loop of small kernels once for each combination of shapes.
"""

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Loop = Callable[..., tuple[Tensor | None, ...]]
Outcome = TypeVar("Outcome")

_MOST = 16  # the largest number of cached graphs
_AGAIN = 2  # capture at the second occurrence of the same shapes: a capture takes as long as about ten runs
_OFTEN = 32  # if the cache is full, capture at this occurrence and evict the least recently used graph
_SHAPES = 1024  # the largest number of combinations of shapes whose occurrences are counted

# True inside `recorded`. A replay of a graph has no host overhead, so kernels are then chosen by device time only.
recording = False


def capture(
    work: Callable[[], Outcome], device: torch.device, *, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Outcome]:
    """Capture the launches of `work` as a CUDA graph without running them; return the graph and the result of `work`.

    Each replay writes its results to the returned tensors. `work` must have run once before, because nothing may be
    compiled or loaded during capture. Graphs that share a memory `pool` must run one after another.
    """
    with aside(device), _uncollected():
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outcome = work()
        finally:
            graph.capture_end()
    return graph, outcome


@contextmanager
def recorded() -> Iterator[None]:
    """Set `recording` during the run that compiles the kernels of a graph, and during its capture."""
    global recording
    before, recording = recording, True
    try:
        yield
    finally:
        recording = before


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Switch to a separate stream, as capture requires; the previous stream waits for it. On the CPU, do nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):  # `device` may differ from the current device
        usual, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(usual)
        with torch.cuda.stream(side):
            yield
        usual.wait_stream(side)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable Python's cyclic garbage collection: in a capture it could free CUDA objects made outside of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run(loop: Loop, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return loop(*tensors); on CUDA the loop is captured when shapes occur again, and replayed as one graph.

    The loop must launch the same kernels for the same shapes and never synchronise. Results are copies, so later
    replays do not overwrite them.
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    if first.device.type != "cuda" or _capturing(first.device):
        return loop(*tensors)
    key = _key(loop, tensors, first)
    graph = _graphs.get(key)
    if graph is not None:
        _graphs.move_to_end(key)
        return graph.replay(tensors)
    _seen[key] = count = _seen.pop(key, 0) + 1
    if len(_seen) > _SHAPES:
        _seen.popitem(last=False)
    if count < (_AGAIN if len(_graphs) < _MOST else _OFTEN):
        return loop(*tensors)
    if len(_graphs) >= _MOST:
        _graphs.popitem(last=False)
    del _seen[key]
    graph = _graphs[key] = _Graph(loop, tensors, first.device)
    return graph.replay(tensors)


def clear() -> None:
    """Discard every graph and free their memory."""
    _graphs.clear()
    _seen.clear()


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _key(loop: Loop, tensors: Sequence[Tensor | None], first: Tensor) -> tuple[Any, ...]:
    """Return the properties of a call on which the launched kernels depend, as a key of the cache of graphs."""
    shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
    precision = torch.backends.cuda.matmul.fp32_precision
    stream = torch.cuda.current_stream(first.device).cuda_stream
    return loop, first.device, stream, precision, shapes


class _Graph:
    """A loop captured as a CUDA graph with copies of its input tensors at fixed addresses, all on one device."""

    def __init__(self, loop: Loop, tensors: Sequence[Tensor | None], device: torch.device) -> None:
        self.inputs = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
        with torch.cuda.device(device):
            loop(*self.inputs)  # a first run compiles the kernels for these addresses before the capture
        self.graph, self.outputs = capture(lambda: loop(*self.inputs), device)

    def replay(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        for place, tensor in zip(self.inputs, tensors, strict=True):
            if place is not None and tensor is not None:
                place.copy_(tensor)
        self.graph.replay()
        return tuple(None if output is None else output.clone() for output in self.outputs)


_graphs: OrderedDict[tuple[Any, ...], _Graph] = OrderedDict()
_seen: OrderedDict[tuple[Any, ...], int] = OrderedDict()
