"""Recordings as log-mel frames, and frames as a picture."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from regard.data.audio.sound_files import Samples
from regard.look.labels import png_bytes
from regard.nn.logmel import LogMel, level
from regard.tasks.speech.config import SpeechConfig

Frames = NDArray[np.float16]  # (t, bands), from −1 to 1
_TALL = 4  # height of a band in a picture, in pixels


@functools.lru_cache(maxsize=4)
def _layer(rate: int, bands: int, hop: float, window: float) -> LogMel:
    return LogMel(rate, bands=bands, hop=hop, window=window)


@torch.no_grad()
def frames_of(samples: Samples, config: SpeechConfig) -> Frames:
    """Return the features of a recording, in half precision: 1 is its maximum, −1 is 80 dB below."""
    settings = config.features
    layer = _layer(config.data.rate, settings.bands, settings.hop, settings.window)
    return level(layer(torch.from_numpy(np.asarray(samples, np.float32))[None])[0]).half().numpy()


def spectrogram(frames: Frames) -> bytes:
    """Return frames as a PNG picture: time to the right, frequency upwards, louder is darker."""
    from PIL import Image

    wide = frames.astype(np.float32)
    low, high = np.quantile(wide, 0.2), max(float(wide.max()), -0.99)  # quieter parts are noise and drawn white
    shades = np.rint(255 * np.clip((high - wide) / max(high - low, 1e-3), 0, 1)).astype(np.uint8)
    return png_bytes(Image.fromarray(np.repeat(shades.T[::-1], _TALL, 0)))


def heard(weights: Sequence[float], step: float) -> tuple[float, float, float]:
    """Return start, end and peak of a symbol in seconds: around its largest weight, down to half of it.

    >>> heard([0.1, 0.4, 0.5, 0.0], 0.5)
    (0.5, 1.5, 1.25)
    """
    peak = max(range(len(weights)), key=weights.__getitem__)
    first = last = peak
    while first > 0 and weights[first - 1] >= weights[peak] / 2:
        first -= 1
    while last + 1 < len(weights) and weights[last + 1] >= weights[peak] / 2:
        last += 1
    return first * step, (last + 1) * step, (peak + 0.5) * step
