"""The codec of captioning: it splits captions into words, and encodes the words as numbers."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regard.data.text.tokens import cut
from regard.data.text.vocabulary import Vocabulary

TOKENIZER, FACTS = "tokenizer.json", "codec.json"
FILES = (TOKENIZER, FACTS)

Words = tuple[str, ...]
Tokens = Literal["words", "characters"]


def words_of(text: str, by: Tokens = "words") -> Words:
    """Return the words of a caption in lower case and without punctuation, as captions are usually compared.

    >>> words_of("A dog , which isn't black , runs .")
    ('a', 'dog', 'which', "isn't", 'black', 'runs')
    """
    return tuple(token.text for token in cut(text, by) if token.text[0].isalnum())


@dataclass(frozen=True, eq=False)
class CaptionCodec:
    """The vocabulary of captions, and how captions are split: into words or into characters."""

    vocabulary: Vocabulary
    by: Tokens = "words"

    @classmethod
    def build(cls, captions: Iterable[Words], by: Tokens, *, size: int, rarest: int = 1) -> "CaptionCodec":
        """Return a codec with the `size` most frequent words that occur at least `rarest` times in these captions."""
        return cls(Vocabulary.build(captions, size=size, rarest=rarest), by)

    def text(self, words: Sequence[str]) -> str:
        return ("" if self.by == "characters" else " ").join(words)

    def save(self, directory: Path) -> None:
        self.vocabulary.save(directory / TOKENIZER)
        (directory / FACTS).write_text(json.dumps({"tokens": self.by}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> "CaptionCodec":
        by: Tokens = json.loads((directory / FACTS).read_text(encoding="utf-8"))["tokens"]
        return cls(Vocabulary.load(directory / TOKENIZER), by)
