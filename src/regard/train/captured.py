"""Gradients by CUDA graph: a small model's step is some hundred launches, and a graph makes one of them."""

import logging
from collections import Counter, OrderedDict
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.train.updates import LossFunction, differentiated

_MOST = 64  # graphs kept; they share their memory
_AGAIN = 2  # a graph is recorded when a shape comes so often: the first time compiles and warms what it calls

_log = logging.getLogger(__name__)

Shapes = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Captured:
    """Leaves a batch's gradients in the parameters as `differentiated` does, replayed for shapes that come again.

    A batch is a dataclass of tensors, and batches should come in few shapes. The loss must not wait for the device, and
    its count must be a tensor there. Where recording fails, that is said once, and every batch runs as it is.
    """

    def __init__(self, loss: LossFunction, model: Any, precision: torch.dtype, device: torch.device) -> None:
        self._loss, self._model, self._precision, self._device = loss, model, precision, device
        self._graphs: OrderedDict[Shapes, _Graph] = OrderedDict()
        self._seen: Counter[Shapes] = Counter()
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []  # places that stay the same over all graphs
        self._works = device.type == "cuda"
        self._pool: Any = None

    def begin(self) -> None:
        """Before the batches of an update: no gradient yet."""
        if not self._gradients:
            for parameter in self._model.parameters():
                parameter.grad = None
            return
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        torch._foreach_zero_([gradient for _, gradient in self._gradients])

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The batch's total and count; its gradients are added to those in the parameters."""
        shapes = _shapes(batch) if self._works else None
        if shapes is None:
            return self._plain(batch)
        if shapes not in self._graphs:
            self._seen[shapes] += 1
            if self._seen[shapes] < _AGAIN or not self._gradients or not self._record(shapes, batch):
                found = self._plain(batch)
                self._settle_places()
                return found
        self._graphs.move_to_end(shapes)
        return self._graphs[shapes].replay(batch)

    def _plain(self, batch: Any) -> tuple[Tensor, Tensor]:
        return differentiated(self._loss, self._model, batch, self._precision, self._device)

    def _settle_places(self) -> None:
        """After the first batch it is known which parameters have gradients: these tensors will hold them for good."""
        if not self._gradients:
            self._gradients = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]

    def _record(self, shapes: Shapes, batch: Any) -> bool:
        """Records the batch's shapes, without running them; False where that cannot be done."""
        held = type(batch)(*(getattr(batch, field.name).to(self._device).clone() for field in fields(batch)))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._plain(held)
        except RuntimeError as error:
            _log.warning("no CUDA graphs for this model: %s", str(error).partition("\n")[0])
            self._works = False
            return False
        self._pool = graph.pool()
        if len(self._graphs) >= _MOST:
            self._graphs.popitem(last=False)
        self._graphs[shapes] = _Graph(graph, held, outputs)
        return True


class _Graph:
    """The recorded work of one set of shapes, with its places for the batch and the sums."""

    def __init__(self, graph: torch.cuda.CUDAGraph, batch: Any, outputs: tuple[Tensor, Tensor]) -> None:
        self._graph, self._batch, self._outputs = graph, batch, outputs

    def replay(self, batch: Any) -> tuple[Tensor, Tensor]:
        for field in fields(batch):
            getattr(self._batch, field.name).copy_(getattr(batch, field.name), non_blocking=True)
        self._graph.replay()
        total, count = self._outputs
        return total.clone(), count.clone()


def _shapes(batch: Any) -> Shapes | None:
    """What decides which kernels a batch needs; None for a batch that is not a dataclass of tensors."""
    if not is_dataclass(batch) or isinstance(batch, type):
        return None
    found = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    if not all(isinstance(value, Tensor) for _, value in found):
        return None
    return tuple((name, value.shape, value.dtype) for name, value in found)
