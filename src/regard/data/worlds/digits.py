"""The built-in data for models of glimpses: digits drawn as pen strokes, alone, on a larger canvas, or among clutter.

A digit is drawn with bright strokes on black in 28×28 pixels, as in MNIST. On the canvas of 60×60 pixels (Mnih et al.
2014, "Recurrent Models of Visual Attention", section 4.1) the digit is at a random position; the clutter consists of
crops of other digits, 8×8 pixels each.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from regard.data.worlds.random_choices import Splits
from regard.data.worlds.shapes import Box, Image, Values

SIDES = {"plain": 28, "translated": 60, "cluttered": 60}

PIECE = 8
PIECES = 4
# The brightness up to which a pixel is background; the bounding box of a digit contains all brighter pixels.
INK = 40

Path = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Digit:
    """A picture of one digit, (1, height, width), its label from 0 to 9, and the bounding box of its strokes."""

    image: Image = field(compare=False, repr=False)
    label: int
    box: Box


def digits(seed: int, *, count: int, layout: str = "plain") -> Iterator[Digit]:
    """Return `count` distinct digits; all labels are equally likely, and a seed gives the same digits on every machine.

    >>> [digit] = digits(1, count=1, layout="cluttered")
    >>> digit.image.shape, digit
    ((1, 60, 60), Digit(label=9, box=(24, 19, 38, 41)))
    """
    return _stream(Random(f"digits {seed} {_known(layout)}"), count, layout, set())


def splits(seed: int, *, train: int, valid: int, test: int, layout: str = "plain") -> Splits[Digit]:
    """Return training, validation and test digits; no picture is in two of these splits.

    >>> parts = splits(1, train=20, valid=5, test=5)
    >>> [len(part) for part in (parts.train, parts.valid, parts.test)]
    [20, 5, 5]
    """
    seen: set[bytes] = set()

    def part(name: str, count: int) -> tuple[Digit, ...]:
        return tuple(_stream(Random(f"digits {seed} {name} {_known(layout)}"), count, layout, seen))

    return Splits(test=part("test", test), valid=part("valid", valid), train=part("train", train))


def write(label: int, random: Random, *, noise: float = 6.0) -> Digit:
    """Return one digit drawn in 28×28 pixels with random slant, rotation, proportions, stroke width and jitter.

    `noise` is the largest amount by which random noise changes a pixel's brightness.
    """
    starts, ends = _segments(label, random)
    half = random.uniform(0.95, 1.75)
    distance = _distance(starts, ends)
    strokes = np.clip(half - distance + 0.5, 0, 1)
    brightness = strokes * random.uniform(215, 255)
    box = ink_box(brightness.astype(np.uint8))
    if noise:
        grain = np.frombuffer(random.randbytes(brightness.size), np.uint8).reshape(brightness.shape)
        brightness = brightness + (grain.astype(np.float32) - 127.5) * (noise / 127.5)
    return Digit(np.clip(np.rint(brightness), 0, 255).astype(np.uint8)[None], label, box)


def on_canvas(
    image: Image, random: Random, *, side: int = 60, clutter: Sequence[Image] = (), pieces: int = PIECES
) -> tuple[Image, Box]:
    """Return a picture (1, h, w) of a digit at a random position on a black canvas, and the bounding box of the digit.

    `clutter` are other pictures: `pieces` crops of them, 8×8 pixels each, are placed outside the digit's box.
    """
    _, high, wide = image.shape
    if side < max(high, wide):
        raise ValueError(f"a picture of {high}×{wide} does not fit on a canvas of {side}×{side}")
    canvas = np.zeros((1, side, side), np.uint8)
    top, left = random.randrange(side - high + 1), random.randrange(side - wide + 1)
    inner = ink_box(image[0])
    box = (inner[0] + left, inner[1] + top, inner[2] + left, inner[3] + top)
    canvas[:, top : top + high, left : left + wide] = image
    for _ in range(pieces if clutter else 0):
        piece = _piece(clutter[random.randrange(len(clutter))], random)
        row, column = _beside(box, side, random)
        part = canvas[:, row : row + PIECE, column : column + PIECE]
        np.maximum(part, piece, out=part)
    return canvas, box


def ink_box(image: Image) -> Box:
    """Return the bounding box of all pixels brighter than the background in a picture (h, w).

    If no pixel is brighter than the background, the box is the whole picture.

    >>> image = np.zeros((5, 7), np.uint8)
    >>> image[1:3, 4] = 255
    >>> ink_box(image)
    (4, 1, 5, 3)
    """
    ink = image > INK
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    if not len(rows):
        return 0, 0, image.shape[1], image.shape[0]
    return int(columns[0]), int(rows[0]), int(columns[-1] + 1), int(rows[-1] + 1)


def _known(layout: str) -> str:
    if layout not in SIDES:
        raise ValueError(f"layout must be one of {', '.join(SIDES)}, not {layout!r}")
    return layout


def _stream(random: Random, count: int, layout: str, seen: set[bytes]) -> Iterator[Digit]:
    pool = [write(label, random, noise=0.0).image for label in range(10)] if layout == "cluttered" else []
    for number in range(count):
        digit = _make(random, layout, pool)
        mark = _mark(digit)
        while mark in seen:
            digit = _make(random, layout, pool)
            mark = _mark(digit)
        seen.add(mark)
        # The clutter is cropped from ten digits, one of which is replaced after every second picture. With a
        # replacement after every picture, two digits would be drawn for each picture.
        if pool and number % 2:
            pool[random.randrange(len(pool))] = write(random.randrange(10), random, noise=0.0).image
        yield digit


def _mark(digit: Digit) -> bytes:
    return hashlib.blake2b(digit.image.tobytes(), digest_size=16).digest()


def _make(random: Random, layout: str, pool: Sequence[Image]) -> Digit:
    if layout == "plain":
        return write(random.randrange(10), random)
    written = write(random.randrange(10), random, noise=0.0)
    canvas, box = on_canvas(written.image, random, side=SIDES[layout], clutter=pool)
    grain = np.frombuffer(random.randbytes(canvas.size), np.uint8).reshape(canvas.shape) >> 4
    return Digit(np.maximum(canvas, grain), written.label, box)


def _piece(image: Image, random: Random) -> Image:
    """Return a random crop of 8×8 pixels near the strokes of a picture."""
    left, top, right, bottom = ink_box(image[0])
    row = random.randrange(top, max(top, bottom - PIECE) + 1)
    column = random.randrange(left, max(left, right - PIECE) + 1)
    row, column = min(row, image.shape[1] - PIECE), min(column, image.shape[2] - PIECE)
    return image[:, row : row + PIECE, column : column + PIECE]


def _beside(box: Box, side: int, random: Random) -> tuple[int, int]:
    """Return a random top left corner (row, column) for 8×8 pixels of clutter that do not overlap the digit's `box`."""
    left, top, right, bottom = box
    if max(left, top, side - right, side - bottom) < PIECE:
        raise ValueError(f"no clutter of {PIECE} pixels fits beside a digit of {box} on a canvas of {side}")
    while True:
        row, column = random.randrange(side - PIECE + 1), random.randrange(side - PIECE + 1)
        if column + PIECE <= left or column >= right or row + PIECE <= top or row >= bottom:
            return row, column


_GRID = np.arange(28, dtype=np.float32) + 0.5


def _distance(starts: Values, ends: Values) -> Values:
    """Return the distance of each pixel's centre to the nearest stroke segment, (28, 28)."""
    along = ends - starts
    length = np.maximum((along**2).sum(1), 1e-6)
    px = _GRID[None, None, :] - starts[:, 0, None, None]
    py = _GRID[None, :, None] - starts[:, 1, None, None]
    dx, dy = along[:, 0, None, None], along[:, 1, None, None]
    share = np.clip((px * dx + py * dy) / length[:, None, None], 0, 1)
    return np.sqrt(((px - share * dx) ** 2 + (py - share * dy) ** 2).min(0))


def _segments(label: int, random: Random) -> tuple[Values, Values]:
    """Return the starts and the ends of the stroke segments of a digit, (segments, 2), in pixels.

    The strokes are jittered, slanted, rotated and scaled at random.
    """
    variants = _GLYPHS[label]
    strokes = [_smooth(path, random) for path in variants[random.randrange(len(variants))]]
    points = np.concatenate(strokes)
    slant, turn = random.uniform(-0.12, 0.32), random.uniform(-0.16, 0.16)
    shear = np.array([[1.0, -slant], [0.0, 1.0]])
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    stretch = np.diag([random.uniform(0.78, 1.15), 1.0])
    points = points @ (rotation @ shear @ stretch).T
    low, high = points.min(0), points.max(0)
    height = random.uniform(16.0, 19.5)
    scale = min(height / (high[1] - low[1]), 19.5 / max(high[0] - low[0], 1e-6))
    middle = np.array([random.uniform(13, 15), random.uniform(13, 15)])
    points = ((points - (low + high) / 2) * scale + middle).astype(np.float32)
    ends = np.cumsum([len(stroke) for stroke in strokes])
    inner = np.ones(len(points) - 1, bool)
    inner[ends[:-1] - 1] = False  # the last point of a stroke and the first point of the next one are not joined
    return points[:-1][inner], points[1:][inner]


def _smooth(path: Path, random: Random) -> Values:
    """Return the points of a smooth curve (a Catmull-Rom spline) through the jittered points of a stroke."""
    points = np.array([(x + random.gauss(0, 0.022), y + random.gauss(0, 0.022)) for x, y in path])
    if len(points) == 2:
        return points
    padded = np.concatenate([points[:1] * 2 - points[1:2], points, points[-1:] * 2 - points[-2:-1]])
    before, start, end, after = padded[:-3], padded[1:-2], padded[2:-1], padded[3:]
    share = np.linspace(0, 1, 4, endpoint=False)[None, :, None]
    a, b, c, d = (part[:, None] for part in (before, start, end, after))
    curve = b + 0.5 * share * (c - a + share * (2 * a - 5 * b + 4 * c - d + share * (3 * (b - c) + d - a)))
    return np.concatenate([curve.reshape(-1, 2), points[-1:]])


def _arc(x: float, y: float, rx: float, ry: float, first: int, last: int, count: int = 8) -> Path:
    """Return `count` points of the ellipse with centre (x, y) and radii rx, ry, from angle `first` to angle `last`.

    Angles are in degrees: 0 is to the right, and they increase clockwise, because y points down.
    """
    angles = [math.radians(first + (last - first) * number / (count - 1)) for number in range(count)]
    return [(x + rx * math.cos(angle), y + ry * math.sin(angle)) for angle in angles]


# For each digit, the ways in which it can be written: each way is a list of strokes, and each stroke a list of points
# in a unit square, with x to the right and y down.
_GLYPHS: tuple[tuple[list[Path], ...], ...] = (
    ([_arc(0.5, 0.5, 0.34, 0.5, -80, 280, 13)], [_arc(0.5, 0.5, 0.28, 0.5, -120, 240, 13)]),
    (
        [[(0.5, 0.0), (0.5, 1.0)]],
        [[(0.32, 0.2), (0.52, 0.0)], [(0.52, 0.0), (0.52, 1.0)]],
        [[(0.34, 0.2), (0.52, 0.0)], [(0.52, 0.0), (0.52, 1.0)], [(0.3, 1.0), (0.74, 1.0)]],
    ),
    (
        [[*_arc(0.48, 0.28, 0.3, 0.28, 190, 370, 7), (0.62, 0.56), (0.2, 0.98)], [(0.2, 0.98), (0.84, 0.98)]],
        [
            [*_arc(0.48, 0.26, 0.28, 0.26, 200, 375, 7), (0.6, 0.6), (0.34, 0.92), (0.2, 0.9), (0.3, 0.8)],
            [(0.3, 0.84), (0.55, 0.93), (0.84, 0.94)],
        ],
    ),
    (
        [[*_arc(0.46, 0.25, 0.28, 0.25, 205, 440, 8), (0.42, 0.5)], _arc(0.44, 0.74, 0.32, 0.26, -90, 155, 9)],
        [[(0.2, 0.02), (0.76, 0.02)], [(0.76, 0.02), (0.45, 0.42)], _arc(0.44, 0.72, 0.32, 0.29, -85, 155, 9)],
    ),
    (
        [[(0.62, 0.0), (0.14, 0.66)], [(0.14, 0.66), (0.88, 0.66)], [(0.64, 0.3), (0.64, 1.0)]],
        [[(0.26, 0.02), (0.2, 0.5)], [(0.2, 0.5), (0.8, 0.5)], [(0.76, 0.05), (0.72, 1.0)]],
    ),
    (
        [
            [(0.78, 0.02), (0.3, 0.02)],
            [(0.3, 0.02), (0.26, 0.44)],
            [(0.26, 0.44), *_arc(0.46, 0.69, 0.32, 0.3, -80, 150, 8)],
        ],
        [
            [(0.28, 0.06), (0.26, 0.46)],
            [(0.26, 0.46), *_arc(0.46, 0.7, 0.3, 0.29, -70, 150, 8)],
            [(0.28, 0.05), (0.8, 0.02)],
        ],
    ),
    (
        [[(0.68, 0.0), (0.38, 0.26), (0.21, 0.62), *_arc(0.48, 0.72, 0.28, 0.27, 175, -200, 11)]],
        [[(0.6, 0.02), (0.3, 0.36), (0.2, 0.7), *_arc(0.5, 0.74, 0.3, 0.25, 150, -150, 11)]],
    ),
    (
        [[(0.16, 0.02), (0.82, 0.02)], [(0.82, 0.02), (0.56, 0.46), (0.42, 1.0)]],
        [[(0.16, 0.02), (0.82, 0.02)], [(0.82, 0.02), (0.42, 1.0)], [(0.36, 0.5), (0.76, 0.5)]],
        [[(0.18, 0.14), (0.2, 0.02)], [(0.2, 0.02), (0.82, 0.04)], [(0.82, 0.04), (0.5, 0.55), (0.44, 1.0)]],
    ),
    (
        [_arc(0.5, 0.25, 0.26, 0.25, 90, 450, 11), _arc(0.5, 0.75, 0.31, 0.26, -90, 270, 11)],
        [
            [
                *_arc(0.5, 0.25, 0.25, 0.25, -40, -270, 8),
                *_arc(0.5, 0.75, 0.29, 0.25, -90, 270, 10),
                (0.7, 0.35),
                (0.72, 0.16),
            ]
        ],
    ),
    (
        [_arc(0.48, 0.29, 0.28, 0.28, 0, 360, 11), [(0.76, 0.26), (0.74, 0.62), (0.62, 1.0)]],
        [
            _arc(0.48, 0.28, 0.26, 0.27, -10, 350, 11),
            [(0.75, 0.22), (0.74, 0.7), *_arc(0.48, 0.76, 0.25, 0.24, 10, 140, 5)],
        ],
        [_arc(0.48, 0.27, 0.27, 0.27, -20, 340, 11), [(0.76, 0.15), (0.72, 1.0)]],
    ),
)
