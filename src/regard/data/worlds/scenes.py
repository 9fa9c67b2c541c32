"""The layout of a scene: positions that do not overlap, and relations between shapes.

The module `shapes` draws scenes, `scene_captions` generates captions of scenes and `scene_questions` generates
questions about scenes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Protocol, TypeVar, runtime_checkable

from regard.data.worlds.random_choices import Dice, Splits, Within, split
from regard.data.worlds.shapes import RADII, SIZES, Box, Scene, Spot

RELATIONS = ("left of", "right of", "above", "below")
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
PLACES = ("top left", "top right", "bottom left", "bottom right")

# `_REACH` is half the width of a shape as a multiple of its radius; `_ROOM` also includes a margin between two shapes.
_REACH = 1.2
_ROOM = 1.3
# A relation such as "left of" is stated only if the distance along one axis is this many times the distance along the
# other axis.
_CLEARLY = 1.3
_ATTEMPTS = 60
# After this number of consecutive failed attempts to make a scene, `describe` raises an error.
_PATIENCE = 2000


@runtime_checkable
class HasScene(Protocol):
    """A text about a scene, such as a caption or a question."""

    @property
    def scene(self) -> Scene: ...


Described = TypeVar("Described", bound=HasScene)


def spots(dice: Dice, sizes: Sequence[str], *, size: int) -> list[Spot] | None:
    """Return a position for each shape, given the shapes' size words `sizes`; None if the shapes do not fit.

    The picture has `size` pixels a side.
    """
    placed: list[Spot] = []
    for word in sizes:
        low, high = RADII[word]
        radius = size * (low + (high - low) * dice.random.random())
        margin = _REACH * radius + 1
        for _ in range(_ATTEMPTS):
            x = margin + (size - 2 * margin) * dice.random.random()
            y = margin + (size - 2 * margin) * dice.random.random()
            if all(_apart(x, y, radius, other) for other in placed):
                placed.append(Spot(x, y, radius, word))
                break
        else:
            return None
    return placed


def _apart(x: float, y: float, radius: float, other: Spot) -> bool:
    room = _ROOM * (radius + other.radius) * 0.95
    return max(abs(x - other.x), abs(y - other.y)) >= room


def size_words(dice: Dice, count: int) -> list[str]:
    """Return a size for each of `count` shapes; many shapes fit only if few of them are large."""
    large = 0.5 if count <= 2 else 1.2 / count
    return [SIZES[1] if dice.chance(large) else SIZES[0] for _ in range(count)]


def box_of(spot: Spot) -> Box:
    """Return the box in pixels in which a shape of any kind is drawn at this position."""
    x, y, radius, _ = spot
    return int(x - radius), int(y - radius), int(x + radius) + 1, int(y + radius) + 1


def around(boxes: Iterable[Box]) -> Box:
    """Return the smallest box that contains all `boxes`.

    >>> around([(2, 3, 5, 7), (4, 1, 6, 4)])
    (2, 1, 6, 7)
    """
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def relation(first: Box, second: Box) -> str | None:
    """Return the relation of the first box to the second, such as "left of"; None if the relation is ambiguous.

    >>> relation((2, 10, 8, 16), (20, 8, 30, 18)), relation((2, 30, 8, 36), (4, 8, 12, 18))
    ('left of', 'below')
    >>> relation((2, 2, 8, 8), (20, 20, 26, 26)) is None
    True
    """
    dx = (first[0] + first[2] - second[0] - second[2]) / 2
    dy = (first[1] + first[3] - second[1] - second[3]) / 2
    if abs(dx) > _CLEARLY * abs(dy):
        if first[2] <= second[0] or second[2] <= first[0]:
            return "left of" if dx < 0 else "right of"
    elif abs(dy) > _CLEARLY * abs(dx) and (first[3] <= second[1] or second[3] <= first[1]):
        return "above" if dy < 0 else "below"
    return None


def place(box: Box, size: int) -> str | None:
    """Return the quadrant of the picture that contains a box; None near the vertical or horizontal middle line.

    >>> place((4, 30, 12, 38), 48), place((4, 20, 12, 28), 48)
    ('bottom left', None)
    """
    x, y = (box[0] + box[2]) / (2 * size), (box[1] + box[3]) / (2 * size)
    if min(abs(x - 0.5), abs(y - 0.5)) < 0.08:
        return None
    return f"{'top' if y < 0.5 else 'bottom'} {'left' if x < 0.5 else 'right'}"


Maker = Callable[[Dice, tuple[int, int], int], Described | None]


def describe(
    make: Maker[Described], stream: str, *, count: int, objects: tuple[int, int], size: int, seen: set[object]
) -> Iterator[Described]:
    """Yield `count` captions or questions about scenes not in `seen`, from a random generator seeded with `stream`.

    `make` is called with the random generator, the range of the number of objects and the picture's side; it returns a
    caption or question with its scene, or None if no scene could be made. Yielded scenes are added to `seen`.
    """
    dice = Dice(Random(f"{stream} {objects} {size}"), 1.0)
    for number in range(count):
        for _ in range(_PATIENCE):
            item = make(dice, objects, size)
            if item is not None and item.scene.objects not in seen:
                break
        else:
            raise ValueError(f"only {number} of {count} scenes could be made: allow fewer objects or a larger picture")
        seen.add(item.scene.objects)
        yield item


def split_scenes(
    make: Maker[Described],
    stream: str,
    *,
    counts: Sequence[int],
    objects: tuple[int, int],
    beyond: tuple[int, int],
    size: int,
) -> Splits[Described]:
    """Return scenes with captions or questions: training, validation, test, and larger scenes of `beyond` objects."""
    if beyond[0] <= objects[1]:
        raise ValueError(f"beyond must be more than objects, not {beyond} after {objects}")
    seen: set[object] = set()

    def part(name: str, count: int, within: Within) -> Iterator[Described]:
        return describe(make, f"{stream} {name}", count=count, objects=within, size=size, seen=seen)

    return split(part, counts, objects, beyond)


def check_objects(objects: tuple[int, int], fewest: int, most: int) -> None:
    """Raise if `objects`, the smallest and largest number of objects in a scene, is not within `fewest` to `most`."""
    low, high = objects
    if not fewest <= low <= high <= most:
        raise ValueError(f"objects must be (fewest, most) within {fewest} to {most}, not {objects}")
