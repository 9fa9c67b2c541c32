"""Readers of questions about passages: the JSON of SQuAD and XQuAD, JSONL, the files of bAbI.

An invalid entry in a file raises an error that names the file and the entry. Questions without an answer, or with an
answer that is not in the passage, are skipped and counted in a report.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.data_files import DataError
from regard.data.json_records import json_object
from regard.data.text.lines import fault_of, lines
from regard.data.text.passages import Passage, words

_PASSAGES = ("passage", "context")
_WIDENED, _MOVED = "widened to whole words", "moved to where the answer is"
UNSEEN = "never seen in training"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a passage, with the accepted answers and the span of words that answers it.

    `span` holds the indices of the first and the last word of the first answer in the passage; it is None if no span of
    the passage is correct, and the question can then not be used for training. `support` holds the indices of the
    sentences that are needed for the answer, if known.
    """

    passage: Passage
    question: tuple[str, ...]
    answers: tuple[str, ...]
    span: tuple[int, int] | None
    support: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Return the question's words as one text, without a space before the question mark."""
        return " ".join(self.question).replace(" ?", "?")


@dataclass(frozen=True, slots=True)
class QuestionReport:
    """The numbers of questions read and kept, of each change to an answer, and of questions skipped for each reason.

    >>> print(QuestionReport(9, 7, {"widened to whole words": 1}, {"answer not in the passage": 2}))
    9 questions read, 7 kept; answers: 1 widened to whole words; skipped: 2 answer not in the passage
    """

    read: int
    kept: int
    answers: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        said = f"{self.read:,} questions read, {self.kept:,} kept"
        for name, counts in {"answers": self.answers, "skipped": self.skipped}.items():
            if counts:
                said += f"; {name}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items())
        return said


class Entry(NamedTuple):
    """One question of a file, with its passage and answers.

    Each answer is a text and the index of the character of the passage where it starts, or None if the file has no
    position.
    """

    passage: str
    question: str
    answers: tuple[tuple[str, int | None], ...]


def load_questions(
    path: Path, *, longest: int | None = None, candidates: Sequence[str] = ()
) -> tuple[list[Question], QuestionReport]:
    """Return the questions of a file, and a report of the questions read and skipped.

    The file is SQuAD's .json, a .jsonl with one object on each line, or bAbI's .txt, each optionally with .gz.
    Questions about passages of more than `longest` words are skipped. `candidates` are answers that are appended to
    bAbI stories. Invalid UTF-8, invalid JSON and missing keys raise `DataError`.
    """
    from regard.data.text.babi import load_stories  # imported here, because babi imports this module

    suffix = next((suffix for suffix in reversed(path.suffixes) if suffix != ".gz"), "")
    if suffix == ".txt":
        return load_stories(path, candidates=candidates, longest=longest)
    readers: dict[str, Callable[[Path], Iterator[Entry]]] = {
        **dict.fromkeys((".jsonl", ".ndjson"), _by_line),
        ".json": _squad,
    }
    if suffix not in readers:
        raise DataError(f"{path}: expected .json (SQuAD), .jsonl (an object a line) or .txt (bAbI), each maybe .gz")
    tally = Tally(path, longest)
    # maps the text of the last passage to this passage, because several questions share a passage
    passages: dict[str, Passage] = {}
    for entry in readers[suffix](path):
        if entry.passage not in passages:
            # Only one passage is stored, because the questions about a passage are adjacent in the file.
            passages = {entry.passage: Passage.of(entry.passage)}
        tally.take(*_located(entry, passages[entry.passage]))
    return tally.finish()


class Tally:
    """Collects the questions of a file, and counts the questions read and skipped for the report."""

    def __init__(self, path: Path, longest: int | None) -> None:
        self.path, self.longest = path, longest
        self.questions: list[Question] = []
        self.read = 0
        self.answers: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()

    def take(self, question: Question | None, remark: str = "") -> None:
        """Add a question and any change to its answer, `remark`; None is counted as skipped for the reason `remark`."""
        self.read += 1
        if question is not None and self.longest is not None and len(question.passage.words) > self.longest:
            question, remark = None, "too long"
        if question is None:
            self.skipped[remark] += 1
            return
        self.questions.append(question)
        if remark:
            self.answers[remark] += 1

    def finish(self) -> tuple[list[Question], QuestionReport]:
        """Return the questions and the report; raise `DataError` if no question was added."""
        report = QuestionReport(
            self.read, len(self.questions), dict(sorted(self.answers.items())), dict(sorted(self.skipped.items()))
        )
        if not self.read:
            raise DataError(f"{self.path}: there is no question in this file")
        if not self.questions:
            raise DataError(f"{self.path}: no question is left ({report})")
        return self.questions, report


def _located(entry: Entry, passage: Passage) -> tuple[Question | None, str]:
    """Return the question with its first answer's span and any change to this answer; or None and why it is skipped."""
    if not passage.words:
        return None, "empty passage"
    question = words(entry.question)
    if not question:
        return None, "empty question"
    if not any(text.strip() for text, _ in entry.answers):
        return None, "no answer"
    text, start = next((text, start) for text, start in entry.answers if text.strip())
    place = _occurrence(passage.text, text, start)
    span = None if place is None else passage.covering(place, place + len(text))
    if place is None or span is None:
        return None, "answer not in the passage"
    remark = _MOVED if start is not None and place != start else ""
    if passage.between(*span).strip() != text.strip():
        remark = _WIDENED
    references = tuple(dict.fromkeys(text for text, _ in entry.answers))
    return Question(passage, question, references, span), remark


def _occurrence(passage: str, text: str, start: int | None) -> int | None:
    """Return the position of an answer in a passage: `start` if it is there, else its nearest occurrence, else None.

    If `start` is None, the first occurrence is returned.
    """
    if start is not None and passage[max(start, 0) : max(start, 0) + len(text)] == text:
        return start
    places = []
    place = passage.find(text)
    while place >= 0:
        places.append(place)
        place = passage.find(text, place + 1)
    return min(places, key=lambda place: abs(place - (start or 0)), default=None)


def _by_line(path: Path) -> Iterator[Entry]:
    """Yield the question of each line, a JSON object with passage or context, question, and answer or answers."""
    for line in lines(path):
        if not line.text and not line.fault:
            continue
        record, fault = json_object(line.text)
        if fault := line.fault or fault:
            raise DataError(f"{path}:{line.number}: {fault}")
        yield _entry(f"{path}:{line.number}", record, record)


def _squad(path: Path) -> Iterator[Entry]:
    """Yield the questions of a file in SQuAD's format.

    The file is one JSON object with the nested fields data › paragraphs › context and qas › question and answers.
    """
    texts: list[str] = []
    for line in lines(path):
        if line.fault:
            raise DataError(f"{path}:{line.number}: {line.fault}")
        texts.append(line.text)
    try:
        whole: Any = json.loads("\n".join(texts))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} at character {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{path}: not JSON: nested too deeply") from error
    for place, article in _items(str(path), "", whole, "data"):
        for inner, paragraph in _items(str(path), place, article, "paragraphs"):
            for innermost, question in _items(str(path), inner, paragraph, "qas"):
                yield _entry(f"{path}: {innermost}", paragraph, question)


def _items(path: str, place: str, record: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the elements of the list in field `name` of a record, each with its position, such as "data[0]"."""
    where = f"{path}: {place}" if place else path
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if not isinstance(record.get(name), list):
        raise DataError(f"{where}: expected a list in the field {name!r}; the object has {_fields(record)}")
    prefix = f"{place}.{name}" if place else name
    for number, item in enumerate(record[name]):
        yield f"{prefix}[{number}]", item


def _entry(place: str, about: Any, record: Any) -> Entry:
    """Return one question, given the JSON objects `about` of its passage and `record` of the question."""
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(record).__name__}")
    passage = next((about[name] for name in _PASSAGES if name in about), None)
    if not isinstance(passage, str):
        raise DataError(f"{place}: expected a text in the field 'passage' or 'context'; found {_fields(about)}")
    if not isinstance(record.get("question"), str):
        raise DataError(f"{place}: expected a text in the field 'question'; the object has {_fields(record)}")
    answers, fault = _answers(record)
    if fault := fault or fault_of("".join((passage, record["question"], *(text for text, _ in answers)))):
        raise DataError(f"{place}: {fault}")
    return Entry(passage, record["question"], answers)


def _answers(record: dict[str, Any]) -> tuple[tuple[tuple[str, int | None], ...], str]:
    """Return the answers as (text, start), and what is wrong with the record, or an empty string.

    The answers are the fields "answer" and "answer_start", or the field "answers" in the format of SQuAD or of the
    Hugging Face Hub.
    """
    value = record.get("answers", record.get("answer"))
    if isinstance(value, str):
        value = [{"text": value, "answer_start": record.get("answer_start")}]
    if isinstance(value, dict):  # the format of the Hugging Face Hub: {"text": […], "answer_start": […]}
        texts, starts = value.get("text"), value.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        return (), f"expected an answer in the field 'answer' or 'answers'; the object has {_fields(record)}"
    answers: list[tuple[str, int | None]] = []
    for item in value:
        text, start = (item, None) if isinstance(item, str) else _text_and_start(item)
        if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int | None):
            return (), f"expected an answer as a text with a number where it starts, found {json.dumps(item)[:60]}"
        answers.append((text, start))
    return tuple(answers), ""


def _text_and_start(item: Any) -> tuple[Any, Any]:
    return (item.get("text"), item.get("answer_start")) if isinstance(item, dict) else (None, None)


def _fields(record: Any) -> str:
    return ", ".join(sorted(map(str, record))[:8]) or "no fields"
