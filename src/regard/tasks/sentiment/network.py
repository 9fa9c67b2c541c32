"""The model of text classification: an encoder, and attention that pools the encoder's states."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from regard.core.requests import Request
from regard.models.classifier import Classified, Classifier
from regard.models.ngrams import NgramEncoder
from regard.models.recurrent.encoder import RecurrentEncoder
from regard.models.transformer.encoder_decoder import TransformerEncoder
from regard.tasks.attention_learning import normalizer
from regard.tasks.config import LearningSettings
from regard.tasks.sentiment.config import ModelSettings
from regard.train.memory_check import count_parameters

_LEARNING = LearningSettings()

Encoder = RecurrentEncoder | TransformerEncoder | NgramEncoder


class TextClassifier(nn.Module):
    """The model of text classification: memory = encoder(source), logits = classifier(memory).

    In training, a fraction `word_dropout` of the tokens is replaced by `unknown`. Stop words, for which the table
    `stop` (v,) over the vocabulary is True, are encoded, but masked in attention: a word that is in nearly every text
    ("the", a full stop) determines no class, but its state also encodes its neighbours, and attention might select the
    stop word instead of these neighbours.
    """

    stop: Tensor

    def __init__(
        self, encoder: Encoder, classifier: Classifier, *, word_dropout: float, unknown: int, stop: Tensor
    ) -> None:
        super().__init__()
        self.encoder, self.classifier = encoder, classifier
        self.word_dropout, self.unknown = word_dropout, unknown
        self.register_buffer("stop", stop)

    def forward(
        self,
        source: Int[Tensor, "b k"],
        lengths: Int[Tensor, " b"] | None = None,
        *,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Classified:
        """Return the logits of the classes for each text, and the requested attention weights (b, looks, k).

        `looks` is the number of learned queries.
        """
        if self.training and self.word_dropout:
            dropped = torch.rand(source.shape, device=source.device) < self.word_dropout
            source = source.masked_fill(dropped, self.unknown)
        memory = self.encoder(source, lengths)
        content = ~self.stop[source]
        memory = replace(memory, mask=content if memory.mask is None else memory.mask & content)
        return self.classifier(memory, weights=weights, generator=generator)


def build(
    settings: ModelSettings,
    vocabulary_size: int,
    classes: int,
    *,
    unknown: int = 3,
    stop: Bool[Tensor, " v"] | None = None,
    learning: LearningSettings = _LEARNING,
) -> TextClassifier:
    """Return a classifier for this vocabulary size and number of classes; `stop` is the result of `stop_words`.

    With `attention="none"`, the classifier's input is the encoder's summary vector instead of a context vector, and the
    classifier has a hidden layer with about as many parameters as the attention.
    """
    stop = torch.zeros(vocabulary_size, dtype=torch.bool) if stop is None else stop
    encoder, classifier = (
        _attending(settings, vocabulary_size, classes, learning)
        if settings.attention != "none"
        else _fixed(settings, vocabulary_size, classes, learning)
    )
    return TextClassifier(encoder, classifier, word_dropout=settings.word_dropout, unknown=unknown, stop=stop)


def stop_words(texts: Iterable[Sequence[int]], vocabulary_size: int, share: float) -> Bool[Tensor, " v"]:
    """Return a mask (v,) over the vocabulary, True for tokens that occur in more than a fraction `share` of the texts.

    >>> stop_words([[4, 5], [4, 6], [4, 4, 7]], 8, 0.5).nonzero().flatten()
    tensor([4])
    """
    counts, total = torch.zeros(vocabulary_size, dtype=torch.long), 0
    for text in texts:
        counts[list(set(text))] += 1
        total += 1
    return counts > share * total


def _fixed(
    settings: ModelSettings, vocabulary_size: int, classes: int, learning: LearningSettings
) -> tuple[Encoder, Classifier]:
    """Return an encoder and a classifier without attention.

    The size of the classifier's hidden layer is chosen so that the model has about as many parameters as the model with
    attention.
    """
    with torch.device("meta"):
        attends = settings.model_copy(update={"attention": "additive"})
        twin = _attending(attends, vocabulary_size, classes, learning)
    encoder = _encoder(settings.model_copy(update={"keys": "states", "values": "states"}), vocabulary_size)
    spare = sum(map(count_parameters, twin)) - count_parameters(encoder)
    features = max(1, round((spare - classes) / (2 * (encoder.memory_size + 1) + classes)))
    classifier = Classifier(
        classes, memory_size=encoder.memory_size, attention=None, features=features, dropout=settings.dropout
    )
    return encoder, classifier


def _attending(
    settings: ModelSettings, vocabulary_size: int, classes: int, learning: LearningSettings
) -> tuple[Encoder, Classifier]:
    encoder = _encoder(settings, vocabulary_size)
    classifier = Classifier(
        classes,
        memory_size=encoder.memory_size,
        attention=settings.attention,
        hidden_size=settings.attention_size or (settings.size if settings.attention == "additive" else None),
        looks=settings.looks,
        features=settings.features or None,
        normalize=normalizer(settings.normalize, learning, alpha=settings.alpha),
        dropout=settings.dropout,
    )
    return encoder, classifier


def _encoder(settings: ModelSettings, vocabulary_size: int) -> Encoder:
    contents: dict[str, Any] = {"keys": settings.keys, "values": settings.values}
    match settings.kind:
        case "ngrams":
            return NgramEncoder(
                vocabulary_size,
                settings.size,
                order=settings.order,
                buckets=settings.buckets,
                dropout=settings.dropout,
            )
        case "recurrent":
            return RecurrentEncoder(
                vocabulary_size,
                settings.size,
                cell=settings.cell,
                layers=settings.layers,
                embedding_size=settings.embedding,
                dropout=settings.dropout,
                **contents,
            )
        case "transformer":
            if settings.size % settings.heads:
                raise ValueError(
                    f"model.size must be a multiple of model.heads: got {settings.size} and {settings.heads}"
                )
            return TransformerEncoder(
                vocabulary_size,
                settings.size,
                layers=settings.layers,
                heads=settings.heads,
                feed_forward=settings.feed_forward,
                positions=None if settings.positions == "none" else settings.positions,
                norm=settings.norm,
                dropout=settings.dropout,
                **contents,
            )
