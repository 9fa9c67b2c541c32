"""An encoder of n-grams: the state of a position is the sum of the vectors of the n-grams that end at this position."""

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.models.memory import Memory

# Odd multipliers of the hash, which mix the token indices of an n-gram; a product is far below 2**63 for any
# vocabulary.
_MIX = (1, 31_607, 7_919_993)


class NgramEncoder(nn.Module):
    """An encoder whose states are sums of word and n-gram vectors (Joulin et al. 2017).

    The state of position j is h_j = E_1[x_j] + Σ_n E_n[hash(x_{j-n+1} … x_j)] with n from 2 to `order`. A source (b, k)
    is encoded as a `Memory` with keys = values (b, k, size); `summary` is their mean over the positions that are not
    padding. A hash maps all n-grams of an order to `buckets` vectors, so no n-gram is unknown; n-grams at the start of
    a row contain padding (0). A state depends only on its token and the `order` - 1 tokens before it, so an attention
    weight belongs to that phrase.

    >>> encoder = NgramEncoder(11, 4, order=2, buckets=97)
    >>> memory = encoder(torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2]))
    >>> memory.values.shape, memory.mask[1]
    (torch.Size([2, 3, 4]), tensor([ True,  True, False]))
    """

    def __init__(
        self, vocabulary: int, size: int, *, order: int = 2, buckets: int = 100_003, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if not 1 <= order <= len(_MIX):
            raise ValueError(f"order must be from 1 to {len(_MIX)}, got {order}")
        self.size = self.memory_size = size
        self.order, self.buckets = order, buckets
        self.embedding = nn.Embedding(vocabulary, size)
        self.grams = nn.Embedding(buckets * (order - 1), size) if order > 1 else None
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.embedding.weight, std=size**-0.5)
        if self.grams is not None:  # at the start of training, a state is the vector of its word alone
            nn.init.zeros_(self.grams.weight)

    def forward(self, source: Int[Tensor, "b k"], lengths: Int[Tensor, " b"] | None = None) -> Memory:
        """Return the memory (states) of source sequences; `lengths` are their numbers of tokens (None: no padding)."""
        states = self.embedding(source)
        for order in range(2, self.order + 1):
            assert self.grams is not None, "there are n-grams"
            states = states + self.grams(self._hashed(source, order))
        states = self.dropout(states)
        if lengths is None:
            return Memory(states, states, None, states.mean(1))
        if lengths.shape != source.shape[:1]:
            raise ValueError(f"lengths must have one number a source, {source.shape[0]}, got {tuple(lengths.shape)}")
        mask = torch.arange(source.shape[1], device=source.device) < lengths.unsqueeze(-1)
        states = torch.where(mask.unsqueeze(-1), states, 0)
        return Memory(states, states, mask, states.sum(1) / lengths.clamp(min=1).unsqueeze(-1))

    def _hashed(self, source: Tensor, order: int) -> Tensor:
        """Return for each position the index of the vector of the n-gram that ends there, with n = `order`."""
        mixed = source
        for back in range(1, order):
            before = nn.functional.pad(source, (back, 0))[:, : source.shape[1]]
            mixed = mixed + before * _MIX[back]
        return mixed % self.buckets + (order - 2) * self.buckets
