"""The model of reading comprehension, and its loss."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core.normalizers import Hard, Normalizer, Softmax
from regard.core.requests import Request
from regard.models.memory import Memory
from regard.models.span_pointer import Pointed, SpanPointer
from regard.models.speech.pyramidal_encoder import BothWays
from regard.tasks.reading.codec import ALPHABET, FEATURES
from regard.tasks.reading.config import ModelSettings
from regard.train.memory_check import count_parameters

_HARD = Hard("straight_through")


@dataclass(frozen=True, eq=False)
class Texts:
    """Padded texts: word numbers, a mask that is False for padding, and the features and letters of each word."""

    words: Int[Tensor, "b n"]
    mask: Bool[Tensor, "b n"]
    features: Float[Tensor, "b n f"]
    letters: Int[Tensor, "b n c"] | None = None

    @classmethod
    def of(cls, batch: Any, name: str) -> "Texts":
        """Return the passages (`name` "passage") or the questions (`name` "question") of a batch of encoded records."""
        words, lengths = getattr(batch, name), getattr(batch, f"{name}_lengths")
        mask = torch.arange(words.shape[1], device=words.device) < lengths.unsqueeze(-1)
        return cls(words, mask, getattr(batch, f"{name}_features"), getattr(batch, f"{name}_letters", None))


class Reader(nn.Module):
    """The model of reading comprehension: a bidirectional GRU that encodes passages and questions, and a span pointer.

    The state of word j is h_j = [→h_j; ←h_j], the states of both directions of the GRU. The input of the GRU is the
    vector of the word, a convolution over its letters (Kim 2014, as in BiDAF, section 2), and its features.
    """

    def __init__(self, settings: ModelSettings, vocabulary: int, size: int, normalize: Normalizer) -> None:
        super().__init__()
        embedding = settings.embedding or settings.size
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=0)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.letters = _Letters(settings.characters) if settings.characters else None
        sizes = [embedding + settings.characters + FEATURES] + [2 * size] * (settings.layers - 1)
        self.layers = nn.ModuleList(
            BothWays(nn.GRU(before, size, batch_first=True), nn.GRU(before, size, batch_first=True)) for before in sizes
        )
        none = settings.attention == "none"
        score = {"none": "mean", "hard": "dot"}.get(settings.attention, settings.attention)
        matching = None if settings.matching == "none" else "mean" if none else settings.matching
        self.pointer = SpanPointer(
            2 * size,
            key_size=embedding if settings.align == "words" else None,
            products=settings.products,
            size=size,
            score=score,
            normalize=normalize,
            matching=matching,
            hops=settings.hops,
            dropout=settings.dropout,
        )
        self.dropout = settings.dropout
        self.aligned_words = settings.align == "words"

    def forward(self, passage: Texts, question: Texts, *, weights: Request | None = None) -> Pointed:
        """Return the scores of each passage word as the first and as the last word of the answer."""
        return self.pointer(self.encode(passage), self.encode(question), weights=weights)

    def encode(self, texts: Texts) -> Memory:
        """Return the keys and values of attention for the texts; the values are the GRU's states of the words."""
        vectors = self.embedding(texts.words)
        parts = [vectors, texts.features]
        if self.letters is not None:
            if texts.letters is None:
                raise ValueError("the model reads letters, and the batch has none: encode with characters=True")
            parts.append(self.letters(texts.letters))
        states = torch.cat([part.to(parts[0].dtype) for part in parts], -1)
        for layer in self.layers:
            states = layer(F.dropout(states, self.dropout, self.training), texts.mask)
        return Memory(vectors if self.aligned_words else states, states, texts.mask, states[:, 0])


class _Letters(nn.Module):
    """Features of a word's spelling: max_t relu(W [l_t; l_{t+1}; …; l_{t+4}] + b), with l_t the vector of letter t.

    W and b are the parameters of the convolution over `width` letters, 5 in this formula.
    """

    def __init__(self, size: int, *, letter_size: int = 16, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ALPHABET, letter_size, padding_idx=0)
        self.convolution = nn.Conv1d(letter_size, size, width, padding=width // 2)

    def forward(self, letters: Int[Tensor, "b n c"]) -> Float[Tensor, "b n d"]:
        vectors = self.embedding(letters).flatten(0, 1).transpose(1, 2)
        return F.relu(self.convolution(vectors).amax(-1)).unflatten(0, letters.shape[:2])


def build(settings: ModelSettings, vocabulary: int, *, normalize: Normalizer | None = None) -> Reader:
    """Return a model for a vocabulary of this size.

    `normalize` is the normaliser of attention over the question; None: softmax, or straight-through hard attention if
    the settings say "hard". A model without attention gets a larger state size, so that it has about as many parameters
    as a model with attention.
    """
    if normalize is None:
        normalize = _HARD if settings.attention == "hard" else Softmax()
    size = settings.size if settings.attention != "none" else _twin_size(settings, vocabulary)
    return Reader(settings, vocabulary, size, normalize)


def _twin_size(settings: ModelSettings, vocabulary: int) -> int:
    """Return the state size with which a model without attention has about as many parameters as one with attention."""
    wanted = _count(settings.model_copy(update={"attention": "dot"}), vocabulary, settings.size)
    sizes = range(settings.size, 2 * settings.size + 1)
    return min(sizes, key=lambda size: abs(_count(settings, vocabulary, size) - wanted))


def _count(settings: ModelSettings, vocabulary: int, size: int) -> int:
    with torch.device("meta"):
        return count_parameters(Reader(settings, vocabulary, size, Softmax()))


def loss(pointed: Pointed, start: Int[Tensor, "b"], end: Int[Tensor, "b"]) -> Tensor:
    """Return −log p(start) − log p(end), summed over the batch; a question without an answer (-1) adds 0."""
    pairs = ((pointed.start_logits, start), (pointed.end_logits, end))
    first, last = (F.cross_entropy(scores.float(), gold, ignore_index=-1, reduction="sum") for scores, gold in pairs)
    return first + last
