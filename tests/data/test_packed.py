"""Tests of packed sequences (texts, lists of numbers, lazy items), which behave like the lists that they replace."""

import json
import random
import tracemalloc
from pathlib import Path

import pytest

from regard.data.packed import Distinct, Lazy, Numbers, Texts
from regard.data.vision.captions import load_captions
from regard.data.vision.image_questions import load_image_questions

TEXTS = ["a cat", "", "一只猫", "a cat", "\udcff.png", "end"]


def test_texts_come_back_as_they_were():
    texts = Texts(TEXTS)
    assert list(texts) == TEXTS
    assert [texts[place] for place in range(-6, 0)] == TEXTS
    assert texts[1:4] == TEXTS[1:4]


@pytest.mark.parametrize("place", [6, -7])
@pytest.mark.parametrize("made", [Texts(TEXTS), Numbers([[1]] * 6), Lazy(6, str)], ids=["texts", "numbers", "lazy"])
def test_a_place_beyond_the_end_is_an_index_error(made, place):
    with pytest.raises(IndexError):
        made[place]


def test_lists_of_numbers_come_back_as_they_were():
    draw = random.Random(1)
    lists = [[draw.randrange(2**31) for _ in range(draw.randrange(4))] for _ in range(23)]
    numbers = Numbers(lists)
    assert list(numbers) == lists
    assert numbers[-3:] == lists[-3:]
    assert numbers.lengths.tolist() == [len(one) for one in lists]


def test_equal_texts_have_one_number():
    names = Distinct()
    for text in TEXTS:
        names.append(text)
    first, number = names.numbered()
    assert first.tolist() == [0, 1, 2, 4, 5]
    assert number.tolist() == [0, 1, 2, 0, 3, 4]


def test_nothing_is_no_text():
    first, number = Distinct().numbered()
    assert len(first) == len(number) == len(Texts()) == len(Numbers().lengths) == 0


def test_a_lazy_sequence_equals_a_sequence_of_the_same_items():
    squares = Lazy(5, lambda place: place * place)
    assert squares == [0, 1, 4, 9, 16]
    assert squares == Lazy(5, lambda place: place**2)
    assert squares != [0, 1, 4, 9]
    assert squares != [0, 1, 4, 9, 17]
    assert squares != 5


def _captions(folder: Path, names: list[str]) -> Path:
    (folder / "captions.tsv").write_text("".join(f"{name}\tA cat on a mat .\n" for name in names), encoding="utf-8")
    return folder


def _questions(folder: Path, names: list[str]) -> Path:
    lines = [json.dumps({"image": name, "question": "What is it?", "answer": "a cat"}) for name in names]
    (folder / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "questions.jsonl"


@pytest.mark.parametrize(
    ("write", "load"), [(_captions, load_captions), (_questions, load_image_questions)], ids=["captions", "questions"]
)
def test_a_picture_more_takes_few_bytes(tmp_path, write, load):
    """Each further picture takes few bytes of memory; path, record and texts as Python objects would take about
    1,000."""
    kept = {}
    for count in (50, 250):
        folder = tmp_path / str(count)
        (folder / "images").mkdir(parents=True)
        names = [f"{number:04}.png" for number in range(count)]
        for name in names:
            (folder / "images" / name).touch()
        path = write(folder, names)
        load(path)  # the first load fills caches, so that their memory is not measured
        tracemalloc.start()
        loaded = load(path)
        kept[count] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(loaded.train) == count
    assert (kept[250] - kept[50]) / 200 < len(str(tmp_path)) + 150
