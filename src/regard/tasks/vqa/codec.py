"""The codec of visual question answering: it encodes questions as word numbers, and holds the possible answers."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from regard.data.text.tokens import cut
from regard.data.text.vocabulary import Vocabulary

_SPELLINGS = {"color": "colour", "colour": "color", "colors": "colours", "colours": "colors"}


@dataclass(frozen=True)
class VqaCodec:
    """The vocabulary of the questions, and the possible answers, which are the classes of the model."""

    vocabulary: Vocabulary
    answers: tuple[str, ...]

    @classmethod
    def build(cls, questions: Iterable[str], answers: Iterable[str]) -> "VqaCodec":
        """Return a codec whose vocabulary has all words of these questions, and whose classes are these answers."""
        return cls(Vocabulary.build([token.text for token in cut(one)] for one in questions), tuple(answers))

    def words(self, question: str) -> list[str]:
        """Return the words of a question; "color" and "colour" are replaced by the spelling that the vocabulary has.

        >>> VqaCodec(Vocabulary(("colour", "?")), ()).words("Color?")
        ['colour', '?']
        """
        known = self.vocabulary.numbers
        words = (token.text for token in cut(question))
        return [_SPELLINGS[word] if word not in known and _SPELLINGS.get(word) in known else word for word in words]

    def encode(self, question: str) -> list[int]:
        """Return the numbers of a question's words."""
        return self.vocabulary.encode(self.words(question))

    def unknown(self, question: str) -> list[str]:
        """Return the words of a question that are not in the vocabulary."""
        return [word for word in self.words(question) if word not in self.vocabulary.numbers]

    def label(self, answer: str) -> int:
        """Return the class number of an answer; -1 if the answer is not one of the possible answers."""
        return self._labels.get(answer, -1)

    @cached_property
    def _labels(self) -> dict[str, int]:
        return {answer: number for number, answer in enumerate(self.answers)}

    def save(self, directory: Path) -> None:
        self.vocabulary.save(directory / "tokenizer.json")
        text = json.dumps({"answers": self.answers}, ensure_ascii=False, indent=1)
        (directory / "codec.json").write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "VqaCodec":
        facts = json.loads((directory / "codec.json").read_text(encoding="utf-8"))
        return cls(Vocabulary.load(directory / "tokenizer.json"), tuple(map(str, facts["answers"])))
