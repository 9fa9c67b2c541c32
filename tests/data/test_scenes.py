"""Tests of drawn scenes: captions and questions agree with the shapes, and gold boxes contain the shapes' pixels."""

from collections import Counter, defaultdict
from random import Random

import numpy as np
import pytest

from regard.data.worlds import scene_captions, scene_questions
from regard.data.worlds.shapes import COLOURS, KINDS, RADII, SIZES, Shape, Spot, draw

CAPTIONED = list(scene_captions.captioned(3, count=100))
ASKED = list(scene_questions.asked(3, count=560))
SINGULAR = {**{kind: kind for kind in KINDS}, **{f"{kind}s": kind for kind in KINDS}, "crosses": "cross"}
NUMBERS = {"a": 1, "an": 1, "zero": 0, "one": 1, "two": 2, "three": 3}


def inside(box, others):
    return any(box == other for other in others)


def lies(first, second):
    """Return the relation of the first box to the second, computed only from their centres."""
    dx = first[0] + first[2] - second[0] - second[2]
    dy = first[1] + first[3] - second[1] - second[3]
    if abs(dx) > abs(dy):
        return "left of" if dx < 0 else "right of"
    return "above" if dy < 0 else "below"


def hull(boxes):
    left, top, right, bottom = np.array(boxes).T
    return left.min(), top.min(), right.max(), bottom.max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_box_holds_exactly_the_pixels_of_its_shape(kind, size):
    random = Random(f"{kind} {size}")
    for side in (48, 64):
        spot = Spot(side * 0.4, side * 0.55, side * random.uniform(*RADII[size]), size)
        scene = draw([(kind, "blue", spot)], random, size=side, noise=0.0, plain=True)
        changed = (scene.image != scene.image[:, :1, :1]).any(0)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        assert scene.objects[0].box == (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)


@pytest.mark.parametrize("colour", COLOURS)
def test_a_colour_is_nearest_to_itself(colour):
    scene = draw([("square", colour, Spot(24.0, 24.0, 8.0, "large"))], Random(2))
    middle = scene.image[:, 21:27, 21:27].reshape(3, -1).mean(1)
    distances = {name: np.abs(middle - np.array(rgb)).sum() for name, rgb in COLOURS.items()}
    assert min(distances, key=distances.__getitem__) == colour


def test_small_and_large_do_not_meet():
    assert RADII["small"][1] * 1.3 < RADII["large"][0]


@pytest.mark.parametrize("items", [CAPTIONED, ASKED], ids=["captions", "questions"])
def test_shapes_stand_inside_the_picture_and_apart(items):
    for item in items:
        boxes = [shape.box for shape in item.scene.objects]
        assert all(0 <= left < right <= 48 and 0 <= top < bottom <= 48 for left, top, right, bottom in boxes)
        taken = np.zeros((48, 48), int)
        for left, top, right, bottom in boxes:
            taken[top:bottom, left:right] += 1
        assert taken.max() == 1, "two boxes share a pixel"


def described(words):
    """Return the groups of shapes in a caption (number, size or None, colour, kind), and the relations between them."""
    groups, between = [], []
    for place, word in enumerate(words):
        if word in SINGULAR:
            start = max(at for at in range(place) if words[at] in NUMBERS)
            size = next((size for size in SIZES if size in words[start:place]), None)
            groups.append((NUMBERS[words[start]], size, words[place - 1], SINGULAR[word]))
        elif word in ("left", "right", "above", "below"):
            between.append("left of" if word == "left" else "right of" if word == "right" else word)
    return groups, between


def test_captions_are_true():
    for item in CAPTIONED:
        groups, between = described(item.words)
        assert len(between) == len(groups) - 1
        chosen = []
        for number, size, colour, kind in groups:
            matching = [
                shape.box
                for shape in item.scene.objects
                if (shape.colour, shape.kind) == (colour, kind) and size in (None, shape.size)
            ]
            assert len(matching) == number
            chosen.append(matching)
        assert sum(map(len, chosen)) == len(item.scene.objects)
        if between:
            assert lies(*map(hull, chosen)) == between[0]


def test_content_words_have_the_boxes_they_speak_of():
    for item in CAPTIONED:
        assert len(item.words) == len(item.regions)
        for word, region in zip(item.words, item.regions, strict=True):
            if word in COLOURS or word in SINGULAR or word in SIZES or word in ("two", "three"):
                wanted = [shape for shape in item.scene.objects if inside(shape.box, region)]
                assert len(wanted) == len(region)
                assert all(
                    word in (shape.colour, shape.size) or SINGULAR.get(word) == shape.kind or word in NUMBERS
                    for shape in wanted
                )
            else:
                assert region is None


def test_a_caption_is_a_function_of_the_scene():
    for item in CAPTIONED[:50]:
        words, _ = scene_captions.caption(item.scene.objects[::-1])
        assert words == item.words


def test_the_larger_shape_is_named_first():
    small, large = Shape("star", "red", "small", (2, 20, 12, 30)), Shape("cross", "red", "large", (28, 16, 44, 32))
    words, _ = scene_captions.caption([small, large])
    assert " ".join(words) == "a large red cross right of a small red star"


def test_no_caption_where_no_relation_is_clear():
    first, second = Shape("star", "red", "small", (2, 2, 12, 12)), Shape("cross", "red", "small", (20, 20, 30, 30))
    assert scene_captions.caption([first, second]) is None


def answer(item):
    """Return the answer to a question and the shapes it is about, computed from the question's words and the shapes."""
    words, shapes = item.question, item.scene.objects

    def matching(*names):
        names = [SINGULAR.get(name, name) for name in names if name != "objects"]
        return [shape for shape in shapes if all(name in (shape.colour, shape.kind) for name in names)]

    if words[:3] == ("what", "colour", "is"):
        [shape] = matching(words[4])
        return shape.colour, [shape]
    if words[:3] == ("what", "shape", "is"):
        [shape] = matching(words[4])
        return shape.kind, [shape]
    if words[:2] == ("how", "many"):
        found = matching(*words[2:-3])
        return scene_questions.COUNTS[len(found)], found
    if words[:2] == ("is", "there"):
        found = matching(*words[3:-1])
        return ("yes" if found else "no"), found
    if words[0] == "where":
        [shape] = matching(words[3])
        x, y = shape.centre
        return f"{'top' if y < 24 else 'bottom'} {'left' if x < 24 else 'right'}", [shape]
    asked = next(name for name in ("left of", "right of", "above", "below") if name in " ".join(words))
    if words[0] == "what":
        [anchor] = matching(*words[-3:-1])
        [shape] = [other for other in shapes if other != anchor and lies(other.box, anchor.box) == asked]
        return shape.kind, [shape]
    [first], [second] = matching(words[2]), matching(words[-2])
    return ("yes" if lies(first.box, second.box) == asked else "no"), [first, second]


@pytest.mark.parametrize("form", scene_questions.FORMS)
def test_answers_are_right_and_their_boxes_gold(form):
    items = [item for item in ASKED if item.form == form]
    assert len(items) > 10
    for item in items:
        expected, shapes = answer(item)
        assert item.answer == expected, item
        assert sorted(item.regions) == sorted(shape.box for shape in shapes)
        assert item.answer in scene_questions.answers()


@pytest.mark.parametrize("form", scene_questions.FORMS)
def test_the_question_alone_tells_little(form):
    counted = Counter(item.answer for item in ASKED if item.form == form)
    possible = {"colour": 6, "shape": 5, "relation": 5, "count": 4, "place": 4, "presence": 2, "comparison": 2}[form]
    assert len(counted) == possible
    assert counted.most_common(1)[0][1] / counted.total() < 1 / possible + 0.12


def test_the_exact_wording_tells_little_either():
    table = defaultdict(Counter)
    for item in ASKED[:400]:
        table[item.question][item.answer] += 1
    guessed = [max(table[item.question], key=table[item.question].get, default=None) for item in ASKED[400:]]
    right = [guess == item.answer for guess, item in zip(guessed, ASKED[400:], strict=True)]
    assert np.mean(right) < 0.45


@pytest.mark.parametrize("world", [scene_captions, scene_questions], ids=["captions", "questions"])
def test_splits_are_disjoint_and_longer_has_more_objects(world):
    made = world.splits(2, train=60, valid=20, test=20, longer=20)
    parts = [made.train, made.valid, made.test, made.longer]
    assert [len(part) for part in parts] == [60, 20, 20, 20]
    scenes = [item.scene.objects for part in parts for item in part]
    assert len(set(scenes)) == len(scenes)
    most = max(len(item.scene.objects) for part in parts[:3] for item in part)
    assert min(len(item.scene.objects) for item in made.longer) > most


@pytest.mark.parametrize("world", [scene_captions, scene_questions], ids=["captions", "questions"])
def test_a_seed_decides_everything(world):
    first, again, other = (world.splits(seed, train=10, valid=2, test=2) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    for one, two in zip(first.train, again.train, strict=True):
        np.testing.assert_array_equal(one.scene.image, two.scene.image)
    more = world.splits(5, train=11, valid=2, test=2)
    assert more.train[:10] == first.train


def test_every_word_of_a_longer_caption_is_trained_on():
    made = scene_captions.splits(1, train=0, valid=0, test=0, longer=20)
    known = {word for item in CAPTIONED for word in item.words}
    assert {word for item in made.longer for word in item.words} <= known


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objects": (0, 3)}, r"objects must be \(fewest, most\) within"),
        ({"objects": (3, 2)}, r"objects must be \(fewest, most\) within"),
        ({"objects": (2, 5), "beyond": (5, 6)}, "objects must be"),
        ({"size": 16}, "at least 32 pixels a side, not 16"),
    ],
    ids=["none", "reversed", "not beyond", "tiny picture"],
)
@pytest.mark.parametrize("world", [scene_captions, scene_questions], ids=["captions", "questions"])
def test_settings_that_cannot_be_met_are_refused(world, settings, message):
    with pytest.raises(ValueError, match=message):
        world.splits(1, train=1, valid=1, test=1, longer=1, **settings)


def test_question_words_are_read_as_people_write_them():
    assert scene_questions.question_words("What color is the Circle?") == ("what", "colour", "is", "the", "circle", "?")


def test_some_forms_of_questions_may_be_chosen():
    items = list(scene_questions.asked(2, count=30, forms=("count", "place")))
    assert {item.form for item in items} == {"count", "place"}
    with pytest.raises(ValueError, match=r"forms must be some of colour, shape, .*, not weather"):
        scene_questions.asked(2, count=1, forms=("weather",))
