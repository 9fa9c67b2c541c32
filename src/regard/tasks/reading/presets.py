"""Configurations by name: functions that return them."""

from regard.tasks.reading.config import DataSettings, ModelSettings, ReadingConfig
from regard.tasks.task import Preset
from regard.train.settings import TrainSettings


def tiny() -> ReadingConfig:
    """The built-in world of stories in a few minutes on two cores."""
    return ReadingConfig(
        preset="tiny",
        data=DataSettings(train=20_000, valid=200, test=500, longer=200, batch_tokens=2000),
        model=ModelSettings(size=48, dropout=0.1, longest_answer=4),
        train=TrainSettings(
            steps=800,
            learning_rate=3e-3,
            schedule="cosine",
            warmup=60,
            weight_decay=0.0,
            log_every=25,
            validate_every=400,
            watch="exact_match",
            watch_for="highest",
        ),
    )


def babi() -> ReadingConfig:
    """One of bAbI's tasks with 10,000 questions: two hops of self-matching find several supporting facts."""
    return ReadingConfig(
        preset="babi",
        data=DataSettings(batch_tokens=6000, longest=450, rare=1, valid=500),
        model=ModelSettings(size=64, hops=2, dropout=0.1, longest_answer=4),
        train=TrainSettings(
            steps=6000,
            learning_rate=2e-3,
            schedule="cosine",
            warmup=200,
            weight_decay=0.0,
            validate_every=500,
            watch="exact_match",
            watch_for="highest",
        ),
    )


def squad() -> ReadingConfig:
    """SQuAD with no vectors from elsewhere: letters for rare words, much dropout, averaged weights."""
    return ReadingConfig(
        preset="squad",
        data=DataSettings(batch_tokens=12_000, longest=400, rare=2, valid=500),
        model=ModelSettings(size=96, embedding=128, characters=64, dropout=0.4, longest_answer=17),
        train=TrainSettings(
            steps=6000,
            learning_rate=1.5e-3,
            schedule="cosine",
            warmup=300,
            weight_decay=0.05,
            validate_every=500,
            watch="f1",
            watch_for="highest",
            patience=6,
            average="ema",
        ),
    )


PRESETS = {
    name: Preset(make.__doc__ or "", make, time)
    for name, make, time in (("tiny", tiny, "about three minutes"), ("babi", babi, ""), ("squad", squad, ""))
}
