"""The built-in data for sentiment: any number of reviews in English or Chinese, with the words that decide the label.

An opinion may be negated ("not bad"). If two opinions contrast, the opinion in the main clause determines the label
("good but too long", "dull, although the music is great"). Other sentences contain opinion words without an opinion ("a
good friend lent it to me"). The decisive words of a review are the opinion word and its negation, without connectives
and intensifiers.

In the label set "subjectivity" the holder of the opinion determines the label: the author's own opinion is subjective
("I find the plot dull"), the opinion of others is objective ("critics find the plot dull"). The holder is the decisive
word.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple
from zlib import crc32

from regard.data.worlds.random_choices import Splits, Within, split
from regard.data.worlds.review_words import GRAMMARS, Grammar

LabelSet = Literal["sentiment", "sentiment3", "subjectivity"]
Language = Literal["en", "zh"]

CLASSES: Mapping[LabelSet, tuple[str, ...]] = {
    "sentiment": ("negative", "positive"),
    "sentiment3": ("negative", "neutral", "positive"),
    "subjectivity": ("objective", "subjective"),
}


@dataclass(frozen=True, slots=True)
class Review:
    """A text as words (in Chinese, characters), its label, and the indices of the words that decide the label."""

    words: tuple[str, ...]
    label: str
    decisive: frozenset[int]


def reviews(
    seed: int,
    *,
    count: int,
    labels: LabelSet = "sentiment",
    language: Language = "en",
    lengths: tuple[int, int] = (5, 30),
) -> Iterator[Review]:
    """Return distinct reviews whose number of words is in the range `lengths`.

    The same seed gives the same reviews on every machine.

    >>> for review in reviews(3, count=2, lengths=(5, 14)):
    ...     print(review.label, "|", text_of(review.words), [review.words[i] for i in sorted(review.decisive)])
    negative | The case isn't remarkably sincere. ["isn't", 'sincere']
    positive | The view isn't irritating. ["isn't", 'irritating']
    """
    _check(lengths)
    random = Random(f"{seed} {labels} {language} {lengths}")
    return _distinct(_Writer(random, language, labels, held_out=True), count, lengths, set())


def splits(
    seed: int,
    *,
    train: int,
    valid: int,
    test: int,
    longer: int = 0,
    labels: LabelSet = "sentiment",
    language: Language = "en",
    lengths: tuple[int, int] = (5, 30),
    beyond: tuple[int, int] = (31, 60),
) -> Splits[Review]:
    """Return training, validation and test reviews of `lengths` words, and reviews of `beyond` words in `longer`.

    A fifth of the pairs of a negation and an opinion word never occur in the training reviews, so that a model that
    only memorises these pairs fails on the validation and test reviews.

    >>> parts = splits(1, train=50, valid=10, test=10, longer=5)
    >>> [len(part) for part in (parts.train, parts.valid, parts.test, parts.longer)]
    [50, 10, 10, 5]
    """
    _check(lengths)
    if beyond[0] <= lengths[1] or beyond[1] < beyond[0]:
        raise ValueError(f"beyond must be longer than lengths, not {beyond} after {lengths}")
    seen: set[tuple[str, ...]] = set()

    def part(name: str, count: int, within: Within) -> Iterator[Review]:
        random = Random(f"{seed} {labels} {language} {name} {within}")
        return _distinct(_Writer(random, language, labels, held_out=name != "train"), count, within, seen)

    return split(part, (train, valid, test, longer), lengths, beyond)


def text_of(words: Sequence[str], language: Language = "en") -> str:
    """Return the words of a review as text, with capital letters and without blanks before punctuation marks.

    >>> text_of(("i", "found", "it", "dull", ",", "not", "bad", "."))
    'I found it dull, not bad.'
    >>> text_of(("剧", "情", "很", "精", "彩", "。"), "zh")
    '剧情很精彩。'
    """
    if language == "zh":
        return "".join(words)
    written = []
    start = True
    for word in words:
        capital = start or word == "i" or word in _NAMES
        written.append(word if word in ".," else f" {word.capitalize() if capital else word}")
        start = word == "."
    return "".join(written).strip()


_NAMES = {"london", "paris", "berlin", "beijing", "rome", "monday", "tuesday", "friday", "sunday"}
# After this number of consecutive duplicates or reviews of a wrong length `_distinct` raises an error: there are hardly
# any new reviews of the requested lengths.
_PATIENCE = 4000


class _Word(NamedTuple):
    """A word of a review; `starred` is True if its pattern marks it as decisive with a star."""

    text: str
    starred: bool


class _Writer:
    """Generates reviews of one label set in one language.

    With `held_out`, the pairs of a negation and an opinion word that are excluded from training may occur.
    """

    def __init__(self, random: Random, language: Language, labels: LabelSet, *, held_out: bool) -> None:
        self.random, self.language, self.labels, self.held_out = random, language, labels, held_out
        self.grammar: Grammar = GRAMMARS[language]

    def review(self, length: int) -> Review:
        """Return one review of about `length` words: a sentence that decides the label, among other sentences."""
        label = self._pick(CLASSES[self.labels])
        sentences = [self._judgement(label)]
        # There are two parties, the author and others; one of them holds the opinion. Half of the reviews also mention
        # the other party, in a sentence without an opinion. If all reviews mentioned the other party, a model could
        # infer the label from the party that has no opinion.
        if self.labels == "subjectivity" and self.random.random() < 0.5:
            sentences.insert(self._place(sentences), self._fact(label == "objective"))
        while sum(map(len, sentences)) + len(sentences) < length - 4:
            sentences.insert(self._place(sentences), self._aside())
        words = [word for sentence in sentences for word in (*sentence, _Word(self.grammar.stop, False))]
        decisive = frozenset(place for place, word in enumerate(words) if word.starred)
        return Review(tuple(word.text for word in words), label, decisive)

    def _judgement(self, label: str) -> list[_Word]:
        if self.labels == "subjectivity":
            return self._held(label == "subjective")
        if label == "neutral":
            return self._fill(self._pick(self.grammar.neutral))
        positive = label == "positive"
        kind = self.random.random()
        if kind < 0.35:
            main, side = self._opinion(positive), _unstarred(self._opinion(not positive))
            return self._join(self._pick(self.grammar.contrast), main=main, side=side)
        if kind < 0.4:
            first, second = self._opinion(positive), self._opinion(positive)
            return self._join(self._pick(self.grammar.together), first=first, second=second)
        return self._opinion(positive)

    def _opinion(self, positive: bool) -> list[_Word]:
        """Return one clause with a positive or negative opinion.

        The clause contains an opinion word, a negated opinion word of the other polarity, or a measure ("too long").
        """
        kind = self.random.random()
        if kind < 0.08:
            return self._fill(self._pick(self.grammar.enough if positive else self.grammar.excess))
        turned = kind < 0.4
        patterns = self.grammar.turned if turned else self.grammar.plain
        entries = self.grammar.entries["positive" if positive != turned else "negative"]
        while True:
            opinion = self._pick(entries)
            words = self._fill(self._pick(patterns), opinion=opinion)
            if not turned or self.held_out or not unseen(_negation(words, opinion, self.language), opinion):
                return words

    def _held(self, own: bool) -> list[_Word]:
        return self._fill(self._pick(self.grammar.held), **self._party(own))

    def _fact(self, own: bool) -> list[_Word]:
        return self._fill(self._pick(self.grammar.facts), **self._party(own))

    def _party(self, own: bool) -> dict[str, str]:
        entries = self.grammar.entries
        holder = self._pick(entries["own" if own else "others"])
        return {"holder": holder, "object": self._pick(entries["own_object"]) if own else holder}

    def _aside(self) -> list[_Word]:
        """Return a sentence that does not affect the label."""
        kind = self.random.random()
        if self.labels == "subjectivity":
            if kind < 0.5:
                return _unstarred(self._fact(self.random.random() < 0.5))
            return self._fill(self._pick([pattern for pattern in self.grammar.fillers if not _names_author(pattern)]))
        return self._fill(self._pick(self.grammar.distractors if kind < 0.6 else self.grammar.fillers))

    def _fill(self, pattern: str, **fillers: str) -> list[_Word]:
        words: list[_Word] = []
        for piece in pattern.split():
            starred, text = piece.startswith("*"), piece.removeprefix("*")
            if text.startswith("{"):
                text = fillers.get(text[1:-1]) or self._pick(self._entries(text[1:-1]))
            words += [_Word(word, starred) for word in self._cut(text)]
        return _articles(words)

    def _join(self, pattern: str, **clauses: list[_Word]) -> list[_Word]:
        words: list[_Word] = []
        for piece in pattern.split():
            words += clauses[piece[1:-1]] if piece.startswith("{") else [_Word(w, False) for w in self._cut(piece)]
        return words

    def _entries(self, name: str) -> tuple[str, ...]:
        if name == "any":
            name = "positive" if self.random.random() < 0.5 else "negative"
        return self.grammar.entries[name]

    def _cut(self, text: str) -> list[str]:
        return list(text) if self.language == "zh" else text.split()

    def _place(self, sentences: list[list[_Word]]) -> int:
        return int(self.random.random() * (len(sentences) + 1))

    def _pick(self, things: Sequence[str]) -> str:
        return things[int(self.random.random() * len(things))]


def unseen(negation: str, opinion: str) -> bool:
    """Return whether a pair of a negation and an opinion word is excluded from training.

    A checksum of the two words selects one pair in five.

    >>> [word for word in ("good", "great", "dull", "weak", "bold", "warm", "rude") if unseen("not", word)]
    ['good', 'bold', 'warm']
    """
    return crc32(f"{negation} {opinion}".encode()) % 5 == 0


def _negation(words: Sequence[_Word], opinion: str, language: Language) -> str:
    """Return the negation of a clause: its starred words without the opinion word at the end."""
    gap = "" if language == "zh" else " "
    return gap.join(word.text for word in words if word.starred).removesuffix(opinion).strip()


def _names_author(pattern: str) -> bool:
    return any(piece in ("i", "we", "my", "me") or "我" in piece for piece in pattern.split())


def _articles(words: list[_Word]) -> list[_Word]:
    """Return the words with each "a" before a vowel replaced by "an"."""
    return [
        word._replace(text="an") if word.text == "a" and after and after.text[0] in "aeiou" else word
        for word, after in zip(words, [*words[1:], None], strict=True)
    ]


def _unstarred(words: list[_Word]) -> list[_Word]:
    return [word._replace(starred=False) for word in words]


def _distinct(writer: _Writer, count: int, lengths: tuple[int, int], seen: set[tuple[str, ...]]) -> Iterator[Review]:
    """Yield `count` reviews of `lengths` words that are not in `seen`, and add each of them to `seen`."""
    low, high = lengths
    tries = 0
    while count > 0:
        review = writer.review(low + int((high - low + 1) * writer.random.random()))
        tries += 1
        if review.words in seen or not low <= len(review.words) <= high:
            if tries > _PATIENCE:
                raise ValueError(f"there are too few reviews of {low} to {high} words: {count} missing")
            continue
        seen.add(review.words)
        yield review
        count -= 1
        tries = 0


def _check(lengths: tuple[int, int]) -> None:
    if not 4 <= lengths[0] <= lengths[1]:
        raise ValueError(f"lengths must be (shortest, longest) with 4 ≤ shortest ≤ longest, not {lengths}")
