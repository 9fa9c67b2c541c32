"""Readers of questions about pictures: easy-VQA's layout, or JSON and JSONL of image, question and answer.

A question whose picture is missing is an error that names the entry.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.data_files import DataError
from regard.data.json_records import records
from regard.data.packed import Distinct, Lazy, Texts
from regard.data.text.parallel_text import Report, report
from regard.data.vision.image_folders import NAMES, PARTS, ImageFolders, part_files

_SUFFIXES = (".json", ".jsonl")
_FIELDS = ("image", "question", "answer")


@dataclass(frozen=True, slots=True)
class ImageQuestion:
    """A question about a picture, and its answer."""

    image: Path
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class QuestionFiles:
    """Questions to train on, to validate with and to test with, if the files define these parts; else all in `train`.

    Questions of the other parts whose answer does not occur in `train` are not removed: a model that chooses among the
    answers of training gets them wrong, and its accuracy must include them. The parts store their texts in packed
    buffers and create items on access.
    """

    train: Sequence[ImageQuestion]
    valid: Sequence[ImageQuestion]
    test: Sequence[ImageQuestion]
    report: Report


def load_image_questions(path: Path) -> QuestionFiles:
    """Return questions and their pictures, in the layout that is found.

    A folder holds easy-VQA's layout (`train/questions.json`, `train/images/`, `test/…`), or `train.json`, `valid.json`
    and `test.json`, or `questions.json`; `.jsonl` too; a path may also be such a file itself. An entry is an object
    with `image`, `question` and `answer`, or easy-VQA's list of question, answer and image. An image is a file name,
    with or without suffix, or a number. Pictures are beside the file or in its folder `images`.
    """
    path = Path(path)
    tally: Counter[str] = Counter()
    parts = {part: _packed(_kept(file, tally)) for part, file in question_files(path).items()}
    if not tally["kept"]:
        raise DataError(f"{path}: no question is left ({report(tally)})")
    return QuestionFiles(*(parts.get(part, ()) for part in PARTS), report=report(tally))


def answer_list(questions: Iterable[ImageQuestion], *, most: int | None = None) -> tuple[str, ...]:
    """Return the answers, the most frequent first; `most` is the largest number of them."""
    counted = Counter(item.answer for item in questions)
    return tuple(sorted(counted, key=lambda answer: (-counted[answer], answer))[:most])


class Pictures(NamedTuple):
    """Return the distinct pictures of some questions, in order of first occurrence, and the picture of each
    question."""

    paths: Sequence[Path]
    place_of: NDArray[np.int64]


def pictures_of(questions: Sequence[ImageQuestion]) -> Pictures:
    """Return the pictures of the questions."""
    digests = Distinct()
    for item in questions:
        digests.append(str(item.image))
    first, place_of = digests.numbered()
    return Pictures(Lazy(len(first), lambda place: questions[first[place]].image), place_of)


def hold_out(
    questions: Sequence[ImageQuestion], *, valid: int, test: int, seed: int = 0
) -> tuple[Sequence[ImageQuestion], Sequence[ImageQuestion], Sequence[ImageQuestion]]:
    """Split questions into training, validation and test parts, so that no picture is in two of them.

    `valid` and `test` are numbers of pictures.
    """
    images, place_of = pictures_of(questions)
    if valid + test >= len(images):
        raise DataError(f"{valid} + {test} pictures cannot be held out of {len(images)}")
    order = list(range(len(images)))
    Random(seed).shuffle(order)
    part_of = np.zeros(len(images), np.int8)
    part_of[order[:valid]] = 1
    part_of[order[valid : valid + test]] = 2
    chosen = part_of[place_of]

    def part(number: int) -> Sequence[ImageQuestion]:
        places = np.flatnonzero(chosen == number)
        return Lazy(len(places), lambda place: questions[places[place]])

    return part(0), part(1), part(2)


def _packed(items: Iterable[ImageQuestion]) -> Sequence[ImageQuestion]:
    """Return the same questions with their texts in packed buffers."""
    images, questions, answers = Texts(), Texts(), Texts()
    for item in items:
        images.append(str(item.image))
        questions.append(item.question)
        answers.append(item.answer)
    return Lazy(len(images), lambda place: ImageQuestion(Path(images[place]), questions[place], answers[place]))


def question_files(path: Path) -> dict[str, Path]:
    """Return the file of questions of each part; easy-VQA has a folder per part."""
    own = {
        part: path / name / f"questions{suffix}"
        for part in PARTS
        for name in NAMES[part]
        for suffix in _SUFFIXES
        if (path / name / f"questions{suffix}").is_file()
    }
    return own or part_files(path, "questions", _SUFFIXES)


def _kept(path: Path, tally: Counter[str]) -> Iterable[ImageQuestion]:
    folders = ImageFolders.beside(path.parent)
    for record in records(path):
        tally["read"] += 1
        entry = record.fault or _entry(record.value)
        if isinstance(entry, str):
            raise DataError(f"{record.where}: {entry}")
        if not (entry["question"] and entry["answer"]):
            tally["empty"] += 1
            continue
        image = folders.find(entry["image"])
        if image is None:
            raise DataError(f"{record.where}: no picture {entry['image']!r} in {folders}")
        tally["kept"] += 1
        yield ImageQuestion(image, entry["question"], entry["answer"])


def _entry(value: Any) -> dict[str, str] | str:
    """Return image, question and answer of an entry as texts, or its fault."""
    if isinstance(value, list) and len(value) == 3:
        value = dict(zip(("question", "answer", "image"), value, strict=True))
    if not isinstance(value, dict):
        return "expected an object with image, question and answer, or a list of question, answer and image"
    if "image" not in value and "image_id" in value:
        value = {**value, "image": value["image_id"]}
    for name in _FIELDS:
        if isinstance(value.get(name), bool) or not isinstance(value.get(name), str | int):
            return (
                f"expected a text in the field {name!r}; the object has {', '.join(sorted(value)[:8]) or 'no fields'}"
            )
    return {name: str(value[name]).strip() for name in _FIELDS}
