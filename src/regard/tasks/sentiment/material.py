"""The training and evaluation data of text classification: the built-in reviews, or the user's files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from regard.data.data_files import DataError
from regard.data.text.labelled import Asked, Labelled
from regard.data.text.labelled_parts import find_parts, load_parts, parts_of_test
from regard.data.text.tokens import Span, build_coder, cut
from regard.data.worlds import reviews
from regard.tasks.sentiment.codec import SentimentCodec
from regard.tasks.sentiment.config import DataSettings, SentimentConfig
from regard.tasks.sentiment.network import stop_words
from regard.tasks.task import Material
from regard.tasks.world_examples import Parts, parts_of


@dataclass(frozen=True)
class Example:
    """A text, its label, and the positions of the words that determine the label, if they are known."""

    text: str
    label: str
    decisive: tuple[Span, ...] = ()


def make_material(
    config: SentimentConfig, cache: Path, codec: SentimentCodec | None, say: Callable[[str], None]
) -> Material:
    """Return the texts of a run; the folder `cache` is not used, because texts are read into memory."""
    return _files(config, codec, say) if config.data.files else _world(config, codec)


def _world(config: SentimentConfig, codec: SentimentCodec | None) -> Material:
    settings = config.data
    labels, language = settings.labels, settings.language
    parts = parts_of(
        reviews.splits, settings, lambda review: _example(review, settings), labels=labels, language=language
    )
    about = f"{len(parts.train):,} reviews of the built-in world, {language}, {labels}"
    return _material(settings, config.model.stop_share, codec, reviews.CLASSES[labels], parts, about)


def _example(review: reviews.Review, settings: DataSettings) -> Example:
    text = reviews.text_of(review.words, settings.language)
    words = cut(text, "characters" if settings.language == "zh" else "words")
    if len(words) != len(review.words):
        raise DataError(f"the built-in world: {text!r} has {len(words)} words, expected {len(review.words)}")
    spans = tuple(words[place].span for place in sorted(review.decisive))
    # A third of the texts has no final full stop: users often omit it, and a model trained only on texts with a full
    # stop would misclassify texts without one.
    bare = text.rstrip(".。") if crc32(text.encode()) % 3 == 0 else text
    return Example(bare, review.label, spans)


def _options(settings: DataSettings) -> Asked:
    return Asked(text=settings.text, label=settings.label, merge=settings.merge, phrases=settings.phrases)


def _files(config: SentimentConfig, codec: SentimentCodec | None, say: Callable[[str], None]) -> Material:
    settings = config.data
    parts = load_parts(settings.files, _options(settings), valid=settings.valid, test=settings.test, seed=settings.seed)
    for reading in parts.readings:
        say(str(reading))
    train, valid, test = ([_labelled(row) for row in rows] for rows in (parts.train, parts.valid, parts.test))
    about = f"{len(train):,} texts of {settings.files[0]}, {len(parts.classes)} classes"
    return _material(settings, config.model.stop_share, codec, parts.classes, Parts(train, valid, test, []), about)


def _labelled(row: Labelled) -> Example:
    return Example(row.text, row.label)


def _material(
    settings: DataSettings,
    stop_share: float,
    codec: SentimentCodec | None,
    classes: Sequence[str],
    parts: Parts,
    about: str,
) -> Material:
    train, valid, test, longer = parts
    if codec is None:
        coder = build_coder(
            (one.text for one in train), settings.tokens, size=settings.vocabulary, rarest=settings.rarest
        )
        codec = SentimentCodec(coder, tuple(classes), settings.longest)
        texts = (codec.encode(one.text)[0] for one in train)
        stop = stop_words(texts, coder.size, stop_share).nonzero().flatten().tolist()
        codec = replace(codec, stop=tuple(stop))
    records = [record for example in train if (record := encode(codec, example))["text"]]
    few = sorted((one.text for one in test[:50]), key=len)
    lengths = [len(record["text"]) for record in records]
    return Material(codec, records, [lengths], valid, test, longer, about, few[len(few) // 4] if few else None)


def encode(codec: SentimentCodec, example: Example) -> dict[str, Any]:
    return {"text": codec.encode(example.text)[0], "label": codec.classes.index(example.label)}


def input_files(config: SentimentConfig) -> list[Path]:
    if not config.data.files:
        return []
    paths = find_parts(Path(config.data.files[0])).values()
    return [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.txt")))]


def examples_of(paths: Sequence[Path], config: SentimentConfig, codec: SentimentCodec) -> tuple[list[Example], str]:
    """Return the labelled texts of other files, and a description; of a folder, the test files are read."""
    reading = parts_of_test(paths, _options(config.data), codec.classes)
    return [_labelled(row) for row in reading.rows], str(reading)
