"""Location-aware attention, which also sees where it looked last; and what attention with a memory of its own shares.

An attention that depends on its earlier weights must go query by query: `attend` with q queries is q calls with one.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.attention import Attended, attention
from regard.core.normalizers import Hard, Normalizer, Softmax
from regard.core.requests import Request, full
from regard.core.scores import Additive
from regard.nn.protocol import Projected

_SOFTMAX = Softmax()
_FULL = full()


@dataclass(frozen=True)
class Smooth(Normalizer):
    """σ(s_j) / Σ σ(s): flatter than softmax, so that several places are read at once (Chorowski et al. 2015, 2.3).

    >>> Smooth()(torch.tensor([0.0, 50.0, 60.0]))
    tensor([0.2000, 0.4000, 0.4000])
    """

    name = "smooth"

    def __call__(
        self, scores: Float[Tensor, "*rows k"], allowed: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "*rows k"]:
        # σ(s) / Σ σ(s) is the softmax of ln σ(s), which does not vanish however low the scores are.
        return _SOFTMAX(F.logsigmoid(scores), allowed)


class LocationAttention(nn.Module):
    """w · tanh(W s_i + V h_j + U f_ij + b) with f_i = F ∗ α_{i−1}: content and place (Chorowski et al. 2015).

    F convolves the last weights with `filters` kernels of (odd) `kernel_size`, so the next place can be found by its
    distance from the last one. Before the first query nothing was looked at: α_0 = 0. `normalize=Smooth()` is the
    paper's smoothing; a `sharpness` β above 1 multiplies the scores (section 2.3).

    The state is (α of the last query,), (b, k).

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
        normalize: Normalizer = _SOFTMAX,
        sharpness: float = 1.0,
    ) -> None:
        super().__init__()
        memory_size = query_size if memory_size is None else memory_size
        hidden_size = query_size if hidden_size is None else hidden_size
        if filters < 1:
            raise ValueError(f"filters must be 1 or more, got {filters}")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that a kernel has a middle, got {kernel_size}")
        if not 0 < sharpness < math.inf:
            raise ValueError(f"sharpness must be a finite number above 0, got {sharpness}")
        self.query_size, self.memory_size, self.output_size = query_size, memory_size, memory_size
        self.normalize, self.sharpness = normalize, sharpness
        self.query = nn.Linear(query_size, hidden_size, bias=False)
        self.key = nn.Linear(memory_size, hidden_size)
        self.convolution = nn.Conv1d(1, filters, kernel_size, padding=kernel_size // 2, bias=False)
        self.location = nn.Linear(filters, hidden_size, bias=False)
        self.weight = score_vector(hidden_size)

    def project(self, memory: Float[Tensor, "b k m"], *, mask: Bool[Tensor, "b k"] | None = None) -> Projected:
        """Keys V h_j + b and values h_j."""
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
        """What the queries read one after the other, and the weights of the last of them."""
        check_query(query, self.query_size, projected)
        last = state[0] if state is not None else blank(projected)
        steps = []
        for one in self.query(query).split(1, 1) if query.shape[1] else ():
            found = read(
                one,
                projected._replace(key=projected.key + self._place(last.to(projected.key.dtype))),
                self.weight * self.sharpness,
                sampling(self.normalize, self.training, generator),
                generator,
            )
            steps.append(found)
            last = alignment(found)
        return gathered(steps, projected, query, weights), (last,)

    def _place(self, last: Float[Tensor, "b k"]) -> Float[Tensor, "b k hidden"]:
        """U f, what the last weights around each key say."""
        if last.shape[1] == 0:  # a convolution wants at least one place
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
        """What each query reads of the memory, the weights of one known to the next: output (b, q, m)."""
        return self.attend(query, self.project(memory, mask=mask), weights=weights, generator=generator)[0]


# What attention with a state shares


def score_vector(size: int) -> nn.Parameter:
    """The w of w · tanh(…), uniform within ±1/√size."""
    bound = 1 / math.sqrt(size)
    return nn.Parameter(torch.empty(size).uniform_(-bound, bound))


def clean_memory(memory: Float[Tensor, "b k m"], size: int, mask: Bool[Tensor, "b k"] | None) -> Float[Tensor, "b k m"]:
    """The memory with zeros where it is padding, so that nothing hidden there (NaN, say) is ever multiplied."""
    if memory.ndim != 3 or memory.shape[-1] != size:
        raise ValueError(f"memory must be (b, k, {size}), got {tuple(memory.shape)}")
    if mask is None:
        return memory
    if mask.dtype != torch.bool or mask.shape != memory.shape[:2]:
        raise ValueError(
            f"mask must be a bool tensor {tuple(memory.shape[:2])}, True for real positions, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    return torch.where(mask.unsqueeze(-1), memory, 0)


def check_query(query: Float[Tensor, "b q d"], size: int, projected: Projected) -> None:
    """Raise unless there are queries of the right size for each memory of the batch."""
    batch = projected.key.shape[0]
    if query.ndim != 3 or query.shape[-1] != size or query.shape[0] != batch:
        raise ValueError(f"query must be ({batch}, q, {size}), got {tuple(query.shape)}")


def blank(projected: Projected) -> Float[Tensor, "b k"]:
    """Weights before anything was looked at: zeros."""
    return projected.value.new_zeros(projected.value.shape[:2])


def sampling(normalize: Normalizer, training: bool, generator: torch.Generator | None) -> Normalizer:
    """Hard attention that does not say when to draw draws in training, and where a generator is given."""
    if isinstance(normalize, Hard) and normalize.sample is None:
        return Hard(normalize.estimator, normalize.temperature, training or generator is not None)
    return normalize


def read(
    query: Float[Tensor, "b 1 d"],
    projected: Projected,
    weight: Float[Tensor, "d"],
    normalize: Normalizer,
    generator: torch.Generator | None,
) -> Attended:
    """One additive reading of the memory, with all its weights."""
    mask = None if projected.mask is None else projected.mask.unsqueeze(1)
    return attention(
        query,
        projected.key,
        projected.value,
        score=Additive(weight),
        normalize=normalize,
        mask=mask,
        weights=_FULL,
        generator=generator,
    )


def alignment(found: Attended) -> Float[Tensor, "b k"]:
    """The weights of a reading by one query."""
    assert isinstance(found.weights, Tensor)
    return found.weights.squeeze(1)


def gathered(steps: list[Attended], projected: Projected, query: Tensor, weights: Request | None) -> Attended:
    """The readings of all queries as one, with what is asked of their weights."""
    if not steps:
        output = projected.value.new_zeros(query.shape[0], 0, projected.value.shape[-1])
        empty = projected.value.new_zeros(query.shape[0], 0, projected.value.shape[1])
        return Attended(output, None if weights is None else weights.of(empty))
    log_probs = [step.log_prob for step in steps if step.log_prob is not None]
    asked = None
    if weights is not None:
        weights.check(len(steps))
        asked = weights.of(torch.stack([alignment(step) for step in steps], 1))
    return Attended(
        torch.cat([step.output for step in steps], 1), asked, torch.cat(log_probs, 1) if log_probs else None
    )
