"""Location-aware attention, whose scores depend on the weights of the previous query.

The layer processes one query at a time: `attend` with q queries equals q calls of `attend` with one query each.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.attended import Attended
from regard.core.normalizers import Normalizer, Softmax
from regard.core.problem import check_normalizer
from regard.core.requests import Request
from regard.nn.alignment_steps import (
    alignment,
    blank,
    check_query,
    clean_memory,
    gathered,
    read,
    sampling,
    score_vector,
)
from regard.nn.argument_checks import check_sizes
from regard.nn.protocol import Projected

_SOFTMAX = Softmax()


@dataclass(frozen=True)
class Smooth(Normalizer):
    """σ(s_j) / Σ σ(s): flatter than softmax, so that several positions get weight (Chorowski et al. 2015, 2.3).

    >>> Smooth()(torch.tensor([0.0, 50.0, 60.0]))
    tensor([0.2000, 0.4000, 0.4000])
    """

    name = "smooth"

    def __call__(
        self, scores: Float[Tensor, "*rows k"], allowed: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "*rows k"]:
        # σ(s) / Σ σ(s) is the softmax of ln σ(s), which does not underflow for low scores.
        return _SOFTMAX(F.logsigmoid(scores), allowed)


class LocationAttention(nn.Module):
    """Scores w · tanh(W s_i + V h_j + U f_ij + b) with f_i = F ∗ α_{i−1}, by content and location (Chorowski 2015).

    F convolves the weights of the previous query with `filters` kernels of (odd) `kernel_size`, so the scores can
    depend on the distance from the previous position. Before the first query α_0 = 0. `normalize=Smooth()` is the
    paper's smoothing; a `sharpness` β above 1 multiplies the scores (section 2.3).

    The `state` that `attend` takes and returns is a tuple of one tensor: the weights α of the last query, (b, k).

    >>> from regard.core.requests import full
    >>> layer = LocationAttention(8, 6, filters=3, kernel_size=5)
    >>> out = layer(torch.randn(2, 4, 8), torch.randn(2, 11, 6), weights=full())
    >>> out.output.shape, out.weights.shape
    (torch.Size([2, 4, 6]), torch.Size([2, 4, 11]))
    """

    stateful = True

    def __init__(
        self,
        query_size: int,
        memory_size: int | None = None,
        *,
        hidden_size: int | None = None,
        filters: int = 10,
        kernel_size: int = 31,
        normalize: Normalizer = Softmax(),
        sharpness: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(query_size=query_size, memory_size=memory_size, hidden_size=hidden_size)
        memory_size = query_size if memory_size is None else memory_size
        hidden_size = query_size if hidden_size is None else hidden_size
        if filters < 1:
            raise ValueError(f"filters must be 1 or more, got {filters}")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that a kernel has a middle, got {kernel_size}")
        if not 0 < sharpness < math.inf:
            raise ValueError(f"sharpness must be a finite number above 0, got {sharpness}")
        self.query_size, self.memory_size, self.output_size = query_size, memory_size, memory_size
        self.normalize, self.sharpness = check_normalizer(normalize), sharpness
        self.query = nn.Linear(query_size, hidden_size, bias=False)
        self.key = nn.Linear(memory_size, hidden_size)
        self.convolution = nn.Conv1d(1, filters, kernel_size, padding=kernel_size // 2, bias=False)
        self.location = nn.Linear(filters, hidden_size, bias=False)
        self.weight = score_vector(hidden_size)

    def project(self, memory: Float[Tensor, "b k m"], *, mask: Bool[Tensor, "b k"] | None = None) -> Projected:
        """Return the keys V h_j + b and the values h_j of a memory, such as the outputs h_j of an encoder."""
        memory = clean_memory(memory, self.memory_size, mask)
        return Projected(self.key(memory), memory, mask)

    def attend(
        self,
        query: Float[Tensor, "b q d"],
        projected: Projected,
        *,
        state: tuple[Tensor] | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Attended, tuple[Tensor]]:
        """Return the outputs of the queries, computed one after another, and the weights of the last query as the new
        `state`."""
        check_query(query, self.query_size, projected)
        last = state[0] if state is not None else blank(projected)
        steps = []
        for single_query in self.query(query).split(1, 1) if query.shape[1] else ():
            attended = read(
                single_query,
                projected._replace(key=projected.key + self._place(last.to(projected.key.dtype))),
                self.weight * self.sharpness,
                sampling(self.normalize, self.training, generator),
                generator,
            )
            steps.append(attended)
            last = alignment(attended)
        return gathered(steps, projected, query, weights), (last,)

    def _place(self, last: Float[Tensor, "b k"]) -> Float[Tensor, "b k hidden"]:
        """Return U f, the features of the previous query's weights around each key."""
        if last.shape[1] == 0:  # torch's convolution needs at least one position
            return last.new_zeros(*last.shape, self.weight.shape[0])
        return self.location(self.convolution(last.unsqueeze(1)).mT)

    def forward(
        self,
        query: Float[Tensor, "b q d"],
        memory: Float[Tensor, "b k m"],
        *,
        mask: Bool[Tensor, "b k"] | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Attended:
        """Return the output of each query, (b, q, m), given the weights of the query before it."""
        return self.attend(query, self.project(memory, mask=mask), weights=weights, generator=generator)[0]
