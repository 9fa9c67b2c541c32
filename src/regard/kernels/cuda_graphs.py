"""CUDA graphs: work recorded once and replayed as one launch; loops of small kernels, recorded for each shape."""

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

Loop = Callable[..., tuple[Tensor | None, ...]]
Outcome = TypeVar("Outcome")

_MOST = 16  # graphs held at a time
_AGAIN = 2  # a graph is recorded at this occurrence of its shapes; recording costs as much as some ten runs
_OFTEN = 32  # ... or at this one, if as many as are held exist already: the least recently used makes room
_SHAPES = 1024  # shapes counted


def capture(
    work: Callable[[], Outcome], device: torch.device, *, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Outcome]:
    """Record what `work` launches on a device, without running it: the graph, and what `work` returned.

    Tensors that it returned are filled by each replay. Everything that it calls must have run before: nothing may be
    compiled or loaded while recording. Graphs that share a `pool` must run one after another.
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
def aside(device: torch.device) -> Iterator[None]:
    """On a stream of the device's own, as recording needs; the usual stream waits for it. On the CPU, nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):  # which need not be the current one
        usual, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(usual)
        with torch.cuda.stream(side):
            yield
        usual.wait_stream(side)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python's collector must not free a tensor while a graph is recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run(loop: Loop, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """loop(*tensors), on CUDA as one graph once the same shapes have occurred before.

    The loop must launch the same kernels for the same shapes and never wait for the device. Results are copies: later
    replays do not touch them.
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    if first.device.type != "cuda" or _capturing(first.device):
        return loop(*tensors)
    key = _key(loop, tensors, first)
    found = _graphs.get(key)
    if found is not None:
        _graphs.move_to_end(key)
        return found.replay(tensors)
    _seen[key] = count = _seen.pop(key, 0) + 1
    if len(_seen) > _SHAPES:
        _seen.popitem(last=False)
    if count < (_AGAIN if len(_graphs) < _MOST else _OFTEN):
        return loop(*tensors)
    if len(_graphs) >= _MOST:
        _graphs.popitem(last=False)
    del _seen[key]
    found = _graphs[key] = _Graph(loop, tensors, first.device)
    return found.replay(tensors)


def clear() -> None:
    """Discard every graph and free their memory."""
    _graphs.clear()
    _seen.clear()


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _key(loop: Loop, tensors: Sequence[Tensor | None], first: Tensor) -> tuple[Any, ...]:
    """What decides which kernels are launched."""
    shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
    precision = torch.backends.cuda.matmul.fp32_precision
    stream = torch.cuda.current_stream(first.device).cuda_stream
    return loop, first.device, stream, precision, shapes


class _Graph:
    """One loop recorded over tensors at fixed addresses, all on one device."""

    def __init__(self, loop: Loop, tensors: Sequence[Tensor | None], device: torch.device) -> None:
        self.inputs = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
        with torch.cuda.device(device):
            loop(*self.inputs)  # other addresses may need other kernels: they are compiled now, not while recording
        self.graph, self.outputs = capture(lambda: loop(*self.inputs), device)

    def replay(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        for place, tensor in zip(self.inputs, tensors, strict=True):
            if place is not None and tensor is not None:
                place.copy_(tensor)
        self.graph.replay()
        return tuple(None if output is None else output.clone() for output in self.outputs)


_graphs: OrderedDict[tuple[Any, ...], _Graph] = OrderedDict()
_seen: OrderedDict[tuple[Any, ...], int] = OrderedDict()
