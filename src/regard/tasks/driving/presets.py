"""The presets of driving: functions that return a named configuration."""

from typing import Any

from regard.tasks.driving.config import DataSettings, DrivingConfig, ModelSettings
from regard.tasks.presets import presets
from regard.train.train_settings import TrainSettings


def _training(steps: int, rate: float, *, every: int = 1000, **others: Any) -> TrainSettings:
    """Return settings with a cosine schedule that select the checkpoint with the lowest loss (or `watch` metric)."""
    return TrainSettings(steps=steps, learning_rate=rate, schedule="cosine", validate_every=every, **others)


def tiny() -> DrivingConfig:
    """Trains on examples of the built-in world, in a few minutes on two cores."""
    return DrivingConfig(
        preset="tiny",
        data=DataSettings(train=80_000, valid=2000, test=4000, batch_tokens=256),
        train=_training(6000, 3e-3, warmup=100, log_every=100),
    )


def small() -> DrivingConfig:
    """Your own scenes with decisions, or the built-in world with more scenes and a larger model."""
    return DrivingConfig(
        preset="small",
        data=DataSettings(train=200_000, valid=4000, test=8000, batch_tokens=512, drives=1200),
        model=ModelSettings(size=128, hidden=256, heads=2, dropout=0.05),
        train=_training(12_000, 2e-3, weight_decay=0.01, warmup=200, patience=6),
    )


def camera() -> DrivingConfig:
    """Your own driving log (--data DIR): steering, throttle and brake from the frames of a camera."""
    return DrivingConfig(
        preset="camera",
        input="camera",
        data=DataSettings(valid=500, test=500, batch_tokens=64),
        model=ModelSettings(attention="additive", size=64, dropout=0.3, frames=2),
        train=_training(400, 3e-3, warmup=100, weight_decay=0.05, watch="steering_mse", every=40),
    )


PRESETS = presets(
    {"tiny": tiny, "small": small, "camera": camera},
    times={"tiny": "about two minutes", "camera": "about two minutes"},
)
