"""The codec of text classification: it encodes texts as token numbers, and holds the names of the classes."""

import json
from dataclasses import dataclass
from pathlib import Path

from regard.data.text.tokens import Coder, Cut, Span

TOKENIZER, CLASSES = "tokenizer.json", "codec.json"
FILES = (TOKENIZER, CLASSES)


@dataclass(frozen=True, eq=False)
class SentimentCodec:
    """The vocabulary, the names of the classes, and the largest number of tokens of a text."""

    coder: Coder
    classes: tuple[str, ...]
    longest: int
    stop: tuple[int, ...] = ()  # numbers of stop words: they are encoded, but masked in attention

    def encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the numbers of the first `longest` tokens of a text, and their positions in the text."""
        coded = self.coder.encode(text)
        return coded.numbers[: self.longest], coded.spans[: self.longest]

    def save(self, directory: Path) -> None:
        self.coder.save(directory / TOKENIZER)
        facts = {
            "tokens": self.coder.by,
            "classes": list(self.classes),
            "longest": self.longest,
            "stop": list(self.stop),
        }
        (directory / CLASSES).write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "SentimentCodec":
        facts = json.loads((directory / CLASSES).read_text(encoding="utf-8"))
        by: Cut = facts["tokens"]
        classes, stop = tuple(map(str, facts["classes"])), tuple(map(int, facts["stop"]))
        return cls(Coder.load(directory / TOKENIZER, by), classes, int(facts["longest"]), stop)
