"""The settings of a driver: its data, its model and its training."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from regard.tasks.attention_learning import NormalizerName
from regard.tasks.config import WORLD, LearningSettings, Need, Settings, TaskConfig, TaskData, Width, shared_needs

Pixels = Annotated[int, Field(gt=0, le=4096)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
_MOST = 4_000_000  # scenes of a part: of more roads than that the parts would share some


class DataSettings(TaskData):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """A JSONL file of scenes with decisions, or a folder with train, valid and test files; none: the world. For a
    camera: a driving log (CSV), or a folder with one."""
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
    """Scenes of a batch, or frames of a camera that are to be answered."""
    picture: tuple[Pixels, Pixels] = (80, 160)
    """Height and width to which the frames of a camera are brought, in pixels."""
    block: int = Field(default=200, gt=0, le=10**6)
    """Frames of a block; whole blocks of a driving log are held out."""
    gap: int = Field(default=20, ge=0, le=10**5)
    """Frames between blocks of different parts that are in neither."""
    flip: bool = True
    """Whether every frame is also learned from as in a mirror, with the opposite steering."""
    skip_faults: bool = False
    """Whether lines of a driving log with a bad number or without their picture are counted and left out."""


class ModelSettings(Settings):
    """An encoder of objects, and a controller that attends over them."""

    attention: Literal["none", "dot", "scaled_dot", "cosine", "bilinear", "additive"] = "scaled_dot"
    """Score by which the objects are weighted; none: their mean is read, with as many parameters."""
    normalize: NormalizerName = "softmax"
    """How scores become weights."""
    alpha: float = Field(default=1.5, ge=1.0, le=10.0)
    """Alpha of entmax."""
    size: Width = 64
    """Size of the objects and of the context."""
    hidden: Width = 128
    """Hidden units of the encoder of an object."""
    heads: int = Field(default=1, gt=0, le=64)
    """Heads of the ego vehicle's attention; the weights shown are their mean."""
    layers: int = Field(default=0, ge=0, le=16)
    """Layers of self-attention in which the objects see one another before they are read."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout in training."""
    frames: int = Field(default=4, gt=0, le=64)
    """Frames of the camera that are attended: this one and those before it."""
    motion: bool = True
    """Whether each frame is seen with its difference from the one before it."""
    angles: bool = False
    """Whether the steering angles before each frame are known; the last angle then is nearly the answer."""
    crop: tuple[Share, Share] = (0.3, 0.1)
    """Shares of a frame that are cut off above, the sky, and below, the bonnet."""
    widths: tuple[Width, ...] = (16, 32, 48)
    """Channels of the convolutions over a frame; each halves it."""
    cell: Width = 8
    """Numbers of a cell of the map from which steering is read."""


class DriverLearning(LearningSettings):
    """How attention and steering are taught."""

    steering_weight: NonNegativeFloat = 10.0
    """Weight of the squared error of the steering, relative to the loss of the action."""
    pedal_weight: NonNegativeFloat = 0.2
    """Weight of the squared errors of throttle and brake, relative to that of the steering, for a camera."""


class DrivingConfig(TaskConfig):
    """A whole run."""

    figures = ("loss", "agreement", "steering_mse")

    task: Literal["driving"] = "driving"
    input: Literal["objects", "camera"] = "objects"
    """What the driver sees: objects as vectors, or pictures of a camera."""
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    learning: DriverLearning = DriverLearning()

    @model_validator(mode="after")
    def _sizes_fit(self) -> "DrivingConfig":
        data, model = self.data, self.model
        if model.size % model.heads:
            raise ValueError(f"model.size {model.size} is not a multiple of model.heads {model.heads}")
        if self.input == "objects" and self.train.watch == "steering_mse":
            raise ValueError("train.watch=steering_mse is of input=camera: expected loss or agreement")
        if self.input == "camera":
            if self.train.watch == "agreement":
                raise ValueError("train.watch=agreement is of input=objects: expected loss or steering_mse")
            if not model.frames + model.motion <= data.gap < data.block:
                least = model.frames + model.motion
                raise ValueError(f"expected data.gap from {least}, the history, to below data.block, got {data.gap}")
            if sum(model.crop) >= 1:
                raise ValueError(f"model.crop {list(model.crop)} leaves nothing of a frame")
        return self


_ATTENDS = Need("model.attention", lambda name: name != "none", "a model with attention")
_HARD = Need("model", lambda model: model.attention != "none" and model.normalize == "hard", "model.normalize=hard")
_SOFT = Need("model", lambda model: model.attention != "none" and model.normalize != "hard", "soft attention")
_OBJECTS = Need.value("input", "objects")
_CAMERA = Need.value("input", "camera")
_OF_OBJECTS = ("data.objects", "model.hidden", "model.heads", "model.layers", "learning.steering_weight")
_OF_CAMERA = (
    *(f"data.{name}" for name in ("picture", "block", "gap", "flip", "skip_faults")),
    *(f"model.{name}" for name in ("frames", "motion", "angles", "crop", "widths", "cell")),
    "learning.pedal_weight",
)
NEEDS = {
    **shared_needs(_HARD, _SOFT),
    **dict.fromkeys(_OF_OBJECTS, (_OBJECTS,)),
    **dict.fromkeys(_OF_CAMERA, (_CAMERA,)),
    **dict.fromkeys(("data.drives", "data.longer"), (_OBJECTS, WORLD)),
    "model.normalize": (_OBJECTS, _ATTENDS),
    "model.alpha": (_OBJECTS, _ATTENDS, Need.value("model.normalize", "entmax")),
}
"""What has each setting that not every run has. One that was asked for and has no effect is an error."""
