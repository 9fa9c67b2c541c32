"""The settings of image classification from glimpses (small image patches): its data, model and training."""

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
    """The data settings of glimpse models: built-in drawn digits, or files."""

    files: tuple[Path, ...] = ()
    """A folder with MNIST's four idx files (optionally .gz); none: the built-in digits."""
    layout: Layout = "plain"
    """plain: the images unchanged; translated: at a random position on 60×60 pixels; cluttered: with pieces of
    others."""
    shift: int = Field(default=0, ge=0, le=8)
    """In training, plain images are shifted by at most this number of pixels in each direction."""
    longer: int = Field(default=0, ge=0, le=10**7)
    """This setting has no effect here: images have no length."""
    batch_tokens: int = Field(default=64, gt=0, le=2**30)
    """Number of images in a batch."""


class ModelSettings(Settings):
    """The model settings: a retina that crops patches, a recurrent core, and a network for the next location."""

    attention: Literal["learned", "random", "none"] = "learned"
    """The gaze: learned by reward; random; or none: every glimpse is at the centre."""
    steps: int = Field(default=6, gt=0, le=100)
    """Number of glimpses at an image."""
    glimpse: int = Field(default=8, gt=0, le=256)
    """Height and width of a patch in pixels."""
    scales: int = Field(default=3, gt=0, le=8)
    """Number of patches in a glimpse, each coarser than the one before and of a larger part of the image."""
    factor: int = Field(default=2, gt=0, le=8)
    """Factor between the resolutions of successive patches."""
    cell: Literal["relu", "gru"] = "gru"
    """The recurrent core: relu is that of Mnih et al. (2014)."""
    size: Width = 128
    """Size of the state."""
    hidden: Width = 96
    """Hidden units of the glimpse network."""
    saccade: int = Field(default=64, ge=0, le=2**16)
    """Hidden units of a location network that sees the patches and moves relative to the current one; 0: the
    location network of Mnih et al. (2014), which does neither."""
    deviation: PositiveFloat = 0.15
    """Standard deviation of the locations sampled in training; half the width of the image is 1."""


class GazeLearning(LearningSettings):
    """Settings of how the gaze (the sequence of glimpse locations) is trained: by REINFORCE, with a baseline."""

    reward_weight: NonNegativeFloat = 0.1
    """Weight of REINFORCE, relative to the classification."""
    baseline_weight: NonNegativeFloat = 1.0
    """Weight of the baseline's squared error."""
    samples: int = Field(default=4, gt=0, le=256)
    """Number of gaze paths over each image of a batch; the mean of the others is a second baseline for each."""
    reward: Literal["log_probability", "right"] = "log_probability"
    """Reward of each glimpse after a move: the log-probability of the right class, or 1 for a right answer."""


class GlimpseConfig(TaskConfig):
    """All settings of a run that trains a glimpse model."""

    figures = ("loss", "accuracy")

    task: Literal["glimpse"] = "glimpse"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    learning: GazeLearning = GazeLearning()


_LEARNED = Need.value("model.attention", "learned")
# The model chooses locations, not keys, so the settings of attention over keys have no effect: there are no attention
# weights to penalise, and REINFORCE is the only gradient estimator.
_NEVER = Need("model", lambda model: False, "attention over keys")
NEEDS = {
    **shared_needs(_NEVER, _NEVER),
    "data.shift": (Need.value("data.layout", "plain"),),
    **dict.fromkeys(("model.saccade", "model.deviation"), (_LEARNED,)),
    **dict.fromkeys(("learning.reward_weight", "learning.baseline_weight", "learning.reward"), (_LEARNED,)),
    "learning.samples": (Need("model.attention", lambda name: name != "none", "a gaze that moves"),),
}
"""For each setting that is not always used, the conditions under which it has an effect. Giving such a setting where it
has no effect is an error."""
