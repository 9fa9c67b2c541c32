"""Conversion of recordings to log-mel frames, of frames to an image, and of attention weights to times."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from regard.data.audio.sound_files import Samples
from regard.look.labels import png_bytes
from regard.nn.logmel import LogMel, level
from regard.tasks.speech.config import SpeechConfig

Frames = NDArray[np.float16]  # log-mel features (t, bands), with values from −1 to 1
_TALL = 4  # height in pixels of a frequency band in an image of frames


@functools.lru_cache(maxsize=4)
def _layer(rate: int, bands: int, hop: float, window: float) -> LogMel:
    return LogMel(rate, bands=bands, hop=hop, window=window)


@torch.no_grad()
def frames_of(samples: Samples, config: SpeechConfig) -> Frames:
    """Return the log-mel features of a recording: 1 is its largest value, −1 is a value at least 80 dB lower."""
    settings = config.features
    layer = _layer(config.data.rate, settings.bands, settings.hop, settings.window)
    return level(layer(torch.from_numpy(np.asarray(samples, np.float32))[None])[0]).half().numpy()


def spectrogram(frames: Frames) -> bytes:
    """Return frames as the bytes of a PNG image: time to the right, frequency upwards; louder values are darker."""
    from PIL import Image

    wide = frames.astype(np.float32)
    # the quietest 20 % of the values are noise, which is drawn white
    low, high = np.quantile(wide, 0.2), max(float(wide.max()), -0.99)
    shades = np.rint(255 * np.clip((high - wide) / max(high - low, 1e-3), 0, 1)).astype(np.uint8)
    return png_bytes(Image.fromarray(np.repeat(shades.T[::-1], _TALL, 0)))


def interval(weights: Sequence[float], step: float) -> tuple[float, float, float]:
    """Return the start, the end and the peak in seconds of the interval that a symbol attends to.

    `weights` are the symbol's attention weights over the encoder steps, each of which lasts `step` seconds. The
    interval consists of the step with the largest weight and the steps around it with at least half of this weight.

    >>> interval([0.1, 0.4, 0.5, 0.0], 0.5)
    (0.5, 1.5, 1.25)
    """
    peak = max(range(len(weights)), key=weights.__getitem__)
    first = last = peak
    while first > 0 and weights[first - 1] >= weights[peak] / 2:
        first -= 1
    while last + 1 < len(weights) and weights[last + 1] >= weights[peak] / 2:
        last += 1
    return first * step, (last + 1) * step, (peak + 0.5) * step
