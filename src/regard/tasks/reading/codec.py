"""Encoding of questions and passages: numbers of words and letters, and features of each word."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regard.data.text.passages import Passage, lowered, words
from regard.data.text.questions import Question
from regard.data.text.vocabulary import Vocabulary
from regard.data.worlds.stories import Story, written

LETTERS = 16  # number of letters of a word that are encoded; of a longer word, the first 8 and the last 8
# number of letter embeddings; a letter with code point c uses embedding 1 + c mod (ALPHABET − 1), so that no alphabet
# has to be stored
ALPHABET = 512
# The features of a word: whether it occurs in the other text (the question for a word of the passage, and vice versa);
# whether a word with the same first 5 letters occurs there; whether it has a capital first letter; whether it is a
# number, is punctuation, or is the first word of its sentence.
FEATURES = 6
_STEM = 5  # number of first letters of a word that are compared with those of the words in the other text

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class ReadingCodec:
    """The codec of reading comprehension: the vocabulary, and candidate answers, which are appended to every passage.

    With candidates, the model can also give answers that do not occur in the passage, because it points at the appended
    ones.
    """

    vocabulary: Vocabulary
    candidates: tuple[str, ...] = ()

    @classmethod
    def build(
        cls, questions: Iterable[Question], *, size: int | None = None, rare: int = 1, candidates: Sequence[str] = ()
    ) -> "ReadingCodec":
        """Return a codec whose vocabulary has the lower-case words of these questions and their passages.

        The vocabulary has the `size` most frequent of the words that occur at least `rare` times.
        """

        def texts() -> Iterator[Sequence[str]]:
            seen: set[int] = set()
            for question in questions:
                yield lowered(question.question)
                if id(question.passage) not in seen:
                    yield lowered(question.passage.words)
                seen.add(id(question.passage))

        return cls(Vocabulary.build(texts(), size=size, rarest=rare), tuple(candidates))

    def passage(self, text: str) -> Passage:
        """Return a text as a passage, with the candidate answers appended."""
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


def question_of(story: Story) -> Question:
    """Return a generated story with its question as a `Question` record, the type of questions from files."""
    passage = Passage.joined([written(sentence) for sentence in story.sentences])
    return Question(passage, words(written(story.question)), (written(story.answer),), story.span, story.support)


def encode(
    codec: ReadingCodec, question: Question, *, exact_match: bool = True, characters: bool = False
) -> dict[str, Numbers | NDArray[np.float32] | int]:
    """Return a question and its passage as a record of arrays for the network.

    The fields of the passage are `passage` (word numbers), `passage_features` and, with `characters`,
    `passage_letters`; the question has the same three fields. `start` and `end` are the indices of the first and the
    last word of the answer, or -1 if the passage does not contain the answer.
    """
    start, end = (-1, -1) if question.span is None else question.span
    record: dict[str, Numbers | NDArray[np.float32] | int] = {"start": start, "end": end}
    texts = {"passage": question.passage.words, "question": question.question}
    firsts = [i == 0 or question.passage.sentences[i - 1] != here for i, here in enumerate(question.passage.sentences)]
    for name, other in (("passage", "question"), ("question", "passage")):
        marks = firsts if name == "passage" else [i == 0 for i in range(len(question.question))]
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
    """Return the numbers of a word's letters, padded with 0; of a long word, those of the first 8 and the last 8."""
    if len(word) > LETTERS:
        word = word[: LETTERS // 2] + word[-LETTERS // 2 :]
    numbers = [1 + ord(letter) % (ALPHABET - 1) for letter in word]
    return np.array(numbers + [0] * (LETTERS - len(numbers)), np.int64)
