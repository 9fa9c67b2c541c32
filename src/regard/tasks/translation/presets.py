"""The presets of translation: functions that return a named configuration."""

from regard.tasks.presets import cosine, presets
from regard.tasks.translation.config import DataSettings, ModelSettings, TranslationConfig, TranslationDecoding
from regard.train.train_settings import TrainSettings


def tiny() -> TranslationConfig:
    """The demo: trains on examples of the built-in world, in about two minutes on two cores."""
    return TranslationConfig(
        preset="tiny",
        data=DataSettings(
            train=60_000, valid=200, test=500, lengths=(3, 15), end_mark=False, batch_tokens=1200, longer=200
        ),
        model=ModelSettings(size=160, embedding=96, dropout=0.1),
        train=cosine("bleu", 1700, 4e-3, warmup=60, log_every=25, validate_every=850),
        smoothing=0.0,
    )


def small() -> TranslationConfig:
    """A recurrent model for tens of thousands of sentence pairs."""
    return TranslationConfig(
        preset="small",
        data=DataSettings(batch_tokens=4096),
        model=ModelSettings(size=256, dropout=0.3),
        train=TrainSettings(
            steps=6000,
            learning_rate=1e-3,
            warmup=500,
            validate_every=500,
            watch="bleu",
            watch_for="highest",
            patience=6,
            average="ema",
        ),
        decode=TranslationDecoding(beam=5),
    )


def base() -> TranslationConfig:
    """The Transformer of Vaswani et al. 2017, table 3."""
    return TranslationConfig(
        preset="base",
        data=DataSettings(batch_tokens=8192, vocabulary=32_000),
        model=ModelSettings(kind="transformer", size=512, layers=6, heads=8, dropout=0.1),
        train=TrainSettings(
            steps=100_000,
            learning_rate=7e-4,
            warmup=4000,
            validate_every=2000,
            watch="bleu",
            watch_for="highest",
            patience=10,
            average="checkpoints",
        ),
        decode=TranslationDecoding(beam=4),
    )


def paper_bahdanau() -> TranslationConfig:
    """Bahdanau et al. 2015: bidirectional GRU of size 1,000, additive attention, beam 12."""
    return TranslationConfig(
        preset="paper-bahdanau",
        data=DataSettings(batch_tokens=4096, vocabulary=30_000, shared=False, longest=50),
        model=ModelSettings(size=1000, embedding=620, dropout=0.0),
        train=TrainSettings(steps=300_000, learning_rate=5e-4, warmup=2000, watch="bleu", watch_for="highest"),
        decode=TranslationDecoding(beam=12),
        smoothing=0.0,
    )


def paper_luong() -> TranslationConfig:
    """Luong et al. 2015: LSTM of size 1,000 in four layers, bilinear scores, input feeding."""
    return TranslationConfig(
        preset="paper-luong",
        data=DataSettings(batch_tokens=4096, vocabulary=32_000, shared=False, longest=50),
        model=ModelSettings(
            attention="bilinear", order="luong", input_feeding=True, cell="lstm", size=1000, layers=4, dropout=0.2
        ),
        train=TrainSettings(steps=100_000, learning_rate=5e-4, warmup=1000, watch="bleu", watch_for="highest"),
        decode=TranslationDecoding(beam=10),
        smoothing=0.0,
    )


def paper_multi30k() -> TranslationConfig:
    """The small Transformer of Wu et al. 2021 for Multi30k: four layers of size 128, sub-words with BPE-dropout."""
    return TranslationConfig(
        preset="paper-multi30k",
        data=DataSettings(batch_tokens=4096, vocabulary=10_000, shared=True, tokenize="none", merge_dropout=0.1),
        model=ModelSettings(
            kind="transformer", size=128, layers=4, heads=4, feed_forward=256, dropout=0.3, inner_dropout=0.0
        ),
        train=TrainSettings(
            steps=30_000,
            learning_rate=5e-3,
            warmup=2000,
            validate_every=3000,
            watch="bleu",
            watch_for="highest",
            patience=10,
            average="ema",
            ema_decay=0.9995,
            graphs=True,
        ),
        decode=TranslationDecoding(beam=5),
    )


PRESETS = presets(
    {
        "tiny": tiny,
        "small": small,
        "base": base,
        "paper-bahdanau": paper_bahdanau,
        "paper-luong": paper_luong,
        "paper-multi30k": paper_multi30k,
    },
    times={"tiny": "about two minutes", "paper-multi30k": "minutes on a GPU"}
    | dict.fromkeys(("base", "paper-bahdanau", "paper-luong"), "hours on a GPU"),
)
