"""The presets of text classification: functions that return a named configuration."""

from regard.tasks.config import LearningSettings
from regard.tasks.presets import cosine, presets
from regard.tasks.sentiment.config import DataSettings, ModelSettings, SentimentConfig


def tiny() -> SentimentConfig:
    """Trains on examples of the built-in world, in about a minute on two cores."""
    return SentimentConfig(
        preset="tiny",
        data=DataSettings(train=20_000, valid=300, test=500, longer=200, batch_tokens=1700),
        model=ModelSettings(size=64, embedding=64, features=32, keys="both", values="words", dropout=0.1),
        train=cosine("accuracy", 1000, 6e-3, warmup=50, log_every=25, validate_every=250),
        learning=LearningSettings(penalty="entropy", beta=0.05, penalty_after=0.5),
    )


def small() -> SentimentConfig:
    """A recurrent reader with additive attention for thousands of your own texts."""
    return SentimentConfig(
        preset="small",
        data=DataSettings(batch_tokens=4096, rarest=2),
        model=ModelSettings(size=128, dropout=0.4, word_dropout=0.1),
        train=cosine(
            "accuracy",
            3000,
            1e-3,
            weight_decay=0.01,
            warmup=100,
            validate_every=200,
            patience=8,
            average="ema",
            ema_decay=0.998,
        ),
        smoothing=0.1,
    )


def sst() -> SentimentConfig:
    """SST-2 from its trees (--data sst/trees), trained on phrases too: recurrent, without pretrained embeddings."""
    return SentimentConfig(
        preset="sst",
        data=DataSettings(
            merge={"0": "negative", "1": "negative", "2": "", "3": "positive", "4": "positive"},
            phrases=True,
            batch_tokens=2048,
        ),
        model=ModelSettings(size=256, embedding=300, dropout=0.5, word_dropout=0.2, looks=2),
        train=cosine(
            "accuracy", 5000, 1e-3, weight_decay=0.01, warmup=200, validate_every=200, average="ema", ema_decay=0.999
        ),
    )


def chnsenticorp() -> SentimentConfig:
    """ChnSentiCorp (--data chnsenticorp): characters and hashed character bigrams and trigrams, pooled by attention."""
    return SentimentConfig(
        preset="chnsenticorp",
        data=DataSettings(tokens="characters", batch_tokens=8192, longest=300),
        model=ModelSettings(kind="ngrams", order=3, buckets=100_003, size=32, dropout=0.5, word_dropout=0.2),
        train=cosine("accuracy", 1200, 1e-2, warmup=100, validate_every=120, average="ema", ema_decay=0.98),
    )


PRESETS = presets(
    {"tiny": tiny, "small": small, "sst": sst, "chnsenticorp": chnsenticorp},
    times={
        "tiny": "about a minute",
        "small": "about ten minutes",
        "sst": "minutes on a GPU",
        "chnsenticorp": "minutes on a GPU",
    },
)
