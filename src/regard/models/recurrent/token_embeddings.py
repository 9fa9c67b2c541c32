"""Embeddings of a batch of tokens and their linear maps, computed once for each distinct token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.kernels.products import linear

_SHARE = 0.6  # up to this fraction of distinct tokens, mapping each once is faster than mapping all tokens
_FEW = 256  # with fewer tokens than this, all are mapped


@dataclass(frozen=True, eq=False)
class Tokens:
    """Vectors (n, e) of distinct tokens, and the vector of each token, `index` (b, t)."""

    vectors: Float[Tensor, "*n e"]
    index: Int[Tensor, "b t"] | None

    def turned(self) -> "Tokens":
        """Return the same with time first: (t, b)."""
        if self.index is None:
            return Tokens(self.vectors.transpose(0, 1), None)
        return Tokens(self.vectors, self.index.t())

    def mapped(self, weight: Float[Tensor, "o e"], bias: Float[Tensor, "o"] | None = None) -> Float[Tensor, "b t o"]:
        """Return W y + b for every token."""
        found = linear(self.vectors, weight, bias)
        return found if self.index is None else F.embedding(self.index, found)


def embedded(embedding: nn.Embedding, dropout: nn.Dropout, tokens: Int[Tensor, "b t"]) -> Tokens:
    """Return the tokens' embeddings. In a batch of text most words are repeated; on the CPU each is mapped once.

    With dropout every token has its own vector, and on a GPU counting words is slower than mapping them all.
    """
    single = dropout.p == 0.0 or not dropout.training
    if single and tokens.device.type == "cpu" and tokens.numel() >= _FEW and not torch.compiler.is_compiling():
        words, index = torch.unique(tokens, return_inverse=True)
        if len(words) <= _SHARE * tokens.numel():
            return Tokens(embedding(words), index)
    return Tokens(dropout(embedding(tokens)), None)
