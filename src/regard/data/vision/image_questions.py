"""Readers of questions about pictures: the layout of easy-VQA, or JSON and JSONL with image, question and answer.

A question whose picture is missing raises an error that names the entry.
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
from regard.data.packed import Distinct, Lazy, Texts, picked
from regard.data.text.parallel_text import Report, report
from regard.data.vision.image_folders import NAMES, PARTS, ImageFolders, part_files

_SUFFIXES = (".json", ".jsonl")
_FIELDS = ("image", "question", "answer")


@dataclass(frozen=True, slots=True)
class ImageQuestion:
    """A question about a picture, with the path of the picture and the answer."""

    image: Path
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class QuestionFiles:
    """Questions for training, validation and test; all are in `train` if the files define no such split.

    Questions for validation and test whose answer does not occur in `train` are not removed: a model that chooses among
    the training answers cannot answer them correctly, and its accuracy must include these errors. Each split stores its
    texts in packed buffers and creates an `ImageQuestion` at each access.
    """

    train: Sequence[ImageQuestion]
    valid: Sequence[ImageQuestion]
    test: Sequence[ImageQuestion]
    report: Report


def load_image_questions(path: Path) -> QuestionFiles:
    """Return the questions at `path` with the paths of their pictures; the layout of the files is recognised.

    A folder has the layout of easy-VQA (`train/questions.json`, `train/images/`, `test/…`), or the files `train.json`,
    `valid.json` and `test.json`, or `questions.json`; any of them may be `.jsonl`. `path` may also be a single such
    file. An entry is an object with `image`, `question` and `answer`, or easy-VQA's list of question, answer and image.
    The image is a file name, with or without suffix, or a number. The pictures are in the same folder as the file or in
    its subfolder `images`.
    """
    path = Path(path)
    tally: Counter[str] = Counter()
    parts = {part: _packed(_questions(file, tally)) for part, file in question_files(path).items()}
    if not tally["kept"]:
        raise DataError(f"{path}: no question is left ({report(tally)})")
    return QuestionFiles(*(parts.get(part, ()) for part in PARTS), report=report(tally))


def answer_list(questions: Iterable[ImageQuestion], *, most: int | None = None) -> tuple[str, ...]:
    """Return the distinct answers of the questions, the most frequent first, at most `most` answers."""
    counted = Counter(item.answer for item in questions)
    return tuple(sorted(counted, key=lambda answer: (-counted[answer], answer))[:most])


class Pictures(NamedTuple):
    """The distinct pictures of some questions, in the order of first occurrence, and each question's picture index."""

    paths: Sequence[Path]
    place_of: NDArray[np.int64]


def pictures_of(questions: Sequence[ImageQuestion]) -> Pictures:
    """Return the distinct pictures of the questions, and the index of each question's picture."""
    digests = Distinct()
    for item in questions:
        digests.append(str(item.image))
    first, place_of = digests.numbered()
    return Pictures(Lazy(len(first), lambda place: questions[first[place]].image), place_of)


def hold_out(
    questions: Sequence[ImageQuestion], *, valid: int, test: int, seed: int = 0
) -> tuple[Sequence[ImageQuestion], Sequence[ImageQuestion], Sequence[ImageQuestion]]:
    """Return the questions split into training, validation and test questions, so that no picture is in two splits.

    `valid` and `test` are the numbers of pictures, not of questions, in the validation and the test split.
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

    train, held_valid, held_test = (picked(questions, np.flatnonzero(chosen == number).tolist()) for number in range(3))
    return train, held_valid, held_test


def _packed(items: Iterable[ImageQuestion]) -> Sequence[ImageQuestion]:
    """Return the questions as a lazy sequence whose texts are stored in packed buffers."""
    images, questions, answers = Texts(), Texts(), Texts()
    for item in items:
        images.append(str(item.image))
        questions.append(item.question)
        answers.append(item.answer)
    return Lazy(len(images), lambda place: ImageQuestion(Path(images[place]), questions[place], answers[place]))


def question_files(path: Path) -> dict[str, Path]:
    """Return the file of questions of each split; in the layout of easy-VQA, each split has a folder."""
    own = {
        part: path / name / f"questions{suffix}"
        for part in PARTS
        for name in NAMES[part]
        for suffix in _SUFFIXES
        if (path / name / f"questions{suffix}").is_file()
    }
    return own or part_files(path, "questions", _SUFFIXES)


def _questions(path: Path, tally: Counter[str]) -> Iterable[ImageQuestion]:
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
    """Return the image, question and answer of a JSON entry as texts, or a message if the entry is invalid."""
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
