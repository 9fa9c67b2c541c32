"""Encoding of texts as token numbers, and decoding: whole words for the built-in sentences, sub-words for files."""

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

    numbers: list[int]  # token numbers
    labels: tuple[str, ...]  # readable label of each token
    owners: list[int]  # for each token, the index of the word that contains the token
    words: tuple[str, ...]


class Words(NamedTuple):
    """The words that a sequence of tokens forms; `owners` holds for each token the index of its word."""

    words: tuple[str, ...]
    owners: list[int]


NO_WORDS = Words((), [])


@runtime_checkable
class Coder(Protocol):
    """The codec of translation: it encodes source and target texts, and decodes target tokens."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the vocabulary sizes of source and target."""

    @property
    def shared(self) -> bool:
        """Return whether both languages share one vocabulary."""

    def read(self, text: str) -> Reading:
        """Return a source text, encoded."""

    def read_words(self, words: Sequence[str]) -> Reading:
        """Return a source text that is already split into words, encoded."""

    def target(self, text: str) -> list[int]:
        """Return the token numbers of a target text."""

    def target_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the token numbers of a target that is split into words, and the index of the word of each token."""

    def labels(self, numbers: Sequence[int], source: Reading, weights: Tensor | None) -> tuple[str, ...]:
        """Return the label of each target token; an unknown word is labelled as in `write`."""

    def source_words(self, numbers: Sequence[int], labels: Sequence[str]) -> Words:
        """Return the words that source tokens with the given labels form."""

    def written_words(self, numbers: Sequence[int], labels: Sequence[str]) -> Words:
        """Return the words that target tokens with the given labels form."""

    def write(self, numbers: Sequence[int], source: Reading, weights: Tensor | None) -> str:
        """Return the target text that these token numbers encode.

        An unknown word is replaced by the source word with the largest attention weight in the unknown word's row of
        `weights` (target tokens, source tokens).
        """

    def save(self, directory: Path) -> None:
        """Write the files of the tokenizers into a run directory."""


@dataclass(frozen=True, eq=False)
class WordCoder:
    """The codec of the built-in sentences, English to Chinese: a token is a whole word.

    In translated texts, an unknown target word is replaced by the source word with the largest attention weight.
    """

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
    """The codec of files: byte-level sub-words. They can encode every text, so the model can copy unseen names."""

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
    """Return sub-words as readable text: characters, not the letters by which byte-level BPE represents bytes."""
    return as_labels((subwords, numbers)).items


def load_coder(directory: Path, *, words: bool) -> Coder:
    """Return the codec of a run directory: a `WordCoder` if `words` is true, else a `PieceCoder`."""
    if words:
        return WordCoder(
            Vocabulary.load(directory / "tokenizer.json"), Vocabulary.load(directory / "tokenizer.target.json")
        )
    return PieceCoder(Codes.load(directory))
