"""Records of the encoder-decoder frame: the memory of an encoder, the output of a decoder, and one decoding step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

Called = TypeVar("Called", bound=Callable[..., Any])


def pure(step: Called) -> Called:
    """Mark a step without side effects and with fixed control flow: it may be captured in a CUDA graph and replayed.

    This applies to the step with states of fixed shapes (`static`); a step that a caller wraps is not
    marked, and is called every time.
    """
    marked: Any = step
    marked.pure = True
    return step


@dataclass(frozen=True, eq=False)
class Memory:
    """The output of an encoder: keys and values to attend to, and one summary vector.

    `summary` is the fixed C of the frame without attention, C = F(x_1..x_m); `values` are the h_j from which a decoder
    with attention computes its C_i = Σ_j a_ij h_j. `mask` is True at positions that are not padding (None: all).
    """

    keys: Float[Tensor, "b k d"]
    values: Float[Tensor, "b k e"]
    mask: Bool[Tensor, "b k"] | None
    summary: Float[Tensor, "b s"]

    def reorder(self, index: Tensor) -> "Memory":
        """Return the rows of the batch named by `index`."""
        mask = None if self.mask is None else self.mask.index_select(0, index)
        keys = self.keys.index_select(0, index)
        values = keys if self.values is self.keys else self.values.index_select(0, index)
        return Memory(keys, values, mask, self.summary.index_select(0, index))


@dataclass(frozen=True, eq=False)
class Decoded:
    """The output of a decoder for a whole prefix: states before the output layer, and the requested weights.

    The logits are `decoder.logits(states)`; a loss that never materialises all logits starts from the states.
    """

    states: Float[Tensor, "b t d"]
    weights: Any = None
    log_prob: Tensor | None = None  # log-probability of hard choices, (b, t)


@runtime_checkable
class DecoderState(Protocol):
    """The state of a decoder between tokens."""

    def reorder(self, index: Tensor) -> "DecoderState":
        """Return the rows of the batch given by `index`, as beam search needs them."""


@dataclass(frozen=True, eq=False)
class Step:
    """One decoding step: scores of the next token, the state after it, and the attention weights (b, k)."""

    logits: Float[Tensor, "b v"]
    state: DecoderState
    weights: Float[Tensor, "b k"] | None = None
