"""Reader of parse trees with a label at every phrase, in the format of the Stanford Sentiment Treebank (Socher et al.
2013)."""

import re
from typing import NamedTuple

_MARK = re.compile(r"\(\s*([^\s()]+)\s|\)|[^\s()]+")
_ESCAPES = {"-LRB-": "(", "-RRB-": ")", r"\/": "/", r"\*": "*"}


class Phrase(NamedTuple):
    """The words of one phrase of a parse tree, joined to a text, and the phrase's label."""

    text: str
    label: str


def phrases_of(tree: str) -> list[Phrase]:
    """Return all phrases of a parse tree in pre-order: the whole sentence first; single words are phrases too.

    >>> phrases_of("(3 (2 not) (1 bad))")
    [Phrase(text='not bad', label='3'), Phrase(text='not', label='2'), Phrase(text='bad', label='1')]
    """
    words: list[str] = []
    # for each open bracket: the phrase's label, the index of its first word, and its index in `phrases`
    open_: list[tuple[str, int, int]] = []
    phrases: list[Phrase | None] = []
    for mark in _MARK.finditer(tree):
        if mark[1] is not None:
            if not open_ and phrases:
                raise ValueError(f"not a tree: it goes on after its end at character {mark.start() + 1}")
            open_.append((mark[1], len(words), len(phrases)))
            phrases.append(None)
        elif mark[0] == ")":
            if not open_:
                raise ValueError(f"not a tree: a bracket too many at character {mark.start() + 1}")
            label, first, place = open_.pop()
            phrases[place] = Phrase(" ".join(words[first:]), label)
        elif not open_:
            raise ValueError(f"not a tree: a word outside of it at character {mark.start() + 1}")
        else:
            words.append(_ESCAPES.get(mark[0], mark[0]).replace(r"\/", "/"))
    if open_ or not phrases:
        raise ValueError("not a tree: a bracket is not closed" if open_ else "not a tree")
    return [phrase for phrase in phrases if phrase is not None and phrase.text]
