"""Clauses with a verb other than "be": subject, predicate and adverbials, in English order and in Chinese order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from regard.data.worlds.grammar.adverbials import SCENES, SURFACES, Setting, manner, place, time
from regard.data.worlds.grammar.lexicon import HAVING, TRANSITIVE, Verb
from regard.data.worlds.grammar.noun_phrases import DEFINITE, SUBJECT, Nominal, phrase
from regard.data.worlds.grammar.predicates import Frame, Predicate, frame, transitive, with_object
from regard.data.worlds.grammar.verb_groups import Group, Tense, can_tell, conjugate, tense
from regard.data.worlds.random_choices import Dice, Made, Token

_NOTHING = Setting([], [])


@dataclass(slots=True)
class Clause:
    """A clause in English and Chinese, without its full stop."""

    english: list[Token]
    chinese: list[Made]
    heavy: bool = False


@dataclass(slots=True)
class Circumstance:
    """The adverbials of place, manner, company and time of a clause.

    `early` is an adverbial of time at the start of the clause in both languages; `late` is one at the end of the
    English clause.
    """

    place: Setting = _NOTHING
    manner: Setting = _NOTHING
    company: Setting = _NOTHING
    late: Setting = _NOTHING
    early: Setting = field(default_factory=lambda: _NOTHING)

    def english(self) -> list[Token]:
        """Return the English words of the adverbials after the verb."""
        return [*self.manner.english, *self.company.english, *self.place.english, *self.late.english]


def statement(
    dice: Dice, *, question: bool = False, allowed: str = "", deny: float = 0.2, early: bool = True
) -> Clause:
    """Return a random clause, such as "Tom often reads a book in the park", 汤姆 经常 在 公园 里 读 一 本 书.

    With `question`, the clause is a question, "does Tom …", 汤姆 … 吗. `allowed` restricts the tenses ("" allows all);
    `deny` is the probability of a negation; `early` allows an adverbial of time at the start of the clause.
    """
    chosen = frame(dice)
    while allowed and not can_tell(chosen.verb, allowed, within=chosen.tenses):
        chosen = frame(dice)
    among = " ".join(name for name in allowed.split() if name in (chosen.tenses or allowed).split())
    subject = described(dice, (dice.pick(chosen.verb.subjects),), SUBJECT, subject=True)
    form = tense(dice, chosen.verb, subject.kind, question=question, allowed=among or chosen.tenses, deny=deny)
    return tell(dice, chosen, subject, form, early=early)


def tell(dice: Dice, chosen: Frame, subject: Nominal, form: Tense, *, early: bool) -> Clause:
    """Return a clause of the given subject, the verb and complements of `chosen`, and random adverbials."""
    if form.name == "progressive" and dice.maybe(0.3):
        form = Tense("was", form.negative, form.question)
    predicate = chosen.complete(dice, form.indefinite, described)
    around = circumstance(dice, chosen.verb, predicate, form, subject, early=early and not form.question)
    group = conjugate(dice, chosen.verb, subject.agreement, form)
    chinese = verbal(group, predicate, form, chosen.verb, around)
    words = [*around.early.chinese, *subject.words(), *around.late.chinese, *chinese]
    after = [*predicate.english, *around.english()]
    if form.question:
        english = [*group.auxiliary, *subject.english, *group.english, *after]
        return Clause(english, [*words, Made("吗", (), tuple(group.auxiliary))], predicate.heavy)
    english = [*around.early.english, *subject.english, *group.auxiliary, *group.english, *after]
    return Clause(english, words, predicate.heavy)


def verbal(group: Group, predicate: Predicate, form: Tense, verb: Verb, around: Circumstance) -> list[Made]:
    """Return the Chinese words of a clause from the negation to the object, such as 没有 在 公园 里 读 书."""
    before, word = group.before, Made(predicate.verb, (group.main,))
    if verb is HAVING and form.negative:
        before = list[Made]()
        word = Made("没有", (group.english[0], group.main), tuple(group.auxiliary))
    ongoing: list[Made] = []
    if group.ongoing is not None:
        # 在 marks the progressive. If the clause has an adverbial of place, which has its own 在, the progressive is
        # marked by 正 instead: 正 在 公园 里 读 书.
        near = bool(around.place.chinese) or predicate.settled
        mark = "正" if near else "在"
        if not (near and form.negative):
            ongoing = [Made(mark, (group.ongoing,), (group.main,))]
    # The function words 了 and 把 have no English counterpart; in the word alignment, they get possible links to the
    # verb and its complements.
    spread = (group.main, *predicate.english)
    after = [] if predicate.settled else [_spread(part, spread) for part in group.after]
    pre = [_spread(part, spread) if part.text == "把" else part for part in predicate.pre]
    settings = [*around.place.chinese, *around.company.chinese, *around.manner.chinese]
    return [*before, *ongoing, *settings, *pre, word, *predicate.joint, *after, *predicate.tail]


def _spread(word: Made, tokens: tuple[Token, ...]) -> Made:
    return word._replace(possible=(*word.possible, *tokens))


def circumstance(
    dice: Dice, verb: Verb, predicate: Predicate, form: Tense, subject: Nominal, *, early: bool = False
) -> Circumstance:
    """Return random adverbials that fit a clause with this predicate.

    If the object ends in a relative clause, no adverbials are added after it, because they would seem to belong to that
    clause.
    """
    around = Circumstance()
    forced = form.name == "was"
    free = not predicate.heavy
    if free and not predicate.placed and not predicate.short and verb.aspect == "action":
        if dice.maybe(0.4):
            around.place = place(dice, SCENES)
        if subject.kind == "person" and not form.negative and dice.maybe(0.12):
            around.manner = manner(dice)
        elif subject.kind == "person" and dice.maybe(0.08):
            around.company = _company(dice)
    timely = form.when and verb.aspect in ("action", "event") and form.name != "habit"
    if timely and form.when and (forced or dice.maybe(0.45)):
        when = time(dice, form.when)
        if early and dice.chance(0.4 if free else 1.0):
            around.early = when
        elif free:
            around.late = when
    return around


def _company(dice: Dice) -> Setting:
    """Return an adverbial of company in both languages, such as "with Mary", 跟 玛丽 一起."""
    person = phrase(dice, ("person",), DEFINITE, plain=True)
    token = Token("with")
    return Setting([token, *person.english], [Made("跟", (token,)), *person.words(), Made("一起", (token,))])


def described(dice: Dice, kinds: Sequence[str], determiners: Mapping[str, float], *, subject: bool = False) -> Nominal:
    """Return a noun phrase that may contain a relative clause or a place: "the cat on the table", 桌子 上 的 猫."""
    nominal = phrase(dice, kinds, determiners, subject=subject)
    if not nominal.open:
        return nominal
    if subject and nominal.english[0].text == "the" and dice.maybe(0.15):
        living = nominal.kind in ("person", "animal")
        where = place(dice, SCENES if living else SURFACES, at=False)
        of = Made("的", (), (*where.english, *nominal.english))
        nominal.english += where.english
        nominal.chinese = [*where.chinese, of, *nominal.chinese]
    elif dice.maybe(0.22):
        relative(dice, nominal)
    return nominal


def relative(dice: Dice, nominal: Nominal) -> None:
    """Add a relative clause to a noun phrase, in place.

    Examples: "the cat that Tom saw", 汤姆 看见 的 猫; "the boy who likes Mary", 喜欢 玛丽 的 男孩.
    """
    that = Token("who" if nominal.kind == "person" else "that")
    active = nominal.kind in ("person", "animal") and dice.chance(0.5)
    allowed = "present past progressive"
    if active:
        chosen = transitive(dice.fresh(_DOERS[nominal.kind]))
        form = tense(dice, chosen.verb, nominal.kind, allowed=allowed, deny=0.1)
        predicate = chosen.complete(dice, form.indefinite, _plain)
        group = conjugate(dice, chosen.verb, nominal.agreement, form)
        english = [that, *group.auxiliary, *group.english, *predicate.english]
        chinese = verbal(group, predicate, form, chosen.verb, Circumstance())
    else:
        verb = dice.fresh(_TAKERS[nominal.kind])
        subject = phrase(dice, (dice.pick(verb.subjects),), SUBJECT, subject=True, plain=True)
        form = tense(dice, verb, subject.kind, allowed=allowed, deny=0.1)
        group = conjugate(dice, verb, subject.agreement, form)
        group.after = []  # Chinese omits the particle 了 before the 的 of a relative clause
        gap = with_object(verb, Nominal([], [], "is", nominal.kind), nominal.kind)
        english = [that, *subject.english, *group.auxiliary, *group.english]
        chinese = [*subject.words(), *verbal(group, gap, form, verb, Circumstance())]
    head = tuple(nominal.english)
    nominal.english += english
    clause = [*chinese, Made("的", (that,), (*head, group.main))]
    if active:
        nominal.chinese = [*clause, *nominal.chinese]
    else:
        # The Chinese relative clause precedes the number and the measure word (汤姆 看见 的 一 只 猫), because 一 只
        # before 汤姆 would seem to belong to 汤姆.
        nominal.lead = [*clause, *nominal.lead]
    nominal.heavy = True


def _plain(dice: Dice, kinds: Sequence[str], determiners: Mapping[str, float]) -> Nominal:
    return phrase(dice, kinds, determiners, plain=True)


_DOERS = {kind: tuple(verb for verb in TRANSITIVE if kind in verb.subjects) for kind in ("person", "animal")}
_KINDS = {kind for verb in TRANSITIVE for kind in verb.chinese}
_TAKERS = {kind: tuple(verb for verb in TRANSITIVE if kind in verb.chinese) for kind in sorted(_KINDS)}
