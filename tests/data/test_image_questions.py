"""Tests of reading questions about pictures: easy-VQA's layout, JSON and JSONL, and reports of missing pictures."""

import gzip
import json
from pathlib import Path

import pytest
from PIL import Image

from regard.data.data_files import DataError
from regard.data.vision.image_questions import ImageQuestion, answer_list, hold_out, load_image_questions


def pictures(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (4, 4)).save(folder / name)


@pytest.fixture
def easy(tmp_path):
    """Return a folder in easy-VQA's layout, with two pictures in each part."""
    for part in ("train", "test"):
        pictures(tmp_path / part / "images", ["0.png", "1.png"])
        entries = [["what colour is it?", "blue", 0], ["is there a circle?", "yes", 1], ["is there a star?", "no", 1]]
        (tmp_path / part / "questions.json").write_text(json.dumps(entries))
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    pictures(tmp_path / "images", ["a.png", "b.jpg", "3.png"])
    return tmp_path


OBJECTS = [
    {"image": "a.png", "question": "What colour?", "answer": "red"},
    {"image": "b", "question": "How many?", "answer": 2},
    {"image_id": 3, "question": "Is it?", "answer": "yes", "more": None},
]


def test_easy_vqa_is_read_by_its_layout(easy):
    loaded = load_image_questions(easy)
    assert loaded.train[0] == ImageQuestion(easy / "train" / "images" / "0.png", "what colour is it?", "blue")
    assert loaded.test[2].image == easy / "test" / "images" / "1.png"
    assert (len(loaded.train), len(loaded.valid), len(loaded.test)) == (3, 0, 3)
    assert str(loaded.report) == "6 lines read, 6 pairs kept"


@pytest.mark.parametrize("form", ["array", "indented array", "lines", "gzipped lines"])
def test_objects_are_read_in_every_form(folder, form):
    text = "\n".join(map(json.dumps, OBJECTS))
    if form == "array":
        (folder / "questions.json").write_text(json.dumps(OBJECTS))
    elif form == "indented array":
        (folder / "questions.json").write_text(json.dumps(OBJECTS, indent=2))
    elif form == "lines":
        (folder / "questions.jsonl").write_text(text + "\n\n")
    else:
        (folder / "questions.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    loaded = load_image_questions(folder)
    assert [(item.image.name, item.question, item.answer) for item in loaded.train] == [
        ("a.png", "What colour?", "red"),
        ("b.jpg", "How many?", "2"),
        ("3.png", "Is it?", "yes"),
    ]


def test_an_array_may_be_one_line_of_megabytes(folder):
    entries = [["what is it?" + " now" * 1000, "cat", "a.png"]] * 300
    (folder / "questions.json").write_text(json.dumps(entries))
    assert (folder / "questions.json").stat().st_size > 1 << 20
    assert len(load_image_questions(folder).train) == 300


def test_lines_of_lists_are_lines(folder):
    (folder / "questions.jsonl").write_text('["What?", "red", "a.png"]\n["Which?", "blue", 3]\n')
    assert [item.answer for item in load_image_questions(folder).train] == ["red", "blue"]


def test_a_file_a_part(folder):
    for stem, entry in zip(("train", "val", "test"), OBJECTS, strict=True):
        (folder / f"{stem}.json").write_text(json.dumps([entry]))
    loaded = load_image_questions(folder)
    assert [part[0].answer for part in (loaded.train, loaded.valid, loaded.test)] == ["red", "2", "yes"]


def test_answers_never_seen_in_training_stay(easy):
    entries = [["what is it?", "a sphinx", 0], ["is it?", "yes", 0], ["what?", "a sphinx", 1]]
    (easy / "test" / "questions.json").write_text(json.dumps(entries))
    loaded = load_image_questions(easy)
    assert len(loaded.test) == 3


FAULTS = {
    "question without image": ({**OBJECTS[0], "image": "z.png"}, "no picture 'z.png' in .*images or "),
    "no answer": ({"image": "a.png", "question": "What?"}, "expected a text in the field 'answer'; the object has im"),
    "answer is a list": ({**OBJECTS[0], "answer": ["red"]}, "expected a text in the field 'answer'"),
    "a number": (5, "expected an object with image, question and answer, or a list"),
    "a list of two": (["What?", "red"], "expected an object with image, question and answer, or a list"),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_fault_names_the_entry(folder, kind, suffix):
    entry, message = FAULTS[kind]
    entries = [OBJECTS[0], entry, OBJECTS[2]]
    text = json.dumps(entries) if suffix == "json" else "\n".join(map(json.dumps, entries))
    (folder / f"questions.{suffix}").write_text(text)
    where = r"questions\.json: entry 2" if suffix == "json" else r"questions\.jsonl:2"
    with pytest.raises(DataError, match=f"{where}: {message}"):
        load_image_questions(folder)


def test_an_empty_question_or_answer_is_skipped_and_counted(folder):
    (folder / "questions.json").write_text(json.dumps([OBJECTS[0], {**OBJECTS[0], "answer": " "}]))
    assert load_image_questions(folder).report.skipped == {"empty": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ('[["What?",\n"red"', r"questions\.json:2: not JSON"),
        ('{"image": "a.png"', r"questions\.json:1: not JSON"),
        ("[]", "no question is left"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "cut array", "cut object", "no entries", "nested"],
)
def test_a_file_that_is_no_json_says_where(folder, content, message):
    (folder / "questions.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_image_questions(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "no such file or folder"), ("images", r"the folder has no train\.json")],
)
def test_a_path_without_questions_says_what_was_expected(folder, name, message):
    with pytest.raises(DataError, match=message):
        load_image_questions(folder / name)


def items(count):
    return [ImageQuestion(Path(f"{number // 3}.png"), f"q{number}", "yes") for number in range(count)]


def test_no_picture_is_in_two_parts():
    parts = hold_out(items(60), valid=3, test=4, seed=1)
    images = [{item.image for item in part} for part in parts]
    assert [len(part) for part in parts] == [39, 9, 12]
    assert sum(map(len, images)) == len(set.union(*images)) == 20
    assert parts == hold_out(items(60), valid=3, test=4, seed=1)
    assert parts != hold_out(items(60), valid=3, test=4, seed=2)


def test_more_than_there_is_cannot_be_held_out():
    with pytest.raises(DataError, match="10 \\+ 10 pictures cannot be held out of 20"):
        hold_out(items(60), valid=10, test=10)


def test_answers_are_ordered_by_frequency():
    answers = [ImageQuestion(items(1)[0].image, "q", answer) for answer in ("b", "c", "a", "c")]
    assert answer_list(answers) == ("c", "a", "b")
    assert answer_list(answers, most=2) == ("c", "a")
