"""Noun phrases in English and Chinese. In Chinese, all modifiers precede the noun."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from regard.data.worlds.grammar.inflection import article
from regard.data.worlds.grammar.lexicon import (
    ADJECTIVES,
    BARE,
    HOLDERS,
    MASS,
    NAMES,
    NOUNS,
    NUMBERS,
    PRONOUNS,
    RELATED,
    Adjective,
    Noun,
)
from regard.data.worlds.random_choices import Dice, Made, Token, tokens

_SUITED = {kind: tuple(word for word in ADJECTIVES if kind in word.kinds and not word.late) for kind in NOUNS}
_SIZES = ("big", "small", "old", "new")


@dataclass(slots=True)
class Nominal:
    """A noun phrase in English and Chinese.

    `agreement` is the form of "be" that the phrase requires as a subject (am, is, are). `lead` are the Chinese
    determiner, number and measure word (一 只 in 一 只 猫, "a cat"); `chinese` are the other Chinese words.
    """

    english: list[Token]
    chinese: list[Made]
    agreement: str
    kind: str
    lead: list[Made] = field(default_factory=list)
    open: bool = False  # whether a relative clause may follow the noun
    # whether the phrase ends in a clause, so that adverbials after the phrase would seem to belong to this clause
    heavy: bool = False

    def words(self) -> list[Made]:
        """Return the whole noun phrase in Chinese."""
        return self.lead + self.chinese


def name(dice: Dice) -> Nominal:
    """Return a person's name, such as "Tom", 汤姆, or "Li Ming", 李明."""
    english = dice.fresh(_NAMES)
    words = tokens(english)
    return Nominal(words, [Made(NAMES[english], tuple(words))], "is", "person")


def pronoun(dice: Dice, *, subject: bool) -> Nominal:
    """Return a personal pronoun, such as "he" or "him", 他."""
    nominative, accusative, _, chinese, agreement = dice.fresh(PRONOUNS)
    token = Token(nominative if subject else accusative)
    return Nominal([token], [Made(chinese, (token,))], agreement, "person")


def bare(kind: str, dice: Dice) -> Nominal:
    """Return a noun with a fixed article or none, such as "English", "football", "the piano"."""
    english = dice.pick(tuple(BARE[kind]))
    words = tokens(english)
    return Nominal(words, [Made(BARE[kind][english], (words[-1],), tuple(words[:-1]))], "is", kind)


def mass(kind: str, dice: Dice, *, definite: bool) -> Nominal:
    """Return a phrase with a mass noun, such as "the tea", 茶, "some tea", 一些 茶, or "two cups of tea", 两 杯 茶."""
    english = dice.pick(tuple(MASS[kind]))
    noun = Token(english)
    agreement = "are" if english.endswith("s") else "is"
    if definite or dice.chance(0.4):
        the = Token("the")
        return Nominal([the, noun], [Made(MASS[kind][english], (noun,), (the,))], agreement, kind)
    core = [Made(MASS[kind][english], (noun,))]
    if dice.chance(0.3):
        some = Token("some")
        return Nominal([some, noun], core, agreement, kind, [Made("一些", (some,))])
    one, many, measure = dice.pick(HOLDERS[kind])
    count, chinese = dice.pick(_COUNTS)
    number, holder, of = Token(count), Token(one if count == "a" else many), Token("of")
    lead = [Made(chinese, (number,)), Made(measure, (holder,), (of,))]
    return Nominal([number, holder, of, noun], core, "is" if count == "a" else "are", kind, lead)


def common(dice: Dice, kind: str, determiners: Mapping[str, float], *, plain: bool = False) -> Nominal:
    """Return a common noun with a determiner and adjectives, such as "a big red car", 一 辆 红色 的 大 汽车.

    `determiners` are the weights with which a determiner is chosen; with `plain` there are no adjectives.
    """
    noun = dice.fresh(NOUNS[kind])
    determiner = "owned" if kind == "kin" else dice.weigh(determiners)
    if determiner == "owned" and kind == "person" and noun.singular not in RELATED:
        determiner = "the"
    plural = determiner in _PLURAL or (determiner in ("the", "owned") and kind != "kin" and dice.chance(0.25))
    head = Token(noun.plural if plural else noun.singular)
    english, described = list[Token](), list[Made]()
    if not plain and kind != "kin":
        english, described = _adjectives(dice, noun, head)
    before, lead = _determiner(dice, determiner, noun, head, (english or [head])[0].text)
    the = tuple(before) if determiner == "the" else ()
    many = determiner == "the" and plural and kind == "person"
    chinese = [*described, Made(f"{noun.chinese}们" if many else noun.chinese, (head,), the)]
    return Nominal(
        english=[*before, *english, head],
        chinese=chinese,
        agreement="are" if plural else "is",
        kind="person" if kind == "kin" else kind,
        lead=lead,
        open=determiner in ("the", "a") and not plain,
    )


def phrase(
    dice: Dice, kinds: Sequence[str], determiners: Mapping[str, float], *, subject: bool = False, plain: bool = False
) -> Nominal:
    """Return a noun phrase whose noun has one of these kinds; it may join two nouns, "Tom and Mary", 汤姆 和 玛丽.

    `subject` selects the subject form of pronouns. A `plain` phrase has no adjectives and joins no nouns.
    """
    kind = dice.pick(kinds)
    first = _single(dice, kind, determiners, subject=subject, plain=plain)
    if plain or kind not in ("person", "animal", "food", "text", "thing") or not dice.maybe(0.15):
        return first
    second = _single(dice, kind, determiners, subject=subject, plain=True)
    if {first.english[0].text, second.english[0].text} & {
        "I",
        "me",
    }:  # "I" is not joined: English puts it last ("Tom and I"), Chinese first (我 和 汤姆)
        return first
    joint = Token("and")
    chinese = [*first.words(), Made("和", (joint,)), *second.words()]
    return Nominal([*first.english, joint, *second.english], chinese, "are", kind)


def _single(dice: Dice, kind: str, determiners: Mapping[str, float], *, subject: bool, plain: bool) -> Nominal:
    if kind in BARE:
        return bare(kind, dice)
    if kind in MASS:
        return mass(kind, dice, definite=determiners is DEFINITE)
    if kind != "person":
        return common(dice, kind, determiners, plain=plain)
    sort = dice.weigh(_PEOPLE)
    if sort == "name":
        return name(dice)
    if sort == "pronoun":
        return pronoun(dice, subject=subject)
    return common(dice, sort, determiners, plain=plain)


def _adjectives(dice: Dice, noun: Noun, head: Token) -> tuple[list[Token], list[Made]]:
    """Return no, one or two adjectives for a noun, such as "big red", 红色 的 大.

    In Chinese, adjectives with 的 are farther from the noun than those without.
    """
    suited = _SUITED[noun.kind]
    if not suited or not dice.maybe(0.4):
        return [], []
    first = dice.pick(suited)
    colours = [word for word in suited if word.colour]
    if first.english in _SIZES and colours and dice.chance(0.3):
        near, nearest = _adjective(first, noun, head, dice, plain=True)
        far, farthest = _adjective(dice.pick(colours), noun, head, dice, plain=True)
        return near + far, [*farthest, Made("的", (), (*far, head)), *nearest]
    return _adjective(first, noun, head, dice, plain=first.colour)


def _adjective(word: Adjective, noun: Noun, head: Token, dice: Dice, *, plain: bool) -> tuple[list[Token], list[Made]]:
    token = Token(word.english)
    chinese = Made(word.word(noun.kind), (token,))
    link = Made("的", (), (token, head))
    if plain or not dice.maybe(0.2):
        return [token], [chinese] if word.close else [chinese, link]
    very = Token("very")
    return [very, token], [Made("非常", (very,)), chinese, link]


def _determiner(dice: Dice, sort: str, noun: Noun, head: Token, following: str) -> tuple[list[Token], list[Made]]:
    """Return the English and Chinese words of a determiner, number or possessive, which precede a noun's adjectives.

    In Chinese, a number, 几, 这 ("this") and 那 ("that") require the noun's measure word.
    """
    if sort == "none":
        return [], []
    if sort == "owned":
        return _owner(dice, noun, head)
    if sort in ("some", "many", "these", "those"):
        token = Token(sort)
        return [token], [Made(_QUANTITIES[sort], (token,))]
    if sort == "few":
        a, few = Token("a"), Token("few")
        return [a, few], [Made("几", (few,), (a,)), Made(noun.measure, (), (few, head))]
    if sort == "the":
        return [Token("the")], []
    text = article(following) if sort == "a" else dice.pick(_NUMBERS) if sort == "number" else sort
    token = Token(text)
    chinese = {"this": "这", "that": "那", "a": "一", "an": "一"}.get(text) or NUMBERS[text]
    return [token], [Made(chinese, (token,)), Made(noun.measure, (), (token, head))]


def _owner(dice: Dice, noun: Noun, head: Token) -> tuple[list[Token], list[Made]]:
    """Return a possessive for a noun, such as "my" (我 的), or "the teacher 's" (老师 的).

    Before a noun of kinship Chinese omits 的: "my mother" is 我 妈妈.
    """
    if dice.chance(0.5):
        _, _, possessive, chinese, _ = dice.pick(PRONOUNS)
        token = Token(possessive)
        link = [] if noun.kind == "kin" else [Made("的", (), (token, head))]
        return [token], [Made(chinese, (token,)), *link]
    s = Token("'s")
    of = Made("的", (s,), (head,))
    if dice.chance(0.6):
        owner = name(dice)
        return [*owner.english, s], [*owner.chinese, of]
    the = Token("the")
    person = dice.fresh(NOUNS["person"])
    token = Token(person.singular)
    return [the, token, s], [Made(person.chinese, (token,), (the,)), of]


_NAMES = tuple(NAMES)
_NUMBERS = tuple(NUMBERS)
_COUNTS = (("a", "一"), *NUMBERS.items())
_PEOPLE = {"name": 5.0, "pronoun": 3.0, "person": 4.0, "kin": 1.0}
_PLURAL = ("none", "some", "many", "these", "those", "few", "number")
_QUANTITIES = {"some": "一些", "many": "很多", "these": "这些", "those": "那些"}
DEFINITE = {"the": 5.0, "this": 1.0, "that": 1.0, "owned": 2.0, "none": 1.0, "these": 0.5, "those": 0.5}
SUBJECT = {**DEFINITE, "a": 0.7, "number": 1.0, "some": 0.5, "many": 0.5, "few": 0.3}
OBJECT = {**DEFINITE, "a": 4.0, "number": 2.0, "some": 0.7, "many": 0.7, "few": 0.5}
INDEFINITE = {"a": 4.0, "number": 3.0, "some": 1.0, "many": 1.0}
ONE = {"a": 1.0}
BARE_PLURAL = {"none": 1.0}
