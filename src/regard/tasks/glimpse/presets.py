"""The presets of glimpse models: functions that return a named configuration."""

from regard.tasks.glimpse.config import DataSettings, GazeLearning, GlimpseConfig, Layout, ModelSettings
from regard.tasks.presets import cosine, presets


def tiny() -> GlimpseConfig:
    """Drawn digits somewhere on 60×60 pixels, found and read in six glimpses, in about two minutes on two cores."""
    return GlimpseConfig(
        preset="tiny",
        data=DataSettings(layout="translated", train=8000, valid=500, test=1000, batch_tokens=64),
        train=cosine("accuracy", 1600, 3e-3, warmup=50, log_every=50, validate_every=400),
    )


def small() -> GlimpseConfig:
    """Your own images as idx files, or drawn digits, as they are: glimpses of 8×8 pixels at two scales."""
    return GlimpseConfig(
        preset="small",
        data=DataSettings(layout="plain", valid=1000, batch_tokens=128),
        model=ModelSettings(glimpse=8, scales=2, size=192, hidden=128),
        train=cosine("accuracy", 6000, 2e-3, weight_decay=0.01, warmup=200, validate_every=500, patience=5),
    )


def mnist() -> GlimpseConfig:
    """MNIST (--data mnist) as it is, 28×28: glimpses of 8×8 pixels at one scale, which show a part of the digit."""
    return _mnist(
        "mnist",
        DataSettings(shift=2, valid=5000, batch_tokens=512),
        ModelSettings(glimpse=8, scales=1, size=256, hidden=192, saccade=128, deviation=0.15),
        steps=16_000,
    )


def mnist_translated() -> GlimpseConfig:
    """Return the preset for MNIST (`--data mnist`) at random positions on 60×60 pixels: glimpses of 12×12 pixels at
    three scales, as in Mnih et al. (2014)."""
    return _canvas("mnist-translated", "translated")


def mnist_cluttered() -> GlimpseConfig:
    """Return the preset for MNIST (`--data mnist`) at random positions on 60×60 pixels, among pieces of other digits;
    glimpses as in `mnist_translated`."""
    return _canvas("mnist-cluttered", "cluttered")


def _canvas(name: str, layout: Layout) -> GlimpseConfig:
    return _mnist(
        name,
        DataSettings(layout=layout, valid=5000, batch_tokens=512),
        ModelSettings(glimpse=12, size=256, hidden=192, saccade=128, deviation=0.12),
        steps=16_000,
    )


def _mnist(name: str, data: DataSettings, model: ModelSettings, steps: int) -> GlimpseConfig:
    train = cosine(
        "accuracy",
        steps,
        1.5e-3,
        weight_decay=0.01,
        warmup=300,
        validate_every=1000,
        average="ema",
        ema_decay=0.998,
        graphs=True,
    )
    return GlimpseConfig(preset=name, data=data, model=model, train=train, learning=GazeLearning(samples=4))


PRESETS = presets(
    {
        "tiny": tiny,
        "small": small,
        "mnist": mnist,
        "mnist-translated": mnist_translated,
        "mnist-cluttered": mnist_cluttered,
    },
    times={"tiny": "about two minutes"}
    | dict.fromkeys(("mnist", "mnist-translated", "mnist-cluttered"), "four minutes on a GPU"),
)
