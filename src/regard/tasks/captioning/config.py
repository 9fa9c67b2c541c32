"""The settings of captioning: its data, its model, its training and its decoding."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from regard.models.vision.image_encoder import MapAttention
from regard.tasks.config import (
    FILES,
    WORLD,
    DecodeSettings,
    LearningSettings,
    Need,
    ScoreName,
    Settings,
    TaskConfig,
    TaskData,
    Width,
    shared_needs,
)
from regard.tasks.text_generation import Credit

AttentionName = Literal["none", ScoreName, "hard"]
MOST_OBJECTS = 6  # largest number of shapes in a generated scene
Objects = Annotated[int, Field(gt=0, lt=MOST_OBJECTS)]


class DataSettings(TaskData):
    """The data of captioning: built-in drawn scenes, or files."""

    files: tuple[Path, ...] = ()
    """A folder of pictures with captions as TSV or JSONL, or with Flickr8k's files; none: the built-in scenes."""
    picture: int = Field(default=48, ge=32, le=1024)
    """Height and width to which pictures are resized, in pixels."""
    objects: tuple[Objects, Objects] = (1, 3)
    """The smallest and largest number of shapes in a scene; those of the longer test set have one or two more."""
    tokens: Literal["words", "characters"] = "words"
    """The tokens of a caption, without punctuation; characters: Chinese characters one by one."""
    vocabulary: int = Field(default=10_000, gt=0, le=10**6)
    """Largest size of the vocabulary, in words."""
    rarest: PositiveInt = 1
    """Words that occur less often in the training captions are unknown."""
    longest: int = Field(default=30, gt=0, le=1000)
    """The largest number of words in a caption, in training and output."""
    flip: bool = False
    """Whether mirrored pictures are added to the training data."""
    skip_faults: bool = False
    """Whether captions without a picture and pictures that cannot be decoded are counted and skipped."""

    @model_validator(mode="after")
    def _objects_in_order(self) -> "DataSettings":
        if self.objects[0] > self.objects[1]:
            raise ValueError(f"expected the smaller number first, got {list(self.objects)} for data.objects")
        return self


class ModelSettings(Settings):
    """The model of captioning: a convolutional encoder, and a recurrent decoder that attends to the image."""

    encoder: Literal["residual", "efficientnet"] = "residual"
    """A residual network trained from scratch, or EfficientNet-Lite0 with ImageNet weights."""
    widths: tuple[Width, ...] = (32, 64, 128)
    """Channels of the residual network's stages; each halves the picture."""
    blocks: int = Field(default=1, gt=0, le=100)
    """Number of residual blocks in a stage."""
    patch: int = Field(default=1, gt=0, le=64)
    """Stride of the residual network's first convolution."""
    stage: int = Field(default=5, ge=1, le=8)
    """The last stage of EfficientNet that is used: 3 gives cells of 8 pixels, 4 and 5 of 16, 6, 7 and 8 of 32."""
    frozen: bool = True
    """Whether EfficientNet is frozen; its maps are then computed once and stored in the run's data folder."""
    encoder_attention: MapAttention = "none"
    """Gates on the map, the same for every word: channel, spatial, both, or gate, one for every entry of a cell."""
    positions: bool = True
    """Whether cells have encodings of their row and column."""
    summary: Literal["mean", "moments"] = "mean"
    """The initial input of the decoder: the mean of the cells, or spatial moments of each channel (amount and
    position)."""
    attention: AttentionName = "additive"
    """Score by which the cells are weighted for each word; hard: one cell is chosen; none: a fixed summary."""
    order: Literal["bahdanau", "luong"] = "bahdanau"
    """Whether attention is computed before (bahdanau) or after (luong) the step of the decoder."""
    input_feeding: bool = False
    """Luong's order: whether the last output is part of the next input."""
    cell: Literal["gru", "lstm"] = "gru"
    """Recurrent cell of the decoder."""
    size: Width = 256
    """Size of the decoder's states and of the picture's cells."""
    attention_size: Width | None = None
    """Size to which state and cells are projected before they are scored; none: the size."""
    embedding: Width | None = None
    """Size of the word vectors; none: the size."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout on word vectors and before the output layer, in training."""
    map_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the map of the picture, in training."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ModelSettings":
        if self.positions and self.size % 4:
            raise ValueError(f"model.size must be a multiple of 4 where cells know their place, got {self.size}")
        if self.input_feeding and self.order != "luong":
            raise ValueError("model.input_feeding goes with model.order=luong: Bahdanau's order feeds what it read")
        return self


class CaptionLearning(LearningSettings):
    """Settings of how attention is trained; hard attention is trained as in Xu et al. 2015, section 4.1."""

    expected: float = Field(default=0.5, ge=0.0, le=1.0)
    """With REINFORCE, fraction of captions that use soft attention, resampled in each step; 0: all sample."""
    credit: Credit = "word"
    """Reward of REINFORCE, a log-probability: of the sample's word, of its and the later words, or of all words."""


class CaptioningConfig(TaskConfig):
    """All settings of a run that trains and evaluates a captioning model."""

    figures = ("loss", "exact", "bleu4")

    task: Literal["captioning"] = "captioning"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    learning: CaptionLearning = CaptionLearning()
    decode: DecodeSettings = DecodeSettings()
    smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Label smoothing: fraction of the target's probability that is spread evenly over all words."""


_RESIDUAL = Need.value("model.encoder", "residual")
_EFFICIENT = Need.value("model.encoder", "efficientnet")
_HARD = Need.value("model.attention", "hard")
_REINFORCE = Need.value("learning.estimator", "reinforce")
_PROJECTED = Need("model.attention", lambda name: name not in ("none", "bilinear"), "attention other than bilinear")
_SOFT = Need("model.attention", lambda name: name not in ("none", "hard"), "soft attention")
NEEDS = {
    **shared_needs(_HARD, _SOFT),
    "data.objects": (WORLD,),
    **dict.fromkeys(("data.tokens", "data.vocabulary", "data.rarest", "data.flip", "data.skip_faults"), (FILES,)),
    **dict.fromkeys(("model.widths", "model.blocks", "model.patch"), (_RESIDUAL,)),
    **dict.fromkeys(("model.stage", "model.frozen"), (_EFFICIENT,)),
    "model.attention_size": (_PROJECTED,),
    "learning.credit": (_HARD, _REINFORCE),
    "model.input_feeding": (Need.value("model.order", "luong"),),
}
"""For each setting that is not always used, the conditions under which it has an effect. Giving such a setting where it
has no effect is an error."""
