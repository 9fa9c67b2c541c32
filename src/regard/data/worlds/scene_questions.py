"""The built-in data for visual question answering: drawn scenes, a question about each, the answer and its region.

The questions are about colour, shape, count, presence, position and relation. The answer is sampled before the shapes,
so that all answers to one type of question are equally likely and cannot be guessed from the question alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from regard.data.worlds.random_choices import Dice, Splits
from regard.data.worlds.scenes import (
    PLACES,
    RELATIONS,
    box_of,
    check_objects,
    describe,
    place,
    relation,
    size_words,
    split_scenes,
    spots,
)
from regard.data.worlds.shapes import COLOURS, KINDS, PLURALS, Box, Scene, Spot, draw

COUNTS = ("zero", "one", "two", "three")
FORMS = ("colour", "shape", "count", "presence", "place", "relation", "comparison")
_MOST = 6
_TRIES = 200

Look = tuple[str, str]  # the description of a shape: colour, kind


@dataclass(frozen=True, slots=True)
class Asked:
    """A scene, the words of a question, the answer, and the boxes of the shapes that show the answer.

    For "what is left of the red circle", `regions` is the box of the shape left of the circle. `regions` is empty if
    the answer is that there is no such shape. `form` is the type of the question, one of `FORMS`, such as "count".
    """

    scene: Scene
    question: tuple[str, ...]
    answer: str
    regions: tuple[Box, ...]
    form: str


def asked(
    seed: int, *, count: int, objects: tuple[int, int] = (2, 4), size: int = 48, forms: Sequence[str] = FORMS
) -> Iterator[Asked]:
    """Return distinct scenes, each with a question; `forms` are the types of questions, such as "count".

    The number of shapes in a scene is in the range `objects`. The same seed gives the same scenes on every machine.

    >>> for item in asked(5, count=3):
    ...     print(written(item.question), item.answer)
    Where is the triangle? top right
    Is there a red square? no
    What is above the red circle? square
    """
    check_objects(objects, 2, _MOST)
    make = partial(_make, forms=_known(forms))
    return describe(make, f"questions {seed}", count=count, objects=objects, size=size, seen=set())


def splits(
    seed: int,
    *,
    train: int,
    valid: int,
    test: int,
    longer: int = 0,
    objects: tuple[int, int] = (2, 4),
    beyond: tuple[int, int] = (5, 6),
    size: int = 48,
    forms: Sequence[str] = FORMS,
) -> Splits[Asked]:
    """Return training, validation and test questions about scenes of `objects` shapes.

    The scenes of the additional test examples `longer` have `beyond` shapes.

    >>> parts = splits(1, train=20, valid=5, test=5, longer=3)
    >>> [len(part) for part in (parts.train, parts.valid, parts.test, parts.longer)]
    [20, 5, 5, 3]
    """
    check_objects(objects, 2, _MOST)
    check_objects(beyond, objects[1] + 1, _MOST)
    counts = (train, valid, test, longer)
    make = partial(_make, forms=_known(forms))
    return split_scenes(make, f"questions {seed}", counts=counts, objects=objects, beyond=beyond, size=size)


def answers() -> tuple[str, ...]:
    """Return all possible answers, in a fixed order."""
    return (*COLOURS, *KINDS, *COUNTS, "yes", "no", *PLACES)


def written(words: Sequence[str]) -> str:
    """Return the words of a question as text.

    >>> written(("what", "colour", "is", "the", "star", "?"))
    'What colour is the star?'
    """
    text = " ".join(words).replace(" ?", "?")
    return text[:1].upper() + text[1:]


def question_words(text: str) -> tuple[str, ...]:
    """Return the words of a question, normalised like the questions that this module generates.

    The words are in lower case and in British spelling, with the question mark as a word.

    >>> question_words("What color is the star?")
    ('what', 'colour', 'is', 'the', 'star', '?')
    """
    words = text.lower().replace("?", " ? ").split()
    return tuple("colour" if word == "color" else word for word in words)


class _Draft(NamedTuple):
    """A question about a scene that is not drawn yet.

    `looks` are the colour and kind of each shape, `shown` the indices of the shapes that show the answer.
    """

    question: str
    answer: str
    looks: list[Look]
    shown: list[int]


def _known(forms: Sequence[str]) -> tuple[str, ...]:
    if not forms or not set(forms) <= set(FORMS):
        raise ValueError(f"forms must be some of {', '.join(FORMS)}, not {', '.join(forms) or 'none'}")
    return tuple(forms)


def _make(dice: Dice, objects: tuple[int, int], size: int, *, forms: Sequence[str]) -> Asked | None:
    form = dice.pick(forms)
    total = dice.pick(range(objects[0], objects[1] + 1))
    # If a scene cannot be drawn, the next attempt has the same type of question and number of shapes, so that
    # combinations that fail more often are not rarer.
    for _ in range(_TRIES):
        placed = spots(dice, size_words(dice, total), size=size)
        draft = _WRITERS[form](dice, placed, size) if placed else None
        if draft is None or placed is None:
            continue
        things = [(kind, colour, spot) for (colour, kind), spot in zip(draft.looks, placed, strict=True)]
        scene = draw(things, dice.random, size=size)
        regions = tuple(scene.objects[number].box for number in draft.shown)
        return Asked(scene, question_words(draft.question), draft.answer, regions, form)
    return None


def _some_look(dice: Dice) -> Look:
    return dice.pick(tuple(COLOURS)), dice.pick(KINDS)


def _others(dice: Dice, looks: dict[int, Look], total: int, allowed: Callable[[Look], bool]) -> list[Look]:
    """Return the colour and kind of each of `total` shapes: as in `looks` if given there, else random and `allowed`."""
    filled = []
    for number in range(total):
        look = looks.get(number)
        while look is None:
            candidate = _some_look(dice)
            look = candidate if allowed(candidate) else None
        filled.append(look)
    return filled


def _ask_colour(dice: Dice, placed: list[Spot], size: int) -> _Draft:
    colour, kind = _some_look(dice)
    looks = _others(dice, {0: (colour, kind)}, len(placed), lambda look: look[1] != kind)
    return _Draft(f"what colour is the {kind} ?", colour, looks, [0])


def _ask_shape(dice: Dice, placed: list[Spot], size: int) -> _Draft:
    colour, kind = _some_look(dice)
    looks = _others(dice, {0: (colour, kind)}, len(placed), lambda look: look[0] != colour)
    return _Draft(f"what shape is the {colour} object ?", kind, looks, [0])


def _ask_count(dice: Dice, placed: list[Spot], size: int) -> _Draft | None:
    count = dice.pick(range(len(COUNTS)))
    if count > len(placed):
        return None
    by_kind = dice.chance(0.5)
    colour, kind = _some_look(dice)

    def matches(look: Look) -> bool:
        return look[1] == kind if by_kind else look[0] == colour

    fixed = {number: _alike(dice, (colour, kind), by_kind) for number in range(count)}
    looks = _others(dice, fixed, len(placed), lambda look: not matches(look))
    noun = PLURALS[kind] if by_kind else f"{colour} objects"
    return _Draft(f"how many {noun} are there ?", COUNTS[count], looks, list(fixed))


def _alike(dice: Dice, look: Look, by_kind: bool) -> Look:
    """Return a random colour and the kind of `look` if `by_kind`; else the colour of `look` and a random kind."""
    other = _some_look(dice)
    return (other[0], look[1]) if by_kind else (look[0], other[1])


def _ask_presence(dice: Dice, placed: list[Spot], size: int) -> _Draft:
    """Return a question of presence, such as "is there a red star".

    For "is there a red star", the scene often has another red shape and a star of another colour, so that a model must
    combine colour and kind.
    """
    colour, kind = _some_look(dice)
    named = dice.chance(0.5)
    noun = f"{colour} {kind}" if named else kind

    def matches(look: Look) -> bool:
        return look[1] == kind and (not named or look[0] == colour)

    present = dice.chance(0.5)
    fixed: dict[int, Look] = {0: (colour, kind)} if present else {}
    if named:
        near = [(colour, dice.pick([other for other in KINDS if other != kind]))]
        near.append((dice.pick([other for other in COLOURS if other != colour]), kind))
        dice.random.shuffle(near)
        fixed |= dict(zip(range(len(fixed), len(placed)), near, strict=False))
    looks = _others(dice, fixed, len(placed), lambda look: not matches(look))
    article = "an" if noun[0] in "aeiou" else "a"
    return _Draft(f"is there {article} {noun} ?", "yes" if present else "no", looks, [0] if present else [])


def _ask_place(dice: Dice, placed: list[Spot], size: int) -> _Draft | None:
    """Return a question of position, such as "where is the star", about a shape in a random quadrant of the picture.

    Returns None if no shape is in the sampled quadrant. A shape near the vertical or the horizontal middle line of the
    picture is in no quadrant.
    """
    wanted = dice.pick(PLACES)
    there = [number for number, spot in enumerate(placed) if place(box_of(spot), size) == wanted]
    if not there:
        return None
    number = dice.pick(there)
    look = _some_look(dice)
    looks = _others(dice, {number: look}, len(placed), lambda other: other[1] != look[1])
    return _Draft(f"where is the {look[1]} ?", wanted, looks, [number])


def _ask_relation(dice: Dice, placed: list[Spot], size: int) -> _Draft | None:
    """Return a question of relation, such as "what is left of the red circle".

    Returns None unless exactly one shape is left of the red circle, and no other shape has an ambiguous position
    relative to the circle.
    """
    wanted = dice.pick(RELATIONS)
    anchor = dice.pick(range(len(placed)))
    around = {number: relation(box_of(spot), box_of(placed[anchor])) for number, spot in enumerate(placed)}
    del around[anchor]
    there = [number for number, direction in around.items() if direction == wanted]
    if len(there) != 1 or None in around.values():
        return None
    look, kind = _some_look(dice), dice.pick(KINDS)
    colour = dice.pick([colour for colour in COLOURS if colour != look[0]])
    looks = _others(dice, {anchor: look, there[0]: (colour, kind)}, len(placed), lambda other: other != look)
    return _Draft(f"what is {wanted} the {' '.join(look)} ?", kind, looks, there)


def _ask_comparison(dice: Dice, placed: list[Spot], size: int) -> _Draft | None:
    """Return a yes/no question about the relative position of two shapes, such as "is the star left of the circle".

    Returns None if the relative position of the two shapes is ambiguous.
    """
    direction = relation(box_of(placed[0]), box_of(placed[1]))
    if direction is None:
        return None
    first, second = dice.random.sample(KINDS, 2)
    right = dice.chance(0.5)
    wanted = direction if right else dice.pick([other for other in RELATIONS if other != direction])
    fixed = {0: (dice.pick(tuple(COLOURS)), first), 1: (dice.pick(tuple(COLOURS)), second)}
    looks = _others(dice, fixed, len(placed), lambda look: look[1] not in (first, second))
    return _Draft(f"is the {first} {wanted} the {second} ?", "yes" if right else "no", looks, [0, 1])


_WRITERS: dict[str, Callable[[Dice, list[Spot], int], _Draft | None]] = {
    "colour": _ask_colour,
    "shape": _ask_shape,
    "count": _ask_count,
    "presence": _ask_presence,
    "place": _ask_place,
    "relation": _ask_relation,
    "comparison": _ask_comparison,
}
