"""Copular, existential and passive clauses, wh-questions and commands, in English and Chinese."""

from regard.data.worlds.grammar.adverbials import SCENES, SURFACES, Setting, place, time
from regard.data.worlds.grammar.lexicon import ADJECTIVES, NOUNS, TRANSITIVE
from regard.data.worlds.grammar.noun_phrases import DEFINITE, INDEFINITE, ONE, SUBJECT, Nominal, common, phrase
from regard.data.worlds.grammar.predicates import Frame, frame, transitive, with_object
from regard.data.worlds.grammar.verb_clauses import Circumstance, Clause, circumstance, described, verbal
from regard.data.worlds.grammar.verb_groups import Tense, conjugate, tense
from regard.data.worlds.random_choices import Dice, Made, Token

_THINGS = ("text", "thing", "vehicle", "clothes", "food", "animal")
_LIVING = ("person", "person", "animal")
_BY_KIND = {kind: tuple(word for word in ADJECTIVES if kind in word.kinds) for kind in NOUNS}
_OBJECTS = tuple(verb for verb in TRANSITIVE if set(verb.chinese) & set(NOUNS))
_PASSIVES = tuple(verb for verb in TRANSITIVE if verb.passive)
_COUNTED = ("text", "thing", "food", "vehicle", "clothes", "animal")


def quality(dice: Dice, *, question: bool = False) -> Clause:
    """Return a clause with an adjective, such as "Mary is very happy", 玛丽 非常 快乐.

    With `question`, the clause is a question, such as "is the car red", 汽车 是 红色 的 吗.
    """
    subject = described(dice, (dice.pick((*_LIVING, *_THINGS)),), DEFINITE, subject=True)
    word = dice.pick(_BY_KIND[subject.kind])
    be, adjective = Token(subject.agreement), Token(word.english)
    negation = [Token("not")] if dice.chance(0.2) else []
    very = [Token("very")] if not negation and not word.colour and dice.maybe(0.3) else []
    chinese = Made(word.word(subject.kind), (adjective,))
    if word.colour:
        denied = [Made("不", tuple(negation))] if negation else []
        words = [*denied, Made("是", (be,)), chinese, Made("的", (), (be, adjective))]
    elif negation:
        words = [Made("不", tuple(negation), (be,)), chinese]
    elif very:
        words = [Made("非常", tuple(very), (be,)), chinese]
    else:
        # A Chinese statement needs a word before the adjective, usually 很; in the word alignment, it gets possible
        # links to "is" and the adjective.
        words = [chinese] if question else [Made("很", (), (be, adjective)), chinese]
    return _being(subject, be, [*negation, *very, adjective], words, question=question)


def comparison(dice: Dice, *, question: bool = False) -> Clause:
    """Return a comparison, such as "Tom is taller than Jerry", 汤姆 比 杰瑞 高."""
    kind = dice.pick((*_LIVING, "thing", "vehicle"))
    subject, other = phrase(dice, (kind,), DEFINITE, subject=True), phrase(dice, (kind,), DEFINITE, plain=True)
    word = dice.pick(tuple(word for word in _BY_KIND[kind] if not word.colour))
    be, than = Token(subject.agreement), Token("than")
    more = [Token("more")] if word.comparative is None else []
    adjective = Token(word.comparative or word.english)
    words = [Made("比", (than,)), *other.words(), Made(word.word(kind), (adjective,), tuple(more))]
    return _being(subject, be, [*more, adjective, than, *other.english], words, question=question)


def role(dice: Dice, *, question: bool = False) -> Clause:
    """Return a clause that states a person's role, such as "Anna is a doctor", 安娜 是 一 位 医生.

    A negated clause is, for example, "they are not teachers", 他们 不 是 老师.
    """
    subject = phrase(dice, ("person",), DEFINITE, subject=True)
    negation = [Token("not")] if dice.chance(0.2) else []
    be = Token(subject.agreement)
    denied = [Made("不", tuple(negation))] if negation else []
    if subject.agreement == "are" and subject.english[0].text != "you":
        noun = dice.fresh(NOUNS["person"])
        plural = Token(noun.plural)
        what = Nominal([plural], [Made(noun.chinese, (plural,))], "are", "person")
    else:
        what = common(dice, "person", ONE, plain=True)
        if negation:
            what.lead = []
            head = what.chinese[-1]
            what.chinese[-1] = head._replace(possible=(what.english[0],))
    words = [*denied, Made("是", (be,)), *what.words()]
    return _being(subject, be, [*negation, *what.english], words, question=question)


def whereabouts(dice: Dice, *, question: bool = False) -> Clause:
    """Return a clause that states where something is, such as "the book is on the table", 书 在 桌子 上."""
    living = dice.chance(0.6)
    subject = phrase(dice, _LIVING if living else ("text", "thing", "food"), DEFINITE, subject=True)
    where = place(dice, SCENES if living else SURFACES)
    be = Token(subject.agreement)
    negation = [Token("not")] if dice.chance(0.15) else []
    denied = [Made("不", tuple(negation), (be,))] if negation else []
    at, *rest = where.chinese
    words = [*denied, at._replace(possible=(*at.possible, be)), *rest]
    return _being(subject, be, [*negation, *where.english], words, question=question)


def _being(subject: Nominal, be: Token, english: list[Token], words: list[Made], *, question: bool) -> Clause:
    chinese = [*subject.words(), *words]
    if question:
        return Clause([be, *subject.english, *english], [*chinese, Made("吗", (), (be,))])
    return Clause([*subject.english, be, *english], chinese)


def existence(dice: Dice, *, question: bool = False) -> Clause:
    """Return an existential clause, such as "there are two books on the table", 桌子 上 有 两 本 书.

    A negated clause is, for example, "there is no book on the table", 桌子 上 没有 书.
    """
    living = dice.chance(0.4)
    kind = dice.pick(("person", "animal") if living else ("text", "thing", "food"))
    where = place(dice, SCENES if living else SURFACES, at=False)
    denied = not question and dice.chance(0.25)
    noun = common(dice, kind, INDEFINITE)
    there, be = Token("there"), Token(noun.agreement)
    if denied:
        # "There is no book" has no number, so the Chinese noun has no number and no measure word either.
        head, none = noun.english[-1], Token("no")
        english = [there, be, none, head, *where.english]
        return Clause(english, [*where.chinese, Made("没有", (none,), (there, be)), noun.chinese[-1]])
    chinese = [*where.chinese, Made("有", (there,), (be,)), *noun.words()]
    if question:
        return Clause([be, there, *noun.english, *where.english], [*chinese, Made("吗", (), (be,))])
    return Clause([there, be, *noun.english, *where.english], chinese)


def passive(dice: Dice) -> Clause:
    """Return a passive clause, such as "the cat was chased by the dog", 猫 被 狗 追逐 了."""
    verb = dice.pick(_PASSIVES)
    kind = dice.pick(tuple(verb.chinese))
    subject = phrase(dice, (kind,), DEFINITE, subject=True)
    agent = phrase(dice, (dice.pick(verb.subjects),), SUBJECT, plain=True)
    by, main = Token("by"), Token(verb.participle)
    future = dice.chance(0.2)
    negation = [Token("not")] if dice.chance(0.15) else []
    auxiliary = Token("will" if future else "were" if subject.agreement == "are" else "was")
    be = [Token("be")] if future else []
    before = [Made("会", (auxiliary,))] if future else []
    if negation:
        before = [Made("不" if future else "没有", tuple(negation)), *before]
    acted = [Made("被", (by,), tuple(be or [auxiliary])), *agent.words(), Made(verb.chinese[kind], (main,))]
    ended = [] if future or negation else [Made("了", (), (auxiliary, main, by, *agent.english))]
    when = time(dice, "future" if future else "past") if dice.maybe(0.35) else Setting([], [])
    english = [*subject.english, auxiliary, *negation, *be, main, by, *agent.english, *when.english]
    return Clause(english, [*subject.words(), *when.chinese, *before, *acted, *ended])


def who(dice: Dice) -> Clause:
    """Return a question about the subject, such as "who chased the cat", 谁 追逐 了 猫."""
    token = Token("who")
    chosen = frame(dice)
    form = tense(dice, chosen.verb, "person", allowed=chosen.tenses or _PLAIN, deny=0.1)
    predicate = chosen.complete(dice, form.indefinite, phrase)
    subject = Nominal([token], [Made("谁", (token,))], "is", "person")
    around = circumstance(dice, chosen.verb, predicate, form, subject)
    group = conjugate(dice, chosen.verb, "is", form)
    english = [token, *group.auxiliary, *group.english, *predicate.english, *around.english()]
    return Clause(
        english, [*subject.chinese, *around.late.chinese, *verbal(group, predicate, form, chosen.verb, around)]
    )


def what(dice: Dice) -> Clause:
    """Return a question about the object, such as "what did Tom eat", 汤姆 吃 了 什么.

    The question begins with "who", "what", "how many" or "which" ("which book", 哪 本 书).
    """
    verb = dice.pick(_OBJECTS)
    kind = dice.pick(tuple(kind for kind in verb.chinese if kind in NOUNS))
    sort = dice.pick(("what", "what", "how many", "which"))
    if sort == "what" or kind not in _COUNTED:
        # The Chinese verb can depend on the kind of the object ("wear a coat" is 穿, "wear a hat" is 戴), which "what"
        # does not determine. The first kind of object in the verb's table, other than a person, is used.
        kind = kind if kind == "person" else next(kind for kind in verb.chinese if kind != "person")
        token = Token("who" if kind == "person" else "what")
        thing = Nominal([token], [Made("谁" if kind == "person" else "什么", (token,))], "is", kind)
    else:
        noun = dice.fresh(NOUNS[kind])
        query = [Token(word) for word in sort.split()]
        head = Token(noun.plural if sort == "how many" else noun.singular)
        lead = [Made("多少" if sort == "how many" else "哪", tuple(query)), Made(noun.measure, (), (*query, head))]
        thing = Nominal([*query, head], [*lead, Made(noun.chinese, (head,))], "is", kind)
    return _object_question(dice, transitive(verb), thing.english, with_object(verb, thing, kind).tail, kind)


def _object_question(dice: Dice, chosen: Frame, front: list[Token], tail: list[Made], kind: str) -> Clause:
    verb = chosen.verb
    subject = phrase(dice, (dice.pick(verb.subjects),), SUBJECT, subject=True, plain=True)
    form = tense(dice, verb, subject.kind, question=True, allowed=_PLAIN, deny=0.0)
    group = conjugate(dice, verb, subject.agreement, form)
    predicate = with_object(verb, Nominal([], tail, "is", kind), kind)
    around = circumstance(dice, verb, predicate, form, subject)
    english = [*front, *group.auxiliary, *subject.english, *group.english, *around.english()]
    return Clause(english, [*subject.words(), *around.late.chinese, *verbal(group, predicate, form, verb, around)])


def where(dice: Dice) -> Clause:
    """Return a question about place, time or reason, such as "where did Tom buy the book", 汤姆 是 在 哪里 买 的 书."""
    verb = dice.pick(tuple(verb for verb in TRANSITIVE if verb.aspect == "action"))
    chosen = transitive(verb)
    word = dice.pick(("where", "when", "why"))
    token = Token(word)
    adverbial = {
        "where": [Made("在", (), (token,)), Made("哪里", (token,))],
        "when": [Made("什么时候", (token,))],
        "why": [Made("为什么", (token,))],
    }[word]
    subject = phrase(dice, (dice.pick(verb.subjects),), SUBJECT, subject=True, plain=True)
    form = tense(dice, verb, subject.kind, question=True, allowed="past future", deny=0.0)
    predicate = chosen.complete(dice, True, phrase)
    group = conjugate(dice, verb, subject.agreement, form)
    english = [token, *group.auxiliary, *subject.english, *group.english, *predicate.english]
    if form.name == "past" and word != "why":
        # Chinese asks about the place or the time of a past event with the pattern 是 … 的.
        did = tuple(group.auxiliary)
        acted = [
            Made(predicate.verb, (group.main,)),
            Made("的", (), (*did, group.main, *predicate.english)),
            *predicate.tail,
        ]
        return Clause(english, [*subject.words(), Made("是", (), (*did, token, group.main)), *adverbial, *acted])
    around = Circumstance(place=Setting([], adverbial)) if word == "where" else Circumstance()
    before = [] if word == "where" else adverbial
    return Clause(english, [*subject.words(), *before, *verbal(group, predicate, form, verb, around)])


_PLAIN = "present past progressive future can"


def location(dice: Dice) -> Clause:
    """Return a question about location, "where is Tom", 汤姆 在 哪里, or "what is on the table", 桌子 上 有 什么."""
    if dice.chance(0.5):
        token = Token("where")
        subject = phrase(dice, (*_LIVING, "text", "thing"), DEFINITE, subject=True)
        be = Token(subject.agreement)
        words = [Made("在", (), (token, be)), Made("哪里", (token,))]
        return Clause([token, be, *subject.english], [*subject.words(), *words])
    token, be = Token("what"), Token("is")
    site = place(dice, SURFACES, at=False)
    return Clause([token, be, *site.english], [*site.chinese, Made("有", (be,)), Made("什么", (token,))])


def command(dice: Dice) -> Clause:
    """Return a command, such as "please open the door", 请 打开 门, or "do not open the door", 不要 打开 门."""
    chosen = frame(dice)
    while chosen.verb.aspect != "action" or "person" not in chosen.verb.subjects:
        chosen = frame(dice)
    negative = dice.chance(0.4)
    predicate = chosen.complete(dice, not negative, phrase)
    main = Token(chosen.verb.base)
    if negative:
        lead = [Token("do"), Token("not")]
        before = [Made("不要", tuple(lead))]
    else:
        lead = [Token("please")]
        before = [Made("请", tuple(lead))]
    group = conjugate(dice, chosen.verb, "are", Tense("future"))
    group.main, group.before = main, before
    around = Circumstance()
    if not (predicate.placed or predicate.short or predicate.heavy) and dice.maybe(0.3):
        around.place = place(dice, SCENES)
    words = verbal(group, predicate, Tense("present"), chosen.verb, around)
    return Clause([*lead, main, *predicate.english, *around.english()], words)
