"""The records that encoders and decoders exchange: an encoder's memory, a decoder's output, and one decoding step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

Called = TypeVar("Called", bound=Callable[..., Any])


def pure(step: Called) -> Called:
    """Mark a step function as pure: its calls may be captured in a CUDA graph and replayed.

    A pure step has no side effects, and its control flow is fixed if its state has fixed shapes (`static`). A function
    of the caller that wraps a pure step is not marked, so it is called at every step.
    """
    marked: Any = step
    marked.pure = True
    return step


@dataclass(frozen=True, eq=False)
class Memory:
    """The output of an encoder: keys and values to attend to, and one summary vector.

    `values` are the states h_j from which a decoder with attention computes a context C_i = Σ_j a_ij h_j at each step.
    `summary` is the fixed context C = F(x_1..x_m) of a decoder without attention. `mask` is True at positions that are
    not padding (None: all).
    """

    keys: Float[Tensor, "b k d"]
    values: Float[Tensor, "b k e"]
    mask: Bool[Tensor, "b k"] | None
    summary: Float[Tensor, "b s"]

    def reorder(self, index: Tensor) -> "Memory":
        """Return the memory with the batch rows `index`, which may be repeated or left out."""
        mask = None if self.mask is None else self.mask.index_select(0, index)
        keys = self.keys.index_select(0, index)
        values = keys if self.values is self.keys else self.values.index_select(0, index)
        return Memory(keys, values, mask, self.summary.index_select(0, index))


@dataclass(frozen=True, eq=False)
class Decoded:
    """The output of a decoder for a whole prefix: states before the output layer, and the requested attention weights.

    The logits are `decoder.logits(states)`. A loss that never materialises all logits is computed from the states.
    """

    states: Float[Tensor, "b t d"]
    weights: Any = None
    log_prob: Tensor | None = None  # log-probability of the keys that hard attention sampled, (b, t)


@runtime_checkable
class DecoderState(Protocol):
    """The interface of a decoder's state between two tokens."""

    def reorder(self, index: Tensor) -> "DecoderState":
        """Return the state with the batch rows `index`, which beam search may repeat or leave out."""


@dataclass(frozen=True, eq=False)
class Step:
    """The result of one decoding step: logits of the next token, the new state, and the attention weights (b, k)."""

    logits: Float[Tensor, "b v"]
    state: DecoderState
    weights: Float[Tensor, "b k"] | None = None
