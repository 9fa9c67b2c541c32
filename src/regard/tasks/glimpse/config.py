"""What can be chosen about glimpses: their data, their model and their training."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from regard.tasks.config import (
    LearningSettings,
    Need,
    Settings,
    TaskConfig,
    TaskData,
    Width,
    shared_needs,
)

Layout = Literal["plain", "translated", "cluttered"]


class DataSettings(TaskData):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """A folder with MNIST's four idx files (each maybe .gz); none: the world."""
    layout: Layout = "plain"
    """plain: the images as they are; translated: somewhere on 60×60 pixels; cluttered: with pieces of others beside."""
    shift: int = Field(default=0, ge=0, le=8)
    """In training, plain images are moved by at most so many pixels each way."""
    longer: int = Field(default=0, ge=0, le=10**7)
    """Has no meaning here: an image has no length."""
    batch_tokens: int = Field(default=64, gt=0, le=2**30)
    """Images of a batch."""


class ModelSettings(Settings):
    """A retina, a recurrent core, and a network that says where to look next."""

    attention: Literal["learned", "random", "none"] = "learned"
    """Where to look: learned by reward; at random; or none: every look is at the middle, and shows the same."""
    steps: int = Field(default=6, gt=0, le=100)
    """Glimpses of an image."""
    glimpse: int = Field(default=8, gt=0, le=256)
    """Height and width of a patch, in numbers."""
    scales: int = Field(default=3, gt=0, le=8)
    """Patches of a glimpse, each coarser than the one before and of a larger part of the image."""
    factor: int = Field(default=2, gt=0, le=8)
    """How much coarser."""
    cell: Literal["relu", "gru"] = "gru"
    """The recurrent core: relu is the paper's own."""
    size: Width = 128
    """Size of the state."""
    hidden: Width = 96
    """Hidden units of the glimpse network."""
    saccade: int = Field(default=64, ge=0, le=2**16)
    """Hidden units of a location network that sees the patches and moves relative to this place; 0: the paper's."""
    deviation: PositiveFloat = 0.15
    """Standard deviation of the places drawn in training; half the width of the image is 1."""


class GazeLearning(LearningSettings):
    """How the gaze is taught."""

    reward_weight: NonNegativeFloat = 0.1
    """Weight of REINFORCE, relative to the classification."""
    baseline_weight: NonNegativeFloat = 1.0
    """Weight of the baseline's squared error."""
    samples: int = Field(default=4, gt=0, le=256)
    """Gaze paths over each image of a batch; each has the mean of the others as a second baseline."""
    reward: Literal["log_probability", "right"] = "log_probability"
    """Reward of each glimpse after a move: the log-probability of the right class, or 1 where the answer is right."""


class GlimpseConfig(TaskConfig):
    """A whole run."""

    figures = ("loss", "accuracy")

    task: Literal["glimpse"] = "glimpse"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    learning: GazeLearning = GazeLearning()


_LEARNED = Need.value("model.attention", "learned")
# The gaze chooses a place and no key: there are no weights to penalise, and no estimator but REINFORCE.
_NEVER = Need("model", lambda model: False, "attention over keys")
NEEDS = {
    **shared_needs(_NEVER, _NEVER),
    "data.shift": (Need.value("data.layout", "plain"),),
    **dict.fromkeys(("model.saccade", "model.deviation"), (_LEARNED,)),
    **dict.fromkeys(("learning.reward_weight", "learning.baseline_weight", "learning.reward"), (_LEARNED,)),
    "learning.samples": (Need("model.attention", lambda name: name != "none", "a gaze that moves"),),
}
"""What has each setting that not every run has. One that was asked for and has no effect is an error."""
