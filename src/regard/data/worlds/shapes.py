"""Coloured shapes and the pictures they are drawn in: antialiased, on a background whose colour varies slightly.

NumPy draws every shape from the signed distances of the pixels to its outline. All random numbers come from one
`random.Random`, so that the same seed gives the same picture on every machine.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Values = NDArray[np.floating[Any]]
Box = tuple[int, int, int, int]  # a box: left, top, right and bottom edge in pixels; right and bottom are exclusive

KINDS = ("circle", "square", "triangle", "star", "cross")
PLURALS = {kind: "crosses" if kind == "cross" else f"{kind}s" for kind in KINDS}
COLOURS = {
    "red": (217, 48, 44),
    "orange": (244, 134, 24),
    "yellow": (247, 210, 38),
    "green": (46, 158, 72),
    "blue": (42, 104, 214),
    "purple": (138, 62, 176),
}
SIZES = ("small", "large")
# Ranges of radii as fractions of the picture's side. The ranges of small and large shapes do not overlap, and the
# smallest shape is visible in a picture of 48 pixels.
RADII = {"small": (0.105, 0.122), "large": (0.168, 0.198)}

_SMALLEST_PICTURE = 32


class Spot(NamedTuple):
    """The position and radius of a shape in pixels, and its size word; its kind and colour are chosen later."""

    x: float
    y: float
    radius: float
    size: str


@dataclass(frozen=True, slots=True)
class Shape:
    """One drawn shape. `box` is the smallest box that contains all of its pixels."""

    kind: str
    colour: str
    size: str
    box: Box

    @property
    def centre(self) -> tuple[float, float]:
        """Return the centre of the box, (x, y)."""
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture, (3, height, width) RGB, and the shapes in it. Two scenes compare equal if their shapes are equal."""

    image: Image = field(compare=False, repr=False)
    objects: tuple[Shape, ...]


def draw(
    things: list[tuple[str, str, Spot]], random: Random, *, size: int = 48, noise: float = 9.0, plain: bool = False
) -> Scene:
    """Return a scene of shapes, given as (kind, colour, spot) in drawing order; if `plain`, on a uniform grey.

    >>> scene = draw([("circle", "red", Spot(20.0, 24.0, 8.0, "large"))], Random(1))
    >>> scene.image.shape, scene.objects
    ((3, 48, 48), (Shape(kind='circle', colour='red', size='large', box=(12, 16, 28, 32)),))
    """
    if size < _SMALLEST_PICTURE:
        raise ValueError(f"a picture has at least {_SMALLEST_PICTURE} pixels a side, not {size}")
    canvas = np.full((3, size, size), 224.0, np.float32) if plain else _background(size, random)
    shapes = []
    for kind, colour, spot in things:
        box = _paint(canvas, kind, colour, spot, random)
        shapes.append(Shape(kind, colour, spot.size, box))
    if noise:
        grain = np.frombuffer(random.randbytes(canvas.size), np.uint8).reshape(canvas.shape)
        canvas += (grain.astype(np.float32) - 127.5) * (noise / 127.5)
    return Scene(np.clip(np.rint(canvas), 0, 255).astype(np.uint8), tuple(shapes))


def _background(size: int, random: Random) -> Values:
    """Return a light background, tinted, with a gradient towards one side."""
    level = random.uniform(214, 240)
    tint = np.array([random.uniform(-10, 10) for _ in range(3)], np.float32)[:, None, None]
    angle, depth = random.uniform(0, 2 * math.pi), random.uniform(0, 22)
    across = np.linspace(-1, 1, size, dtype=np.float32)
    slope = depth * (math.cos(angle) * across[None, :] + math.sin(angle) * across[:, None])
    return level + tint - np.abs(slope - slope.min()) / 2


def _paint(canvas: Values, kind: str, colour: str, spot: Spot, random: Random) -> Box:
    """Draw one shape with a darker rim; return the bounding box of the changed pixels."""
    size = canvas.shape[-1]
    reach = math.ceil(spot.radius * 1.2) + 1
    left, top = max(0, int(spot.x) - reach), max(0, int(spot.y) - reach)
    right, bottom = min(size, int(spot.x) + reach + 1), min(size, int(spot.y) + reach + 1)
    across = np.arange(left, right, dtype=np.float32) + 0.5 - spot.x
    down = np.arange(top, bottom, dtype=np.float32) + 0.5 - spot.y
    turn = random.uniform(-0.2, 0.2)
    cos, sin = math.cos(turn), math.sin(turn)
    x = across[None, :] * cos + down[:, None] * sin
    y = down[:, None] * cos - across[None, :] * sin
    distance = _distance(kind, x, y, spot.radius)
    # A pixel of which the shape covers less than a tenth is not drawn: it would be invisible, but enlarge the bounding
    # box.
    cover = np.clip(0.5 - distance, 0, 1)
    cover[cover < 0.1] = 0
    light = random.uniform(0.9, 1.05)
    fill = np.array([min(255.0, part * light) for part in COLOURS[colour]], np.float32)[:, None, None]
    rim = np.clip(1.5 + distance, 0, 1) * 0.28
    patch = canvas[:, top:bottom, left:right]
    patch += (fill * (1 - rim) - patch) * cover
    rows, columns = np.flatnonzero(cover.any(1)), np.flatnonzero(cover.any(0))
    return int(left + columns[0]), int(top + rows[0]), int(left + columns[-1] + 1), int(top + rows[-1] + 1)


def _distance(kind: str, x: Values, y: Values, radius: float) -> Values:
    """Return the signed distance of points to the outline of a shape, negative inside the shape.

    The outlines are scaled so that shapes of different kinds with the same radius look equally large.
    """
    if kind == "circle":
        return np.hypot(x, y) - np.float32(0.95 * radius)
    starts, ends = _outline(kind)
    return _polygon(x, y, starts * np.float32(radius), ends * np.float32(radius))


@cache
def _outline(kind: str) -> tuple[Values, Values]:
    """Return the edges of a polygon of radius 1 as start and end points; y points down."""
    if kind == "square":
        corners = [(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)]
    elif kind == "triangle":
        corners = [(0.0, -1.05), (1.06, 0.82), (-1.06, 0.82)]
    elif kind == "cross":
        thin, wide = 0.36, 1.02
        corners = [(-thin, -wide), (thin, -wide), (thin, -thin), (wide, -thin), (wide, thin), (thin, thin)]
        corners += [(-x, -y) for x, y in corners]
    elif kind == "star":
        radii = (1.16, 0.5)
        angles = [math.pi * number / 5 - math.pi / 2 for number in range(10)]
        corners = [
            (radii[number % 2] * math.cos(angle), radii[number % 2] * math.sin(angle))
            for number, angle in enumerate(angles)
        ]
    else:
        raise ValueError(f"no shape {kind!r}; known: {', '.join(KINDS)}")
    starts = np.array(corners, np.float32)
    return starts, np.roll(starts, -1, axis=0)


def _polygon(x: Values, y: Values, starts: Values, ends: Values) -> Values:
    """Return the distance of points to the nearest edge of a polygon, negative inside the polygon.

    A point is inside if a ray from it to the left crosses an odd number of edges.
    """
    (ax, ay), (bx, by) = starts.T[..., None, None], ends.T[..., None, None]
    dx, dy = bx - ax, by - ay
    px, py = x - ax, y - ay
    along = np.clip((px * dx + py * dy) / (dx * dx + dy * dy), 0, 1)
    nearest = np.sqrt(((px - along * dx) ** 2 + (py - along * dy) ** 2).min(0))
    # The ray crosses an edge left of the point if px > dx·py/dy; both sides are multiplied by dy. It never crosses a
    # horizontal edge.
    crossed = ((ay > y) != (by > y)) & ((px * dy > py * dx) == (dy > 0))
    return np.where(crossed.sum(0) % 2 == 1, -nearest, nearest)
