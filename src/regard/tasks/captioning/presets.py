"""The presets of captioning: functions that return a named configuration."""

from regard.tasks.captioning.config import CaptioningConfig, CaptionLearning, DataSettings, ModelSettings
from regard.tasks.config import DecodeSettings
from regard.tasks.presets import cosine, presets


def tiny() -> CaptioningConfig:
    """Trains on examples of the built-in world, in about four minutes on two cores."""
    return CaptioningConfig(
        preset="tiny",
        # Batches are small because the model needs a certain number of steps, of any batch size, until it distinguishes
        # the kinds of shapes.
        data=DataSettings(train=20_000, valid=200, test=500, longer=200, batch_tokens=300, longest=14),
        # A cell has 4 × 4 pixels, and its receptive field is little larger than one shape. With larger receptive
        # fields, a cell depends on neighbouring shapes, and attention points beside the shape that a word is about.
        # The first word depends on the number and the order of the shapes, which the spatial moments (`summary`)
        # contain. The time of additive attention is proportional to attention_size, and scores need fewer features than
        # cells have.
        model=ModelSettings(
            widths=(48,), blocks=2, patch=2, summary="moments", size=96, attention_size=32, dropout=0.0
        ),
        train=cosine("exact", 4200, 3e-3, warmup=100, log_every=50, validate_every=600),
    )


def small() -> CaptioningConfig:
    """Thousands of your own pictures, with a convolutional network trained from scratch."""
    return CaptioningConfig(
        preset="small",
        data=DataSettings(picture=96, rarest=3, batch_tokens=1024, flip=True),
        model=ModelSettings(widths=(32, 64, 128), patch=2, size=256, dropout=0.3, map_dropout=0.1),
        train=cosine("bleu4", 6000, 1e-3, weight_decay=0.01, warmup=300, validate_every=500, patience=5),
        learning=CaptionLearning(penalty="doubly_stochastic", beta=0.01),
        decode=DecodeSettings(beam=3),
        smoothing=0.1,
    )


def flickr8k() -> CaptioningConfig:
    """Flickr8k (--data flickr8k): frozen EfficientNet-Lite0, soft attention as in Show, Attend and Tell, for a GPU."""
    return CaptioningConfig(
        preset="flickr8k",
        data=DataSettings(picture=224, rarest=5, batch_tokens=2048, flip=True),
        model=ModelSettings(encoder="efficientnet", stage=8, size=512, dropout=0.5, map_dropout=0.2),
        train=cosine("bleu4", 4000, 5e-4, weight_decay=0.01, warmup=300, validate_every=400, patience=4, graphs=True),
        learning=CaptionLearning(penalty="doubly_stochastic", beta=0.02),
        decode=DecodeSettings(beam=5, length_penalty=0.8),
        smoothing=0.1,
    )


PRESETS = presets(
    {"tiny": tiny, "small": small, "flickr8k": flickr8k},
    times={"tiny": "about four minutes", "flickr8k": "three minutes on a GPU"},
)
