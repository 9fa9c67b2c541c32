"""Stacked attention: a question attends to a memory in several hops; each hop's query contains earlier contexts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.attention import AnyScore, attention
from regard.core.normalizers import Normalizer, Sigmoid, Softmax
from regard.core.requests import Request, Top
from regard.models.memory import Memory
from regard.nn.attention import Attention, pairs
from regard.nn.protocol import Projected

# The gate σ(score − 2) of each key; the sum of the gates is a soft count of the keys that match the query. The bias
# makes the gates small at the start of training.
_GATE = Sigmoid(bias=-2.0)


@dataclass(frozen=True, eq=False)
class Stacked:
    """The logits of the classes for each question, and the requested weights of every hop, in full (b, n, k)."""

    logits: Float[Tensor, "b n classes"]
    weights: tuple[Tensor | Top, ...] = ()
    # log-probability of the keys that hard attention sampled in each hop
    log_prob: Float[Tensor, "b n hops"] | None = None


class StackedClassifier(nn.Module):
    """Classifies the answers to questions about a memory, by stacked attention (Yang et al. 2016, section 3.3).

    u_0 is the question. Hop k computes the context c_k = Σ_j a_kj h_j with a_k = normalize(score(f_k(u_{k-1}), h_j)),
    and u_k = c_k + u_{k-1}, where f_k(u) = V relu(V' u). In the paper f_k is linear, so that the query of the second
    hop is a sum of the question and the context of the first hop. The hidden layer of f_k can also form products of
    the two, as the question "left of the circle" requires. After the last hop K, the logits are W (W_f r ⊙ (1 + W_g r))
    + b with r = [c_K; u_0; s_K]. The count s_K = Σ_j σ(score_Kj − 2) measures how many keys match, which weights that
    sum to 1 cannot. With `counts=False`, r has no count.

    Yang et al. classify u_K, which includes the contexts of all hops. With u_K the answer may come from any hop, and
    the weights of the last hop need not show its position. In this class earlier hops only determine the next query, so
    the answer comes from the last hop, whose weights show its position.

    `attention` is the name of a score, a score record or function, or None: then c_K is the memory's summary. Several
    questions (b, n, d) about one memory share its keys.

    >>> classifier = StackedClassifier(3, memory_size=8, hops=2)
    >>> memory = Memory(torch.randn(2, 5, 8), torch.randn(2, 5, 8), None, torch.randn(2, 8))
    >>> classifier(memory, torch.randn(2, 4, 8)).logits.shape
    torch.Size([2, 4, 3])
    """

    def __init__(
        self,
        classes: int,
        *,
        memory_size: int,
        hops: int = 2,
        attention: str | AnyScore | None = "scaled_dot",
        features: int = 128,
        counts: bool = True,
        normalize: Normalizer = Softmax(),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if hops < 1:
            raise ValueError(f"hops must be at least 1, got {hops}")
        size = memory_size
        self.memory_size, self.dropout = memory_size, dropout
        self.hops = nn.ModuleList()
        self.queries = nn.ModuleList()
        if attention is not None:
            for _ in range(hops):
                self.queries.append(nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size)))
                self.hops.append(Attention(size, score=attention, hidden_size=size, normalize=normalize))
        self.counts = counts and attention is not None
        self.features = nn.Linear(2 * size + self.counts, 2 * features)
        self.output = nn.Linear(features, classes)

    def forward(
        self,
        memory: Memory,
        query: Float[Tensor, "b n d"],
        *,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Stacked:
        """Return the logits of the answers; `query` (b, n, memory_size) holds n questions about each memory."""
        self._check(memory, query)
        if not self.hops:
            read = memory.summary.unsqueeze(1).expand(-1, query.shape[1], -1)
            return Stacked(self._decide([read, query]))
        known = query
        maps: list[Tensor | Top] = []
        chances: list[Tensor] = []
        parts: list[Tensor] = []
        for ask, hop in zip(self.queries, self.hops, strict=True):
            assert isinstance(hop, Attention)
            projected = hop.project(memory.keys, mask=memory.mask)
            if memory.values is not memory.keys:
                projected = projected._replace(value=memory.values)
            hop_query = ask(known)
            attended, _ = hop.attend(hop_query, projected, weights=weights, generator=generator)
            read = attended.output.to(query.dtype)
            known = known + read
            if attended.weights is not None:
                maps.append(attended.weights)
            if attended.log_prob is not None:
                chances.append(attended.log_prob)
            if hop is self.hops[-1]:
                parts = [read, query, *([_count(hop, hop_query, projected).to(query.dtype)] if self.counts else [])]
        return Stacked(self._decide(parts), tuple(maps), torch.stack(chances, -1) if chances else None)

    def _decide(self, parts: list[Tensor]) -> Tensor:
        read = F.dropout(torch.cat(parts, -1), self.dropout, self.training)
        said, turned = self.features(read).chunk(2, -1)
        return self.output(said * (1 + turned))

    def _check(self, memory: Memory, query: Tensor) -> None:
        expected = (len(memory.keys), self.memory_size)
        if query.ndim != 3 or (query.shape[0], query.shape[2]) != expected:
            raise ValueError(f"query must be ({expected[0]}, n, {expected[1]}), got shape {tuple(query.shape)}")
        if not self.hops and memory.summary.shape[-1] != self.memory_size:
            raise ValueError(
                f"summary of the memory has size {memory.summary.shape[-1]}, the classifier expects {self.memory_size}"
            )


def _count(hop: Attention, hop_query: Tensor, projected: Projected) -> Float[Tensor, "b n 1"]:
    """Return the soft count of matching keys, Σ_j σ(score_j − 2) over the keys that are not masked, of each query."""
    query = hop_query if hop.query is None else hop.query(hop_query)
    key = projected.key.unsqueeze(1)
    attended = attention(
        query.unsqueeze(1),
        key,
        torch.ones_like(key[..., :1]),
        score=hop.score(),
        normalize=_GATE,
        mask=pairs(projected.mask),
    )
    return attended.output.squeeze(1)
