"""The model of speech recognition: a pyramidal encoder, and a recurrent decoder with attention."""

import torch
from torch import Tensor, nn

from regard.models.frame import EncoderDecoder
from regard.models.memory import Memory
from regard.models.recurrent.cells import Recurrence
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.speech.pyramidal_encoder import SpeechEncoder
from regard.nn.attention import Attention
from regard.nn.location import LocationAttention
from regard.nn.monotonic import MonotonicAttention
from regard.nn.protocol import Attends
from regard.nn.spec_augment import SpecAugment
from regard.tasks.attention_learning import hard
from regard.tasks.speech.config import FeatureSettings, ModelSettings, SpeechConfig
from regard.train.memory_check import count_parameters


class Listener(nn.Module):
    """An encoder of log-mel frames (b, t, bands): SpecAugment masks in training, then a pyramidal encoder."""

    def __init__(self, settings: ModelSettings, features: FeatureSettings) -> None:
        super().__init__()
        self.augment = SpecAugment(
            bands=features.mask_bands,
            band_width=features.band_width,
            spans=features.mask_spans,
            span_width=features.span_width,
        )
        self.pyramid = SpeechEncoder(
            features.bands,
            settings.encoder_size,
            layers=settings.pyramid,
            stack=settings.stack,
            dropout=settings.dropout,
        )

    def forward(self, source: Tensor, lengths: Tensor | None = None) -> Memory:
        return self.pyramid(self.augment(source.float(), lengths), lengths)


def build(config: SpeechConfig, vocabulary: int) -> EncoderDecoder:
    """Return a model of speech recognition for a vocabulary of this size.

    With `attention="none"`, the embeddings of the symbols are wider, so that the model has about as many parameters as
    with attention.
    """
    encoder = Listener(config.model, config.features)
    memory = encoder.pyramid.memory_size
    settings = config.model
    embedding = settings.embedding or settings.size

    def decoder(attention: Attends | None, embedding: int) -> RecurrentDecoder:
        return RecurrentDecoder(
            vocabulary,
            settings.size,
            memory_size=memory,
            attention=attention,
            order=settings.order,
            recurrence=Recurrence(settings.cell, 1, embedding, settings.dropout),
        )

    if settings.attention != "none":
        return EncoderDecoder(encoder, decoder(_attention(config, memory), embedding))
    with torch.device("meta"):
        wanted = count_parameters(decoder(LocationAttention(settings.size, memory), embedding))
        less, more = (count_parameters(decoder(None, embedding + n)) for n in (0, 1))
    wider = embedding + max(0, round((wanted - less) / (more - less)))
    return EncoderDecoder(encoder, decoder(None, wider))


def _attention(config: SpeechConfig, memory: int) -> Attends:
    settings = config.model
    size, name = settings.size, settings.attention
    if name == "location":
        return LocationAttention(size, memory, hidden_size=size, filters=settings.filters, kernel_size=settings.kernel)
    if name == "monotonic":
        return MonotonicAttention(size, memory, hidden_size=size)
    if name == "hard":
        return Attention(size, memory, hidden_size=size, normalize=hard(config.learning))
    return Attention(size, memory, score=name, hidden_size=None if name == "bilinear" else size)
