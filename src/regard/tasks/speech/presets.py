"""The presets of speech recognition: functions that return a named configuration."""

from regard.tasks.config import DecodeSettings
from regard.tasks.presets import cosine, presets
from regard.tasks.speech.config import DataSettings, FeatureSettings, ModelSettings, SpeechConfig


def tiny() -> SpeechConfig:
    """Trains on the built-in utterances in about three minutes on two cores: 8 kHz sound, characters as output."""
    return SpeechConfig(
        preset="tiny",
        # With characters as symbols, transcripts of utterances longer than in training have few errors; with whole
        # words as symbols, a fifth of the words is wrong.
        data=DataSettings(
            symbols="characters", train=4000, valid=100, test=400, longer=100, batch_tokens=4800, longest=60
        ),
        # With order "luong" (Luong et al. 2015), attention follows the decoder's recurrent step, so that the query
        # contains the previous character; attention peaks are then at more accurate times.
        model=ModelSettings(order="luong"),
        # Checkpoints are selected by the loss, because the loss and the timing of attention still improve when
        # transcripts already have no errors.
        train=cosine("loss", 1600, 4e-3, warmup=100, log_every=50, validate_every=400),
    )


def small() -> SpeechConfig:
    """For hours of your own recordings: characters as output, 16 kHz sound; trained on a GPU."""
    return SpeechConfig(
        preset="small",
        data=DataSettings(rate=16_000, symbols="characters", batch_tokens=24_000),
        features=FeatureSettings(bands=80, mask_bands=2, band_width=15, mask_spans=2, span_width=40),
        model=ModelSettings(encoder_size=256, stack=1, pyramid=2, size=320, dropout=0.2, filters=16, kernel=31),
        train=cosine("exact", 20_000, 1e-3, weight_decay=0.01, warmup=1000, validate_every=1000, patience=8),
        decode=DecodeSettings(beam=8),
        smoothing=0.1,
    )


def fsdd() -> SpeechConfig:
    """Free Spoken Digit Dataset, single digits or strings of them: 8 kHz sound, words as output, for a GPU."""
    return SpeechConfig(
        preset="fsdd",
        data=DataSettings(batch_tokens=12_000, valid=200, longest=16),
        features=FeatureSettings(mask_bands=2, band_width=8, mask_spans=2, span_width=10),
        model=ModelSettings(encoder_size=128, stack=1, pyramid=2, size=192, dropout=0.3),
        train=cosine("loss", 2500, 2e-3, weight_decay=0.01, warmup=200, validate_every=250, precision="float32"),
        smoothing=0.05,
    )


PRESETS = presets(
    {"tiny": tiny, "small": small, "fsdd": fsdd},
    times={"tiny": "about three minutes", "fsdd": "minutes on a GPU"},
)
