"""The data of visual question answering: the built-in scenes, or the user's images and questions."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from regard.data.data_files import DataError, only_path
from regard.data.packed import Lazy, Numbers
from regard.data.record_batches import padded
from regard.data.vision.image_files import Pixels, decode
from regard.data.vision.image_questions import (
    ImageQuestion,
    answer_list,
    hold_out,
    load_image_questions,
    pictures_of,
    question_files,
)
from regard.data.vision.image_store import store_images
from regard.data.worlds import scene_questions
from regard.data.worlds.further_questions import further
from regard.data.worlds.scene_questions import written
from regard.data.worlds.shapes import Box
from regard.tasks.image_inputs import png_of
from regard.tasks.task import Material
from regard.tasks.vqa.codec import VqaCodec
from regard.tasks.vqa.config import DataSettings, VqaConfig
from regard.tasks.world_examples import Parts, parts_of

_LARGEST = 6  # largest number of shapes in a generated scene


@dataclass(frozen=True)
class Example:
    """A question about the image `pictures[place]`, with its answer.

    `regions` are the boxes of the shapes that show the answer, if they are known; `form` is the type of a generated
    question, such as "count"; `path` is the file of the image, if there is one.
    """

    pictures: Any = field(repr=False, compare=False)  # the images (3, height, width) that all examples share
    place: int
    question: str
    answer: str
    regions: tuple[Box, ...] = ()
    form: str = ""
    path: Path | None = None

    @property
    def pixels(self) -> Pixels:
        """Return the image (3, height, width)."""
        return self.pictures[self.place]

    @property
    def inputs(self) -> dict[str, Any]:
        return {"image": self.path or png_of(self.pixels), "question": self.question}


class Grouped(Sequence[dict[str, Any]]):
    """Training records: each has an image and all of its questions, so that the network encodes an image only once.

    Questions whose answer is not one of the possible answers are left out.
    """

    def __init__(self, codec: VqaCodec, examples: Sequence[Example]) -> None:
        questions, labels, places = Numbers(), array("q"), array("q")
        for one in examples:
            label = codec.label(one.answer)
            if label >= 0:
                questions.append(codec.encode(one.question))
                labels.append(label)
                places.append(one.place)
        _, first, group = np.unique(np.array(places, np.int64), return_index=True, return_inverse=True)
        # the images are numbered in the order of their first questions
        rank = np.argsort(np.argsort(first))[group.reshape(-1)]
        self._order = np.argsort(rank, kind="stable")
        self._begins = np.searchsorted(rank[self._order], np.arange(len(first) + 1))
        self._questions, self._labels, self._places = questions, labels, places
        self._pictures = examples[0].pictures if len(examples) else ()
        self.lengths = np.diff(self._begins)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]
        chosen = self._order[self._begins[number] : self._begins[number + 1]].tolist()
        return {
            "image": self._pictures[self._places[chosen[0]]],
            "question": tuple(self._questions[one] for one in chosen),
            "answer": tuple(self._labels[one] for one in chosen),
        }


def make_material(config: VqaConfig, cache: Path, codec: VqaCodec | None, say: Callable[[str], None]) -> Material:
    """Return the images and questions of a run; decoded images of files are stored in the folder `cache`."""
    return _files(config, cache, codec, say) if config.data.files else _world(config, codec)


def _world(config: VqaConfig, codec: VqaCodec | None) -> Material:
    settings = config.data
    random = Random(f"{settings.seed} further")
    images: list[Pixels] = []
    groups: list[list[Example]] = []

    def example(one: scene_questions.Asked) -> Example:
        images.append(one.scene.image)
        items = [one]
        if len(groups) < settings.train:  # `parts_of` converts the training questions first
            items += further(one.scene, random, count=settings.questions - 1, forms=settings.forms)
        place = len(images) - 1
        groups.append(
            [Example(images, place, written(item.question), item.answer, item.regions, item.form) for item in items]
        )
        return groups[-1][0]

    beyond = (min(settings.objects[1] + 1, _LARGEST), _LARGEST)
    options: dict[str, Any] = {"objects": settings.objects, "beyond": beyond, "size": settings.picture}
    try:
        parts = parts_of(scene_questions.splits, settings, example, forms=settings.forms, **options)
    except ValueError as error:
        raise DataError(f"the built-in world: {error}") from error
    train = [one for group in groups[: settings.train] for one in group]
    codec = codec or VqaCodec.build((one.question for one in train), scene_questions.answers())
    about = f"{len(train):,} questions about {settings.train:,} scenes of the built-in world"
    return _material(codec, parts._replace(train=train), about)


def _files(config: VqaConfig, cache: Path, codec: VqaCodec | None, say: Callable[[str], None]) -> Material:
    settings = config.data
    dataset = load_image_questions(only_path(settings.files))
    say(str(dataset.report))
    train, valid, test = _parted(dataset.train, dataset.valid, dataset.test, settings)
    codec = codec or VqaCodec.build((one.question for one in train), answer_list(train, most=settings.answers))
    for name, items in (("training", train), ("validation", valid), ("test", test)):
        missing = sum(codec.label(one.answer) < 0 for one in items)
        if missing:
            say(f"{missing:,} of {len(items):,} {name} questions have an answer that cannot be given")
    examples = _examples((train, valid, test), partial(store_images, cache=cache, size=(settings.picture,) * 2))
    about = f"{len(train):,} questions about pictures of {settings.files[0]}, {len(codec.answers)} answers"
    return _material(codec, Parts(*examples, longer=[]), about)


def _parted(
    train: Sequence[ImageQuestion],
    valid: Sequence[ImageQuestion],
    test: Sequence[ImageQuestion],
    settings: DataSettings,
) -> tuple[Sequence[ImageQuestion], Sequence[ImageQuestion], Sequence[ImageQuestion]]:
    """Return the training, validation and test questions.

    A missing validation or test split is held out of the training questions: those about at most a fifth of the images.
    """
    most = max(1, len(pictures_of(train).paths) // 5)
    counts = [0 if valid else min(settings.valid, most), 0 if test else min(settings.test, most)]
    train, held_valid, held_test = hold_out(train, valid=counts[0], test=counts[1], seed=settings.seed)
    return train, valid or held_valid, test or held_test


def _examples(
    parts: Sequence[Sequence[ImageQuestion]], opened: Callable[[Sequence[Path]], Any]
) -> list[Sequence[Example]]:
    """Return the examples of each split; an example is created on access.

    All examples share one sequence of images, which `opened(paths)` returns for the image files.
    """
    begins = np.cumsum([0, *map(len, parts)]).tolist()

    def item(place: int) -> ImageQuestion:
        part = int(np.searchsorted(begins, place, side="right")) - 1
        return parts[part][place - begins[part]]

    paths, place_of = pictures_of(Lazy(begins[-1], item))
    pictures = opened(paths)

    def example(place: int) -> Example:
        one = item(place)
        return Example(pictures, int(place_of[place]), one.question, one.answer, path=one.image)

    def examples(begin: int, end: int) -> Sequence[Example]:
        return Lazy(end - begin, lambda place: example(begin + place))

    return [examples(begin, end) for begin, end in pairwise(begins)]


def _material(codec: VqaCodec, parts: Parts, about: str) -> Material:
    records = Grouped(codec, parts.train)
    if not len(records):
        raise DataError("no training question has an answer that can be given: there is nothing to learn from")
    example = {"image": parts.test[0].pixels, "question": parts.test[0].question} if parts.test else None
    return Material(codec, records, [records.lengths], parts.valid, parts.test, parts.longer, about, example)


def encode(codec: VqaCodec, one: Example) -> dict[str, Any]:
    """Return an example as a record for the network: an image with one question."""
    return {"image": one.pixels, "question": (codec.encode(one.question),), "answer": (codec.label(one.answer),)}


def collated(records: Sequence[dict[str, Any]], *, grid: int = 1, rows: int = 0) -> Any:
    """Return images with their questions as a batch: image (b, 3, height, width), question (b, n, m), answer (b, n).

    n is the largest number of questions about an image, and m the largest number of words of a question. The answer -1
    marks padding, or an answer that is not one of the possible answers.
    """
    longest = max(len(question) for record in records for question in record["question"])
    width = max(1, -(-longest // grid)) * grid
    columns = []
    for record in records:
        questions = np.zeros((len(record["question"]), width), np.int64)
        for row, numbers in zip(questions, record["question"], strict=True):
            row[: len(numbers)] = numbers
        columns.append({**record, "question": questions, "answer": np.asarray(record["answer"], np.int64)})
    return padded(columns, {"question": 0, "answer": -1}, grid=grid, rows=rows)


def input_files(config: VqaConfig) -> list[Path]:
    """Return the files of questions that a run uses, without the images: the image store detects changed images."""
    return list(question_files(only_path(config.data.files)).values()) if config.data.files else []


def examples_of(paths: Sequence[Path], config: VqaConfig, codec: VqaCodec) -> tuple[list[Example], str]:
    """Return the questions of other files, and a description; of a folder, the test split is read."""
    dataset = load_image_questions(only_path(paths))
    items = dataset.test or dataset.valid or dataset.train
    size = (config.data.picture,) * 2
    [examples] = _examples([items], lambda paths: Lazy(len(paths), lambda place: decode(paths[place], size)))
    return list(examples), f"{paths[0]}: {dataset.report}"
