"""Tests of exact match and F1, compared with values computed by hand with the rules of SQuAD's evaluation script."""

import pytest

from regard.tasks.reading.scoring import exact_match, f1, normal, pointing, scores


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Kitchen.", "kitchen"),
        ("an apple a day", "apple day"),
        ("Theatre", "theatre"),
        ("U.S.", "us"),
        ("10,000", "10000"),
        ("the", ""),
        ("厨房。", "厨房"),
    ],
)
def test_normal_form(text, expected):
    assert normal(text) == expected


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("the kitchen", ["Kitchen!"], 1.0),
        ("kitchen", ["garden", "a kitchen"], 1.0),
        ("kitchen sink", ["kitchen"], 0.0),
        ("the", [""], 1.0),
        ("kitchen", [], 0.0),
    ],
)
def test_exact_match(answer, references, expected):
    assert exact_match(answer, references) == expected


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        # "red" and "ball" are shared: precision 2/3, recall 2/2.
        ("the big red ball", ["a red ball"], 0.8),
        ("the big red ball", ["box", "red ball", "big red ball"], 1.0),
        # One "very" is shared, because the reference has one: precision 1/2, recall 1/2.
        ("very very", ["very good"], 0.5),
        ("kitchen", ["garden"], 0.0),
        ("the", ["a"], 1.0),
        ("the", ["kitchen"], 0.0),
        # Three characters are shared: precision 3/4, recall 3/3.
        ("在厨房里", ["厨房里"], 6 / 7),
    ],
)
def test_f1(answer, references, expected):
    assert f1(answer, references) == pytest.approx(expected)


def test_means():
    found = scores(["the kitchen", "red ball", "hat"], [["kitchen"], ["ball"], ["key"]])
    assert found == pytest.approx({"exact_match": 1 / 3, "f1": (1 + 2 / 3 + 0) / 3})


def test_pointing_is_the_share_inside_the_answering_sentence():
    sentences = [[0, 0, 1, 1], [0, 1, 1, 2], [0, 0]]
    assert pointing([2, 3, 1], sentences, [1, 1, 0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("score", [lambda: scores([], []), lambda: pointing([], [], [])], ids=["scores", "pointing"])
def test_nothing_to_score_is_an_error(score):
    with pytest.raises(ValueError, match="there is no"):
        score()
