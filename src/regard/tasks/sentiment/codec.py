"""Texts as numbers and classes by name, as a run keeps them."""

import json
from dataclasses import dataclass
from pathlib import Path

from regard.data.text.tokens import Coder, Cut, Span

TOKENIZER, CLASSES = "tokenizer.json", "codec.json"
FILES = (TOKENIZER, CLASSES)


@dataclass(frozen=True, eq=False)
class SentimentCodec:
    """The tokens that are known, the classes, and how many tokens of a text are read."""

    coder: Coder
    classes: tuple[str, ...]
    longest: int

    def encode(self, text: str) -> tuple[list[int], list[Span]]:
        """The numbers of a text's first tokens, and where they stand."""
        coded = self.coder.encode(text)
        return coded.numbers[: self.longest], coded.spans[: self.longest]

    def save(self, directory: Path) -> None:
        self.coder.save(directory / TOKENIZER)
        facts = {"tokens": self.coder.by, "classes": list(self.classes), "longest": self.longest}
        (directory / CLASSES).write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "SentimentCodec":
        facts = json.loads((directory / CLASSES).read_text(encoding="utf-8"))
        by: Cut = facts["tokens"]
        return cls(Coder.load(directory / TOKENIZER, by), tuple(map(str, facts["classes"])), int(facts["longest"]))
