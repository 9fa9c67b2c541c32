"""The settings of visual question answering: its data, its model and its training."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from regard.data.worlds.scene_questions import FORMS
from regard.tasks.attention_learning import NormalizerName
from regard.tasks.config import (
    FILES,
    WORLD,
    Count,
    Need,
    ScoreName,
    Settings,
    TaskConfig,
    TaskData,
    Width,
    shared_needs,
)

Form = Literal["colour", "shape", "count", "presence", "place", "relation", "comparison"]


class DataSettings(TaskData):
    """The data of visual question answering: built-in drawn scenes, or files."""

    files: tuple[Path, ...] = ()
    """easy-VQA's folder, or a folder or file of JSON or JSONL with image, question and answer; none: the built-in
    scenes."""
    picture: int = Field(default=48, ge=32, le=1024)
    """Height and width of the pictures in pixels; others are scaled and cropped to it."""
    objects: tuple[int, int] = (2, 4)
    """The smallest and largest number of shapes in a scene."""
    forms: tuple[Form, ...] = FORMS  # type: ignore
    """The forms of the generated questions."""
    questions: int = Field(default=8, gt=0, le=64)
    """Number of generated questions about each training scene."""
    answers: Count = 1000
    """Number of possible answers for files: the most frequent in training."""
    batch_tokens: int = Field(default=384, gt=0, le=2**30)
    """The largest number of questions in a batch, including padding."""


class ModelSettings(Settings):
    """The model of visual question answering: encoders of image and question, stacked attention, and a classifier."""

    attention: Literal["none", ScoreName] = "scaled_dot"
    """Score of the cells of the picture; none: the mean of the cells replaces attention."""
    normalize: NormalizerName = "softmax"
    """The function from scores to weights."""
    alpha: float = Field(default=1.5, ge=1.0, le=10.0)
    """Alpha of entmax."""
    hops: int = Field(default=2, gt=0, le=16)
    """Number of hops; the query of each depends on the results of the hops before it."""
    counts: bool = True
    """Whether the number of cells that match the question is an input of the classifier; weights that sum to 1 lack
    it."""
    image: bool = True
    """Whether the picture is an input; false: the question alone is answered."""
    widths: tuple[Width, ...] = Field(default=(32, 64, 64), min_length=1, max_length=8)
    """Channels of the convolutions; each halves the picture, so three give cells of 8 × 8 pixels."""
    kernels: tuple[Literal[2, 4], ...] = ()
    """Kernel sizes, one for each convolution; none: 4. Smaller kernels have smaller receptive fields."""
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
    """All settings of a run that trains and evaluates a model of visual question answering."""

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
"""For each setting that is not always used, the conditions under which it has an effect. Giving such a setting where it
has no effect is an error."""
