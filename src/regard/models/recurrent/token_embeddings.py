"""Embeddings of a batch of tokens and their linear maps, computed once for each distinct token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.kernels.products import linear

_SHARE = 0.6  # if at most this fraction of tokens is distinct, each distinct token is mapped only once
_FEW = 256  # in a batch with fewer tokens, every token is mapped, even if it occurs more than once


@dataclass(frozen=True, eq=False)
class Tokens:
    """Embeddings of a batch of tokens (b, t).

    `vectors` (n, e) are those of the distinct tokens, and `index` (b, t) is the row of each token's vector. If `index`
    is None, `vectors` (b, t, e) has one vector for each token.
    """

    vectors: Float[Tensor, "*n e"]
    index: Int[Tensor, "b t"] | None

    def turned(self) -> "Tokens":
        """Return these embeddings with the token axes exchanged, so that time comes first, (t, b)."""
        if self.index is None:
            return Tokens(self.vectors.transpose(0, 1), None)
        return Tokens(self.vectors, self.index.t())

    def mapped(self, weight: Float[Tensor, "o e"], bias: Float[Tensor, "o"] | None = None) -> Float[Tensor, "b t o"]:
        """Return W y + b for the embedding y of every token."""
        products = linear(self.vectors, weight, bias)
        return products if self.index is None else F.embedding(self.index, products)


def embedded(embedding: nn.Embedding, dropout: nn.Dropout, tokens: Int[Tensor, "b t"]) -> Tokens:
    """Return the tokens' embeddings, on the CPU once for each distinct token, because most words in a text repeat.

    With dropout or on a GPU, every token has its own vector; on a GPU, to determine the distinct tokens takes longer
    than to map all tokens.
    """
    single = dropout.p == 0.0 or not dropout.training
    if single and tokens.device.type == "cpu" and tokens.numel() >= _FEW and not torch.compiler.is_compiling():
        words, index = torch.unique(tokens, return_inverse=True)
        if len(words) <= _SHARE * tokens.numel():
            return Tokens(embedding(words), index)
    return Tokens(dropout(embedding(tokens)), None)
