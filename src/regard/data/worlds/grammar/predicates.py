"""Predicates: verbs with their complements, in English order and in Chinese order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from regard.data.worlds.grammar.adverbials import CITIES, SEATS, SURFACES, Setting, goal, place, ride, span
from regard.data.worlds.grammar.lexicon import (
    GIVING,
    GOING,
    HAVING,
    INTRANSITIVE,
    LASTING,
    LIVING,
    PUTTING,
    SENDING,
    STAYING,
    TRANSITIVE,
    Verb,
)
from regard.data.worlds.grammar.noun_phrases import BARE_PLURAL, DEFINITE, INDEFINITE, OBJECT, Nominal, phrase
from regard.data.worlds.random_choices import Dice, Made, Token

Phrases = Callable[..., Nominal]


@dataclass(slots=True)
class Predicate:
    """The complements of a verb: the words after the English verb, and the parts of the Chinese predicate.

    In Chinese, "sends a letter to Mary" is 给 玛丽 寄 一 封 信: `pre` is 给 玛丽, `verb` is 寄, `tail` is 一 封 信.
    `settled` means that a place belongs to the verb (坐 在 椅子 上, "sits on the chair"), so that 了 is omitted.
    """

    english: list[Token]
    tail: list[Made]
    verb: str
    joint: list[Made] = field(default_factory=list)  # the Chinese preposition 在 between a verb and the place after it
    pre: list[Made] = field(default_factory=list)
    settled: bool = False
    placed: bool = False  # whether the predicate already contains a place, so that no other place is added
    # whether the object ends in a clause, so that adverbials after it would seem to belong to this clause
    heavy: bool = False
    short: bool = False  # whether no adverbials may be added to the predicate


@dataclass(frozen=True, slots=True)
class Frame:
    """A verb with the function that generates its complements (objects, places) at random.

    `tenses` lists the tenses in which the verb may be used; "" means all tenses that its aspect allows.
    """

    verb: Verb
    complete: Callable[[Dice, bool, Phrases], Predicate]
    tenses: str = ""


def _given(indefinite: bool) -> Mapping[str, float]:
    """Return the sampling weights of an object's determiners; "a" and "some" are excluded unless `indefinite` is true.

    After a negation an indefinite object such as 没有 吃 一 个 苹果 ("did not eat an apple") would sound odd.
    """
    return OBJECT if indefinite else DEFINITE


def frame(dice: Dice) -> Frame:
    """Return a random verb as a `Frame`; frequent sentence patterns are more likely."""
    return _PATTERNS[dice.weigh(_WEIGHTS)](dice)


def transitive(verb: Verb) -> Frame:
    """Return the `Frame` of a verb with one object, such as "chases the cat", 追逐 猫."""

    def complete(dice: Dice, indefinite: bool, phrases: Phrases) -> Predicate:
        kind = dice.pick(tuple(verb.chinese))
        return with_object(verb, phrases(dice, (kind,), _given(indefinite)), kind)

    return Frame(verb, complete)


def with_object(verb: Verb, thing: Nominal, kind: str) -> Predicate:
    """Return a predicate with the Chinese verb that the kind of its object requires.

    For example, "wear" is 穿 with a coat and 戴 with a hat.
    """
    return Predicate(thing.english, thing.words(), verb.chinese[kind], heavy=thing.heavy)


def _simple(dice: Dice) -> Frame:
    return transitive(dice.fresh(TRANSITIVE))


def _alone(dice: Dice) -> Frame:
    """Return the `Frame` of a verb without object, such as "sleeps", 睡觉, or "worked for two hours"."""
    verb = dice.fresh(INTRANSITIVE)
    lasting = verb.base in LASTING and dice.maybe(0.4)

    def complete(dice: Dice, indefinite: bool, phrases: Phrases) -> Predicate:
        length = span(dice) if lasting and indefinite else Setting([], [])
        return Predicate(length.english, length.chinese, verb.chinese[""], short=bool(length.english))

    return Frame(verb, complete, "past future" if lasting else "")


def _give(dice: Dice) -> Frame:
    """Return the `Frame` of a verb with two objects.

    For example, "gives Mary a book" or "gives a book to Mary", both 给 玛丽 一 本 书.
    """
    verb = dice.pick(GIVING)

    def complete(dice: Dice, indefinite: bool, phrases: Phrases) -> Predicate:
        kind = dice.pick(tuple(verb.chinese))
        person = phrase(dice, ("person",), DEFINITE, plain=True)
        if dice.chance(0.5):
            thing = phrases(dice, (kind,), _given(indefinite))
            english = [*person.english, *thing.english]
        else:
            thing = phrase(dice, (kind,), _given(indefinite))
            to = Token("to")
            person.chinese[0] = person.chinese[0]._replace(possible=(*person.chinese[0].possible, to))
            english = [*thing.english, to, *person.english]
        return Predicate(english, [*person.words(), *thing.words()], verb.chinese[kind], heavy=thing.heavy)

    return Frame(verb, complete)


def _send(dice: Dice) -> Frame:
    """Return the `Frame` of a verb with a recipient, such as "sends a letter to Mary", 给 玛丽 寄 一 封 信."""
    verb = dice.pick(SENDING)

    def complete(dice: Dice, indefinite: bool, phrases: Phrases) -> Predicate:
        kind = dice.pick(tuple(verb.chinese))
        person, thing = phrase(dice, ("person",), DEFINITE, plain=True), phrase(dice, (kind,), _given(indefinite))
        to = Token("to")
        pre = [Made("给", (to,)), *person.words()]
        return Predicate([*thing.english, to, *person.english], thing.words(), verb.chinese[kind], pre=pre)

    return Frame(verb, complete)


def _put(dice: Dice) -> Frame:
    """Return the `Frame` of a verb of placing, such as "puts the book on the table", 把 书 放 在 桌子 上."""
    verb = dice.pick(PUTTING)

    def complete(dice: Dice, indefinite: bool, phrases: Phrases) -> Predicate:
        kind = dice.pick(tuple(verb.chinese))
        thing = phrase(dice, (kind,), DEFINITE)
        where = place(dice, SURFACES)
        pre = [Made("把", (), tuple(thing.english)), *thing.words()]
        english = [*thing.english, *where.english]
        word = verb.chinese[kind]
        return Predicate(english, where.chinese[1:], word, where.chinese[:1], pre, placed=True, short=True)

    return Frame(verb, complete, "past perfect future can should must want plan going habit")


def _stay(dice: Dice) -> Frame:
    """Return the `Frame` of a verb of posture, such as "sits on the chair", 坐 在 椅子 上."""
    verb = dice.pick(STAYING)

    def complete(dice: Dice, indefinite: bool, phrases: Phrases) -> Predicate:
        where = place(dice, SEATS)
        word = verb.chinese[""]
        return Predicate(where.english, where.chinese[1:], word, where.chinese[:1], settled=True, placed=True)

    return Frame(verb, complete, "past progressive habit")


def _go(dice: Dice) -> Frame:
    """Return the `Frame` of a verb of motion, such as "goes to the park by bus", 坐 公共汽车 去 公园."""
    verb = dice.pick(GOING)

    def complete(dice: Dice, indefinite: bool, phrases: Phrases) -> Predicate:
        where = goal(dice)
        means = ride(dice) if dice.maybe(0.4) else Setting([], [])
        english = [*where.english, *means.english]
        return Predicate(english, where.chinese, verb.chinese[""], pre=means.chinese, placed=True)

    # The progressive of "go" is excluded, because "is going to the park" could also mean a plan.
    return Frame(verb, complete, "present past perfect future can should must want plan habit never")


def _live(dice: Dice) -> Frame:
    """Return the `Frame` of the verb "live", such as "lives in Beijing", 住 在 北京."""

    def complete(dice: Dice, indefinite: bool, phrases: Phrases) -> Predicate:
        where = place(dice, CITIES)
        settled = Predicate(where.english, where.chinese[1:], "住", where.chinese[:1], settled=True)
        return replace(settled, placed=True, short=True)

    return Frame(LIVING, complete, "present")


def _have(dice: Dice) -> Frame:
    """Return the `Frame` of the verb "have", such as "has a cat", 有 一 只 猫, or "does not have", 没有."""

    def complete(dice: Dice, indefinite: bool, phrases: Phrases) -> Predicate:
        thing = phrases(dice, ("animal", "thing", "vehicle", "clothes"), INDEFINITE if indefinite else BARE_PLURAL)
        return Predicate(thing.english, thing.words(), "有", placed=True, heavy=thing.heavy, short=True)

    return Frame(HAVING, complete, "present")


_PATTERNS = {
    "simple": _simple,
    "alone": _alone,
    "give": _give,
    "send": _send,
    "put": _put,
    "stay": _stay,
    "go": _go,
    "live": _live,
    "have": _have,
}
_WEIGHTS = {
    **{"simple": 10.0, "alone": 2.5, "give": 1.0, "send": 0.7, "put": 0.8, "stay": 0.7, "go": 1.2},
    **{"live": 0.4, "have": 1.2},
}
