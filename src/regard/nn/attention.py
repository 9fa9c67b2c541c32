"""One head of attention over a memory (the outputs of an encoder, for example), with the projections for its score."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.attended import Attended
from regard.core.attention import AnyScore, attention
from regard.core.hard import read_expected
from regard.core.masks import Mask
from regard.core.normalizers import Hard, Normalizer, Softmax
from regard.core.problem import check_dropout, check_normalizer
from regard.core.requests import Request, Top
from regard.nn.argument_checks import also_called, check_input, check_sizes
from regard.nn.projection import SCORES, OwnedScore, settled
from regard.nn.protocol import Projected

_EQUAL = ("dot", "scaled_dot", "cosine")  # names of the scores that need queries and keys of equal size


class Attention(nn.Module):
    """C_i = Σ_j a_ij v_j with a_i = normalize(score(q_i, h_j)): attention of a decoder's states over a memory.

    score "additive": w · tanh(W_q q + W_k h) with `hidden_size` features (Bahdanau et al. 2015); "bilinear": ⟨q, z_j⟩
    with z_j = W_z h_j (Luong et al. 2015, "general"); "dot", "scaled_dot", "cosine": scores of query and memory
    directly or, with `hidden_size`, after projecting both to that size. Values are the memory, or W_v h with
    `value_size`. Hard attention samples in training, and if a generator is given; if `Hard.expected` is a probability,
    one random number for each item of the batch decides whether all queries of the item use the expected value.

    >>> layer = Attention(6, 10, score="additive", hidden_size=8)
    >>> out = layer(torch.randn(2, 3, 6), torch.randn(2, 5, 10))
    >>> out.output.shape
    torch.Size([2, 3, 10])
    """

    stateful = False

    def __init__(
        self,
        query_size: int,
        memory_size: int | None = None,
        *,
        score: str | AnyScore = "additive",
        hidden_size: int | None = None,
        value_size: int | None = None,
        normalize: Normalizer = Softmax(),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(query_size=query_size, memory_size=memory_size, hidden_size=hidden_size, value_size=value_size)
        memory_size = query_size if memory_size is None else memory_size
        self.query_size, self.memory_size = query_size, memory_size
        self.output_size = memory_size if value_size is None else value_size
        self.normalize = check_normalizer(normalize)
        self.dropout = check_dropout(dropout)
        query_to, key_to = _projected_sizes(score, query_size, memory_size, hidden_size)
        self.query = None if query_to is None else nn.Linear(query_size, query_to, bias=False)
        self.key = None if key_to is None else nn.Linear(memory_size, key_to, bias=False)
        self.value = None if value_size is None else nn.Linear(memory_size, value_size, bias=False)
        # The matrix of a bilinear score is the projection of the memory, so that it is applied once for all queries.
        self.score = OwnedScore("dot" if score == "bilinear" else score, query_to or query_size)

    def forward(
        self,
        query: Float[Tensor, "b q d"],
        memory: Float[Tensor, "b k m"],
        *,
        mask: Mask | Tensor | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Attended:
        """Return the output of each query, (b, q, e), and the requested weights, (b, q, k) with `weights=full()`.

        A bool mask is (b, k), True for real positions, or (b, q, k) for pairs; other masks must fit scores (b, 1, q,
        k).
        """
        projected = self.project(memory)
        return self._attend(query, projected, pairs(mask), None, weights, generator)[0]

    def project(self, memory: Float[Tensor, "b k m"], *, mask: Bool[Tensor, "b k"] | None = None) -> Projected:
        """Return keys and values of a memory, computed once for all queries."""
        check_input(memory, "memory", self.memory_size)
        return Projected(
            memory if self.key is None else self.key(memory), memory if self.value is None else self.value(memory), mask
        )

    def attend(
        self,
        query: Float[Tensor, "b q d"],
        projected: Projected,
        *,
        state: Bool[Tensor, "b"] | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Attended, Bool[Tensor, "b"] | None]:
        """Return the outputs of queries over a projected memory, and the `state` for the next call.

        The `state` says for which items of the batch hard attention uses the expected value, so that all queries of a
        sequence do the same. For all other normalisers the `state` is None.
        """
        return self._attend(query, projected, pairs(projected.mask), state, weights, generator)

    def _attend(
        self,
        query: Tensor,
        projected: Projected,
        mask: Mask | Tensor | None,
        expected: Tensor | None,
        weights: Request | None,
        generator: torch.Generator | None,
    ) -> tuple[Attended, Tensor | None]:
        check_input(query, "query", self.query_size)
        query = query if self.query is None else self.query(query)
        normalize = settled(self.normalize, self.training or generator is not None)
        if isinstance(normalize, Hard) and normalize.sample and normalize.mixes:
            if expected is None:
                expected = read_expected(normalize, query[:, 0, 0], generator)
            normalize = replace(normalize, expected=expected[:, None, None])
        attended = attention(
            query.unsqueeze(1),
            projected.key.unsqueeze(1),
            projected.value.unsqueeze(1),
            score=self.score(),
            normalize=normalize,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            weights=weights,
            generator=generator,
        )
        return without_head(attended), expected


class SelfAttention(nn.Module):
    """softmax(Q Kᵀ / √d_k) V with Q = x W_q, K = x W_k, V = x W_v: self-attention (Vaswani et al. 2017, 3.2.1).

    `dim_in` is the size of x, `dim_k` that of queries and keys, `dim_v` that of values. The three maps have no bias.
    `size`, `key_size` and `value_size`, the names that the other layers use, mean the same.

    >>> SelfAttention(dim_in=6, dim_k=4, dim_v=3)(torch.randn(2, 5, 6)).output.shape
    torch.Size([2, 5, 3])
    """

    @also_called(size="dim_in", key_size="dim_k", value_size="dim_v")
    def __init__(self, dim_in: int, dim_k: int, dim_v: int) -> None:
        super().__init__()
        check_sizes(dim_in=dim_in, dim_k=dim_k, dim_v=dim_v)
        self.size = dim_in
        self.query = nn.Linear(dim_in, dim_k, bias=False)
        self.key = nn.Linear(dim_in, dim_k, bias=False)
        self.value = nn.Linear(dim_in, dim_v, bias=False)

    def forward(
        self, x: Float[Tensor, "b n d"], *, mask: Mask | Tensor | None = None, weights: Request | None = None
    ) -> Attended:
        """Return the output of each position, (b, n, dim_v), and the requested weights; `mask` is as in
        `Attention`."""
        check_input(x, "x", self.size, "dim_in")
        query, key, value = (map_(x).unsqueeze(1) for map_ in (self.query, self.key, self.value))
        return without_head(attention(query, key, value, mask=pairs(mask), weights=weights))


def pairs(mask: Mask | Tensor | None) -> Mask | Tensor | None:
    """Reshape a bool mask of positions (b, k) or of pairs (b, q, k) to broadcast to scores (b, 1, q, k).

    A `Mask` object or None is returned unchanged.
    """
    if not isinstance(mask, Tensor):
        return mask
    if mask.ndim not in (2, 3):
        raise ValueError(f"mask must be (b, k) for positions or (b, q, k) for pairs, got shape {tuple(mask.shape)}")
    return mask[:, None, None] if mask.ndim == 2 else mask[:, None]


def without_head(attended: Attended) -> Attended:
    """Return the result of attention without the axis of its single head."""
    weights, log_prob = attended.weights, attended.log_prob
    if isinstance(weights, Top):
        weights = Top(weights.values.squeeze(1), weights.indices.squeeze(1))
    elif weights is not None:
        weights = weights.squeeze(1)
    return Attended(attended.output.squeeze(1), weights, None if log_prob is None else log_prob.squeeze(1))


def _projected_sizes(
    score: str | AnyScore, query_size: int, memory_size: int, hidden_size: int | None
) -> tuple[int | None, int | None]:
    """Return the sizes to which query and memory are projected before scoring; a size is None if there is no
    projection."""
    if score == "additive":
        hidden_size = query_size if hidden_size is None else hidden_size
        return hidden_size, hidden_size
    if score == "bilinear":
        return hidden_size, query_size if hidden_size is None else hidden_size
    if hidden_size is not None:
        return hidden_size, hidden_size
    if score in _EQUAL and query_size != memory_size:
        raise ValueError(
            f"{score} scores compare vectors of one size, query_size is {query_size} and memory_size {memory_size}: "
            "give hidden_size to project both to it"
        )
    if isinstance(score, str) and score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, a regard score or a function, got {score!r}")
    return None, None
