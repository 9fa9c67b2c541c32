"""Functions that build the model of translation from its settings."""

from torch import nn

from regard.models.frame import EncoderDecoder
from regard.models.recurrent.cells import Recurrence
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.recurrent.encoder import RecurrentEncoder
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder
from regard.nn.attention import Attention
from regard.nn.coverage import CoverageAttention
from regard.nn.local import LocalAttention
from regard.nn.location import LocationAttention
from regard.nn.monotonic import MonotonicAttention
from regard.nn.protocol import Attends
from regard.nn.transformer import unnormalized
from regard.tasks.attention_learning import hard
from regard.tasks.config import LearningSettings
from regard.tasks.translation.config import ModelSettings

_LEARNING = LearningSettings()


def build(
    settings: ModelSettings, sizes: tuple[int, int], *, shared: bool, learning: LearningSettings = _LEARNING
) -> EncoderDecoder:
    """Return an untrained translation model for vocabularies of these `sizes`, of source and target.

    If `shared` is true, encoder and decoder of a Transformer share one embedding.
    """
    if settings.kind == "transformer":
        return _transformer(settings, sizes, shared)
    source, target = sizes
    embedding = settings.embedding or settings.size
    encoder = RecurrentEncoder(
        source,
        settings.size,
        cell=settings.cell,
        layers=settings.layers,
        embedding_size=embedding,
        dropout=settings.dropout,
        keys=settings.keys,
        values=settings.values,
    )
    decoder = RecurrentDecoder(
        target,
        settings.size,
        memory_size=encoder.memory_size,
        attention=attention(settings, encoder.memory_size, learning),
        order=settings.order,
        input_feeding=settings.input_feeding,
        recurrence=Recurrence(settings.cell, settings.decoder_layers or settings.layers, embedding, settings.dropout),
    )
    return EncoderDecoder(encoder, decoder)


def attention(settings: ModelSettings, memory_size: int, learning: LearningSettings = _LEARNING) -> Attends | None:
    """Return the attention mechanism `settings.attention` of the recurrent model; None for "none"."""
    name, size, reach = settings.attention, settings.size, settings.reach
    match name:
        case "none":
            return None
        case "local-m" | "local-p":
            kind = "monotonic" if name == "local-m" else "predictive"
            return LocalAttention(size, memory_size, reach=reach, kind=kind, hidden_size=size)
        case "local-hard":
            return LocalAttention(size, memory_size, reach=reach, kind="hard", hidden_size=size, lock=hard(learning))
        case "hard":
            return Attention(size, memory_size, hidden_size=size, normalize=hard(learning))
        case "monotonic":
            return MonotonicAttention(size, memory_size, hidden_size=size)
        case "location":
            return LocationAttention(size, memory_size, hidden_size=size)
        case "coverage":
            return CoverageAttention(size, memory_size, hidden_size=size)
    return Attention(size, memory_size, score=name, hidden_size=None if name == "bilinear" else size)


def _transformer(settings: ModelSettings, sizes: tuple[int, int], shared: bool) -> EncoderDecoder:
    embedding = None
    if shared:
        embedding = nn.Embedding(sizes[0], settings.size)
        nn.init.normal_(embedding.weight, std=settings.size**-0.5)
    positions = None if settings.positions == "none" else settings.positions
    norm, normalization = (settings.norm, nn.LayerNorm) if settings.norm != "none" else ("pre", unnormalized)
    encoder = TransformerEncoder(
        sizes[0],
        settings.size,
        layers=settings.layers,
        heads=settings.heads,
        feed_forward=settings.feed_forward,
        positions=positions,
        norm=norm,
        normalization=normalization,
        dropout=settings.dropout,
        inner_dropout=settings.inner_dropout,
        residual=settings.residual,
        embedding=embedding,
        keys=settings.keys,
        values=settings.values,
    )
    decoder = TransformerDecoder(
        sizes[1],
        settings.size,
        layers=settings.decoder_layers or settings.layers,
        heads=settings.heads,
        feed_forward=settings.feed_forward,
        positions=positions,
        norm=norm,
        normalization=normalization,
        dropout=settings.dropout,
        inner_dropout=settings.inner_dropout,
        residual=settings.residual,
        embedding=embedding,
    )
    return EncoderDecoder(encoder, decoder)
