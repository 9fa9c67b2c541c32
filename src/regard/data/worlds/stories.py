"""The built-in data of reading: generated short stories, each with a question and the sentence that answers it.

People move between places, take, drop and give objects; other sentences state how many things are in a place. If
several sentences state the place of a person, the latest one is true. Further sentences mention the same places, people
and objects without information, so the words of an answer occur more than once in the story and a model has to find the
right occurrence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from regard.data.worlds.random_choices import Dice, Splits, Within, split
from regard.data.worlds.story_events import EVENTS, OBJECTS, PEOPLE, PLACES, Sentence, World, anything, aside

# After this number of consecutive duplicates `_distinct` raises an error: there are hardly any new stories.
_PATIENCE = 400


@dataclass(frozen=True, slots=True)
class Story:
    """A story as sentences, a question about it, the span of words that answers it, and the supporting sentences.

    `span` holds the indices of the first and the last word of the answer, counted over the words of all sentences.
    `support` holds the indices of the supporting sentences in ascending order; `answering` is the index of the sentence
    that contains the span.
    """

    sentences: tuple[tuple[str, ...], ...]
    question: tuple[str, ...]
    span: tuple[int, int]
    support: tuple[int, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words of all sentences of the story."""
        return tuple(word for sentence in self.sentences for word in sentence)

    @property
    def answer(self) -> tuple[str, ...]:
        return self.words[self.span[0] : self.span[1] + 1]

    @property
    def answering(self) -> int:
        """Return the index of the sentence that contains the answer."""
        left = self.span[0]
        for number, sentence in enumerate(self.sentences):
            if left < len(sentence):
                return number
            left -= len(sentence)
        raise ValueError(f"the answer starts at word {self.span[0]} of a story of {len(self.words)} words")

    @property
    def passage(self) -> str:
        return " ".join(map(written, self.sentences))


def example() -> Story:
    """Return a fixed example story.

    >>> story = example()
    >>> story.passage
    'Emma took the ball. Emma went to the kitchen. Bill talked about the kitchen.'
    >>> written(story.question), written(story.answer), story.answering, story.support
    ('Where is the ball?', 'the kitchen', 1, (0, 1))
    """
    lines = ("Emma took the ball .", "Emma went to the kitchen .", "Bill talked about the kitchen .")
    return Story(tuple(tuple(line.split()) for line in lines), ("Where", "is", "the", "ball", "?"), (8, 9), (0, 1))


def stories(seed: int, *, count: int, sentences: tuple[int, int] = (5, 9)) -> Iterator[Story]:
    """Return distinct stories of `sentences` sentences; the same seed gives the same stories on every machine.

    >>> [story] = stories(3, count=1, sentences=(3, 4))
    >>> story.passage
    'Nobody was afraid of the garage. Henry travelled to the kitchen. There was music in the kitchen.'
    >>> written(story.question), written(story.answer), story.answering
    ('Where is Henry?', 'the kitchen', 1)
    """
    return _distinct(Random(f"{seed} {sentences}"), count, _checked(sentences), set())


def splits(
    seed: int,
    *,
    train: int,
    valid: int,
    test: int,
    longer: int = 0,
    sentences: tuple[int, int] = (5, 9),
    beyond: tuple[int, int] = (12, 16),
) -> Splits[Story]:
    """Return training, validation and test stories of `sentences` sentences, and `longer` stories of `beyond`
    sentences.

    No story is in two splits, not even with different questions.

    >>> parts = splits(1, train=50, valid=10, test=10, longer=5)
    >>> [len(part) for part in (parts.train, parts.valid, parts.test, parts.longer)]
    [50, 10, 10, 5]
    """
    if beyond[0] <= _checked(sentences)[1]:
        raise ValueError(f"beyond must be longer than sentences, not {beyond} after {sentences}")
    seen: set[tuple[tuple[str, ...], ...]] = set()

    def part(name: str, count: int, within: Within) -> Iterator[Story]:
        return _distinct(Random(f"{seed} {name} {within}"), count, _checked(within), seen)

    return split(part, (train, valid, test, longer), sentences, beyond)


def written(words: Sequence[str]) -> str:
    """Return the words of a story or a question as text.

    >>> written(("Where", "is", "the", "ball", "?"))
    'Where is the ball?'
    """
    return " ".join(words).replace(" .", ".").replace(" ?", "?")


def _checked(sentences: tuple[int, int]) -> tuple[int, int]:
    if not 2 <= sentences[0] <= sentences[1]:
        raise ValueError(f"sentences must be (fewest, most) with 2 ≤ fewest ≤ most, not {sentences}")
    return sentences


def _distinct(
    random: Random, count: int, sentences: tuple[int, int], seen: set[tuple[tuple[str, ...], ...]]
) -> Iterator[Story]:
    """Yield stories that are not in `seen`, and add each of them to `seen`."""
    low, high = sentences
    tries = 0
    while count > 0:
        story = _random_story(Dice(random, 1.0), low + int(random.random() * (high - low + 1)))
        tries += 1
        if story is None or story.sentences in seen:
            if tries > _PATIENCE:
                raise ValueError(f"there are too few stories of {sentences} sentences: {count} missing")
            continue
        seen.add(story.sentences)
        yield story
        count -= 1
        tries = 0


def _some(dice: Dice, names: Sequence[str], count: int) -> list[str]:
    """Return `count` distinct names. `Random.sample` is not used: its choices may differ between Python versions."""
    left = list(names)
    return [left.pop(int(dice.random.random() * len(left))) for _ in range(count)]


def _random_story(dice: Dice, length: int) -> Story | None:
    """Return a story of `length` sentences with a question, or None if no question is possible.

    A sentence without information is added after the question is chosen, so that the words of the answer occur twice in
    the story.
    """
    world = World(dice, people=_some(dice, PEOPLE, 4), places=_some(dice, PLACES, 4), objects=_some(dice, OBJECTS, 2))
    for _ in range(length - 1):
        dice.weigh(EVENTS)(world)
    questions = [question for ask in _QUESTIONS for question in ask(world)]
    kinds = sorted({question.kind for question in questions})
    if not kinds:
        return None
    # The kind of question is sampled first, so that kinds with many possible questions are not more frequent.
    kind = dice.pick(kinds)
    question = dice.pick([question for question in questions if question.kind == kind])
    once = _occurrences(world.sentences, question.answer) < 2
    extra = Sentence(aside(world, question.answer if once else anything(world)))
    world.sentences.insert(int(dice.random.random() * (len(world.sentences) + 1)), extra)
    return _story(world.sentences, question)


@dataclass(frozen=True, slots=True)
class _Question:
    """A question, the words of its answer, the sentence that contains them, and all supporting sentences."""

    kind: str
    words: str
    answer: tuple[str, ...]
    sentence: Sentence
    support: tuple[Sentence, ...]


def _question(kind: str, words: str, answer: str, sentence: Sentence, *others: Sentence) -> _Question:
    return _Question(kind, words, tuple(answer.split()), sentence, (sentence, *others))


def _where_people(world: World) -> Iterator[_Question]:
    for person, visits in world.visits.items():
        place, sentence = visits[-1]
        yield _question("where a person is", f"Where is {person} ?", f"the {place}", sentence)
        for (before, visit), (after, move) in pairwise(visits):
            if sum(place == after for place, _ in visits) == 1:
                words = f"Where was {person} before the {after} ?"
                yield _question("where a person was", words, f"the {before}", visit, move)


def _where_objects(world: World) -> Iterator[_Question]:
    for thing, (person, sentence) in world.holder.items():
        place, visit = world.visits[person][-1]
        yield _question("where an object is", f"Where is the {thing} ?", f"the {place}", visit, sentence)
    for thing, (place, visit, dropped) in world.lying.items():
        yield _question("where an object is", f"Where is the {thing} ?", f"the {place}", visit, dropped)


def _who_has(world: World) -> Iterator[_Question]:
    for thing, (person, sentence) in world.holder.items():
        yield _question("who has it", f"Who has the {thing} ?", person, sentence)
        if len(world.held(person)) == 1:
            yield _question("what is carried", f"What is {person} carrying ?", f"the {thing}", sentence)


def _who_gave(world: World) -> Iterator[_Question]:
    for (thing, person), (giver, sentence) in world.givers.items():
        yield _question("who gave it", f"Who gave the {thing} to {person} ?", giver, sentence)


def _how_many(world: World) -> Iterator[_Question]:
    for (things, place), (number, sentence) in world.counts.items():
        yield _question("how many", f"How many {things} are in the {place} ?", number, sentence)


_QUESTIONS = (_where_people, _where_objects, _who_has, _who_gave, _how_many)


def _occurrences(sentences: Sequence[Sentence], answer: tuple[str, ...]) -> int:
    return sum(_find(sentence.words, answer) is not None for sentence in sentences)


def _find(words: Sequence[str], part: tuple[str, ...]) -> int | None:
    """Return the start of the last occurrence of `part` in a sentence, or None. In "Anna gave the ball to Bill" the
    last name is the receiver."""
    starts = [start for start in range(len(words) - len(part) + 1) if tuple(words[start : start + len(part)]) == part]
    return starts[-1] if starts else None


def _story(sentences: Sequence[Sentence], question: _Question) -> Story:
    start = _find(question.sentence.words, question.answer)
    assert start is not None
    order = {id(sentence): number for number, sentence in enumerate(sentences)}
    start += sum(len(sentence.words) for sentence in sentences[: order[id(question.sentence)]])
    return Story(
        tuple(sentence.words for sentence in sentences),
        tuple(question.words.split()),
        (start, start + len(question.answer) - 1),
        tuple(sorted(order[id(sentence)] for sentence in question.support)),
    )
