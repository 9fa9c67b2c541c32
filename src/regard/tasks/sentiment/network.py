"""The text classifier from its settings: an encoder, and attention that pools what it read."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.core.normalizers import Entmax, Normalizer, Sigmoid, Softmax, Sparsemax
from regard.core.requests import Request
from regard.models.classifier import Classified, Classifier
from regard.models.ngrams import NgramEncoder
from regard.models.recurrent_encoder import RecurrentEncoder
from regard.models.transformer import TransformerEncoder
from regard.tasks.config import LearningSettings
from regard.tasks.learning import hard
from regard.tasks.sentiment.config import ModelSettings

_LEARNING = LearningSettings()

Encoder = RecurrentEncoder | TransformerEncoder | NgramEncoder


class TextClassifier(nn.Module):
    """Classes of token sequences: memory = encoder(source), logits = classifier(memory).

    In training a share of `word_dropout` of the tokens is replaced by `unknown`.
    """

    def __init__(self, encoder: Encoder, classifier: Classifier, *, word_dropout: float, unknown: int) -> None:
        super().__init__()
        self.encoder, self.classifier = encoder, classifier
        self.word_dropout, self.unknown = word_dropout, unknown

    def forward(
        self,
        source: Int[Tensor, "b k"],
        lengths: Int[Tensor, " b"] | None = None,
        *,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Classified:
        """Scores of the classes of some texts, and the weights asked for, (b, looks, k)."""
        if self.training and self.word_dropout:
            dropped = torch.rand(source.shape, device=source.device) < self.word_dropout
            source = source.masked_fill(dropped, self.unknown)
        return self.classifier(self.encoder(source, lengths), weights=weights, generator=generator)


def build(
    settings: ModelSettings,
    vocabulary_size: int,
    classes: int,
    *,
    unknown: int = 3,
    learning: LearningSettings = _LEARNING,
) -> TextClassifier:
    """A classifier of texts of so many different tokens into so many classes.

    With `attention="none"` the summary of the encoder decides, after a hidden layer that holds as many parameters as
    the attention would.
    """
    if settings.attention != "none":
        return _attending(settings, vocabulary_size, classes, unknown, learning)
    with torch.device("meta"):
        attends = settings.model_copy(update={"attention": "additive"})
        twin = _attending(attends, vocabulary_size, classes, unknown, learning)
    encoder = _encoder(settings.model_copy(update={"keys": "states", "values": "states"}), vocabulary_size)
    spare = count_parameters(twin) - count_parameters(encoder)
    features = max(1, round((spare - classes) / (2 * (encoder.memory_size + 1) + classes)))
    classifier = Classifier(
        classes, memory_size=encoder.memory_size, attention=None, features=features, dropout=settings.dropout
    )
    return TextClassifier(encoder, classifier, word_dropout=settings.word_dropout, unknown=unknown)


def count_parameters(model: nn.Module) -> int:
    """How many numbers a model learns."""
    return sum(parameter.numel() for parameter in model.parameters())


def _attending(
    settings: ModelSettings, vocabulary_size: int, classes: int, unknown: int, learning: LearningSettings
) -> TextClassifier:
    encoder = _encoder(settings, vocabulary_size)
    classifier = Classifier(
        classes,
        memory_size=encoder.memory_size,
        attention=settings.attention,
        hidden_size=settings.attention_size or (settings.size if settings.attention == "additive" else None),
        looks=settings.looks,
        features=settings.features or None,
        normalize=_normalizer(settings, learning),
        dropout=settings.dropout,
    )
    return TextClassifier(encoder, classifier, word_dropout=settings.word_dropout, unknown=unknown)


def _normalizer(settings: ModelSettings, learning: LearningSettings) -> Normalizer:
    match settings.normalize:
        case "softmax":
            return Softmax()
        case "sparsemax":
            return Sparsemax()
        case "entmax":
            return Entmax(settings.alpha)
        case "sigmoid":
            return Sigmoid()
        case "hard":
            return hard(learning)


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
