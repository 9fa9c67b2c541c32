"""The built-in data for captioning: drawn scenes with captions, and the picture region of every content word.

The caption is a function of the scene, so that a model can predict it exactly. A scene has one or two groups of equal
shapes. The group of larger shapes is named first; if both have the same size, the group further left or further up. The
size is named if there is one group, or if the two groups differ in size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from regard.data.worlds.random_choices import Dice, Splits
from regard.data.worlds.scenes import OPPOSITE, around, box_of, check_objects, describe, relation, split_scenes, spots
from regard.data.worlds.shapes import COLOURS, KINDS, PLURALS, SIZES, Box, Scene, Shape, draw

NUMBERS = ("a", "two", "three")
_MOST = 2 * len(NUMBERS)
_TRIES = 200

Regions = tuple[Box, ...]
Words = tuple[str, str, str]  # the description of a shape: size, colour, kind


@dataclass(frozen=True, slots=True)
class Captioned:
    """A scene, the words of its caption, and for each word the boxes of the shapes that it refers to.

    A word that refers to several shapes has several boxes. Articles and words of relation, such as "above", have None.
    """

    scene: Scene
    words: tuple[str, ...]
    regions: tuple[Regions | None, ...]


def captioned(seed: int, *, count: int, objects: tuple[int, int] = (1, 3), size: int = 48) -> Iterator[Captioned]:
    """Return distinct scenes with captions; the number of shapes in a scene is in the range `objects`.

    The same seed gives the same scenes on every machine.

    >>> for item in captioned(5, count=3):
    ...     print(" ".join(item.words))
    a yellow circle above a purple star
    a large red triangle
    a small blue star
    """
    check_objects(objects, 1, _MOST)
    return describe(_make, f"captions {seed}", count=count, objects=objects, size=size, seen=set())


def splits(
    seed: int,
    *,
    train: int,
    valid: int,
    test: int,
    longer: int = 0,
    objects: tuple[int, int] = (1, 3),
    beyond: tuple[int, int] = (4, 5),
    size: int = 48,
) -> Splits[Captioned]:
    """Return training, validation and test scenes of `objects` shapes, and scenes of `beyond` shapes in `longer`.

    Each word of the captions in `longer` also occurs in training captions, but `longer` has new combinations, such as
    "three red stars above two blue squares".

    >>> parts = splits(1, train=20, valid=5, test=5, longer=3)
    >>> [len(part) for part in (parts.train, parts.valid, parts.test, parts.longer)]
    [20, 5, 5, 3]
    """
    check_objects(objects, 1, _MOST)
    check_objects(beyond, objects[1] + 1, _MOST)
    counts = (train, valid, test, longer)
    return split_scenes(_make, f"captions {seed}", counts=counts, objects=objects, beyond=beyond, size=size)


def caption(objects: Sequence[Shape]) -> tuple[tuple[str, ...], tuple[Regions | None, ...]] | None:
    """Return the caption of a scene with these shapes, as its words and the regions of each word.

    Returns None unless the shapes form one group, or two groups whose relative position is unambiguous, each of at most
    three equal shapes.

    >>> circle, star = Shape("circle", "red", "large", (4, 9, 20, 25)), Shape("star", "blue", "small", (30, 12, 40, 22))
    >>> words, regions = caption([star, circle])
    >>> " ".join(words)
    'a large red circle left of a small blue star'
    >>> regions[3], regions[4]
    (((4, 9, 20, 25),), None)
    """
    groups: dict[Words, list[Box]] = {}
    for shape in objects:
        groups.setdefault((shape.size, shape.colour, shape.kind), []).append(shape.box)
    if len(groups) > 2 or max(map(len, groups.values())) > len(NUMBERS):
        return None
    ordered = sorted(groups, key=lambda group: -SIZES.index(group[0]))
    if len(ordered) == 1:
        words, regions = _phrase(ordered[0], groups[ordered[0]], sized=True)
        return tuple(words), tuple(regions)
    first, second = ordered
    direction = relation(around(groups[first]), around(groups[second]))
    if direction is None:
        return None
    if first[0] == second[0] and direction in ("right of", "below"):
        first, second, direction = second, first, OPPOSITE[direction]
    sized = first[0] != second[0]
    words, regions = _phrase(first, groups[first], sized=sized)
    between = direction.split()
    after, their_regions = _phrase(second, groups[second], sized=sized)
    return (*words, *between, *after), (*regions, *[None] * len(between), *their_regions)


def _phrase(group: Words, boxes: list[Box], *, sized: bool) -> tuple[list[str], list[Regions | None]]:
    size, colour, kind = group
    number = NUMBERS[len(boxes) - 1]
    noun = kind if len(boxes) == 1 else PLURALS[kind]
    if len(boxes) == 1 and (size if sized else colour)[0] in "aeiou":
        number = "an"
    words = [number, *([size] if sized else []), colour, noun]
    region = tuple(boxes)
    return words, [region if len(boxes) > 1 else None, *[region] * (len(words) - 1)]


def _make(dice: Dice, objects: tuple[int, int], size: int) -> Captioned | None:
    total = dice.pick(range(objects[0], objects[1] + 1))
    counts = _grouping(dice, total)
    # If a scene cannot be drawn, the next attempt has the same number of shapes, so that scenes with many shapes, which
    # fail more often, are not rarer.
    for _ in range(_TRIES):
        descriptions = _descriptions(dice, len(counts))
        placed = spots(dice, [words[0] for words in _each(descriptions, counts)], size=size)
        if placed is None:
            continue
        groups = [placed[: counts[0]], placed[counts[0] :]][: len(counts)]
        if len(groups) == 2 and not relation(*(around(map(box_of, group)) for group in groups)):
            continue
        described = zip(_each(descriptions, counts), placed, strict=True)
        things = [(kind, colour, spot) for (_, colour, kind), spot in described]
        dice.random.shuffle(things)
        scene = draw(things, dice.random, size=size)
        words_and_regions = caption(scene.objects)
        if words_and_regions:
            return Captioned(scene, *words_and_regions)
    return None


def _each(descriptions: Sequence[Words], counts: Sequence[int]) -> list[Words]:
    """Return the description of each shape, given the descriptions of the groups and their numbers of shapes."""
    return [words for words, count in zip(descriptions, counts, strict=True) for _ in range(count)]


def _grouping(dice: Dice, total: int) -> tuple[int, ...]:
    """Return the numbers of shapes in one or two groups; their sum is `total`."""
    most = len(NUMBERS)
    if total == 1 or (total <= most and dice.chance(0.3)):
        return (total,)
    first = dice.pick(range(max(1, total - most), min(most, total - 1) + 1))
    return first, total - first


def _descriptions(dice: Dice, groups: int) -> list[Words]:
    """Return a random size, colour and kind for each group of shapes; no two groups agree in colour and kind."""
    chosen: list[Words] = []
    while len(chosen) < groups:
        colour, kind = dice.pick(tuple(COLOURS)), dice.pick(KINDS)
        if all((colour, kind) != words[1:] for words in chosen):
            chosen.append((dice.pick(SIZES), colour, kind))
    return chosen
