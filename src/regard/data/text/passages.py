"""Splits texts into words with character positions, so that a span of words is an exact part of the text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_CJK = "぀-ヿ㐀-鿿豈-﫿"
# A word is one Chinese or Japanese character, a run of letters and digits, or one punctuation mark.
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+|\S")
_ENDS = frozenset(".!?。！？")

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Passage:
    """A text with its words, and for each word its character positions and the index of its sentence.

    `places` holds (start, end) for each word, so that the word is text[start:end].

    >>> passage = Passage.of("Tom ran. 他在厨房。")
    >>> passage.words, passage.sentences
    (('Tom', 'ran', '.', '他', '在', '厨', '房', '。'), (0, 0, 0, 1, 1, 1, 1, 1))
    >>> passage.between(5, 6), passage.covering(11, 13)
    ('厨房', (5, 6))
    """

    text: str
    words: tuple[str, ...]
    places: tuple[Place, ...]
    sentences: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> "Passage":
        """Return the passage of a text, split into words and sentences.

        A sentence ends at a full stop, question mark or exclamation mark before a blank, or at a Chinese or Japanese
        one even without a blank. An abbreviation such as "Dr." therefore ends a sentence too.
        """
        places = tuple(match.span() for match in _WORD.finditer(text))
        words = tuple(text[start:end] for start, end in places)
        sentences: list[int] = []
        number = 0
        for word, (_, end) in zip(words, places, strict=True):
            sentences.append(number)
            if word in _ENDS and (end == len(text) or text[end].isspace() or not word.isascii()):
                number += 1
        return cls(text, words, places, tuple(sentences))

    @classmethod
    def joined(cls, sentences: Sequence[str], *, whole: Sequence[str] = ()) -> "Passage":
        """Return the passage that consists of these sentences; `whole` lists the words of an additional last sentence.

        The words in `whole` are not split further.

        >>> Passage.joined(["Tom ran."], whole=["apple,milk", "none"]).words
        ('Tom', 'ran', '.', 'apple,milk', 'none')
        """
        text = " ".join((*sentences, *whole))
        rows: list[tuple[str, Place, int]] = []
        shift = 0
        for number, sentence in enumerate(sentences):
            for match in _WORD.finditer(sentence):
                rows.append((match.group(), (shift + match.start(), shift + match.end()), number))
            shift += len(sentence) + 1
        for word in whole:
            rows.append((word, (shift, shift + len(word)), len(sentences)))
            shift += len(word) + 1
        words, places, numbers = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(text, words, places, numbers)

    def between(self, first: int, last: int) -> str:
        """Return the text from word `first` to word `last`, both included."""
        return self.text[self.places[first][0] : self.places[last][1]]

    def covering(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the indices of the first and last word that share a character with text[start:end], or None."""
        touched = [number for number, (first, past) in enumerate(self.places) if first < end and past > start]
        return (touched[0], touched[-1]) if touched else None

    def sentence(self, number: int) -> str:
        """Return the text of the sentence with this index."""
        inside = [word for word, sentence in enumerate(self.sentences) if sentence == number]
        return self.between(inside[0], inside[-1])


def words(text: str) -> tuple[str, ...]:
    """Return the words and punctuation marks of a text; a Chinese or Japanese character is a word.

    >>> words("Where's the ball?")
    ('Where', "'", 's', 'the', 'ball', '?')
    """
    return tuple(_WORD.findall(text))


def lowered(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words in lower case."""
    return tuple(word.lower() for word in words)
