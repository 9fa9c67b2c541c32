"""The presets of reading comprehension: functions that return a named configuration."""

from regard.tasks.presets import cosine, presets
from regard.tasks.reading.config import DataSettings, ModelSettings, ReadingConfig


def tiny() -> ReadingConfig:
    """Trains on stories of the built-in world, in a few minutes on two cores."""
    return ReadingConfig(
        preset="tiny",
        data=DataSettings(train=20_000, valid=200, test=500, longer=200, batch_tokens=2000),
        model=ModelSettings(align="words", products=True, exact_match=False, size=48, dropout=0.1, longest_answer=4),
        train=cosine("exact_match", 600, 3e-3, warmup=60, log_every=25, validate_every=200),
    )


def small() -> ReadingConfig:
    """Thousands of your own questions about passages of up to 300 words."""
    return ReadingConfig(
        preset="small",
        data=DataSettings(batch_tokens=4000, longest=300, rare=2),
        model=ModelSettings(size=64, characters=32, dropout=0.3, longest_answer=12),
        train=cosine("f1", 3000, 2e-3, weight_decay=0.01, warmup=150, validate_every=300, patience=5),
    )


def babi() -> ReadingConfig:
    """One of bAbI's tasks with 10,000 questions: two hops of self-matching find several supporting facts."""
    return ReadingConfig(
        preset="babi",
        data=DataSettings(batch_tokens=6000, longest=450, rare=1, valid=500),
        model=ModelSettings(size=64, hops=2, dropout=0.1, longest_answer=4),
        train=cosine("exact_match", 6000, 2e-3, warmup=200, validate_every=500, graphs=True),
    )


def squad() -> ReadingConfig:
    """SQuAD without pretrained word embeddings: character embeddings for rare words, high dropout, averaged weights."""
    return ReadingConfig(
        preset="squad",
        data=DataSettings(batch_tokens=12_000, longest=400, rare=2, valid=500),
        model=ModelSettings(size=96, embedding=128, characters=64, dropout=0.4, longest_answer=17),
        train=cosine("f1", 6000, 1.5e-3, weight_decay=0.05, warmup=300, validate_every=500, patience=6, average="ema"),
    )


PRESETS = presets(
    {"tiny": tiny, "small": small, "babi": babi, "squad": squad},
    times={"tiny": "about two minutes", "babi": "minutes on a GPU", "squad": "minutes on a GPU"},
)
