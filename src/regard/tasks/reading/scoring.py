"""Metrics of answers: exact match and F1 by SQuAD's rules (Rajpurkar et al. 2016, section 6.1), pointing accuracy."""

import string
from collections import Counter
from collections.abc import Iterable, Sequence

from regard.data.text.passages import words

_ARTICLES = {"a", "an", "the"}
# SQuAD's script removes only ASCII punctuation; this set adds the punctuation marks of other languages.
_MARKS = str.maketrans("", "", string.punctuation + "。，、！？；：「」『』（）《》〈〉“”‘’«»„…–—·")


def normal(text: str) -> str:
    """Return a text normalised for comparison: lower case, without punctuation and articles, with single spaces.

    >>> normal("The  Denver-Broncos!")
    'denverbroncos'
    """
    tokens = text.lower().translate(_MARKS).split()
    return " ".join(word for word in tokens if word not in _ARTICLES)


def exact_match(answer: str, references: Iterable[str]) -> float:
    """Return 1 if the answer equals one of the references after normalisation, else 0.

    >>> exact_match("the kitchen.", ["Kitchen", "garden"])
    1.0
    """
    return float(any(normal(answer) == normal(reference) for reference in references))


def f1(answer: str, references: Iterable[str]) -> float:
    """Return the harmonic mean of the precision and recall of an answer's words; the largest over the references.

    A Chinese or Japanese character counts as a word. If the answer or the reference has no words, the result is 1 if
    both have none, else 0.

    >>> f1("the big red ball", ["a red ball", "box"])
    0.8
    """
    return max((_f1(answer, reference) for reference in references), default=0.0)


def _f1(answer: str, reference: str) -> float:
    # SQuAD's own script splits at spaces only; in languages that write spaces between words, this function gives the
    # same words as that script.
    ours, theirs = (words(normal(text)) for text in (answer, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def scores(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the means of exact match and F1 over the answers, from 0 to 1.

    >>> scores(["the kitchen", "red ball"], [["kitchen"], ["ball"]])
    {'exact_match': 0.5, 'f1': 0.8333333333333333}
    """
    if not answers:
        raise ValueError("there is no answer to score")
    pairs = list(zip(answers, references, strict=True))
    return {
        "exact_match": sum(exact_match(answer, wanted) for answer, wanted in pairs) / len(pairs),
        "f1": sum(f1(answer, wanted) for answer, wanted in pairs) / len(pairs),
    }


def pointing(places: Sequence[int], sentences: Sequence[Sequence[int]], answering: Sequence[int]) -> float:
    """Return the fraction of questions whose most attended passage word is in the sentence that contains the answer.

    `places` are the indices of the most attended words; `sentences` holds for each passage the sentence of each of its
    words; `answering` are the sentences with the answers.

    >>> pointing([0, 4], [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]], [1, 1])
    0.5
    """
    if not places:
        raise ValueError("there is no question to score")
    inside = [sentence[place] == gold for place, sentence, gold in zip(places, sentences, answering, strict=True)]
    return sum(inside) / len(inside)
