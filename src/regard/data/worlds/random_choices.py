"""Seeded random choices, the parts of a generated data set, and Chinese words with the English words they translate."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, NamedTuple, TypeVar

Thing = TypeVar("Thing")
Within = tuple[int, int]  # the smallest and the largest size of an example


@dataclass(frozen=True, slots=True)
class Splits(Generic[Thing]):
    """Examples to train on, to validate with and to test with; those of `longer` are larger than any of the others.

    No example is in two of them.
    """

    train: tuple[Thing, ...]
    valid: tuple[Thing, ...]
    test: tuple[Thing, ...]
    longer: tuple[Thing, ...] = ()


def split(
    part: Callable[[str, int, Within], Iterable[Thing]], counts: Sequence[int], within: Within, beyond: Within
) -> Splits[Thing]:
    """Return the parts that `part(name, count, size)` generates; training comes last and avoids all others."""
    train, valid, test, longer = counts
    tested, validated = tuple(part("test", test, within)), tuple(part("valid", valid, within))
    farther = tuple(part("longer", longer, beyond))
    return Splits(tuple(part("train", train, within)), validated, tested, farther)


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
