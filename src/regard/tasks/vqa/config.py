"""The settings of a model that answers questions about pictures: its data, its model and its training."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from regard.data.worlds.scene_questions import FORMS
from regard.tasks.attention_learning import NormalizerName
from regard.tasks.config import FILES, WORLD, Count, Need, Settings, TaskConfig, TaskData, Width, shared_needs

Form = Literal["colour", "shape", "count", "presence", "place", "relation", "comparison"]


class DataSettings(TaskData):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """easy-VQA's folder, or a folder or file of JSON or JSONL with image, question and answer; none: the world."""
    picture: int = Field(default=48, ge=32, le=1024)
    """Height and width of the pictures in pixels; others are scaled and cropped to it."""
    objects: tuple[int, int] = (2, 4)
    """Shapes of a scene of the world, at least and at most."""
    forms: tuple[Form, ...] = FORMS  # type: ignore
    """What the world asks about."""
    questions: int = Field(default=8, gt=0, le=64)
    """Questions of the world about each scene of training."""
    answers: Count = 1000
    """Answers of files that can be given: the most frequent in training."""
    batch_tokens: int = Field(default=384, gt=0, le=2**30)
    """Questions of a batch, padding counted."""


class ModelSettings(Settings):
    """Encoders of picture and question, stacked attention and an answer classifier."""

    attention: Literal["none", "dot", "scaled_dot", "cosine", "bilinear", "additive"] = "scaled_dot"
    """Score by which the cells of the picture are weighted; none: the mean of the cells is read."""
    normalize: NormalizerName = "softmax"
    """How scores become weights."""
    alpha: float = Field(default=1.5, ge=1.0, le=10.0)
    """Alpha of entmax."""
    hops: int = Field(default=2, gt=0, le=16)
    """How often the picture is read; each hop knows what the ones before it read."""
    counts: bool = True
    """Whether the classifier is given how many cells match the question, which weights that sum to 1 do not say."""
    image: bool = True
    """Whether the picture is read at all; false: the question alone is answered."""
    widths: tuple[Width, ...] = Field(default=(32, 64, 64), min_length=1, max_length=8)
    """Channels of the convolutions; each halves the picture, so that three make cells of 8 × 8 pixels."""
    kernels: tuple[Literal[2, 4], ...] = ()
    """Sides of their kernels, one for each; none: 4. With smaller ones a cell sees less beside its own pixels."""
    size: int = Field(default=64, gt=0, le=2**16, multiple_of=4)
    """Size of the cells and of the question's state."""
    embedding: Width = 32
    """Size of the word vectors."""
    features: Width = 128
    """Hidden size of the answer classifier."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout in training."""

    @model_validator(mode="after")
    def _every_layer_has_a_kernel(self) -> "ModelSettings":
        if self.kernels and len(self.kernels) != len(self.widths):
            raise ValueError(f"kernels: expected one for each of the {len(self.widths)} widths, got {self.kernels}")
        return self


class VqaConfig(TaskConfig):
    """A whole run."""

    figures = ("loss", "accuracy")

    task: Literal["vqa"] = "vqa"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()


_PICTURE = Need.value("model.image", True)
_ATTENDS = Need("model", lambda model: model.image and model.attention != "none", "a model with attention")
_HARD = Need("model", lambda model: model.image and model.normalize == "hard", "model.normalize=hard")
_SOFT = Need(
    "model", lambda model: model.image and model.attention != "none" and model.normalize != "hard", "soft attention"
)
NEEDS = {
    **shared_needs(_HARD, _SOFT),
    **dict.fromkeys(("data.objects", "data.forms", "data.questions"), (WORLD,)),
    "data.answers": (FILES,),
    **dict.fromkeys(("model.attention", "model.widths", "model.kernels"), (_PICTURE,)),
    **dict.fromkeys(("model.normalize", "model.hops", "model.counts"), (_ATTENDS,)),
    "model.alpha": (_ATTENDS, Need.value("model.normalize", "entmax")),
}
"""What has each setting that not every run has. One that was asked for and has no effect is an error."""
