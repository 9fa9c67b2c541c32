"""The interface of an attention layer that a decoder can use: the layer projects the memory (an encoder's outputs) once
to keys and values, which every query then attends."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.attended import Attended
from regard.core.requests import Request


class Projected(NamedTuple):
    """The keys and values to which a layer projects a memory (such as an encoder's outputs) once for all queries."""

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

    `state` holds what the next query needs from earlier queries (the last weights, a coverage, a position): a tensor or
    a tuple of tensors, batch first. It is None at the first query, and always None for a layer without such a
    dependence.
    """

    output_size: int
    stateful: bool  # whether a query depends on the earlier queries through `state`

    def project(self, memory: Tensor, *, mask: Tensor | None = None) -> Projected:
        """Return keys and values of a memory (b, k, m), computed once for all queries."""
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
