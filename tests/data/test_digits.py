"""Tests of drawn digits: the box contains the strokes, clutter is outside the box, the seed determines the result."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from regard.data.worlds import digits

LAYOUTS = ["plain", "translated", "cluttered"]


@pytest.mark.parametrize("label", range(10))
def test_the_box_holds_every_stroke_and_no_empty_line(label):
    for seed in range(5):
        digit = digits.write(label, Random(seed), noise=0.0)
        assert digit.image.shape == (1, 28, 28)
        assert digit.label == label
        left, top, right, bottom = digit.box
        ink = digit.image[0] > digits.INK
        assert not (ink.sum() - ink[top:bottom, left:right].sum())
        cut = ink[top:bottom, left:right]
        assert cut.any(0)[[0, -1]].all()
        assert cut.any(1)[[0, -1]].all()
        assert min(left, top) >= 1, "a digit is not cut by the edge"
        assert max(right, bottom) <= 27


@pytest.mark.parametrize("label", range(10))
def test_digits_of_one_label_differ(label):
    random = Random(label)
    images = {digits.write(label, random, noise=0.0).image.tobytes() for _ in range(20)}
    assert len(images) == 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_are_disjoint_and_a_seed_decides_everything(layout):
    made, again, other = (digits.splits(seed, train=30, valid=7, test=7, layout=layout) for seed in (1, 1, 2))
    parts = [made.train, made.valid, made.test]
    images = [digit.image.tobytes() for part in parts for digit in part]
    assert len(set(images)) == len(images) == 44
    assert made == again
    assert made != other
    np.testing.assert_array_equal(made.train[29].image, again.train[29].image)
    side = digits.SIDES[layout]
    assert all(digit.image.shape == (1, side, side) for part in parts for digit in part)


def test_labels_are_equally_likely():
    counted = Counter(digit.label for digit in digits.digits(3, count=1000))
    assert set(counted) == set(range(10))
    assert max(counted.values()) < 150


def test_a_translated_digit_stands_anywhere_and_its_box_holds_it():
    made = list(digits.digits(4, count=150, layout="translated"))
    for digit in made:
        left, top, right, bottom = digit.box
        outside = digit.image[0].copy()
        outside[top:bottom, left:right] = 0
        assert outside.max() <= digits.INK
    boxes = np.array([digit.box for digit in made])
    assert boxes[:, 0].min() < 10
    assert boxes[:, 2].max() > 50
    assert boxes[:, 1].min() < 10
    assert boxes[:, 3].max() > 50


def test_clutter_is_beside_the_digit_never_in_its_box():
    random = Random(7)
    image = digits.write(3, random, noise=0.0).image
    clutter = [np.full((1, 28, 28), 255, np.uint8)]
    for _ in range(30):
        canvas, box = digits.on_canvas(image, random, clutter=clutter, pieces=1)
        left, top, right, bottom = box
        inner = digits.ink_box(image[0])
        np.testing.assert_array_equal(
            canvas[0, top:bottom, left:right], image[0, inner[1] : inner[3], inner[0] : inner[2]]
        )
        canvas[0, top:bottom, left:right] = 0
        assert (canvas == 255).sum() == digits.PIECE**2


def test_cluttered_digits_have_clutter():
    for digit in digits.digits(4, count=30, layout="cluttered"):
        left, top, right, bottom = digit.box
        outside = digit.image[0].copy()
        outside[top:bottom, left:right] = 0
        assert (outside > digits.INK).sum() > 10


def test_a_picture_of_any_kind_is_put_on_a_canvas():
    """The function `on_canvas`, which also places MNIST's pictures on larger images, places a picture with two bright
    pixels."""
    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 5, 11:13] = 200
    canvas, (left, top, right, bottom) = digits.on_canvas(image, Random(1), side=41)
    assert canvas.shape == (1, 41, 41)
    assert (right - left, bottom - top) == (2, 1)
    assert (canvas[0, top:bottom, left:right] == 200).all()
    assert (canvas > 0).sum() == 2


def test_an_empty_picture_has_the_whole_as_its_box():
    assert digits.ink_box(np.zeros((5, 7), np.uint8)) == (0, 0, 7, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: digits.splits(1, train=1, valid=1, test=1, layout="rotated"), "layout must be one of plain, transl"),
        (lambda: digits.on_canvas(np.zeros((1, 28, 28), np.uint8), Random(1), side=20), "does not fit on a canvas"),
        (
            lambda: digits.on_canvas(
                np.full((1, 28, 28), 255, np.uint8), Random(1), side=30, clutter=[np.zeros((1, 28, 28), np.uint8)]
            ),
            "no clutter of 8 pixels fits",
        ),
    ],
    ids=["unknown layout", "canvas too small", "no room for clutter"],
)
def test_what_cannot_be_drawn_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
