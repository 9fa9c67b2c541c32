"""What can be chosen about a driver: its data, its model and its training."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, model_validator

from regard.tasks.config import WORLD, LearningSettings, Need, Settings, TaskConfig, TaskData, Width, shared_needs
from regard.tasks.learning import NormalizerName

_MOST = 4_000_000  # scenes of a part: of more roads than that the parts would share some


class DataSettings(TaskData):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """A JSONL file of scenes with decisions, or a folder with train, valid and test files; none: the world."""
    train: int = Field(default=20_000, gt=0, le=_MOST)
    """Scenes of the world to train on."""
    valid: int = Field(default=500, gt=0, le=_MOST)
    """Scenes held out for validation, of the world or of files that bring none."""
    test: int = Field(default=500, gt=0, le=_MOST)
    """Scenes held out for the test, likewise."""
    objects: int = Field(default=12, gt=0, le=1000)
    """Objects of a scene that are seen: the nearest."""
    drives: int = Field(default=600, gt=0, le=100_000)
    """Roads of the world that are driven in the closed loop to evaluate."""
    longer: int = Field(default=500, ge=0, le=_MOST)
    """Scenes with twice the traffic of those trained on."""
    batch_tokens: int = Field(default=256, gt=0, le=2**30)
    """Scenes of a batch."""


class ModelSettings(Settings):
    """An encoder of objects, and a controller that attends over them."""

    attention: Literal["none", "dot", "scaled_dot", "cosine", "bilinear", "additive"] = "scaled_dot"
    """Score by which the objects are weighted; none: their mean is read, with as many parameters."""
    normalize: NormalizerName = "softmax"
    """How scores become weights."""
    alpha: float = Field(default=1.5, ge=1.0, le=10.0)
    """Of entmax."""
    size: Width = 64
    """Of the objects and of what is read."""
    hidden: Width = 128
    """Hidden units of the encoder of an object."""
    heads: int = Field(default=1, gt=0, le=64)
    """Heads of the ego vehicle's attention; the weights shown are their mean."""
    layers: int = Field(default=0, ge=0, le=16)
    """Layers of self-attention in which the objects see one another before they are read."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """In training."""


class DriverLearning(LearningSettings):
    """How attention and steering are taught."""

    steering_weight: NonNegativeFloat = 10.0
    """Of the squared error of the steering beside the loss of the action."""


class DrivingConfig(TaskConfig):
    """A whole run."""

    figures = ("loss", "agreement")

    task: Literal["driving"] = "driving"
    input: Literal["objects", "camera"] = "objects"
    """What the driver sees: objects as vectors, or pictures of a camera."""
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    learning: DriverLearning = DriverLearning()

    @model_validator(mode="after")
    def _heads_divide_the_size(self) -> "DrivingConfig":
        if self.input == "camera":
            raise ValueError("input=camera is not there yet: expected objects")
        if self.model.size % self.model.heads:
            raise ValueError(f"model.size {self.model.size} is not a multiple of model.heads {self.model.heads}")
        return self


_ATTENDS = Need("model.attention", lambda name: name != "none", "a model with attention")
_HARD = Need("model", lambda model: model.attention != "none" and model.normalize == "hard", "model.normalize=hard")
_SOFT = Need("model", lambda model: model.attention != "none" and model.normalize != "hard", "soft attention")
NEEDS = {
    **shared_needs(_HARD, _SOFT),
    **dict.fromkeys(("data.drives", "data.longer"), (WORLD,)),
    "model.normalize": (_ATTENDS,),
    "model.alpha": (_ATTENDS, Need.value("model.normalize", "entmax")),
}
"""What has each setting that not every run has. One that was asked for and has no effect is an error."""
