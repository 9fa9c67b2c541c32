"""Generates English sentences of one or several clauses with their Chinese translations and word alignments."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from regard.data.worlds.grammar import clause_patterns
from regard.data.worlds.grammar.lexicon import ASKING, SAYING
from regard.data.worlds.grammar.noun_phrases import DEFINITE, SUBJECT, phrase
from regard.data.worlds.grammar.predicates import frame
from regard.data.worlds.grammar.verb_clauses import Clause, described, statement
from regard.data.worlds.grammar.verb_groups import Tense, conjugate, tense
from regard.data.worlds.random_choices import Dice, Made, Token

Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pair:
    """A sentence in two languages, split into words, with its word alignment.

    `links` are the sure links (source word, target word), with words counted from 0. `possible` includes the sure links
    and further links; predicting one of these further links counts as neither right nor wrong.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    links: frozenset[Link]
    possible: frozenset[Link]


def compose(random: Random, want: int) -> Pair:
    """Return a random sentence of about `want` English words."""
    parts = _parts(random, want)
    dice = Dice(random, min(1.0, max(0.05, (want / parts - 4) / 7)))
    if parts == 1 and dice.chance(0.25):
        clause, mark = _question(dice), "?"
    elif parts == 1 and dice.chance(0.05):
        clause, mark = clause_patterns.command(dice), "."
    else:
        clause, mark = _declarative(dice, parts), "." if dice.chance(0.75) else ""
    english, chinese = clause.english, clause.chinese
    if mark:
        stop = Token(mark)
        if chinese[-1].text == "吗":
            chinese[-1] = chinese[-1]._replace(possible=(*chinese[-1].possible, stop))
        english, chinese = [*english, stop], [*chinese, Made("？" if mark == "?" else "。", (stop,))]
    return pair(english, chinese)


def pair(english: list[Token], chinese: list[Made]) -> Pair:
    """Return the English and the Chinese words, with the links between their positions."""
    at = {id(token): index for index, token in enumerate(english)}
    sure = [(at[id(token)], index) for index, word in enumerate(chinese) for token in word.sure]
    possible = [(at[id(token)], index) for index, word in enumerate(chinese) for token in word.possible]
    links = frozenset(_LINKS.setdefault(link, link) for link in sure)
    both = links.union(_LINKS.setdefault(link, link) for link in possible)
    source, target = tuple(token.text for token in english), tuple(word.text for word in chinese)
    return Pair(source, target, links, both)


# Each distinct link (source position, target position) is stored as one tuple, shared between sentences; otherwise a
# hundred thousand sentences would have millions of tuples.
_LINKS: dict[Link, Link] = {}


def _parts(random: Random, want: int) -> int:
    """Return a random number of clauses, suitable for a sentence of about `want` English words."""
    if want < 9:
        return 1
    if want < 14:
        return 1 if random.random() < 0.65 else 2
    if want < 20:
        return 1 if random.random() < 0.2 else 2
    return max(2, round(want / 10 + random.random() - 0.5))


def _declarative(dice: Dice, parts: int) -> Clause:
    """Return a random declarative sentence of `parts` clauses."""
    if parts == 1:
        return _ALONE[dice.weigh(_WEIGHTS)](dice)
    join = dice.weigh({"and": 3.0, "but": 2.0, "that": 3.0, "to": 1.0 if parts == 2 else 0.0, "first": 4.0})
    if join == "to":
        return _requested(dice)
    if join == "that":
        return _reported(dice, _declarative(dice, parts - 1))
    if join == "first":
        return _conditioned(dice, parts)
    return _joined(join, _declarative(dice, 1), _declarative(dice, parts - 1))


def _joined(join: str, left: Clause, right: Clause) -> Clause:
    """Return two clauses joined by "and" or "but": "A , and B", A ， B; "A , but B", A ， 但是 B."""
    comma, word = Token(","), Token(join)
    stop = Made("，", (comma,), (word,) if join == "and" else ())
    joined = [stop] if join == "and" else [stop, Made("但是", (word,))]
    return Clause([*left.english, comma, word, *right.english], [*left.chinese, *joined, *right.chinese])


def _reported(dice: Dice, clause: Clause) -> Clause:
    """Return a sentence with `clause` as the object of a verb of speech, such as "Mary thinks that …", 玛丽 认为 …."""
    verb = dice.pick(SAYING)
    subject = phrase(dice, ("person",), SUBJECT, subject=True)
    form = tense(dice, verb, "person", deny=0.0)
    if form.name == "present" and verb.base in ("think", "know", "believe") and dice.chance(0.2):
        form = Tense("present", negative=True)
    group = conjugate(dice, verb, subject.agreement, form)
    that = [] if clause.english[0].text == "that" else [Token("that")]
    said = Made(verb.chinese[""], (group.main,), tuple(that))
    english = [*subject.english, *group.auxiliary, *group.english, *that, *clause.english]
    return Clause(english, [*subject.words(), *group.before, said, *clause.chinese])


def _requested(dice: Dice) -> Clause:
    """Return a clause with an infinitive, such as "Tom asked Mary to open the door", 汤姆 请 玛丽 打开 门."""
    verb = dice.pick(ASKING)
    subject = phrase(dice, ("person",), SUBJECT, subject=True)
    person = phrase(dice, ("person",), DEFINITE, plain=True)
    group = conjugate(dice, verb, subject.agreement, tense(dice, verb, "person", deny=0.0))
    wanted = frame(dice)
    while wanted.verb.aspect != "action" or "person" not in wanted.verb.subjects:
        wanted = frame(dice)
    to, main = Token("to"), Token(wanted.verb.base)
    predicate = wanted.complete(dice, True, described)
    request = Made(verb.chinese[""], (group.main,), (to,))
    done = [*predicate.pre, Made(predicate.verb, (main,)), *predicate.joint, *predicate.tail]
    english = [*subject.english, *group.english, *person.english, to, main, *predicate.english]
    return Clause(english, [*subject.words(), request, *person.words(), *done])


def _conditioned(dice: Dice, parts: int) -> Clause:
    """Return a sentence of `parts` clauses (a number), the first of which is subordinate.

    Examples: "because A , B", 因为 A ， 所以 B; "when A , B", A 的 时候 ， B.
    """
    word = dice.weigh({"because": 3.0, "although": 2.0, "if": 2.0, "when": 3.0, "after": 1.5, "before": 1.5})
    token, comma = Token(word), Token(",")
    stop = Made("，", (comma,))
    if word in _TWICE:
        first, second = _TWICE[word]
        left, right = _declarative(dice, 1), _declarative(dice, 1)
        chinese = [Made(first, (token,)), *left.chinese, stop, Made(second, (), (token, comma)), *right.chinese]
    elif word == "if":
        left = statement(dice, allowed="present can", early=False)
        right = statement(dice, allowed="future can should must")
        chinese = [Made("如果", (token,)), *left.chinese, stop, *right.chinese]
    else:
        left = statement(dice, allowed="past", deny=0.0, early=False)
        right = statement(dice, allowed="past")
        # Chinese omits the particle 了 in a clause before 的 时候 ("when"), 之后 ("after") or 之前 ("before").
        when = [word for word in left.chinese if word.text != "了"]
        of = [Made("的", (), (token, comma))] if word == "when" else []
        chinese = [*when, *of, Made(_AFTER[word], (token,)), stop, *right.chinese]
    clause = Clause([token, *left.english, comma, *right.english], chinese)
    return clause if parts == 2 else _joined(dice.pick(("and", "but")), clause, _declarative(dice, parts - 2))


_TWICE = {"because": ("因为", "所以"), "although": ("虽然", "但是")}
_AFTER = {"when": "时候", "after": "之后", "before": "之前"}


def _question(dice: Dice) -> Clause:
    return _QUESTIONS[dice.weigh(_CURIOSITY)](dice)


def _whether(dice: Dice) -> Clause:
    """Return a yes/no question with a verb other than "be", in a tense in which questions are generated."""
    return statement(dice, question=True, allowed="present past progressive perfect future can should want")


def _being(dice: Dice) -> Clause:
    shape = dice.pick(
        (
            clause_patterns.quality,
            clause_patterns.comparison,
            clause_patterns.role,
            clause_patterns.whereabouts,
            clause_patterns.existence,
        )
    )
    return shape(dice, question=True)


_ALONE: dict[str, Callable[[Dice], Clause]] = {
    "statement": statement,
    "quality": clause_patterns.quality,
    "comparison": clause_patterns.comparison,
    "role": clause_patterns.role,
    "whereabouts": clause_patterns.whereabouts,
    "existence": clause_patterns.existence,
    "passive": clause_patterns.passive,
}
_WEIGHTS = {
    **{"statement": 12.0, "quality": 1.3, "comparison": 0.8, "role": 0.6, "whereabouts": 0.8, "existence": 1.0},
    **{"passive": 1.0},
}
_CURIOSITY = {"whether": 5.0, "being": 2.0, "who": 2.0, "what": 2.0, "where": 2.0, "location": 0.7}
_QUESTIONS: dict[str, Callable[[Dice], Clause]] = {
    "whether": _whether,
    "being": _being,
    "who": clause_patterns.who,
    "what": clause_patterns.what,
    "where": clause_patterns.where,
    "location": clause_patterns.location,
}
