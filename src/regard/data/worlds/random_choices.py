"""Seeded random choices of the grammar, and Chinese words with the English words that they translate."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple, TypeVar

Thing = TypeVar("Thing")


class Token:
    """One English word of one sentence, compared by identity: two occurrences of "the" are two tokens."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Made(NamedTuple):
    """One Chinese word and the English tokens that it translates: surely, or possibly (function words)."""

    text: str
    sure: tuple[Token, ...] = ()
    possible: tuple[Token, ...] = ()


class Dice:
    """The random choices of one sentence: a generator, and the amount of optional material (`rich`, 0 to 1)."""

    def __init__(self, random: Random, rich: float) -> None:
        self.random = random
        self.rich = rich
        self.used: set[object] = set()

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < probability

    def maybe(self, probability: float) -> bool:
        """Return True with this probability times `rich`."""
        return self.random.random() < probability * self.rich

    def pick(self, things: Sequence[Thing]) -> Thing:
        """Return one of the items, all equally likely."""
        return things[int(self.random.random() * len(things))]

    def fresh(self, things: Sequence[Thing]) -> Thing:
        """Return one of the items that this sentence has not used yet, if there is one."""
        choice = self.pick(things)
        for _ in range(4):
            if choice not in self.used:
                break
            choice = self.pick(things)
        self.used.add(choice)
        return choice

    def weigh(self, weights: Mapping[Thing, float]) -> Thing:
        """Return one key of the mapping, with probability proportional to its weight."""
        left = self.random.random() * sum(weights.values())
        for thing, weight in weights.items():
            left -= weight
            if left < 0:
                return thing
        return next(reversed(list(weights)))


def tokens(text: str) -> list[Token]:
    """Return each English word as a token."""
    return [Token(word) for word in text.split()]
