"""The interface of an attention layer that a decoder can use: project the memory once, then attend it."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.attention import Attended
from regard.core.requests import Request


class Projected(NamedTuple):
    """A memory, projected once by a layer for all queries."""

    key: Float[Tensor, "b k d"]
    value: Float[Tensor, "b k e"]
    mask: Bool[Tensor, "b k"] | None  # True at real positions, False at padding

    def reorder(self, index: Tensor) -> "Projected":
        """Return the batch rows selected by `index`; beam search reorders its hypotheses with it."""
        mask = None if self.mask is None else self.mask.index_select(0, index)
        return Projected(self.key.index_select(0, index), self.value.index_select(0, index), mask)


@runtime_checkable
class Attends(Protocol):
    """An attention layer that a decoder can use.

    `state` is what the mechanism carries between steps (the last alignment, a coverage, a position): None at the first
    step, and always None for a stateless mechanism. States are tuples of tensors, batch first.
    """

    output_size: int
    stateful: bool  # whether a step depends on the step before through `state`

    def project(self, memory: Tensor, *, mask: Tensor | None = None) -> Projected:
        """Return keys and values of a memory (b, k, m), computed once."""
        ...

    def attend(
        self,
        query: Tensor,
        projected: Projected,
        *,
        state: Any = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Attended, Any]:
        """Return the outputs of the queries (b, q, d), and the state after the last of them."""
        ...
