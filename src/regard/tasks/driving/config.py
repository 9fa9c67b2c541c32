"""The settings of driving: its data, its model and its training."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from regard.tasks.attention_learning import NormalizerName
from regard.tasks.config import (
    WORLD,
    LearningSettings,
    Need,
    ScoreName,
    Settings,
    TaskConfig,
    TaskData,
    Width,
    shared_needs,
)

Pixels = Annotated[int, Field(gt=0, le=4096)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
# the largest number of scenes in a split; with more scenes, two splits would have scenes of the same road
_MOST = 4_000_000


class DataSettings(TaskData):
    """The data of driving: scenes of the built-in simulator, or files."""

    files: tuple[Path, ...] = ()
    """A JSONL file of scenes with decisions, or a folder with train, valid and test files; none: the simulator.

    For a camera: a driving log (CSV), or a folder with one.
    """
    train: int = Field(default=20_000, gt=0, le=_MOST)
    """Number of simulated training scenes."""
    valid: int = Field(default=500, gt=0, le=_MOST)
    """Number of validation scenes, simulated or held out of files without a validation part."""
    test: int = Field(default=500, gt=0, le=_MOST)
    """Number of test scenes, simulated or held out of files without a test part."""
    objects: int = Field(default=12, gt=0, le=1000)
    """Number of objects in the input: the nearest."""
    drives: int = Field(default=600, gt=0, le=100_000)
    """Number of roads for closed-loop evaluation."""
    longer: int = Field(default=500, ge=0, le=_MOST)
    """Number of scenes with twice the traffic of training."""
    batch_tokens: int = Field(default=256, gt=0, le=2**30)
    """Number of scenes, or of camera frames, in a batch."""
    picture: tuple[Pixels, Pixels] = (80, 160)
    """Height and width to which camera frames are resized, in pixels."""
    block: int = Field(default=200, gt=0, le=10**6)
    """Number of frames in a block; whole blocks of a driving log are held out."""
    gap: int = Field(default=20, ge=0, le=10**5)
    """Number of frames between blocks of different parts that are in neither."""
    flip: bool = True
    """Whether mirrored frames with the opposite steering are added to the training data."""
    skip_faults: bool = False
    """Whether lines of a driving log with a bad number or a missing picture are counted and skipped."""


class ModelSettings(Settings):
    """The model of driving: an encoder of objects or camera frames, and a controller with attention over them."""

    attention: Literal["none", ScoreName] = "scaled_dot"
    """Score of the objects; none: their mean replaces attention, with the same number of parameters."""
    normalize: NormalizerName = "softmax"
    """The function from scores to weights."""
    alpha: float = Field(default=1.5, ge=1.0, le=10.0)
    """Alpha of entmax."""
    size: Width = 64
    """Size of the objects and of the context."""
    hidden: Width = 128
    """Hidden units of the encoder of an object."""
    heads: int = Field(default=1, gt=0, le=64)
    """Number of heads of the ego vehicle's attention; the displayed weights are their mean."""
    layers: int = Field(default=0, ge=0, le=16)
    """Number of self-attention layers among the objects."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout in training."""
    frames: int = Field(default=4, gt=0, le=64)
    """Number of camera frames that are attended: the current one and those before it."""
    motion: bool = True
    """Whether each frame is joined with its difference from the previous one."""
    angles: bool = False
    """Whether the steering angles before each frame are an input; the last angle is then nearly the answer."""
    crop: tuple[Share, Share] = (0.3, 0.1)
    """Fractions of a frame that are cropped at the top (sky) and at the bottom (bonnet)."""
    widths: tuple[Width, ...] = (16, 32, 48)
    """Channels of the convolutions over a frame; each halves it."""
    cell: Width = 8
    """Number of features per cell for the steering."""


class DriverLearning(LearningSettings):
    """The training of driving: the weights of the losses of steering, throttle and brake, and settings of attention."""

    steering_weight: NonNegativeFloat = 10.0
    """Weight of the squared error of the steering, relative to the loss of the action."""
    pedal_weight: NonNegativeFloat = 0.2
    """Weight of the squared errors of throttle and brake, relative to that of the steering, for a camera."""


class DrivingConfig(TaskConfig):
    """All settings of a run that trains and evaluates a driving model."""

    figures = ("loss", "agreement", "steering_mse")

    task: Literal["driving"] = "driving"
    input: Literal["objects", "camera"] = "objects"
    """The input of the driver: objects as vectors, or pictures of a camera."""
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
"""For each setting that is not always used, the conditions under which it has an effect. Giving such a setting where it
has no effect is an error."""
