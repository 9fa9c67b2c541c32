"""Questions as numbers: words, their letters, and features of a word's form and of the other text."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regard.data.text.passages import Passage, lowered, words
from regard.data.text.questions import Asked
from regard.data.text.vocabulary import Vocabulary
from regard.data.worlds.stories import Story, written

LETTERS = 16  # number of letters of a word that are used; of longer words, the first and last half
ALPHABET = 512  # number of letter embeddings; code points share them, so that no list of letters is stored
# The word occurs in the other text; its first letters do; capital; number; punctuation; first in its sentence.
FEATURES = 6
_STEM = 5

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class ReadingCodec:
    """The vocabulary, and the candidate answers that are appended to passages that do not contain them."""

    vocabulary: Vocabulary
    candidates: tuple[str, ...] = ()

    @classmethod
    def build(
        cls, questions: Iterable[Asked], *, size: int | None = None, rare: int = 1, candidates: Sequence[str] = ()
    ) -> "ReadingCodec":
        """Return the words of these questions and their passages, without capitals, that occur at least `rare`
        times."""

        def texts() -> Iterator[Sequence[str]]:
            seen: set[int] = set()
            for asked in questions:
                yield lowered(asked.question)
                if id(asked.passage) not in seen:
                    yield lowered(asked.passage.words)
                seen.add(id(asked.passage))

        return cls(Vocabulary.build(texts(), size=size, rarest=rare), tuple(candidates))

    def passage(self, text: str) -> Passage:
        """Return a text as a passage, with the candidates appended."""
        plain = Passage.of(text)
        if not self.candidates:
            return plain
        sentences = [plain.sentence(number) for number in dict.fromkeys(plain.sentences)]
        return Passage.joined(sentences, whole=self.candidates)

    def save(self, directory: Path) -> None:
        self.vocabulary.save(directory / "tokenizer.json")
        (directory / "codec.json").write_text(json.dumps({"candidates": self.candidates}), encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "ReadingCodec":
        record = json.loads((directory / "codec.json").read_text(encoding="utf-8"))
        return cls(Vocabulary.load(directory / "tokenizer.json"), tuple(record["candidates"]))


def asked(story: Story) -> Asked:
    """Return a generated story as the record that questions of files have."""
    passage = Passage.joined([written(sentence) for sentence in story.sentences])
    return Asked(passage, words(written(story.question)), (written(story.answer),), story.span, story.support)


def encode(
    codec: ReadingCodec, asked: Asked, *, exact_match: bool = True, characters: bool = False
) -> dict[str, Numbers | NDArray[np.float32] | int]:
    """Return a question as a record: word numbers, features and letters of both texts, and the span (-1: none).

    Fields of the passage are `passage`, `passage_features` and `passage_letters`; of the question the same.
    """
    start, end = (-1, -1) if asked.span is None else asked.span
    record: dict[str, Numbers | NDArray[np.float32] | int] = {"start": start, "end": end}
    texts = {"passage": asked.passage.words, "question": asked.question}
    firsts = [i == 0 or asked.passage.sentences[i - 1] != here for i, here in enumerate(asked.passage.sentences)]
    for name, other in (("passage", "question"), ("question", "passage")):
        marks = firsts if name == "passage" else [i == 0 for i in range(len(asked.question))]
        record[name] = np.array(codec.vocabulary.encode(lowered(texts[name])), np.int64)
        record[f"{name}_features"] = _features(texts[name], texts[other] if exact_match else (), marks)
        if characters:
            record[f"{name}_letters"] = np.stack([_letters(word) for word in texts[name]])
    return record


def _features(text: Sequence[str], other: Sequence[str], firsts: Sequence[bool]) -> NDArray[np.float32]:
    whole = set(lowered(other))
    stems = {word[:_STEM] for word in whole}
    rows = [
        (low in whole, low[:_STEM] in stems, word[:1].isupper(), word.isdigit(), not word.isalnum(), first)
        for word, low, first in zip(text, lowered(text), firsts, strict=True)
    ]
    return np.array(rows, np.float32)


def _letters(word: str) -> Numbers:
    """Return numbers of a word's letters, padded with 0; for a long word the first half and the last half."""
    if len(word) > LETTERS:
        word = word[: LETTERS // 2] + word[-LETTERS // 2 :]
    numbers = [1 + ord(letter) % (ALPHABET - 1) for letter in word]
    return np.array(numbers + [0] * (LETTERS - len(numbers)), np.int64)
