"""Coverage attention, whose scores depend on the weight that each key has received so far."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.attended import Attended
from regard.core.normalizers import Normalizer, Softmax
from regard.core.problem import HALF, check_normalizer
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


class CoverageAttention(nn.Module):
    """Scores w · tanh(W s_i + V h_j + u c_ij + b) with the coverage c_i = Σ_{t<i} α_t (See et al. 2017, eq. 11).

    s_i is a query, h_j a position of the memory, α_t the weights of query t. With a `fertility` N each key may receive
    a total weight of Φ_j = N · σ(v · h_j): c_i = Σ_{t<i} α_t / Φ (the linguistic coverage of Tu et al. 2016). The loss
    against attending to a key twice is `regard.nn.losses.coverage_penalty` of the weights.

    The `state` that `attend` takes and returns is a tuple of one tensor: the coverage c after the last query, (b, k).

    >>> from regard.core.requests import full
    >>> layer = CoverageAttention(8, 6)
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
        normalize: Normalizer = Softmax(),
        fertility: float | None = None,
    ) -> None:
        super().__init__()
        check_sizes(query_size=query_size, memory_size=memory_size, hidden_size=hidden_size)
        memory_size = query_size if memory_size is None else memory_size
        hidden_size = query_size if hidden_size is None else hidden_size
        if fertility is not None and not fertility > 0:
            raise ValueError(f"fertility must be above 0, or None, got {fertility}")
        self.query_size, self.memory_size, self.output_size = query_size, memory_size, memory_size
        self.normalize, self.fertility = check_normalizer(normalize), fertility
        self.query = nn.Linear(query_size, hidden_size, bias=False)
        self.key = nn.Linear(memory_size, hidden_size)
        self.coverage = nn.Linear(1, hidden_size, bias=False)
        self.fertile = None if fertility is None else nn.Linear(memory_size, 1, bias=False)
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
        """Return the outputs of the queries, computed one after another, and the coverage after the last query."""
        check_query(query, self.query_size, projected)
        covered = state[0] if state is not None else blank(projected)
        covered = covered.float() if covered.dtype in HALF else covered  # many small weights are summed: float32
        times = None
        if self.fertile is not None and self.fertility is not None:
            # A fertility of 0 would make the coverage infinite, so the sigmoid is at least 10⁻⁴.
            times = self.fertility * torch.sigmoid(self.fertile(projected.value).squeeze(-1)).clamp_min(1e-4)
        steps = []
        for single_query in self.query(query).split(1, 1) if query.shape[1] else ():
            attended = read(
                single_query,
                projected._replace(key=projected.key + self.coverage(covered.unsqueeze(-1).to(projected.key.dtype))),
                self.weight,
                sampling(self.normalize, self.training, generator),
                generator,
            )
            steps.append(attended)
            new = alignment(attended)
            covered = covered + (new if times is None else new / times)
        return gathered(steps, projected, query, weights), (covered,)

    def forward(
        self,
        query: Float[Tensor, "b q d"],
        memory: Float[Tensor, "b k m"],
        *,
        mask: Bool[Tensor, "b k"] | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Attended:
        """Return the output of each query, (b, q, m), given the weights of the queries before it."""
        return self.attend(query, self.project(memory, mask=mask), weights=weights, generator=generator)[0]
