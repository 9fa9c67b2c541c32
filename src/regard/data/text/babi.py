"""Reader of the files of the bAbI tasks: numbered lines of stories, with questions between them (Weston et al. 2015).

    1 Mary moved to the bathroom.
    2 Where is Mary? <tab> bathroom <tab> 1

A model answers with a span of the story, and the reader searches this span in the supporting sentences. In tasks whose
answers do not occur in the stories (yes and no, counts, lists, directions), one more sentence that lists all answers of
the task is appended to every story, so that each answer is a span of the story. An answer that is itself a list, such
as "apple,football", is a single word of that sentence.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from regard.data.data_files import DataError
from regard.data.text.lines import lines
from regard.data.text.passages import Passage, lowered, words
from regard.data.text.questions import UNSEEN, Question, QuestionReport, Tally

_LINE = re.compile(r"(\d+)\s+(.*)")


class _StoryQuestion(NamedTuple):
    """A question of a story, with the story's sentences before the question."""

    sentences: tuple[str, ...]
    question: str
    answer: str
    support: tuple[int, ...]  # indices of the supporting sentences, from 0


def load_stories(
    path: Path, *, candidates: Sequence[str] = (), longest: int | None = None
) -> tuple[list[Question], QuestionReport]:
    """Return the questions of a bAbI file, and a report of the questions read and skipped.

    `candidates` are the possible answers, those of the training file; they are appended to every story. A question
    whose answer is not a candidate has no correct span, so that every prediction for it is wrong. Stories of more than
    `longest` words are skipped.
    """
    tally = Tally(path, longest)
    for record in _questions(path):
        tally.take(*_located(record, tuple(candidates)))
    return tally.finish()


def candidates(path: Path) -> tuple[str, ...]:
    """Return all answers of a bAbI file in alphabetical order, to be appended to the stories.

    The result is empty if the supporting sentences contain every answer, so that no answers need to be appended.
    """
    known = list(_questions(path))
    if all(_located(record, ())[0] is not None for record in known):
        return ()
    return tuple(sorted({record.answer for record in known}))


def _located(record: _StoryQuestion, candidates: tuple[str, ...]) -> tuple[Question | None, str]:
    """Return the question with the span of its answer and any remark on the answer; or None and why it is skipped."""
    passage = Passage.joined(record.sentences, whole=candidates)
    if not record.sentences:
        return None, "empty passage"
    question = Question(passage, words(record.question), (record.answer,), None, record.support)
    if candidates:
        if record.answer not in candidates:
            return question, UNSEEN
        place = len(passage.words) - len(candidates) + candidates.index(record.answer)
        return _with_span(question, place, 1), ""
    wanted = lowered(words(record.answer))
    # An answer may occur in several supporting sentences; the last one states it, the others only lead to it.
    for sentence in reversed(record.support):
        inside = [place for place, number in enumerate(passage.sentences) if number == sentence]
        for place in reversed(inside[: len(inside) - len(wanted) + 1]):
            if lowered(passage.words[place : place + len(wanted)]) == wanted:
                return _with_span(question, place, len(wanted)), ""
    return None, "answer not in a supporting sentence"


def _with_span(question: Question, place: int, count: int) -> Question:
    return Question(question.passage, question.question, question.answers, (place, place + count - 1), question.support)


def _questions(path: Path) -> Iterator[_StoryQuestion]:
    """Yield the questions of all stories; a new story begins where the line numbers start again."""
    sentences: dict[int, str] = {}
    before = 0
    for line in lines(path):
        place = f"{path}:{line.number}"
        numbered = _LINE.fullmatch(line.text)
        if line.fault:
            raise DataError(f"{place}: {line.fault}")
        if not line.text:
            continue
        if numbered is None:
            raise DataError(f"{place}: expected a number before the sentence")
        number, text = int(numbered[1]), numbered[2]
        if number <= before:
            sentences = {}
        before = number
        if "\t" in text:
            yield _question(place, sentences, text)
        else:
            sentences[number] = text.strip()


def _question(place: str, sentences: dict[int, str], text: str) -> _StoryQuestion:
    question, answer, *rest = (cell.strip() for cell in text.split("\t"))
    numbers = rest[0].split() if rest else []
    if not question or not answer:
        raise DataError(f"{place}: expected a question, a tab and its answer")
    order = {number: position for position, number in enumerate(sentences)}
    missing = [number for number in numbers if not number.isdecimal() or int(number) not in order]
    if missing:
        raise DataError(f"{place}: expected numbers of supporting sentences, found {missing[0]!r}")
    return _StoryQuestion(tuple(sentences.values()), question, answer, tuple(order[int(number)] for number in numbers))
