"""A captured attention call, the check of its weights against its output, and its gradient.

All modules of `regard.look.capture` that capture attention calls use the classes of this module.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.look.attention_records import Source, VersionedTensors
from regard.look.recomputed_weights import Modified, Pairs, lent

_CHECKED_ROWS = 4  # number of rows of the weights whose product with the values is compared with the output
# largest size in bytes of a value tensor that is stored, so that weights @ value can be compared with the output later
_HELD_BYTES = 2**20


@runtime_checkable
class Computes(Source, Protocol):
    """A `Source` that can also compute its weights on the device of its tensors, without waiting for that device."""

    def block(self, batch: slice, heads: range, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Call:
    """A captured attention call, before the watcher names it and adds it to the trace.

    `value` is (batch, key/value heads, keys, features). `output` is the tensor that the call returned to the model, in
    any shape; `view` reshapes the output, or its gradient, to (batch, query heads, queries, features).
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
    """The interface through which the handlers of captured functions add calls to a trace."""

    sinks: Tensor | None  # attention sinks of the running layer, for kernels that do not take the sinks as an argument

    def record(self, call: Call) -> None: ...

    def cannot_see(self, what: str) -> None: ...

    def safely(self) -> AbstractContextManager[None]:
        """In this context, an exception in the capture code is reported in the trace and does not stop the model."""

    def heads(self, count: int) -> int | None:
        """Return the number of heads in an axis of length `count` that joins sequences and heads; None if unknown."""

    def inside(self, heads: int) -> AbstractContextManager[None]:
        """In this context, attention calls inside the function of a layer with `heads` heads are captured."""

    def with_sinks(self, sinks: Tensor | None) -> AbstractContextManager[None]:
        """In this context, `self.sinks` are the attention sinks of the running layer."""

    def paused(self) -> AbstractContextManager[None]:
        """In this context no attention call is captured, because the call that contains them all is itself recorded."""

    @property
    def count(self) -> int:
        """Return the number of calls captured so far."""


Function = Callable[..., Any]


class Done(NamedTuple):
    """The arguments and the result of a finished call of a torch function."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


Handler = Callable[[Recorder, Function, tuple[Any, ...], dict[str, Any]], Any]

DROPOUT = "dropout was active: these are the weights before it, and the check cannot apply"


class Checked:
    """A check that compares weights @ value with the recorded output at some rows when it is requested."""

    def __init__(self, source: Computes, value: Tensor, rows: Tensor, output: Tensor) -> None:
        self._source, self._value, self._rows, self._output = source, value, rows, output
        self._versioned = VersionedTensors(value)

    def holds(self) -> list[Tensor]:
        return [self._value, self._output]

    def settle(self) -> "Settled":
        """Return the check with weights @ value computed now, so that the values need not be stored any longer."""
        self._versioned.check()
        heads = self._source.shape[1]
        with torch.no_grad(), torch.autocast(self._value.device.type, enabled=False):
            weights = self._source.block(slice(None), range(heads), self._rows)
            return Settled(weights @ spread(self._value, heads).to(weights.dtype), self._output)

    def of(self, batch: int) -> float:
        try:
            return self.settle().of(batch)
        except RuntimeError:  # a stored tensor has been overwritten since the attention call
            return math.nan


class Settled:
    """A check that holds weights @ value, computed at some rows, and the recorded output at these rows."""

    def __init__(self, product: Tensor, output: Tensor) -> None:
        self._product, self._output = product, output

    def holds(self) -> list[Tensor]:
        return [self._product, self._output]

    def of(self, batch: int) -> float:
        """Return the largest |weights @ value − output| divided by the largest |output|."""
        product, output = self._product[batch], self._output[batch].to(self._product.dtype)
        return float((product - output).abs().max() / output.abs().max().clamp_min(torch.finfo(output.dtype).tiny))


def checked(call: Call) -> Checked | Settled | None:
    """Return a check that compares weights @ value with the output of a call at some rows; None if it cannot apply.

    The weights are those that the record shows. If the value tensor is small, it is stored and the product is computed
    when the check is requested, which does not delay the model. If it is large, the product is computed now.
    """
    if not call.checkable or call.value is None or call.output is None or 0 in call.source.shape:
        return None
    queries, value = call.source.shape[2], call.value.detach()
    # Four rows suffice to detect weights with a wrong mask, scale, head or layer.
    count = min(queries, _CHECKED_ROWS)
    rows = torch.tensor([i * (queries - 1) // max(1, count - 1) for i in range(count)], device=value.device)
    output = call.view(call.output.detach()).index_select(-2, rows)
    check = Checked(call.source, value, rows, output)
    return check.settle() if queries == 1 or value.nbytes > _HELD_BYTES or lent(value) else check


def shortened(call: Call) -> Call | None:
    """Return the call with queries and keys in 24 bits per number and a note on the error; None if nothing is saved."""
    short = call.source.short() if isinstance(call.source, Pairs | Modified) else None
    if short is None:
        return None
    return replace(call, source=short.source, note=f"{call.note}; {short.note}" if call.note else short.note)


def spread(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values (batch, heads, keys, features), each head repeated for the query heads that share it."""
    group = heads // max(1, tensor.shape[1])
    return tensor if group <= 1 else tensor.repeat_interleave(group, 1)


def four_axes(tensor: Tensor, heads: int | None = None) -> Tensor:
    """Return the tensor as (b, h, n, d): sequences, heads, positions, features.

    An input of shape (n, d) becomes one head of one sequence. An input of shape (b·h, n, d) is split into h heads if
    `heads` is known; otherwise its first axis counts sequences with one head. If the input has more than four axes, all
    axes before that of the heads become one.
    """
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 3:
        fits = heads is not None and (tensor.shape[0] % heads == 0)
        return tensor.unflatten(0, (-1, heads or 1)) if fits else tensor[:, None]
    return tensor if tensor.ndim == 4 else tensor.reshape(-1, *tensor.shape[-3:])


class Backward:
    """The gradient ∂L/∂weights = ∂L/∂output · valueᵀ of a call, available after the backward pass of the loss L."""

    def __init__(self, call: Call, name: str) -> None:
        assert call.value is not None
        self._value, self._view, self._name = call.value.detach(), call.view, name
        self._heads = call.source.shape[1]
        self.grad: Tensor | None = None

    def store(self, grad: Tensor) -> None:
        """Store the gradient of the output; it replaces the gradient of an earlier backward pass."""
        self.grad = self._view(grad.detach())

    def rows(self, batch: int, heads: range, rows: Tensor) -> Tensor:
        if self.grad is None:
            raise ValueError(f"no gradient has come to {self._name!r}: call backward() on a loss that depends on it")
        grad = self.grad[batch, heads.start : heads.stop].index_select(-2, rows.to(self.grad.device))
        value = spread(self._value[batch : batch + 1], self._heads)[0, heads.start : heads.stop]
        return (grad.float() @ value.float().mT).cpu()
