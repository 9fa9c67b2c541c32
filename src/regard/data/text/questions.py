"""Readers of questions about passages: SQuAD's JSON, XQuAD, one JSON object a line, bAbI.

A fault in a file is an error that names the file and the place. Questions without an answer, or with an answer that is
not in the passage, are skipped, counted and reported.
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
class Asked:
    """A question about a passage, the answers that count as right, and the words of the passage that answer it.

    `span` is the first and the last word of the first answer, both included; None if no span is right, so that the
    question cannot be trained on. `support` are the sentences that are needed to answer, if known.
    """

    passage: Passage
    question: tuple[str, ...]
    answers: tuple[str, ...]
    span: tuple[int, int] | None
    support: tuple[int, ...] = ()

    @property
    def asked_text(self) -> str:
        """Return the question as text: its words, without a blank before the question mark."""
        return " ".join(self.question).replace(" ?", "?")


@dataclass(frozen=True, slots=True)
class QuestionReport:
    """The number of questions read and kept, changes to answers, and the number skipped for each reason.

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
    """One question of a file. Each answer is a text and the character where it starts, None if the file has no
    position."""

    passage: str
    question: str
    answers: tuple[tuple[str, int | None], ...]


def load_questions(
    path: Path, *, longest: int | None = None, candidates: Sequence[str] = ()
) -> tuple[list[Asked], QuestionReport]:
    """Return the questions of a file: SQuAD's .json, .jsonl with an object per line, or bAbI's .txt, optionally .gz.

    Passages of more than `longest` words are skipped. `candidates` are answers that are appended to bAbI stories. A
    fault (bad UTF-8, no JSON, a missing key) is a DataError.
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
    passages: dict[str, Passage] = {}  # by text, because several questions share a passage
    for entry in readers[suffix](path):
        if entry.passage not in passages:
            passages = {entry.passage: Passage.of(entry.passage)}  # questions about one passage are adjacent
        tally.take(*_located(entry, passages[entry.passage]))
    return tally.finish()


class Tally:
    """The questions accepted so far, and the counts of a report."""

    def __init__(self, path: Path, longest: int | None) -> None:
        self.path, self.longest = path, longest
        self.kept: list[Asked] = []
        self.read = 0
        self.answers: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()

    def take(self, asked: Asked | None, remark: str = "") -> None:
        """Add a question with a remark about its answer, or skip it for the reason in the remark."""
        self.read += 1
        if asked is not None and self.longest is not None and len(asked.passage.words) > self.longest:
            asked, remark = None, "too long"
        if asked is None:
            self.skipped[remark] += 1
            return
        self.kept.append(asked)
        if remark:
            self.answers[remark] += 1

    def finish(self) -> tuple[list[Asked], QuestionReport]:
        """Return the questions and the report; a file without any is an error."""
        made = QuestionReport(
            self.read, len(self.kept), dict(sorted(self.answers.items())), dict(sorted(self.skipped.items()))
        )
        if not self.read:
            raise DataError(f"{self.path}: there is no question in this file")
        if not self.kept:
            raise DataError(f"{self.path}: no question is left ({made})")
        return self.kept, made


def _located(entry: Entry, passage: Passage) -> tuple[Asked | None, str]:
    """Return the question with the words of its first answer and a remark; or None and the reason why it is skipped."""
    if not passage.words:
        return None, "empty passage"
    asked = words(entry.question)
    if not asked:
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
    return Asked(passage, asked, references, span), remark


def _occurrence(passage: str, text: str, start: int | None) -> int | None:
    """Return the position of the answer: at `start`, else the nearest to it; the first one if there is no start."""
    if start is not None and passage[max(start, 0) : max(start, 0) + len(text)] == text:
        return start
    places = []
    place = passage.find(text)
    while place >= 0:
        places.append(place)
        place = passage.find(text, place + 1)
    return min(places, key=lambda place: abs(place - (start or 0)), default=None)


def _by_line(path: Path) -> Iterator[Entry]:
    """Yield one JSON object per line with passage or context, question, and answer or answers."""
    for line in lines(path):
        if not line.text and not line.fault:
            continue
        record, fault = json_object(line.text)
        if fault := line.fault or fault:
            raise DataError(f"{path}:{line.number}: {fault}")
        yield _entry(f"{path}:{line.number}", record, record)


def _squad(path: Path) -> Iterator[Entry]:
    """Yield the questions of one JSON object: data › paragraphs › context and qas › question and answers."""
    told: list[str] = []
    for line in lines(path):
        if line.fault:
            raise DataError(f"{path}:{line.number}: {line.fault}")
        told.append(line.text)
    try:
        whole: Any = json.loads("\n".join(told))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} at character {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{path}: not JSON: nested too deeply") from error
    for place, article in _items(str(path), "", whole, "data"):
        for inner, paragraph in _items(str(path), place, article, "paragraphs"):
            for innermost, asked in _items(str(path), inner, paragraph, "qas"):
                yield _entry(f"{path}: {innermost}", paragraph, asked)


def _items(path: str, place: str, record: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the elements of a list in a record, each with its place."""
    where = f"{path}: {place}" if place else path
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if not isinstance(record.get(name), list):
        raise DataError(f"{where}: expected a list in the field {name!r}; the object has {_fields(record)}")
    prefix = f"{place}.{name}" if place else name
    for number, item in enumerate(record[name]):
        yield f"{prefix}[{number}]", item


def _entry(place: str, about: Any, asked: Any) -> Entry:
    """Return one question, from the object of the passage and the object of the question."""
    if not isinstance(asked, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(asked).__name__}")
    passage = next((about[name] for name in _PASSAGES if name in about), None)
    if not isinstance(passage, str):
        raise DataError(f"{place}: expected a text in the field 'passage' or 'context'; found {_fields(about)}")
    if not isinstance(asked.get("question"), str):
        raise DataError(f"{place}: expected a text in the field 'question'; the object has {_fields(asked)}")
    answers, fault = _answers(asked)
    if fault := fault or fault_of("".join((passage, asked["question"], *(text for text, _ in answers)))):
        raise DataError(f"{place}: {fault}")
    return Entry(passage, asked["question"], answers)


def _answers(asked: dict[str, Any]) -> tuple[tuple[tuple[str, int | None], ...], str]:
    """Return texts and starts: of "answer" and "answer_start", or of "answers" in SQuAD's or the hub's form."""
    found = asked.get("answers", asked.get("answer"))
    if isinstance(found, str):
        found = [{"text": found, "answer_start": asked.get("answer_start")}]
    if isinstance(found, dict):  # the form of the hub: {"text": […], "answer_start": […]}
        texts, starts = found.get("text"), found.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            found = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(found, list):
        return (), f"expected an answer in the field 'answer' or 'answers'; the object has {_fields(asked)}"
    answers: list[tuple[str, int | None]] = []
    for item in found:
        text, start = (item, None) if isinstance(item, str) else _text_and_start(item)
        if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int | None):
            return (), f"expected an answer as a text with a number where it starts, found {json.dumps(item)[:60]}"
        answers.append((text, start))
    return tuple(answers), ""


def _text_and_start(item: Any) -> tuple[Any, Any]:
    return (item.get("text"), item.get("answer_start")) if isinstance(item, dict) else (None, None)


def _fields(record: Any) -> str:
    return ", ".join(sorted(map(str, record))[:8]) or "no fields"
