"""Tokenisers that return token positions: words, characters of Chinese and Japanese, or sub-words."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from regard.data.text.bpe import Subwords, train_bpe
from regard.data.text.vocabulary import Vocabulary

Cut = Literal["words", "characters", "subwords"]

_CJK = "぀-ヿ㐀-鿿豈-﫿"
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*|[^\w\s]|_")
_CHARACTER = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+(?:['’-][^\W_{_CJK}]+)*|[^\w\s]|_")
_SENTENCE = re.compile(r"[^.!?。！？\n]*[.!?。！？\n]+[\"'”’)]*|[^.!?。！？\n]+")
_PHRASE = re.compile(r"[^.,;:!?。，、；：！？\n]*[.,;:!?。，、；：！？\n]+[\"'”’)]*|[^.,;:!?。，、；：！？\n]+")


class Span(NamedTuple):
    """A range of characters of a text, from character `start` up to but not including character `end`."""

    start: int
    end: int


class Token(NamedTuple):
    """A token, spelled as in the vocabulary, and its position in the text."""

    text: str
    span: Span


def cut(text: str, by: Literal["words", "characters"] = "words") -> list[Token]:
    """Return the words of a text in lower case and its punctuation marks, with their positions.

    With `by="characters"` each Chinese or Japanese character is a token.

    >>> [token.text for token in cut("It isn't bad, really!")]
    ['it', "isn't", 'bad', ',', 'really', '!']
    >>> cut("看DVD。", "characters")[1]
    Token(text='dvd', span=Span(start=1, end=4))
    """
    pattern = _WORD if by == "words" else _CHARACTER
    return [Token(match[0].lower().replace("’", "'"), Span(*match.span())) for match in pattern.finditer(text)]


def sentences(text: str) -> list[Span]:
    """Return the positions of the sentences of a text, split at full stops, question marks, exclamation marks, lines.

    >>> [text[a:b] for text in ["Not bad. Too long!"] for a, b in sentences(text)]
    ['Not bad.', 'Too long!']
    """
    return _spans(_SENTENCE, text)


def phrases(text: str) -> list[Span]:
    """Return the positions of the phrases of a text, split at punctuation marks."""
    return _spans(_PHRASE, text)


def summed(weights: Sequence[float], tokens: Sequence[Span], parts: Sequence[Span]) -> list[float]:
    """Return the weight of each phrase or sentence: the sum of the weights of the tokens that begin in it.

    >>> summed([0.1, 0.2, 0.7], [Span(0, 3), Span(4, 7), Span(9, 12)], [Span(0, 8), Span(9, 12)])
    [0.3..., 0.7]
    """
    return [
        sum(weight for weight, token in zip(weights, tokens, strict=True) if part.start <= token.start < part.end)
        for part in parts
    ]


def _spans(pattern: re.Pattern[str], text: str) -> list[Span]:
    spans = []
    for match in pattern.finditer(text):
        blank = len(match[0]) - len(match[0].lstrip())
        start, end = match.start() + blank, match.start() + len(match[0].rstrip())
        if end > start:
            spans.append(Span(start, end))
    return spans


class Coded(NamedTuple):
    """A text as token numbers, and the position of each token in the text."""

    numbers: list[int]
    spans: list[Span]


@dataclass(frozen=True, eq=False)
class Coder:
    """A tokeniser that maps texts to token numbers.

    The tokens are the words or characters of a vocabulary, or sub-words, which can encode any text.

    >>> coder = build_coder(["Not bad at all."], "words")
    >>> coder.encode("Bad, not dull").numbers == [coder.words.numbers["bad"], 3, coder.words.numbers["not"], 3]
    True
    """

    by: Cut
    words: Vocabulary | Subwords

    pad = 0

    @property
    def size(self) -> int:
        return self.words.size

    @property
    def unknown(self) -> int:
        """Return the token number of unknown words; for sub-words, which have no unknown words, that of padding."""
        return self.words.unknown if isinstance(self.words, Vocabulary) else self.words.pad

    def encode(self, text: str) -> Coded:
        """Return a text as token numbers, with the position of each token in the text."""
        if isinstance(self.words, Subwords):
            encoding = self.words.model.encode(text, add_special_tokens=False)
            return Coded(encoding.ids, [Span(*offsets) for offsets in encoding.offsets])
        tokens = cut(text, "words" if self.by == "words" else "characters")
        return Coded(self.words.encode([token.text for token in tokens]), [token.span for token in tokens])

    def save(self, path: Path) -> None:
        self.words.save(path)

    @classmethod
    def load(cls, path: Path, by: Cut) -> "Coder":
        return cls(by, Subwords.load(path) if by == "subwords" else Vocabulary.load(path))


def build_coder(texts: Iterable[str], by: Cut, *, size: int = 30_000, rarest: int = 1) -> Coder:
    """Return a `Coder` whose vocabulary is the most frequent tokens of these texts, at most `size` tokens.

    Words and characters that occur fewer than `rarest` times are left out. Sub-words are trained on the texts.
    """
    if by == "subwords":
        return Coder(by, train_bpe(texts, size=size))
    counts = Counter(token.text for text in texts for token in cut(text, by))
    ordered = sorted((word for word in counts if counts[word] >= rarest), key=lambda word: (-counts[word], word))
    return Coder(by, Vocabulary(tuple(ordered[:size])))
