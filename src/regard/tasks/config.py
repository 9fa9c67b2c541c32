"""What can be chosen about every task; each task adds its own settings."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from regard.train.settings import TrainSettings


class Settings(BaseModel):
    """Frozen; an unknown name is an error; the line below a field says what it means."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LearningSettings(Settings):
    """How attention is taught beside the task's own loss."""

    penalty: Literal["none", "squares", "doubly_stochastic", "entropy"] = "none"
    """Penalty on the weights: squares is −β ln p(α|x) Σα², doubly_stochastic β Σ(1 − Σα)², entropy β times it."""
    beta: NonNegativeFloat = 0.1
    """Factor β of the penalty."""
    estimator: Literal["straight_through", "reinforce", "gumbel"] = "straight_through"
    """How hard attention learns from the key that it samples."""
    temperature: PositiveFloat = 1.0
    """Of the Gumbel-softmax estimator."""
    reward_weight: NonNegativeFloat = 1.0
    """Of the reward in REINFORCE."""
    entropy_weight: NonNegativeFloat = 0.01
    """Of the entropy of the choices in REINFORCE, which keeps it exploring."""


class TaskData(Settings):
    """The built-in world, or files."""

    files: tuple[Path, ...] = ()
    """Files or a folder to learn from; none: the built-in world."""
    train: PositiveInt = 20_000
    """Examples of the world to train on."""
    valid: PositiveInt = 500
    """Examples held out for validation, of the world or of files that bring none."""
    test: PositiveInt = 500
    """Examples held out for the test, likewise."""
    longer: NonNegativeInt = 200
    """Examples of the world that are longer than any trained on."""
    batch_tokens: PositiveInt = 2048
    """Tokens of a batch, padding counted."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Of the world and of the order."""


class TaskConfig(Settings):
    """A whole run."""

    task: str
    preset: str = "small"
    data: Any = None
    model: Any = None
    train: TrainSettings = TrainSettings()
    learning: LearningSettings = LearningSettings()
