"""Further questions about a scene, so that one picture can be used in several training questions.

For each type of question, such as "count", all questions that can be answered from the scene are listed. An answer is
sampled first, and then one of the questions with this answer; otherwise, answers that many questions have would be more
frequent.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random

from regard.data.worlds.scene_questions import COUNTS, FORMS, Asked, question_words
from regard.data.worlds.scenes import RELATIONS, place, relation
from regard.data.worlds.shapes import COLOURS, KINDS, PLURALS, Scene, Shape

# yields tuples: a question, its answer, and the shapes that show the answer
_Possible = Iterator[tuple[str, str, list[Shape]]]


def further(scene: Scene, random: Random, *, count: int, forms: Sequence[str] = FORMS) -> list[Asked]:
    """Return at most `count` distinct questions about a scene; the type of each is sampled from `forms`.

    >>> from regard.data.worlds.scene_questions import asked, written
    >>> [first] = asked(5, count=1)
    >>> for item in further(first.scene, Random(2), count=3):
    ...     print(written(item.question), item.answer)
    Is the star below the circle? no
    What colour is the circle? purple
    What is below the blue triangle? star
    """
    possible = {form: list(_LISTS[form](scene)) for form in forms}
    questions: dict[str, Asked] = {}
    for _ in range(4 * count):
        form = random.choice(list(forms))
        answers = sorted({answer for _, answer, _ in possible[form]})
        if not answers or len(questions) == count:
            continue
        wanted = random.choice(answers)
        question, answer, shown = random.choice([candidate for candidate in possible[form] if candidate[1] == wanted])
        regions = tuple(shape.box for shape in shown)
        questions[question] = Asked(scene, question_words(question), answer, regions, form)
    return list(questions.values())


def _alone(scene: Scene, name: Callable[[Shape], str]) -> list[Shape]:
    """Return the shapes of a scene whose name, `name(shape)`, no other shape of the scene has."""
    names = Counter(map(name, scene.objects))
    return [shape for shape in scene.objects if names[name(shape)] == 1]


def _kind(shape: Shape) -> str:
    return shape.kind


def _colour(shape: Shape) -> str:
    return shape.colour


def _look(shape: Shape) -> str:
    return f"{shape.colour} {shape.kind}"


def _colours(scene: Scene) -> _Possible:
    for shape in _alone(scene, _kind):
        yield f"what colour is the {shape.kind} ?", shape.colour, [shape]


def _shapes(scene: Scene) -> _Possible:
    for shape in _alone(scene, _colour):
        yield f"what shape is the {shape.colour} object ?", shape.kind, [shape]


def _counts(scene: Scene) -> _Possible:
    nouns = [(PLURALS[kind], _kind, kind) for kind in KINDS]
    nouns += [(f"{colour} objects", _colour, colour) for colour in COLOURS]
    for noun, name, wanted in nouns:
        shown = [shape for shape in scene.objects if name(shape) == wanted]
        if len(shown) < len(COUNTS):
            yield f"how many {noun} are there ?", COUNTS[len(shown)], shown


def _presences(scene: Scene) -> _Possible:
    """Yield questions of presence, such as "is there a red star" and "is there a star", with the answer yes or no."""
    looks = [(colour, kind) for colour in map(_colour, scene.objects) for kind in map(_kind, scene.objects)]
    nouns = [(f"{colour} {kind}", _look) for colour, kind in sorted(set(looks))] + [(kind, _kind) for kind in KINDS]
    for noun, name in nouns:
        shown = [shape for shape in scene.objects if name(shape) == noun]
        article = "an" if noun[0] in "aeiou" else "a"
        yield f"is there {article} {noun} ?", "yes" if shown else "no", shown


def _places(scene: Scene) -> _Possible:
    for shape in _alone(scene, _kind):
        quarter = place(shape.box, scene.image.shape[-1])
        if quarter is not None:
            yield f"where is the {shape.kind} ?", quarter, [shape]


def _relations(scene: Scene) -> _Possible:
    for anchor in _alone(scene, _look):
        around = [(relation(shape.box, anchor.box), shape) for shape in scene.objects if shape is not anchor]
        for wanted in RELATIONS:
            there = [shape for direction, shape in around if direction == wanted]
            if len(there) == 1 and all(direction is not None for direction, _ in around):
                yield f"what is {wanted} the {_look(anchor)} ?", there[0].kind, there


def _comparisons(scene: Scene) -> _Possible:
    single = _alone(scene, _kind)
    for first in single:
        for second in single:
            direction = None if first is second else relation(first.box, second.box)
            for wanted in RELATIONS if direction else ():
                answer = "yes" if wanted == direction else "no"
                yield f"is the {first.kind} {wanted} the {second.kind} ?", answer, [first, second]


_LISTS: dict[str, Callable[[Scene], _Possible]] = {
    "colour": _colours,
    "shape": _shapes,
    "count": _counts,
    "presence": _presences,
    "place": _places,
    "relation": _relations,
    "comparison": _comparisons,
}
