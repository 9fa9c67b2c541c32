"""Token embeddings with positions."""

import copy
import math

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.positions import Alibi, LearnedPositions, RelativePositions, Rotary, SinusoidalPositions

# Positions of type `Added` are added to the embeddings; positions of type `Inside` are an argument of the
# self-attention of every layer.
Added = SinusoidalPositions | LearnedPositions
Inside = Rotary | Alibi | RelativePositions
NAMES = ("sinusoidal", "learned", "relative", "rotary", "alibi")

_CAPACITY = 1024  # number of positions of `positions="learned"`
_REACH = 16  # largest distance of `positions="relative"`, as in Shaw et al. 2018, section 4.1


def positions_of(positions: str | Added | Inside | None, size: int, heads: int) -> Added | Inside | None:
    """Return the module of positions for a model of that size; `positions` is a name, a module or None."""
    if positions is None or isinstance(positions, nn.Module):
        return positions
    if positions not in NAMES:
        raise ValueError(
            f"positions must be one of {', '.join(NAMES)}, a module of positions or None, got {positions!r}"
        )
    if positions == "sinusoidal":
        return SinusoidalPositions(size)
    if positions == "learned":
        return LearnedPositions(size, _CAPACITY)
    if positions == "alibi":
        return Alibi(heads)
    return Rotary(size // heads) if positions == "rotary" else RelativePositions(size // heads, _REACH)


def inside(positions: Added | Inside | None) -> Inside | None:
    """Return a copy of the positions for the self-attention of one layer; None if they are added to the embeddings.

    Each layer has its own copy of the positions, because it learns their parameters separately.
    """
    return copy.deepcopy(positions) if isinstance(positions, (Rotary, Alibi, RelativePositions)) else None


class TokenInput(nn.Module):
    """√d · E[token] + p(position), then dropout (Vaswani et al. 2017, sections 3.4 and 3.5).

    >>> import torch
    >>> TokenInput(nn.Embedding(11, 8), SinusoidalPositions(8))(torch.tensor([[3, 4, 5]])).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, embedding: nn.Embedding, positions: Added | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = embedding
        self.positions = positions
        self.dropout = nn.Dropout(dropout)
        self.scale = math.sqrt(embedding.embedding_dim)

    def forward(self, tokens: Int[Tensor, "b n"], *, offset: int = 0) -> Float[Tensor, "b n d"]:
        """Return vectors of the tokens (b, n); the first token is at position `offset`."""
        x = self.embedding(tokens) * self.scale
        return self.dropout(x if self.positions is None else self.positions(x, offset=offset))


def embedding_for(vocabulary: int, size: int, embedding: nn.Embedding | None) -> nn.Embedding:
    """Return the given embedding, or a new one whose rows have a norm of about 1, suitable as tied output weights."""
    if embedding is None:
        created = nn.Embedding(vocabulary, size)
        nn.init.normal_(created.weight, std=size**-0.5)
        return created
    if (embedding.num_embeddings, embedding.embedding_dim) != (vocabulary, size):
        raise ValueError(
            f"embedding must hold {vocabulary} tokens of size {size}, "
            f"got {embedding.num_embeddings} of size {embedding.embedding_dim}"
        )
    return embedding
