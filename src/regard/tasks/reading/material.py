"""The training and evaluation data of reading comprehension: the built-in stories, or the user's files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from regard.data.data_files import DataError, only_path
from regard.data.text.babi import candidates
from regard.data.text.labelled_parts import find_parts
from regard.data.text.questions import Question, load_questions
from regard.data.worlds import stories
from regard.tasks.reading.codec import ReadingCodec, encode, question_of
from regard.tasks.reading.config import ReadingConfig
from regard.tasks.task import Material
from regard.tasks.world_examples import Parts, parts_of


def make_material(
    config: ReadingConfig, cache: Path, codec: ReadingCodec | None, say: Callable[[str], None]
) -> Material:
    """Return the questions of a run; the folder `cache` is not used, because questions are read into memory."""
    return _files(config, codec, say) if config.data.files else _world(config, codec)


def _world(config: ReadingConfig, codec: ReadingCodec | None) -> Material:
    parts = parts_of(stories.splits, config.data, question_of, sentences=config.data.sentences)
    codec = codec or ReadingCodec.build(parts.train)
    return _material(config, codec, parts, f"{len(parts.train):,} stories of the built-in world")


def _files(config: ReadingConfig, codec: ReadingCodec | None, say: Callable[[str], None]) -> Material:
    settings = config.data
    files = _parts(settings.files)
    ends = codec.candidates if codec is not None else _candidates(files["train"])
    parts: dict[str, list[Question]] = {}
    for name, path in files.items():
        longest = settings.longest if name == "train" else None
        parts[name], report = load_questions(path, longest=longest, candidates=ends)
        say(f"{path.name}: {report}")
    train = parts["train"]
    for name, count in (("valid", settings.valid), ("test", settings.test)):
        if name not in parts:
            train, parts[name] = _held_out(train, count, Random(f"{settings.seed} {name}"))
    if codec is None:
        codec = ReadingCodec.build(train, size=settings.vocabulary, rare=settings.rare, candidates=ends)
    about = f"{len(train):,} questions of {files['train']}"
    return _material(config, codec, Parts(train, parts["valid"], parts["test"], []), about)


def _candidates(path: Path) -> tuple[str, ...]:
    return candidates(path) if path.name.removesuffix(".gz").endswith(".txt") else ()


def _held_out(questions: list[Question], count: int, random: Random) -> tuple[list[Question], list[Question]]:
    """Return the training questions and about `count` held-out questions.

    Questions about one passage are either all held out or all for training. At most a fifth of the passages is held
    out.
    """
    passages = list(dict.fromkeys(one.passage.text for one in questions))
    random.shuffle(passages)
    if len(passages) < 3:
        raise DataError(f"too few passages to hold some out: {len(passages)}")
    chosen: set[str] = set()
    held = 0
    per = dict.fromkeys(passages, 0)
    for one in questions:
        per[one.passage.text] += 1
    for text in passages[: max(1, len(passages) // 5)]:
        if held >= count:
            break
        chosen.add(text)
        held += per[text]
    rest = [one for one in questions if one.passage.text not in chosen]
    return rest, [one for one in questions if one.passage.text in chosen]


def _material(
    config: ReadingConfig,
    codec: ReadingCodec,
    parts: Parts,
    about: str,
) -> Material:
    train, valid, test, longer = parts
    records = [encoded(codec, one, config) for one in train if one.span is not None]
    if not records:
        raise DataError("no question has an answer in its passage: there is nothing to learn from")
    lengths = [len(record["passage"]) for record in records]
    first = min(test[:50], key=lambda one: len(one.passage.text)) if test else None
    example = None if first is None else [first.passage.text, first.text]
    return Material(codec, records, [lengths], valid, test, longer, about, example)


def encoded(codec: ReadingCodec, one: Question, config: ReadingConfig) -> dict[str, Any]:
    return dict(encode(codec, one, exact_match=config.model.exact_match, characters=config.model.characters > 0))


def _parts(files: Sequence[Path]) -> dict[str, Path]:
    """Return the data files by the name of their split: "train", "valid" and "test", if they exist."""
    if len(files) == 1:
        return find_parts(Path(files[0]))
    names = {2: ("train", "test"), 3: ("train", "valid", "test")}.get(len(files))
    if names is None:
        raise DataError(f"expected one file or folder, or 2 or 3 files, found {len(files)}")
    return dict(zip(names, map(Path, files), strict=True))


def input_files(config: ReadingConfig) -> list[Path]:
    return list(_parts(config.data.files).values()) if config.data.files else []


def examples_of(paths: Sequence[Path], config: ReadingConfig, codec: ReadingCodec) -> tuple[list[Question], str]:
    """Return the questions of another file, or those of the test file in a folder, and a description."""
    path = only_path(paths)
    if not path.is_file():
        parts = find_parts(path)
        path = parts.get("test", parts["train"])
    questions, report = load_questions(path, candidates=codec.candidates)
    return questions, f"{path}: {report}"
