"""The events of a story: people move, take, drop and give, things are counted, and some sentences are distractors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from regard.data.worlds.random_choices import Dice

PEOPLE = ("Anna", "Bill", "Carla", "David", "Emma", "Fred", "Grace", "Henry", "Julie", "Omar")
PLACES = (
    *("kitchen", "garden", "office", "bedroom", "hallway", "bathroom", "park", "school", "cinema", "library"),
    *("garage", "museum"),
)
OBJECTS = ("ball", "apple", "book", "lamp", "cup", "key", "hat", "box", "milk", "phone")
COUNTED = ("chairs", "boxes", "birds")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")

_MOVES = ("went to", "moved to", "walked to", "ran to", "travelled to")
_TAKES = ("took", "picked up", "grabbed", "got")
_DROPS = ("dropped", "put down", "left")
_GIVES = ("gave", "handed", "passed")
_MOODS = ("was tired", "was hungry", "was happy", "sang a song", "made a call", "was late")
_WEATHER = ("It was quiet in", "It was cold in", "Nobody was afraid of", "There was music in")


class Sentence:
    """One sentence of a story, compared by identity: two sentences with the same words are not equal."""

    __slots__ = ("words",)

    def __init__(self, *parts: str) -> None:
        self.words = tuple(word for part in (*parts, ".") for word in part.split())


@dataclass
class World:
    """The facts that the sentences of a story state so far, and the sentence that states each fact."""

    dice: Dice
    people: Sequence[str]
    places: Sequence[str]
    objects: Sequence[str]
    sentences: list[Sentence] = field(default_factory=list)
    # for each person: the places visited, in order, each with the sentence that states the visit
    visits: dict[str, list[tuple[str, Sentence]]] = field(default_factory=dict)
    holder: dict[str, tuple[str, Sentence]] = field(default_factory=dict)  # person who holds an object
    # For each object that was put down: the place, the sentence that states who came there, and the one that states
    # that the object was put down.
    lying: dict[str, tuple[str, Sentence, Sentence]] = field(default_factory=dict)
    # how many things of one kind (such as books) a place has
    counts: dict[tuple[str, str], tuple[str, Sentence]] = field(default_factory=dict)
    givers: dict[tuple[str, str], tuple[str, Sentence]] = field(default_factory=dict)  # who gave an object to a person

    def tell(self, *parts: str) -> Sentence:
        """Append a sentence to the story and return it."""
        self.sentences.append(Sentence(*parts))
        return self.sentences[-1]

    def place(self, person: str) -> str | None:
        """Return the place of a person, or None if the story has not stated it."""
        visits = self.visits.get(person)
        return visits[-1][0] if visits else None

    def held(self, person: str) -> list[str]:
        """Return the objects that a person holds."""
        return [thing for thing, (holder, _) in self.holder.items() if holder == person]


# The functions below are the events of a story. Each adds one sentence to the story; if its event is impossible, a
# person moves instead.


def _move(world: World) -> None:
    person = world.dice.pick(world.people)
    place = world.dice.pick([place for place in world.places if place != world.place(person)])
    sentence = world.tell(person, world.dice.pick(_MOVES), "the", place)
    world.visits.setdefault(person, []).append((place, sentence))


def _take(world: World) -> None:
    pairs = [
        (person, thing)
        for person in world.visits
        for thing in world.objects
        if thing not in world.holder and world.lying.get(thing, (world.place(person),))[0] == world.place(person)
    ]
    if not pairs:
        return _move(world)
    person, thing = world.dice.pick(pairs)
    world.lying.pop(thing, None)
    world.holder[thing] = person, world.tell(person, world.dice.pick(_TAKES), "the", thing)


def _drop(world: World) -> None:
    if not world.holder:
        return _move(world)
    thing = world.dice.pick(list(world.holder))
    person, _ = world.holder.pop(thing)
    place, visit = world.visits[person][-1]
    world.lying[thing] = place, visit, world.tell(person, world.dice.pick(_DROPS), "the", thing)


def _give(world: World) -> None:
    chances = [
        (thing, giver, person)
        for thing, (giver, _) in world.holder.items()
        for person in world.visits
        if person != giver and world.place(person) == world.place(giver)
    ]
    if not chances:
        return _move(world)
    thing, giver, person = world.dice.pick(chances)
    sentence = world.tell(giver, world.dice.pick(_GIVES), "the", thing, "to", person)
    world.holder[thing] = person, sentence
    world.givers[thing, person] = giver, sentence


def _count(world: World) -> None:
    place, things = world.dice.pick(world.places), world.dice.pick(COUNTED)
    number = world.dice.pick(NUMBERS)
    again = "now" if (things, place) in world.counts else ""
    world.counts[things, place] = number, world.tell("There are", again, number, things, "in the", place)


def _talk(world: World) -> None:
    world.tell(aside(world, anything(world)))


EVENTS: dict[Callable[[World], None], float] = {
    _move: 5.0,
    _take: 3.0,
    _drop: 1.0,
    _give: 2.0,
    _count: 1.5,
    _talk: 2.0,
}


def anything(world: World) -> tuple[str, ...]:
    """Return the words of a random person, place or object of this story, or of a random number."""
    nouns = (f"the {noun}" for noun in (*world.places, *world.objects))
    return tuple(world.dice.pick([*world.people, *nouns, world.dice.pick(NUMBERS)]).split())


def aside(world: World, about: tuple[str, ...]) -> str:
    """Return a sentence that contains the words `about` and answers no question."""
    pick, name = world.dice.pick, " ".join(about)
    if name in NUMBERS:
        return f"{pick(world.people)} waited {name} hours"
    if name in world.people:
        return f"{name} {pick(_MOODS)}"
    if about[-1] in PLACES and world.dice.chance(0.5):
        return f"{pick(_WEATHER)} {name}"
    return f"{pick(world.people)} talked about {name}"
