"""The codec of speech recognition: it splits transcripts into symbols, words or characters, and encodes them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regard.data.text.tokens import cut
from regard.data.text.vocabulary import Vocabulary

TOKENIZER, FACTS = "tokenizer.json", "codec.json"
BLANK = "␣"

Symbols = Literal["words", "characters"]


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a transcript in lower case and without punctuation, as compared for the word error rate.

    >>> words_of("Don't stop, 3 4!")
    ("don't", 'stop', '3', '4')
    """
    return tuple(token.text for token in cut(text, "words") if token.text[0].isalnum())


@dataclass(frozen=True, eq=False)
class SpeechCodec:
    """The vocabulary of symbols, which are words, or characters with the symbol "␣" for a space."""

    vocabulary: Vocabulary
    by: Symbols = "words"

    @classmethod
    def build(cls, transcripts: Iterable[Sequence[str]], by: Symbols, *, size: int) -> "SpeechCodec":
        """Return a codec with the `size` most frequent symbols of these transcripts, which are given as words."""
        return cls(Vocabulary.build((spelled(words, by) for words in transcripts), size=size), by)

    def symbols(self, words: Sequence[str]) -> tuple[str, ...]:
        return spelled(words, self.by)

    def numbers(self, words: Sequence[str]) -> list[int]:
        return self.vocabulary.encode(self.symbols(words))

    def text(self, symbols: Sequence[str]) -> str:
        return " ".join(symbols) if self.by == "words" else "".join(symbols).replace(BLANK, " ").strip()

    def save(self, directory: Path) -> None:
        (directory / FACTS).write_text(json.dumps({"symbols": self.by}) + "\n", encoding="utf-8")
        self.vocabulary.save(directory / TOKENIZER)

    @classmethod
    def load(cls, directory: Path) -> "SpeechCodec":
        """Return the codec in a run directory."""
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
        return cls(Vocabulary.load(directory / TOKENIZER), facts["symbols"])


def spelled(words: Sequence[str], by: Symbols) -> tuple[str, ...]:
    """Return words as symbols: unchanged, or as their characters with "␣" between words.

    >>> spelled(("go", "up"), "characters")
    ('g', 'o', '␣', 'u', 'p')
    """
    return tuple(words) if by == "words" else tuple(BLANK.join(words))
