"""The records that travel through the frame: what an encoder gives, what a decoder gives, and one step of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

Called = TypeVar("Called", bound=Callable[..., Any])


def pure(step: Called) -> Called:
    """Mark a step that does the same each time, and nothing but compute: it may be captured once and replayed.

    It says so of the step with states that have shapes of their own (`static`); a step that a caller wraps is not
    marked, and is called every time.
    """
    marked: Any = step
    marked.pure = True
    return step


@dataclass(frozen=True, eq=False)
class Memory:
    """What an encoder has made of a source: keys and values to attend, and one summary of it all.

    `summary` is the fixed C of the frame without attention, C = F(x_1..x_m); `values` are the h_j from which a decoder
    with attention takes its C_i = Σ_j a_ij h_j. `mask` says which positions are real (None: all).
    """

    keys: Float[Tensor, "b k d"]
    values: Float[Tensor, "b k e"]
    mask: Bool[Tensor, "b k"] | None
    summary: Float[Tensor, "b s"]

    def reorder(self, index: Tensor) -> "Memory":
        """The rows of the batch named by `index`."""
        mask = None if self.mask is None else self.mask.index_select(0, index)
        keys = self.keys.index_select(0, index)
        values = keys if self.values is self.keys else self.values.index_select(0, index)
        return Memory(keys, values, mask, self.summary.index_select(0, index))


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a decoder made of a whole prefix: states before the output layer, and the weights asked for.

    The logits are `decoder.logits(states)`; a loss that never holds them whole starts from the states.
    """

    states: Float[Tensor, "b t d"]
    weights: Any = None
    log_prob: Tensor | None = None  # of hard choices, (b, t)


@runtime_checkable
class DecoderState(Protocol):
    """What a decoder carries from token to token."""

    def reorder(self, index: Tensor) -> "DecoderState":
        """The rows of the batch named by `index`, as beam search wants them."""
        ...


@dataclass(frozen=True, eq=False)
class Step:
    """One token further: scores of the next token, the state after it, and where it looked (b, k)."""

    logits: Float[Tensor, "b v"]
    state: DecoderState
    weights: Float[Tensor, "b k"] | None = None
