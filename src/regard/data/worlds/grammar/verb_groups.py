"""Generates verb groups: tense, aspect and negation, by verb forms in English and by particles in Chinese."""

from dataclasses import dataclass, field
from functools import cache

from regard.data.worlds.grammar.adverbials import FREQUENCIES
from regard.data.worlds.grammar.lexicon import Verb
from regard.data.worlds.random_choices import Dice, Made, Token

# The relative frequency of each tense in the generated sentences, for each aspect of a verb.
_TENSES = {
    "action": {
        **{"present": 5.0, "past": 6.0, "progressive": 4.0, "perfect": 2.0, "future": 3.0, "habit": 1.5, "never": 0.7},
        **{"can": 1.0, "should": 0.7, "must": 0.7, "want": 1.2, "plan": 0.7, "going": 0.7},
    },
    "event": {"past": 6.0, "perfect": 2.0, "future": 1.5, "can": 0.7},
    "state": {"present": 6.0, "habit": 0.7},
    "saying": {"present": 3.0, "past": 2.0},
    "asking": {"present": 1.5, "past": 2.0},
}
# Tenses that express an intention or a duty; only people are their subjects.
_HUMAN = ("should", "must", "want", "plan", "going")
# The tenses in which questions (_ASKED) and negations (_DENIED) are generated. Habits are excluded, because the Chinese
# translation of "does not always" is ambiguous.
_ASKED = frozenset(("present", "past", "progressive", "perfect", "future", "can", "should", "want"))
_DENIED = _ASKED | {"must", "plan", "going"}

# The auxiliary of each tense in English and in Chinese.
_AUXILIARIES = {"future": ("will", "会"), "can": ("can", "能"), "should": ("should", "应该"), "must": ("must", "必须")}
_TO = {"want": ("want", "wants", "想"), "plan": ("plan", "plans", "计划")}


@dataclass(frozen=True, slots=True)
class Tense:
    """The tense of a clause's verb, and whether the clause is negated or a question."""

    name: str
    negative: bool = False
    question: bool = False

    @property
    def indefinite(self) -> bool:
        """Return whether the verb's object may be indefinite (一 个); it is never indefinite after a negation."""
        return not self.negative and self.name != "never"

    @property
    def when(self) -> str | None:
        """Return the kind of time adverbials that agree with the tense, a key of `adverbials.TIMES`, or None."""
        return _WHEN.get(self.name)


@dataclass(slots=True)
class Group:
    """The English words of a verb with its auxiliaries and negation, and the Chinese words before and after the verb.

    In an English question the subject is between `auxiliary` and `english`. `main` is the main verb. In the
    progressive, `ongoing` is the auxiliary that the Chinese particle 在 translates.
    """

    auxiliary: list[Token]
    english: list[Token]
    main: Token
    before: list[Made] = field(default_factory=list)
    after: list[Made] = field(default_factory=list)
    ongoing: Token | None = None


def tense(dice: Dice, verb: Verb, kind: str, *, question: bool = False, allowed: str = "", deny: float = 0.2) -> Tense:
    """Return a random tense that suits the verb and a subject of this kind; it is negated with probability `deny`.

    `allowed` lists the tenses to choose from; "" allows all.
    """
    chosen = dice.weigh(_suited(verb.aspect, allowed, kind == "person", question))
    return Tense(chosen, chosen in _DENIED and dice.chance(deny), question)


@cache
def _suited(aspect: str, allowed: str, person: bool, question: bool) -> dict[str, float]:
    return {
        name: weight
        for name, weight in _TENSES[aspect].items()
        if (not allowed or name in allowed.split())
        and (person or name not in _HUMAN)
        and (not question or name in _ASKED)
    }


def can_tell(verb: Verb, allowed: str, *, within: str = "") -> bool:
    """Return whether one of the tenses in `allowed` (and in `within`, if given) suits the verb with any subject."""
    names = set(allowed.split()) & (set(within.split()) if within else set(_TENSES[verb.aspect]))
    return bool(names & set(_TENSES[verb.aspect]) - set(_HUMAN))


def conjugate(dice: Dice, verb: Verb, agreement: str, form: Tense) -> Group:
    """Return the verb group in this tense; `agreement` is the form of "be" (am, is, are) that the subject requires."""
    if form.name in ("present", "past"):
        return _simple(verb, agreement, form)
    if form.name in ("habit", "never"):
        return _adverb(dice, verb, agreement, form)
    if form.name in _AUXILIARIES:
        return _modal(verb, form)
    if form.name in _TO:
        return _wish(verb, agreement, form)
    return _compound(verb, agreement, form)


def present(verb: Verb, agreement: str) -> str:
    """Return the present form of a verb that agrees with the subject, such as "chase" or "chases"."""
    return verb.third if agreement == "is" else verb.base


def _simple(verb: Verb, agreement: str, form: Tense) -> Group:
    past = form.name == "past"
    if not form.negative and not form.question:
        # "They read" could be present or past. For verbs whose past equals the base form, the plural present is not
        # generated: such a sentence is in the past.
        past = past or (verb.base == verb.past and agreement != "is")
        main = Token(verb.past if past else present(verb, agreement))
        return Group([], [main], main, after=_ended(verb, main) if past else [])
    auxiliary = Token("did" if past else "does" if agreement == "is" else "do")
    main = Token(verb.base)
    if not form.negative:
        return Group([auxiliary], [main], main, after=_ended(verb, main, auxiliary) if past else [])
    negation = Token("not")
    word = Made("没有", (auxiliary, negation)) if past else Made("不", (negation,), (auxiliary,))
    return Group([auxiliary], [negation, main], main, before=[word])


def _ended(verb: Verb, main: Token, *auxiliary: Token) -> list[Made]:
    """Return the Chinese particle 了 of the past; nothing for verbs of speech, which have no 了 (他 说, "he said")."""
    return [] if verb.aspect in ("saying", "asking") else [Made("了", (), (main, *auxiliary))]


def _adverb(dice: Dice, verb: Verb, agreement: str, form: Tense) -> Group:
    """Return the verb group of a habit, such as "often chases", 经常 追逐, or "never chases", 从来 不 追逐."""
    main = Token(present(verb, agreement))
    adverb = Token("never" if form.name == "never" else dice.pick(tuple(FREQUENCIES)))
    words = ("从来", "不") if form.name == "never" else (FREQUENCIES[adverb.text],)
    return Group([], [adverb, main], main, before=[Made(word, (adverb,)) for word in words])


def _modal(verb: Verb, form: Tense) -> Group:
    english, chinese = _AUXILIARIES[form.name]
    auxiliary, main = Token(english), Token(verb.base)
    if not form.negative:
        return Group([auxiliary], [main], main, before=[Made(chinese, (auxiliary,))])
    negation = Token("not")
    may = "可以" if form.name == "must" else chinese  # "must not" is translated as 不 可以
    return Group([auxiliary], [negation, main], main, before=[Made("不", (negation,)), Made(may, (auxiliary,))])


def _wish(verb: Verb, agreement: str, form: Tense) -> Group:
    """Return the verb group of an intention, such as "wants to chase", 想 追逐."""
    base, third, chinese = _TO[form.name]
    to, main = Token("to"), Token(verb.base)
    if not form.negative and not form.question:
        wish = Token(third if agreement == "is" else base)
        return Group([], [wish, to, main], main, before=[Made(chinese, (wish,), (to,))])
    auxiliary, wish = Token("does" if agreement == "is" else "do"), Token(base)
    wished = Made(chinese, (wish,), (to,))
    if not form.negative:
        return Group([auxiliary], [wish, to, main], main, before=[wished])
    negation = Token("not")
    return Group([auxiliary], [negation, wish, to, main], main, before=[Made("不", (negation,), (auxiliary,)), wished])


def _compound(verb: Verb, agreement: str, form: Tense) -> Group:
    """Return the verb group of a compound tense.

    Examples: "is chasing", 在 追逐; "has chased", 已经 追逐 了; "is going to chase", 打算 追逐.
    """
    negation = [Token("not")] if form.negative else []
    if form.name == "perfect":
        auxiliary, main = Token("has" if agreement == "is" else "have"), Token(verb.participle)
        if negation:
            before = [Made("还", (auxiliary,), tuple(negation)), Made("没有", tuple(negation), (auxiliary,))]
            return Group([auxiliary], [*negation, main], main, before=before)
        after = [Made("了", (), (auxiliary, main))]
        return Group([auxiliary], [main], main, before=[Made("已经", (auxiliary,))], after=after)
    if form.name == "going":
        auxiliary, going, to, main = Token(agreement), Token("going"), Token("to"), Token(verb.base)
        denied = [Made("不", tuple(negation))] if negation else []
        before = [*denied, Made("打算", (going,), (auxiliary, to))]
        return Group([auxiliary], [*negation, going, to, main], main, before=before)
    past = form.name == "was"
    auxiliary, main = Token(("were" if agreement == "are" else "was") if past else agreement), Token(verb.gerund)
    before = [Made("没有", tuple(negation), (auxiliary,))] if negation else []
    return Group([auxiliary], [*negation, main], main, before=before, ongoing=auxiliary)


_WHEN = {
    **{"present": "habitual", "past": "past", "was": "past", "progressive": "now"},
    **{"future": "future", "can": "future", "should": "future", "must": "future"},
    **{"want": "future", "plan": "future", "going": "future"},
}
