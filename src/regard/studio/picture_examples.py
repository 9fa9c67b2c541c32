"""Example traces with drawings: a picture with its caption, and a spoken word with its spectrogram."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.look.color_scale import LIGHT, shade
from regard.look.labels import Labels, png_bytes
from regard.look.trace import Trace
from regard.studio.examples import Answering, Example, asked_by, noise

SIDE, PATCHES = 336, 14  # side of the picture in pixels, and number of patches along each side
SKY, GRASS, HOUSE, ROOF, BALL, SUN, TREE = range(7)
COLOURS = ["#bfe0f7", "#8cbf6a", "#3f6fb5", "#2b4a7a", "#d23b36", "#f6c445", "#3d7d4a"]
SHAPES: list[tuple[str, int, tuple[int, ...]]] = [
    ("rectangle", GRASS, (0, 226, 336, 336)),
    ("ellipse", SUN, (246, 22, 306, 82)),
    ("rectangle", HOUSE, (48, 150, 156, 250)),
    ("polygon", ROOF, (36, 150, 102, 96, 168, 150)),
    ("ellipse", TREE, (276, 136, 334, 226)),
    ("rectangle", TREE, (300, 210, 310, 252)),
    ("ellipse", BALL, (184, 236, 254, 306)),
]
CAPTION: list[tuple[str, dict[int, float]]] = [
    ("a", {}), ("red", {BALL: 1.0}), ("ball", {BALL: 1.0}), ("beside", {BALL: 0.6, HOUSE: 0.6}), ("a", {}),
    ("blue", {HOUSE: 1.0, ROOF: 0.5}), ("house", {HOUSE: 0.9, ROOF: 0.9}), ("under", {SUN: 0.5, SKY: 0.25}),
    ("the", {}), ("sun", {SUN: 1.0}),
]  # fmt: skip


def image() -> Example:
    """Return an example of a caption over 14 × 14 patches; a patch's features are its fractions of each object."""
    pixels = _things()
    shares = torch.stack([(pixels == thing).float() for thing in range(len(COLOURS))])
    step = SIDE // PATCHES
    features = torch.nn.functional.avg_pool2d(shares[None], step)[0].flatten(1).T.contiguous()
    # Each object's feature is divided by its largest fraction in any patch, so that small objects get large features
    # too.
    inputs = 2.0 * features / features.amax(0).clamp_min(0.2) + 0.05 * noise(PATCHES**2, len(COLOURS), 12)
    asks = torch.tensor([[wanted.get(thing, 0.0) for thing in range(len(COLOURS))] for _, wanted in CAPTION])
    model = Answering(inputs, asked_by(asks, 3.2, 1.4), 2.0 * asks, threshold=2.0)
    extra = {"image": _png(_coloured(pixels)), "grid": (PATCHES, PATCHES)}
    names = tuple(f"({i}, {j})" for i in range(PATCHES) for j in range(PATCHES))
    trace = Trace.from_weights(
        {"word → image": model.weights()},
        title="A caption, a map for each word",
        rows=Labels("tokens", tuple(word for word, _ in CAPTION)),
        columns=Labels("patches", names, extra),
    )
    return Example(trace, {"word → image": model})


RATE, HOP, BINS = 8_000, 160, 64  # samples per second, samples per frame, displayed frequency bands
SPOKEN = "attention"
# The frequencies in Hz of two formants of each letter, and its duration in seconds. A frequency of 0 means noise.
VOICE = {
    "a": (750, 1200, 0.18), "t": (0, 3000, 0.07), "e": (530, 1850, 0.13), "n": (280, 1400, 0.11),
    "i": (280, 2250, 0.10), "o": (500, 1000, 0.16),
}  # fmt: skip


def sound() -> Example:
    """Return an example of letters over the frames of a synthetic voice; the frames of each letter are known."""
    wave, spans = _speak()
    power = torch.stft(wave, 256, HOP, window=torch.hann_window(256), return_complex=True).abs()[:BINS] + 1e-3
    loudness = power.log10()
    frames = loudness.shape[1]
    starts = torch.arange(frames) * HOP / RATE
    features = torch.zeros(frames, len(SPOKEN))
    for letter, (begin, end) in enumerate(spans):
        inside = (starts + HOP / RATE).clamp(begin, end) - starts.clamp(begin, end)
        features[:, letter] = inside * RATE / HOP
    blurred = torch.nn.functional.avg_pool1d(features.T[None], 3, 1, 1)[0].T
    inputs = 2.0 * blurred + 0.06 * noise(frames, len(SPOKEN), 21)
    asks = torch.eye(len(SPOKEN))
    model = Answering(inputs, asked_by(asks, 2.8, 1.3), 2.0 * asks, threshold=2.0)
    extra = {"spectrogram": _png(_spectrogram(loudness)), "seconds": HOP / RATE}
    trace = Trace.from_weights(
        {"letter → frames": model.weights()},
        title="Speech, the frames of each letter",
        rows=Labels("tokens", tuple(SPOKEN)),
        columns=Labels("frames", tuple(f"{float(start):.2f} s" for start in starts), extra),
    )
    return Example(trace, {"letter → frames": model})


def _things() -> Tensor:
    """Return the index of the object that each pixel shows."""
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (SIDE, SIDE), SKY)
    draw = ImageDraw.Draw(canvas)
    for shape, thing, corners in SHAPES:
        getattr(draw, shape)(corners, fill=thing)
    return torch.frombuffer(bytearray(canvas.tobytes()), dtype=torch.uint8).reshape(SIDE, SIDE)


def _coloured(things: Tensor) -> Tensor:
    palette = torch.tensor([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in COLOURS], dtype=torch.uint8)
    return palette[things.long()]


def _speak() -> tuple[Float[Tensor, "n"], list[tuple[float, float]]]:
    """Return a synthetic voice with two formants per letter, and the start and end of each letter in seconds."""
    generator = torch.Generator().manual_seed(3)
    parts, now = [torch.zeros(RATE // 16)], 1 / 16
    spans: list[tuple[float, float]] = []
    for letter in SPOKEN:
        low, high, seconds = VOICE[letter]
        time = torch.arange(int(seconds * RATE)) / RATE
        breath = torch.randn(len(time), generator=generator)
        voiced = sum(
            (1 / n) * math.exp(-(((n * 140 - low) / 160) ** 2)) * torch.sin(2 * math.pi * 140 * n * time)
            + 0.6 * math.exp(-(((n * 140 - high) / 220) ** 2)) * torch.sin(2 * math.pi * 140 * n * time)
            for n in range(1, 27)
        )
        body = 0.35 * breath if low == 0 else voiced + 0.02 * breath
        fade = torch.minimum(time / 0.015, (seconds - time) / 0.015).clamp(0, 1)
        parts.append(torch.as_tensor(body) * fade)
        spans.append((now, now + len(time) / RATE))
        now += len(time) / RATE
    return torch.cat([*parts, torch.zeros(RATE // 16)]), spans


def _spectrogram(loudness: Float[Tensor, "f t"]) -> Tensor:
    low, high = float(loudness.quantile(0.05)), float(loudness.max())
    levels = (((loudness - low) / (high - low)).clamp(0, 1) * 255).round().long().flip(0)
    palette = torch.tensor([shade(level / 255, LIGHT) for level in range(256)], dtype=torch.uint8)
    return palette[levels].repeat_interleave(3, 0).repeat_interleave(8, 1)


def _png(pixels: Tensor) -> bytes:
    from PIL import Image

    return png_bytes(Image.fromarray(pixels.contiguous().numpy()))
