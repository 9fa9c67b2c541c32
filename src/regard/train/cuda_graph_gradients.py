"""Gradients by CUDA graph: a small model's step launches hundreds of kernels, which a graph launches all at once."""

import logging
import warnings
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.kernels import cuda_graphs
from regard.train.updates import LossFunction, differentiated

# The largest number of CUDA graphs, one for each shape of a batch, which share a memory pool; batches of further shapes
# run without a graph.
_MOST = 64
_AGAIN = 2  # a graph is captured when a shape occurs the second time: the first batch compiles and warms up kernels

_log = logging.getLogger(__name__)

Shapes = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Captured:
    """Adds a batch's gradients to the parameters' `grad` as `differentiated` does; repeated shapes replay a CUDA graph.

    A batch is a dataclass of tensors, and batches should come in few shapes. The loss must not synchronise with the
    device, and its count must be a tensor on the device. If the loss synchronises, a warning is logged once, and from
    then on every batch runs without a graph.
    """

    def __init__(self, loss: LossFunction, model: Any, precision: torch.dtype, device: torch.device) -> None:
        self._loss, self._model, self._precision, self._device = loss, model, precision, device
        self._graphs: dict[Shapes, _Graph] = {}
        self._seen: Counter[Shapes] = Counter()
        # the gradient of each parameter, to whose address all graphs write
        self._places: dict[nn.Parameter, Tensor] = {}
        self._works = device.type == "cuda"
        self._pool: Any = None

    def begin(self) -> None:
        """Set all gradients to zero before the batches of an update, in tensors whose addresses stay the same."""
        for parameter in self._model.parameters():
            parameter.grad = self._places.get(parameter)
        if self._places:
            torch._foreach_zero_(list(self._places.values()))

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return a batch's total loss and number of summands, and add its gradients to the parameters' gradients."""
        shapes = _shapes(batch) if self._works else None
        if shapes is None:
            return self._plain(batch)
        if shapes in self._graphs:
            return self._graphs[shapes].replay(batch)
        self._seen[shapes] += 1
        if self._seen[shapes] >= _AGAIN and self._places and len(self._graphs) < _MOST:
            return self._recorded(shapes, batch)
        result = self._plain(batch)
        # The first batch determines which parameters have gradients. The gradients of all later batches are added to
        # the gradient tensors of these parameters.
        self._places = self._places or self._gradients()
        return result

    def _plain(self, batch: Any) -> tuple[Tensor, Tensor]:
        return differentiated(self._loss, self._model, batch, self._precision, self._device)

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        return {p: p.grad for p in self._model.parameters() if p.grad is not None}

    def _recorded(self, shapes: Shapes, batch: Any) -> tuple[Tensor, Tensor]:
        """Run the batch without a graph, and if it did not synchronise with the device, capture a graph of its shapes.

        The total loss of the batch and the number of its summands, such as tokens, are returned.
        """
        held = type(batch)(*(getattr(batch, field.name).to(self._device).clone() for field in fields(batch)))
        before = [gradient.clone() for gradient in self._places.values()]
        try:
            with _no_waiting(), cuda_graphs.recorded():
                result = self._plain(held)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The batch runs without a graph first, to detect synchronisation before a capture: a capture that fails
            # half-way leaves torch's random generator unusable.
            _log.warning("no CUDA graphs for this model: %s", str(error).partition("\n")[0])
            self._works = False
            self.begin()
            torch._foreach_add_(list(self._places.values()), before)
            return self._plain(batch)
        # true if this batch gave gradients to the same parameters as the first batch
        if self._gradients().keys() == self._places.keys():
            # the graphs have a memory pool of their own and cannot use the blocks of memory that PyTorch has cached
            torch.cuda.empty_cache()
            with cuda_graphs.recorded():
                graph, outputs = cuda_graphs.capture(lambda: self._plain(held), self._device, pool=self._pool)
            self._pool = graph.pool()
            self._graphs[shapes] = _Graph(graph, held, outputs)
        return result


class _Graph:
    """A CUDA graph captured for one set of batch shapes, with its static input and output tensors."""

    def __init__(self, graph: torch.cuda.CUDAGraph, batch: Any, outputs: tuple[Tensor, Tensor]) -> None:
        self._graph, self._batch, self._outputs = graph, batch, outputs

    def replay(self, batch: Any) -> tuple[Tensor, Tensor]:
        for field in fields(batch):
            getattr(self._batch, field.name).copy_(getattr(batch, field.name), non_blocking=True)
        self._graph.replay()
        total, count = self._outputs
        return total.clone(), count.clone()


@contextmanager
def _no_waiting() -> Generator[None, None, None]:
    """A context in which an operation that makes the host wait for the device raises an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _shapes(batch: Any) -> Shapes | None:
    """Return names, shapes and dtypes of a batch's tensors as a key; None if it is not a dataclass of tensors."""
    if not is_dataclass(batch) or isinstance(batch, type):
        return None
    values = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    if not all(isinstance(value, Tensor) for _, value in values):
        return None
    return tuple((name, value.shape, value.dtype) for name, value in values)
