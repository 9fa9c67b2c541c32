"""The presets of visual question answering: functions that return a named configuration.

Presets for a GPU train in float32. In bfloat16, cuDNN's backward pass of attention returned NaN for sharply peaked
weights (85 × 9 queries over 64 keys of size 96, torch 2.11 on an H200); other kernels did not.
"""

from regard.tasks.config import LearningSettings
from regard.tasks.presets import cosine, presets
from regard.tasks.vqa.config import DataSettings, ModelSettings, VqaConfig


def tiny() -> VqaConfig:
    """Trains on scenes of the built-in world, without questions that compare shapes, in a few minutes on two cores."""
    return VqaConfig(
        preset="tiny",
        data=DataSettings(
            train=20_000,
            valid=400,
            test=1000,
            longer=200,
            forms=("colour", "shape", "count", "presence", "place", "relation"),
        ),
        model=ModelSettings(kernels=(4, 2, 4)),
        train=cosine("accuracy", 4000, 4e-3, warmup=50, log_every=50, validate_every=1000),
        learning=LearningSettings(penalty="entropy", beta=0.03, penalty_after=0.4),
    )


def small() -> VqaConfig:
    """Thousands of your own questions about pictures, scaled to 96 × 96 pixels."""
    return VqaConfig(
        preset="small",
        data=DataSettings(picture=96, batch_tokens=256, valid=200),
        model=ModelSettings(size=96, widths=(32, 64, 96, 96), dropout=0.2),
        train=cosine(
            "accuracy", 4000, 2e-3, weight_decay=0.01, warmup=100, validate_every=400, patience=5, precision="float32"
        ),
    )


def easy_vqa() -> VqaConfig:
    """easy-VQA: one shape in a picture of 64 × 64 pixels."""
    return VqaConfig(
        preset="easy-vqa",
        data=DataSettings(picture=64, batch_tokens=768, valid=200),
        model=ModelSettings(size=96, widths=(32, 64, 96), dropout=0.1),
        train=cosine("accuracy", 4000, 3e-3, weight_decay=0.01, warmup=100, validate_every=500, precision="float32"),
    )


PRESETS = presets(
    {"tiny": tiny, "small": small, "easy-vqa": easy_vqa},
    times={"tiny": "about three minutes", "easy-vqa": "two minutes on a GPU"},
)
