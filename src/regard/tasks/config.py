"""The settings that every task has; each task adds its own settings to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

from regard.train.train_settings import Seed, TrainSettings

# The upper bounds of these integer types are far above any usable value, so that a mistyped setting is an error before
# a model is built.
Count = Annotated[int, Field(gt=0, le=10**7)]
Width = Annotated[int, Field(gt=0, le=2**16)]
Depth = Annotated[int, Field(gt=0, le=1000)]
ScoreName = Literal["dot", "scaled_dot", "cosine", "bilinear", "additive"]


class Settings(BaseModel):
    """The base class of settings: a frozen pydantic model in which an unknown field is an error.

    The docstring below a field is the description that `--set help` prints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class LearningSettings(Settings):
    """Settings of the training of attention: penalties on its weights, and gradient estimators of hard attention."""

    penalty: Literal["none", "squares", "doubly_stochastic", "entropy"] = "none"
    """Penalty on the weights: squares is −β ln p(α|x) Σα², doubly_stochastic β Σ(1 − Σα)², entropy β times the
    entropy."""
    beta: NonNegativeFloat = 0.1
    """Factor β of the penalty."""
    penalty_after: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of the training steps before the penalty starts, so that the task is learned first."""
    estimator: Literal["straight_through", "reinforce", "gumbel"] = "straight_through"
    """The gradient estimator of hard attention."""
    temperature: PositiveFloat = 1.0
    """Temperature of the Gumbel-softmax estimator."""
    reward_weight: NonNegativeFloat = 1.0
    """Weight of the reward in REINFORCE."""
    entropy_weight: NonNegativeFloat = 0.01
    """Weight of the entropy of the samples in REINFORCE, which encourages exploration."""
    expected: float = Field(default=0.0, ge=0.0, le=1.0)
    """With REINFORCE, fraction of sequences that use soft attention, resampled in each step; 0: all sample."""
    hard_after: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Fraction of the training steps before hard attention samples: until then it uses the expected value."""


class TaskData(Settings):
    """The data of a run: built-in generated data, or files."""

    files: tuple[Path, ...] = ()
    """Files or a folder to train on; none: the built-in data."""
    train: Count = 20_000
    """Number of built-in training examples."""
    valid: Count = 500
    """Number of validation examples, built-in or held out of files without a validation part."""
    test: Count = 500
    """Number of test examples, built-in or held out of files without a test part."""
    longer: int = Field(default=200, ge=0, le=10**7)
    """Number of built-in examples that are longer than any in training."""
    batch_tokens: int = Field(default=2048, gt=0, le=2**30)
    """The largest number of tokens in a batch on any side, including padding."""
    seed: Seed = 1
    """Seed of the built-in data and of the order of the data."""


class DecodeSettings(Settings):
    """Settings of beam search."""

    beam: int = Field(default=1, gt=0, le=256)
    """Number of hypotheses; 1 is greedy."""
    length_penalty: float = Field(default=0.6, ge=0.0, le=100.0)
    """Exponent of the length penalty."""


class TaskConfig(Settings):
    """All settings of a run that trains and evaluates a model.

    `figures` are the names of the metrics that each validation computes; `train.watch` must be one of these names.
    """

    figures: ClassVar[tuple[str, ...]] = ("loss",)

    task: str
    preset: str = "small"
    data: Any = None
    model: Any = None
    train: TrainSettings = TrainSettings()
    learning: LearningSettings = LearningSettings()

    @model_validator(mode="after")
    def _watched_figure_exists(self) -> "TaskConfig":
        if self.train.watch not in self.figures:
            raise ValueError(f"train.watch: expected one of {', '.join(self.figures)}, got {self.train.watch!r}")
        return self


@dataclass(frozen=True)
class Need:
    """A condition under which a setting has an effect: `holds(value)` is true for the value of the setting `place`."""

    place: str
    holds: Callable[[Any], bool]
    words: str  # the condition in words, for messages

    @classmethod
    def value(cls, place: str, *values: Any) -> "Need":
        """Return the condition that the setting `place` has one of these values."""
        return cls(place, lambda value: value in values, " or ".join(f"{place}={value}" for value in values))


Needs = Mapping[str, tuple[Need, ...]]  # the conditions of each setting, by its full name, such as "train.ema_decay"
WORLD = Need("data.files", lambda files: not files, "the built-in world")
FILES = Need("data.files", bool, "files (--data)")


def shared_needs(hard: Need, soft: Need) -> Needs:
    """Return the conditions under which each setting that is common to all tasks has an effect.

    `hard` is the condition that the task uses hard attention, `soft` the condition that it uses soft attention.
    """
    penalized = Need("learning.penalty", lambda name: name != "none", "a penalty (learning.penalty)")
    return {
        "data.train": (WORLD,),
        "train.ema_decay": (Need.value("train.average", "ema"),),
        "train.average_last": (Need.value("train.average", "checkpoints"),),
        "train.final_share": (Need.value("train.schedule", "cosine"),),
        "learning.penalty": (soft,),
        "learning.beta": (soft, penalized),
        "learning.penalty_after": (soft, penalized),
        "learning.estimator": (hard,),
        "learning.temperature": (hard, Need.value("learning.estimator", "gumbel")),
        "learning.reward_weight": (hard, Need.value("learning.estimator", "reinforce")),
        "learning.entropy_weight": (hard, Need.value("learning.estimator", "reinforce")),
        "learning.expected": (hard, Need.value("learning.estimator", "reinforce")),
        "learning.hard_after": (hard,),
    }
