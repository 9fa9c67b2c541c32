"""A recurrent encoder of token sequences."""

from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.core import sharding
from regard.models.memory import Memory
from regard.models.memory_words import Content, check_content, with_words
from regard.models.recurrent import gru_sequence
from regard.models.recurrent.cells import Recurrence
from regard.models.recurrent.token_embeddings import embedded


class RecurrentEncoder(nn.Module):
    """A recurrent encoder h_j = f(x_j, h_{j-1}), in one or in two directions (Bahdanau et al. 2015, section 3.2).

    With two directions, word j is encoded as [→h_j; ←h_j]. A source (b, k) is encoded as a `Memory` with keys = values
    (b, k, m), where m = size for one direction and 2 · size for two. `summary` is the last state of the top layer, of
    all directions. Padding changes no result: the states of a sequence do not depend on the rest of the batch, and
    states at padded positions are zeros.

    A state also depends on neighbouring words, so a decoder may attend to a position beside the word that it needs.
    `keys` and `values` are the contents of the memory: "states" h_j; "words", the mapped embeddings W_x x_j alone; or
    "both", the sum of the two. If the values are words, the context contains only the attended words (Nguyen & Chiang
    2018, section 4).

    >>> encoder = RecurrentEncoder(11, 4)
    >>> memory = encoder(torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2]))
    >>> memory.values.shape, memory.summary.shape, memory.mask[1]
    (torch.Size([2, 3, 8]), torch.Size([2, 8]), tensor([ True,  True, False]))
    """

    def __init__(
        self,
        vocabulary: int,
        size: int,
        *,
        cell: Literal["gru", "lstm"] = "gru",
        layers: int = 1,
        bidirectional: bool = True,
        embedding_size: int | None = None,
        dropout: float = 0.0,
        keys: Content = "states",
        values: Content = "states",
    ) -> None:
        super().__init__()
        check_content(keys=keys, values=values)
        recurrence = Recurrence(cell=cell, layers=layers, embedding_size=embedding_size, dropout=dropout)
        self.size = size
        self.memory_size = size * (2 if bidirectional else 1)
        self.embedding = nn.Embedding(vocabulary, embedding_size or size)
        self.network = recurrence.network(embedding_size or size, size, bidirectional=bidirectional)
        self.dropout = nn.Dropout(dropout)
        self.keys, self.values = keys, values
        plain = keys == values == "states"
        self.words = None if plain else nn.Linear(embedding_size or size, self.memory_size, bias=False)

    def forward(self, source: Int[Tensor, "b k"], lengths: Int[Tensor, "b"] | None = None) -> Memory:
        """Return the memory (states) of source sequences; `lengths` are their numbers of tokens (None: no padding)."""
        sharding.refuse("a recurrent encoder")
        memory = self._read(source, lengths)
        if self.words is None:
            return memory
        vectors = self.embedding(source)
        # embeddings of padding are set to zero, so that padding contributes neither to values nor to gradients
        if memory.mask is not None:
            vectors = torch.where(memory.mask.unsqueeze(-1), vectors, 0)
        words = self.words(self.dropout(vectors))
        return with_words(memory, words, keys=self.keys, values=self.values)

    def _read(self, source: Tensor, lengths: Tensor | None) -> Memory:
        """Return the memory whose keys and values are the network's states."""
        mask = None
        captured = gru_sequence.serves_cuda(self.network) and source.numel() > 0
        if lengths is not None:
            # Lengths on CUDA are not checked: a check would wait for the device, which is an error in a graph capture.
            if captured and lengths.is_cuda:
                _check_shape(source, lengths)
            else:
                lengths = lengths.cpu()  # torch's pack_padded_sequence needs the lengths on the CPU
                _check(source, lengths)
            mask = torch.arange(source.shape[1], device=source.device) < lengths.to(source.device).unsqueeze(-1)
        if gru_sequence.serves(self.network) and source.numel():
            result = self._by_hand(source, lengths)
            return Memory(result.states, result.states, mask, result.last)
        vectors = self.dropout(self.embedding(source))
        if captured:
            result = gru_sequence.read_cuda(self.network, vectors, mask)
            return Memory(result.states, result.states, mask, result.last)
        if lengths is None or mask is None:
            states, last = self.network(vectors)
            return Memory(states, states, None, self._summary(last))
        # An empty row is encoded as one token, because pack_padded_sequence needs at least one; then its state is set
        # to zero.
        packed = pack_padded_sequence(vectors, lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
        outputs, last = self.network(packed)
        states, _ = pad_packed_sequence(outputs, batch_first=True, total_length=source.shape[1])
        summary = self._summary(last).masked_fill(~mask.any(-1, keepdim=True), 0.0)
        states = states.masked_fill(~mask.unsqueeze(-1), 0.0)
        return Memory(states, states, mask, summary)

    def _by_hand(self, source: Tensor, lengths: Tensor | None) -> gru_sequence.Read:
        """Return the states and last states computed by the hand-written loop, with the rows in their given order.

        The loop needs the rows in descending order of their lengths, and time as the first axis.
        """
        order = None
        if lengths is not None and bool((lengths[1:] > lengths[:-1]).any()):
            order = lengths.argsort(descending=True, stable=True)
            source, lengths = source[order], lengths[order]
        if lengths is not None:  # padding is replaced by a valid token, whose embedding gets no gradient from padding
            source = torch.where(torch.arange(source.shape[1]) < lengths.unsqueeze(-1), source, source[0, 0])
        words = embedded(self.embedding, self.dropout, source.t())
        result = gru_sequence.read(self.network, words, lengths)
        if order is None:
            return result
        places = order.argsort()
        return gru_sequence.Read(result.states[places], result.last[places])

    def _summary(self, last: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Return the top layer's last hidden state, with both directions concatenated."""
        hidden = last if isinstance(last, Tensor) else last[0]
        directions = 2 if self.network.bidirectional else 1
        return torch.cat(tuple(hidden[-directions:]), -1)


def _check_shape(source: Tensor, lengths: Tensor) -> None:
    if lengths.shape != source.shape[:1]:
        raise ValueError(
            f"lengths must have one number for each of the {len(source)} sources, got {tuple(lengths.shape)}"
        )


def _check(source: Tensor, lengths: Tensor) -> None:
    _check_shape(source, lengths)
    if lengths.numel():
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > source.shape[1]:
            raise ValueError(f"lengths must be between 0 and {source.shape[1]}, got {low} to {high}")
