"""A decoder that classifies a memory: attention over the memory, then a linear layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.attention import AnyScore
from regard.core.normalizers import Normalizer, Softmax
from regard.core.requests import Request, Top
from regard.models.memory import Memory
from regard.nn.attention import Attention


@dataclass(frozen=True, eq=False)
class Classified:
    """The logits of the classes, and the requested attention weights; full weights have the shape (b, looks, k)."""

    logits: Float[Tensor, "b classes"]
    weights: Tensor | Top | None = None
    # log-probability of the keys that hard attention sampled, for each learned query (look)
    log_prob: Float[Tensor, "b looks"] | None = None


class Classifier(nn.Module):
    """Classifies a memory from the context vector of a query that attends to it.

    The context is c = Σ_j a_j h_j with a = normalize(score(u, h_j)), and the logits are W c + b. The query u is a
    learned parameter. With the additive score w · tanh(W_k h_j + W_q u) this is the word attention of Yang et al.
    (2016a, section 2.2). Several `looks` are the hops of Lin et al. (2017): each has its own query, and all are
    computed in parallel.

    With `query_size`, u is an argument of `forward` instead, such as a question about an image (Yang et al. 2016b,
    section 3.3), and the logits are W [c; u] + b. `attention` is the name of a score, a score record or function, or
    None: then c is the memory's summary, of size `memory_size`. With `features` the classifier has a hidden layer of
    products: logits = W (W_f r ⊙ (1 + W_g r)) + b with r = c or r = [c; u]. This hidden layer is needed if the memory's
    values are word embeddings: "not" reverses the meaning of "bad", which no sum of the two embeddings can express.

    >>> classifier = Classifier(3, memory_size=8)
    >>> memory = Memory(torch.randn(2, 5, 8), torch.randn(2, 5, 8), None, torch.randn(2, 8))
    >>> classifier(memory).logits.shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        classes: int,
        *,
        memory_size: int,
        query_size: int | None = None,
        attention: str | AnyScore | None = "additive",
        hidden_size: int | None = None,
        looks: int = 1,
        features: int | None = None,
        normalize: Normalizer = Softmax(),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if looks < 1 or (looks > 1 and (query_size is not None or attention is None)):
            hint = "" if looks < 1 or query_size is None else ": several hops of a question are a StackedClassifier"
            raise ValueError(f"looks must be 1, or more for learned queries with attention, got {looks}{hint}")
        self.query_size, self.memory_size = query_size, memory_size
        size = memory_size if query_size is None else query_size
        learned = attention is not None and query_size is None
        self.query = nn.Parameter(torch.empty(looks, size)) if learned else None
        self.attention = (
            None
            if attention is None
            else Attention(size, memory_size, score=attention, hidden_size=hidden_size, normalize=normalize)
        )
        read_size = looks * memory_size + (query_size or 0)
        self.features = None if features is None else nn.Linear(read_size, 2 * features)
        self.output = nn.Linear(features or read_size, classes)
        self.dropout = dropout
        if self.query is not None:
            nn.init.normal_(self.query, std=size**-0.5)

    def forward(
        self,
        memory: Memory,
        query: Float[Tensor, "b d"] | None = None,
        *,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Classified:
        """Return the logits of the classes of each sequence, image or scene whose encoding is in `memory`.

        `query` (b, query_size) is required if the classifier was built with `query_size`, and not allowed otherwise.
        """
        self._check(memory, query)
        if self.attention is None:
            return Classified(self._decide(memory.summary, query))
        queries = self.query if query is None else query.unsqueeze(1)
        assert queries is not None, "one of them is there"
        projected = self.attention.project(memory.keys, mask=memory.mask)
        if memory.values is not memory.keys:
            projected = projected._replace(value=memory.values)
        attended, _ = self.attention.attend(
            queries.expand(len(memory.keys), -1, -1), projected, weights=weights, generator=generator
        )
        return Classified(self._decide(attended.output.flatten(1), query), attended.weights, attended.log_prob)

    def _decide(self, read: Tensor, query: Tensor | None) -> Tensor:
        read = read if query is None else torch.cat([read, query.to(read.dtype)], -1)
        if self.features is not None:
            said, turned = self.features(F.dropout(read, self.dropout, self.training)).chunk(2, -1)
            read = said * (1 + turned)  # the summand 1 keeps a term that is linear in the features
        return self.output(F.dropout(read, self.dropout, self.training))

    def _check(self, memory: Memory, query: Tensor | None) -> None:
        if self.query_size is None and query is not None:
            raise ValueError("query must be None: the classifier learns its own; build it with query_size to be asked")
        if self.query_size is not None and (query is None or query.shape[-1] != self.query_size):
            came = "None" if query is None else f"shape {tuple(query.shape)}"
            raise ValueError(f"query must be (b, {self.query_size}), got {came}")
        if self.attention is None and memory.summary.shape[-1] != self.memory_size:
            raise ValueError(
                f"summary of the memory has size {memory.summary.shape[-1]}, the classifier expects {self.memory_size}"
            )
