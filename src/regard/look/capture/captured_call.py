"""A captured attention call, its check and its gradient: shared by all capture modules."""

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
_HELD_BYTES = 2**20  # bytes of values that are stored for a check


@runtime_checkable
class Computes(Source, Protocol):
    """A source that can also return a part of all sequences on their device, without synchronising."""

    def block(self, batch: slice, heads: range, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Call:
    """A captured attention call that has no name yet.

    `value` is (b, g, k, e); `output` is the tensor that the model uses, in any shape, and `view` reshapes it, or its
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
    """The interface of the watcher that handlers use."""

    sinks: Tensor | None  # attention sinks of the running layer, if they are not arguments of its kernel

    def record(self, call: Call) -> None: ...

    def cannot_see(self, what: str) -> None: ...

    def safely(self) -> AbstractContextManager[None]:
        """Report an error of the capture in the trace instead of stopping the model."""

    def heads(self, count: int) -> int | None:
        """Return the number of heads in an axis of `count` sequences and heads; None if unknown."""

    def inside(self, heads: int) -> AbstractContextManager[None]:
        """Enable capture while a handler runs the function of the layer."""

    def telling(self, sinks: Tensor | None) -> AbstractContextManager[None]:
        """Store the attention sinks of a layer while it runs."""

    def deaf(self) -> AbstractContextManager[None]:
        """Disable capture: the running call is already being recorded."""

    @property
    def count(self) -> int:
        """Return the number of calls captured so far."""


Function = Callable[..., Any]


class Done(NamedTuple):
    """A call of a function: its arguments and its result."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


Handler = Callable[[Recorder, Function, tuple[Any, ...], dict[str, Any]], Any]

DROPOUT = "dropout was active: these are the weights before it, and the check cannot apply"


class Checked:
    """Compares weights @ value with the output at some rows; computed when requested."""

    def __init__(self, source: Computes, value: Tensor, rows: Tensor, output: Tensor) -> None:
        self._source, self._value, self._rows, self._output = source, value, rows, output
        self._kept = Kept(value)

    def holds(self) -> list[Tensor]:
        return [self._value, self._output]

    def settle(self) -> "Settled":
        """Compute the product now, and release the values."""
        self._kept.check()
        heads = self._source.shape[1]
        with torch.no_grad(), torch.autocast(self._value.device.type, enabled=False):
            weights = self._source.block(slice(None), range(heads), self._rows)
            return Settled(weights @ spread(self._value, heads).to(weights.dtype), self._output)

    def of(self, batch: int) -> float:
        try:
            return self.settle().of(batch)
        except RuntimeError:  # a tensor has been overwritten since the call
            return math.nan


class Settled:
    """The computed and the expected output."""

    def __init__(self, found: Tensor, output: Tensor) -> None:
        self._found, self._output = found, output

    def holds(self) -> list[Tensor]:
        return [self._found, self._output]

    def of(self, batch: int) -> float:
        """Return the largest difference over the largest output."""
        found, output = self._found[batch], self._output[batch].to(self._found.dtype)
        return float((found - output).abs().max() / output.abs().max().clamp_min(torch.finfo(output.dtype).tiny))


def checked(call: Call) -> Checked | Settled | None:
    """Return the check of a call on some rows, with the weights that the record shows; None if it would be meaningless.

    Small values are stored and compared when requested, which does not delay the model; large ones at once.
    """
    if not call.checkable or call.value is None or call.output is None or 0 in call.source.shape:
        return None
    queries, value = call.source.shape[2], call.value.detach()
    # Four rows suffice to detect a wrong mask, scale, head or layer.
    count = min(queries, _CHECKED_ROWS)
    rows = torch.tensor([i * (queries - 1) // max(1, count - 1) for i in range(count)], device=value.device)
    output = call.view(call.output.detach()).index_select(-2, rows)
    found = Checked(call.source, value, rows, output)
    return found.settle() if queries == 1 or value.nbytes > _HELD_BYTES or lent(value) else found


def shortened(call: Call) -> Call | None:
    """Return the call with its queries and keys in fewer bits, with a note about it; None if that saves nothing."""
    found = call.source.short() if isinstance(call.source, Pairs | Modified) else None
    if found is None:
        return None
    return replace(call, source=found.source, note=f"{call.note}; {found.note}" if call.note else found.note)


def spread(tensor: Tensor, heads: int) -> Tensor:
    """Return values with each head repeated for the query heads that share it."""
    group = heads // max(1, tensor.shape[1])
    return tensor if group <= 1 else tensor.repeat_interleave(group, 1)


def four_axes(tensor: Tensor, heads: int | None = None) -> Tensor:
    """Return (b, h, n, d): leading axes become one; (n, d) is one head; (b·h, n, d) has `heads` heads if known."""
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 3:
        fits = heads is not None and (tensor.shape[0] % heads == 0)
        return tensor.unflatten(0, (-1, heads or 1)) if fits else tensor[:, None]
    return tensor if tensor.ndim == 4 else tensor.reshape(-1, *tensor.shape[-3:])


class Backward:
    """∂L/∂weights = ∂L/∂output · valueᵀ, from the values and the gradient of the output after the backward pass."""

    def __init__(self, call: Call, name: str) -> None:
        assert call.value is not None
        self._value, self._view, self._name = call.value.detach(), call.view, name
        self._heads = call.source.shape[1]
        self.grad: Tensor | None = None

    def store(self, grad: Tensor) -> None:
        """Store the gradient of the output; the last backward pass replaces earlier ones."""
        self.grad = self._view(grad.detach())

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        if self.grad is None:
            raise ValueError(f"no gradient has come to {self._name!r}: call backward() on a loss that depends on it")
        grad = self.grad[batch, heads.start : heads.stop].index_select(-2, rows.to(self.grad.device))
        value = spread(self._value[batch : batch + 1], self._heads)[0, heads.start : heads.stop]
        return (grad.float() @ value.float().mT).cpu()
