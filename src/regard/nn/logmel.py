"""Log-mel features of sound: the power of each frequency band over time, on the device of the samples."""

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

_FLOOR = 1e-10  # the smallest power, as in librosa's `power_to_db`
# Slaney's mel scale: linear below 1 kHz, and logarithmic above it, with 27 steps for a factor of 6.4.
_LINEAR, _BREAK = 200 / 3, 1000.0
_STEP = math.log(6.4) / 27


class LogMel(nn.Module):
    """log₁₀ of the power in mel bands, equal to that of librosa's `melspectrogram` for the same rate, bands and frames.

    Frames are `hop` seconds apart, frame n centred at n · hop, under a Hann window of `window` seconds; the length of
    the transform is the window's number of samples, rounded up to a power of two. Bands are triangles of equal area on
    Slaney's mel scale, up to half the rate.

    >>> LogMel(8000, bands=40)(torch.zeros(2, 8000)).shape
    torch.Size([2, 101, 40])
    """

    filters: Tensor
    shape: Tensor

    def __init__(self, rate: int, *, bands: int = 40, hop: float = 0.01, window: float = 0.025) -> None:
        super().__init__()
        self.hop, self.window = round(hop * rate), round(window * rate)
        if self.hop < 1 or self.window < 2:
            raise ValueError(
                f"hop and window must have samples: {hop} s and {window} s have too few at {rate} a second"
            )
        self.size = 2 ** math.ceil(math.log2(self.window))
        self.register_buffer("filters", mel_filters(rate, self.size, bands).float(), persistent=False)
        self.register_buffer("shape", torch.hann_window(self.window), persistent=False)

    def forward(self, samples: Float[Tensor, "b n"]) -> Float[Tensor, "b t f"]:
        """Return the features of recordings of n samples: ⌊n / hop⌋ + 1 frames, hop in samples."""
        spectrum = torch.stft(
            samples, self.size, self.hop, self.window, self.shape, pad_mode="constant", return_complex=True
        )
        power = spectrum.real.square() + spectrum.imag.square()
        return (power.mT @ self.filters).clamp_min(_FLOOR).log10()

    def frames(self, samples: int) -> int:
        """Return the number of frames of a given number of samples."""
        return samples // self.hop + 1


def level(features: Float[Tensor, "t f"], *, depth: float = 8.0) -> Float[Tensor, "t f"]:
    """Return the features scaled to [−1, 1]: 1 is the largest power of the recording, −1 is 10^−depth of it or less.

    The maximum of each recording is subtracted, so its volume makes no difference.

    >>> level(torch.tensor([[3.0, -1.0, -9.0]]))
    tensor([[ 1.,  0., -1.]])
    """
    most = features.amax()
    return (features.clamp_min(most - depth) - most) * (2 / depth) + 1


@functools.lru_cache(maxsize=8)
def mel_filters(rate: int, size: int, bands: int) -> Float[Tensor, "bins f"]:
    """Return triangular filters on the mel scale, each of area 1 in Hz, for the bins of a `size`-point transform."""
    edges = _hertz(torch.linspace(0.0, _mel(rate / 2), bands + 2, dtype=torch.float64))
    bins = torch.linspace(0.0, rate / 2, size // 2 + 1, dtype=torch.float64).unsqueeze(1)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp_min(0) * (2 / (edges[2:] - edges[:-2]))


def _mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < _BREAK else _BREAK / _LINEAR + math.log(hertz / _BREAK) / _STEP


def _hertz(mels: Tensor) -> Tensor:
    bend = _BREAK / _LINEAR
    return torch.where(mels < bend, mels * _LINEAR, _BREAK * torch.exp(_STEP * (mels - bend)))
