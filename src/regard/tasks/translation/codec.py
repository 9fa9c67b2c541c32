"""Text as token numbers and back: words of the built-in sentences, or sub-words of any text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from regard.data.text.bpe import Codes, Subwords
from regard.data.text.vocabulary import Vocabulary
from regard.data.worlds import sentence_pairs as world
from regard.look.labels import as_labels

TOKENIZERS = ("tokenizer.json", "tokenizer.target.json")  # file names in a run directory


class Reading(NamedTuple):
    """An encoded source text."""

    numbers: list[int]
    labels: tuple[str, ...]  # readable label of each token number
    owners: list[int]  # index of the word of each token number
    words: tuple[str, ...]


class Words(NamedTuple):
    """Words of a text that is given by numbers, and the word of each number."""

    words: tuple[str, ...]
    owners: list[int]


NO_WORDS = Words((), [])


@runtime_checkable
class Coder(Protocol):
    """Both languages of a translator."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the vocabulary sizes of source and target."""

    @property
    def shared(self) -> bool:
        """Return whether both languages share one vocabulary."""

    def read(self, text: str) -> Reading:
        """Return a source text."""

    def read_words(self, words: Sequence[str]) -> Reading:
        """Return a source that is already split into words."""

    def target(self, text: str) -> list[int]:
        """Return the numbers of a target text."""

    def target_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the numbers of a target that is split into words, and the word of each."""

    def labels(self, numbers: Sequence[int], source: Reading, weights: Tensor | None) -> tuple[str, ...]:
        """Return the label of each target number."""

    def source_words(self, numbers: Sequence[int], labels: Sequence[str]) -> Words:
        """Return the words of source numbers with their labels."""

    def written_words(self, numbers: Sequence[int], labels: Sequence[str]) -> Words:
        """Return the words of target numbers with their labels."""

    def write(self, numbers: Sequence[int], source: Reading, weights: Tensor | None) -> str:
        """Return the target text of these numbers; by `weights` (t, s), an unknown word is copied from the source."""

    def save(self, directory: Path) -> None:
        """Write the tokenizers."""


@dataclass(frozen=True, eq=False)
class WordCoder:
    """The codec of the built-in sentences: whole words, English to Chinese. Unknown words are copied by attention."""

    source: Vocabulary
    goal: Vocabulary
    shared = False

    @property
    def sizes(self) -> tuple[int, int]:
        return self.source.size, self.goal.size

    def read(self, text: str) -> Reading:
        return self.read_words(world.words(text))

    def read_words(self, words: Sequence[str]) -> Reading:
        return Reading(self.source.encode(words), tuple(words), list(range(len(words))), tuple(words))

    def target(self, text: str) -> list[int]:
        return self.goal.encode(text.split())

    def target_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        return self.goal.pieces(words)

    def labels(self, numbers: Sequence[int], source: Reading, weights: Tensor | None) -> tuple[str, ...]:
        words = list(self.goal.decode(numbers))
        for place, number in enumerate(numbers[: len(words)]):
            if number == self.goal.unknown and weights is not None and source.words:
                words[place] = source.words[int(weights[place, : len(source.words)].argmax())]
        return tuple(words)

    def source_words(self, numbers: Sequence[int], labels: Sequence[str]) -> Words:
        return Words(tuple(labels), list(range(len(labels))))

    def written_words(self, numbers: Sequence[int], labels: Sequence[str]) -> Words:
        return Words(tuple(labels), list(range(len(labels))))

    def write(self, numbers: Sequence[int], source: Reading, weights: Tensor | None) -> str:
        return world.chinese_text(self.labels(numbers, source, weights))

    def save(self, directory: Path) -> None:
        self.source.save(directory / "tokenizer.json")
        self.goal.save(directory / "tokenizer.target.json")


@dataclass(frozen=True, eq=False)
class PieceCoder:
    """The codec of sub-words of bytes: nothing is unknown, so unseen names can be copied."""

    codes: Codes

    @property
    def sizes(self) -> tuple[int, int]:
        return self.codes.source.size, self.codes.target.size

    @property
    def shared(self) -> bool:
        return self.codes.source is self.codes.target

    def read(self, text: str) -> Reading:
        return self.read_words(text.split())

    def read_words(self, words: Sequence[str]) -> Reading:
        numbers, owners = self.codes.source.pieces(words)
        return Reading(numbers, _shown(self.codes.source, numbers), owners, tuple(words))

    def target(self, text: str) -> list[int]:
        return self.codes.target.encode(" ".join(text.split()))

    def target_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        return self.codes.target.pieces(words)

    def labels(self, numbers: Sequence[int], source: Reading, weights: Tensor | None) -> tuple[str, ...]:
        return _shown(self.codes.target, numbers)

    def source_words(self, numbers: Sequence[int], labels: Sequence[str]) -> Words:
        return Words(*self.codes.source.words(numbers))

    def written_words(self, numbers: Sequence[int], labels: Sequence[str]) -> Words:
        return Words(*self.codes.target.words(numbers))

    def write(self, numbers: Sequence[int], source: Reading, weights: Tensor | None) -> str:
        return self.codes.target.decode(numbers)

    def save(self, directory: Path) -> None:
        self.codes.save(directory)


def _shown(subwords: Subwords, numbers: Sequence[int]) -> tuple[str, ...]:
    """Return readable sub-words: characters, not the letters that represent their bytes."""
    return as_labels((subwords, numbers)).items


def load_coder(directory: Path, *, words: bool) -> Coder:
    """Return the codec of a run."""
    if words:
        return WordCoder(
            Vocabulary.load(directory / "tokenizer.json"), Vocabulary.load(directory / "tokenizer.target.json")
        )
    return PieceCoder(Codes.load(directory))
