"""Questions as numbers and answers by name, as stored in a run."""

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
    """The vocabulary, and the possible answers."""

    vocabulary: Vocabulary
    answers: tuple[str, ...]

    @classmethod
    def build(cls, questions: Iterable[str], answers: Iterable[str]) -> "VqaCodec":
        """Return the codec of the words of these questions, with all of these answers."""
        return cls(Vocabulary.build([token.text for token in cut(one)] for one in questions), tuple(answers))

    def words(self, question: str) -> list[str]:
        """Return the words of a question; British and American spellings are replaced by the one in the vocabulary.

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
        """Return the words of a question that occur in no training question."""
        return [word for word in self.words(question) if word not in self.vocabulary.numbers]

    def label(self, answer: str) -> int:
        """Return the number of an answer, -1 if it is not possible."""
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
