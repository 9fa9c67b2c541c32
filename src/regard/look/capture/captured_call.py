"""What every way of seeing an attention call shares: the call as it was, its check, and its gradient."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.look.attention_records import Kept, Source
from regard.look.recomputed_weights import Modified, Pairs, lent

_CHECKED_ROWS = 4
_HELD_BYTES = 2**20  # of values that are held for a check


@runtime_checkable
class Computes(Source, Protocol):
    """A source that can also give a part of all sequences where they are, without waiting for the device."""

    def block(self, batch: slice, heads: range, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Call:
    """An attention call that was seen, before it has a name.

    `value` is (b, g, k, e); `output` is what the model goes on with, in whatever form, and `view` brings it, or its
    gradient, to (b, h, q, e).
    """

    kind: str
    source: Computes
    value: Tensor | None
    output: Tensor | None
    scale: float | None = None
    note: str | None = None
    checkable: bool = True
    view: Callable[[Tensor], Tensor] = lambda output: output


@runtime_checkable
class Recorder(Protocol):
    """What a handler may ask of the watcher."""

    sinks: Tensor | None  # of the layer that is running, where its kernel is not told of them

    def record(self, call: Call) -> None: ...

    def cannot_see(self, what: str) -> None: ...

    def safely(self) -> AbstractContextManager[None]:
        """Whatever goes wrong in watching is said in the trace, and does not stop the model."""
        ...

    def heads(self, count: int) -> int | None:
        """How many heads are in an axis of `count` sequences and heads; None where nothing tells."""
        ...

    def inside(self, heads: int) -> AbstractContextManager[None]:
        """See calls again while a handler runs the layer's function that it handles."""
        ...

    def telling(self, sinks: Tensor | None) -> AbstractContextManager[None]:
        """Know of a layer's sinks while it runs."""
        ...

    def deaf(self) -> AbstractContextManager[None]:
        """See nothing: what runs is already being recorded."""
        ...

    @property
    def count(self) -> int:
        """How many calls were seen so far."""
        ...


Function = Callable[..., Any]


class Done(NamedTuple):
    """A function that has run."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


Handler = Callable[[Recorder, Function, tuple[Any, ...], dict[str, Any]], Any]

DROPOUT = "dropout was active: these are the weights before it, and the check cannot apply"


class Checked:
    """weights @ value beside the output itself, at some rows; multiplied and compared when somebody asks."""

    def __init__(self, source: Computes, value: Tensor, rows: Tensor, output: Tensor) -> None:
        self._source, self._value, self._rows, self._output = source, value, rows, output
        self._kept = Kept(value)

    def holds(self) -> list[Tensor]:
        return [self._value, self._output]

    def settle(self) -> "Settled":
        """Multiply now, and keep the values no longer."""
        self._kept.check()
        heads = self._source.shape[1]
        with torch.no_grad(), torch.autocast(self._value.device.type, enabled=False):
            weights = self._source.block(slice(None), range(heads), self._rows)
            return Settled(weights @ spread(self._value, heads).to(weights.dtype), self._output)

    def of(self, batch: int) -> float:
        try:
            return self.settle().of(batch)
        except RuntimeError:  # something was written over since
            return math.nan


class Settled:
    """What was found and what ought to have been."""

    def __init__(self, found: Tensor, output: Tensor) -> None:
        self._found, self._output = found, output

    def holds(self) -> list[Tensor]:
        return [self._found, self._output]

    def of(self, batch: int) -> float:
        """The largest difference over the largest output."""
        found, output = self._found[batch], self._output[batch].to(self._found.dtype)
        return float((found - output).abs().max() / output.abs().max().clamp_min(torch.finfo(output.dtype).tiny))


def checked(call: Call) -> Checked | Settled | None:
    """The check of a call on some rows, with the weights as a record will show them; None where it would tell nothing.

    Small values are held until somebody asks, so that the model is not kept waiting; large ones are not.
    """
    if not call.checkable or call.value is None or call.output is None or 0 in call.source.shape:
        return None
    queries, value = call.source.shape[2], call.value.detach()
    # Four rows tell a wrong mask, scale, head or layer from the right one; more would only cost more.
    count = min(queries, _CHECKED_ROWS)
    rows = torch.tensor([i * (queries - 1) // max(1, count - 1) for i in range(count)], device=value.device)
    output = call.view(call.output.detach()).index_select(-2, rows)
    found = Checked(call.source, value, rows, output)
    return found.settle() if queries == 1 or value.nbytes > _HELD_BYTES or lent(value) else found


def shortened(call: Call) -> Call | None:
    """The call with its queries and keys in fewer bits, said in its note; None where that saves nothing."""
    found = call.source.short() if isinstance(call.source, Pairs | Modified) else None
    if found is None:
        return None
    return replace(call, source=found.source, note=f"{call.note}; {found.note}" if call.note else found.note)


def spread(tensor: Tensor, heads: int) -> Tensor:
    """Values with each head repeated for the query heads that share it."""
    group = heads // max(1, tensor.shape[1])
    return tensor if group <= 1 else tensor.repeat_interleave(group, 1)


def four_axes(tensor: Tensor, heads: int | None = None) -> Tensor:
    """(b, h, n, d): leading axes become one; (n, d) is one head; (b·h, n, d) has `heads` heads where they are known."""
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 3:
        fits = heads is not None and (tensor.shape[0] % heads == 0)
        return tensor.unflatten(0, (-1, heads or 1)) if fits else tensor[:, None]
    return tensor if tensor.ndim == 4 else tensor.reshape(-1, *tensor.shape[-3:])


class Backward:
    """∂L/∂weights = ∂L/∂output · valueᵀ: the values, and the gradient of the output once it has come."""

    def __init__(self, call: Call, name: str) -> None:
        assert call.value is not None
        self._value, self._view, self._name = call.value.detach(), call.view, name
        self._heads = call.source.shape[1]
        self.grad: Tensor | None = None

    def hear(self, grad: Tensor) -> None:
        """Keep the gradient of the output; the last backward pass counts."""
        self.grad = self._view(grad.detach())

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        if self.grad is None:
            raise ValueError(f"no gradient has come to {self._name!r}: call backward() on a loss that depends on it")
        grad = self.grad[batch, heads.start : heads.stop].index_select(-2, rows.to(self.grad.device))
        value = spread(self._value[batch : batch + 1], self._heads)[0, heads.start : heads.stop]
        return (grad.float() @ value.float().mT).cpu()
