"""Tests of reading questions about passages: answers as spans of words, errors with file and position, skipped lines
are counted."""

import gzip
import json
from pathlib import Path

import pytest

from regard.data.data_files import DataError
from regard.data.text.babi import candidates, load_stories
from regard.data.text.passages import Passage
from regard.data.text.questions import load_questions

TEXT = "Tesla was born in Smiljan, Croatia. He died in New York, aged 86."


def squad(*qas: dict, context: object = TEXT) -> str:
    return json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": qas}]}]})


def qa(answer: str, start: int, question: str = "Where?") -> dict:
    return {"id": "1", "question": question, "answers": [{"text": answer, "answer_start": start}]}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_words_know_their_characters():
    passage = Passage.of("U.S. troops (10,000) left Peking/北京 — in 2½ days.")
    assert passage.words == (
        *("U", ".", "S", ".", "troops", "(", "10", ",", "000", ")", "left", "Peking", "/", "北", "京", "—", "in", "2½"),
        *("days", "."),
    )
    assert all(
        passage.text[start:end] == word for word, (start, end) in zip(passage.words, passage.places, strict=True)
    )
    assert passage.between(6, 8) == "10,000"
    assert passage.between(13, 14) == "北京"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("He ran. She sat.", [0, 0, 0, 1, 1, 1]),
        ("Version 3.5 ran", [0, 0, 0, 0, 0]),
        ("他跑。她坐！", [0, 0, 0, 1, 1, 1]),
        ("Why? Who knows", [0, 0, 1, 1]),
    ],
)
def test_sentences_of_words(text, numbers):
    assert list(Passage.of(text).sentences) == numbers


def test_squad_answers_are_words(tmp_path):
    path = write(tmp_path / "dev.json", squad(qa("Smiljan, Croatia", 18), qa("New York", 47), qa("86", 62)))
    asked, report = load_questions(path)
    assert [item.span for item in asked] == [(4, 6), (11, 12), (15, 15)]
    assert [item.passage.between(*item.span) for item in asked] == ["Smiljan, Croatia", "New York", "86"]
    assert [item.passage.sentences[item.span[0]] for item in asked] == [0, 1, 1]
    assert asked[0].passage is asked[1].passage
    assert str(report) == "3 questions read, 3 kept"


def test_several_references(tmp_path):
    answers = [{"text": "New York", "answer_start": 47}, {"text": "in New York", "answer_start": 44}]
    answers.append(answers[0])
    path = write(tmp_path / "dev.json.gz", gzip.compress(squad({"question": "Where?", "answers": answers}).encode()))
    [asked], _ = load_questions(path)
    assert (asked.answers, asked.span) == (("New York", "in New York"), (11, 12))


def test_an_answer_that_cuts_a_word_is_widened_and_counted(tmp_path):
    asked, report = load_questions(write(tmp_path / "a.json", squad(qa("Smil", 18), qa("8", 62), qa("York", 51))))
    assert [item.passage.between(*item.span) for item in asked] == ["Smiljan", "86", "York"]
    assert [item.answers for item in asked] == [("Smil",), ("8",), ("York",)]
    assert dict(report.answers) == {"widened to whole words": 2}
    assert str(report) == "3 questions read, 3 kept; answers: 2 widened to whole words"


def test_a_wrong_start_moves_to_the_nearest_occurrence(tmp_path):
    """The answer "in" occurs at characters 15 and 44 of the passage."""
    asked, report = load_questions(write(tmp_path / "a.json", squad(qa("in", 40), qa("in", 14), qa("in", -3))))
    assert [item.span for item in asked] == [(10, 10), (3, 3), (3, 3)]
    assert dict(report.answers) == {"moved to where the answer is": 3}


def test_what_cannot_be_learnt_from_is_skipped_and_counted(tmp_path):
    lines = [
        {"passage": TEXT, "question": "Where?", "answer": "Paris"},
        {"passage": " ", "question": "Where?", "answer": "Paris"},
        {"passage": TEXT, "question": "", "answer": "86"},
        {"passage": TEXT, "question": "Where?", "answers": []},
        {"passage": TEXT, "question": "Where?", "answer": "86"},
        {"passage": "word " * 20, "question": "Where?", "answer": "word"},
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    asked, report = load_questions(path, longest=19)
    assert (len(asked), report.read, report.kept) == (1, 6, 1)
    assert dict(report.skipped) == {
        **{"answer not in the passage": 1, "empty passage": 1, "empty question": 1, "no answer": 1, "too long": 1}
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"passage": TEXT, "answer": "New York"},
        {"context": TEXT, "answer": "New York", "answer_start": 47},
        {"context": TEXT, "answers": ["New York", "York"]},
        {"context": TEXT, "answers": {"text": ["New York"], "answer_start": [47]}},
        {"context": TEXT, "answers": [{"text": "New York", "answer_start": 47}]},
    ],
    ids=["passage", "context and start", "texts", "columns", "SQuAD's"],
)
def test_objects_a_line(tmp_path, fields):
    path = write(tmp_path / "a.jsonl", "\n" + json.dumps({"question": "Where did he die?", **fields}) + "\n")
    [asked], report = load_questions(path)
    assert asked.passage.between(*asked.span) == asked.answers[0] == "New York"
    assert asked.question == ("Where", "did", "he", "die", "?")
    assert (report.read, report.kept) == (1, 1)


GOOD = json.dumps({"passage": TEXT, "question": "Where?", "answer": "86"})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"[1]", "expected a JSON object, found list"),
        (
            b'{"question": "Where?", "answer": "86"}',
            "a text in the field 'passage' or 'context'; found answer",
        ),
        (
            b'{"passage": "a", "answer": "86"}',
            "a text in the field 'question'; the object has answer, passage",
        ),
        (b'{"passage": "a", "question": "Where?"}', "expected an answer in the field 'answer' or 'answers'"),
        (b'{"passage": "a", "question": "Where?", "answer": "a", "answer_start": "0"}', "where it starts, found"),
        (b'{"passage": "a", "question": "Where?", "answers": [7]}', "expected an answer as a text"),
        (b'{"passage": "\\ud800", "question": "Where?", "answer": "a"}', "half of a surrogate pair"),
        ('{"passage": "ä"}'.encode("latin-1"), "not UTF-8: byte 0xe4"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=["broken", "no object", "no passage", "no question", "no answer", "start", "number", "half", "latin", "deep"],
)
def test_a_faulty_line_is_an_error_with_its_place(tmp_path, line, fault):
    path = write(tmp_path / "a.jsonl", GOOD.encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError) as caught:
        load_questions(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [\n{"paragraphs": ]}', "a.json:2: not JSON: Expecting value at character 16"),
        ("[]", "a.json: expected a JSON object, found list"),
        ('{"answers": 1}', "a.json: expected a list in the field 'data'; the object has answers"),
        ('{"data": [{}]}', "a.json: data[0]: expected a list in the field 'paragraphs'; the object has no fields"),
        ('{"data": [{"paragraphs": [5]}]}', "a.json: data[0].paragraphs[0]: expected a JSON object, found int"),
        (squad("what"), "a.json: data[0].paragraphs[0].qas[0]: expected a JSON object, found str"),
        (squad(qa("86", 62), {"question": "Where?"}), "a.json: data[0].paragraphs[0].qas[1]: expected an answer in"),
        (
            squad(qa("86", 62), context=7),
            "a.json: data[0].paragraphs[0].qas[0]: expected a text in the field",
        ),
        (b'{"data": [\n"\xe4"]}', "a.json:2: not UTF-8: byte 0xe4 at byte 2"),
        ('{"data": []}', "a.json: there is no question in this file"),
        (squad(qa("Paris", 3)), "a.json: no question is left (1 questions read, 0 kept; skipped: 1 answer not in the"),
    ],
    ids=["broken", "list", "no data", "empty", "int", "str", "no answer", "no text", "latin", "none", "nothing left"],
)
def test_what_is_wrong_with_a_squad_file_is_named_with_its_place(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)
    with pytest.raises(DataError) as caught:
        load_questions(path)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.csv: expected \.json \(SQuAD\), \.jsonl"):
        load_questions(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"missing\.json: cannot be read"):
        load_questions(tmp_path / "missing.json")


STORY = """1 Mary moved to the garden.
2 Mary got the milk there.
3 Where is the milk? \tgarden\t2 1
4 Mary went to the bathroom.
5 John moved to the garden.
6 Where is the milk? \tbathroom\t2 4
1 John went to the bathroom.
2 Where is John?\tBathroom\t1
"""


def test_babi_answers_are_spans_of_supporting_sentences(tmp_path):
    path = write(tmp_path / "qa2_train.txt", STORY)
    assert candidates(path) == ()
    asked, report = load_questions(path)
    assert str(report) == "3 questions read, 3 kept"
    assert [item.span for item in asked] == [(4, 4), (16, 16), (4, 4)]
    assert [item.support for item in asked] == [(1, 0), (1, 2), (0,)]
    assert asked[0].passage.text == "Mary moved to the garden. Mary got the milk there."
    assert asked[1].question == ("Where", "is", "the", "milk", "?")
    assert asked[1].passage.sentences == (0,) * 6 + (1,) * 6 + (2,) * 6 + (3,) * 6


LISTS = """1 Mary got the milk.
2 What is Mary carrying? \tmilk\t1
3 Mary got the apple.
4 What is Mary carrying? \tmilk,apple\t1 3
5 Is Mary sad? \tno\t
"""


def test_answers_that_no_story_holds_stand_at_its_end(tmp_path):
    path = write(tmp_path / "qa8_train.txt", LISTS)
    assert candidates(path) == ("milk", "milk,apple", "no")
    asked, _ = load_questions(path, candidates=candidates(path))
    assert [item.passage.between(*item.span) for item in asked] == ["milk", "milk,apple", "no"]
    assert [item.span for item in asked] == [(5, 5), (11, 11), (12, 12)]
    assert asked[1].passage.text == "Mary got the milk. Mary got the apple. milk milk,apple no"
    assert asked[1].passage.sentences[-4:] == (1, 2, 2, 2)


def test_an_answer_that_training_never_had_stays_in_the_test(tmp_path):
    asked, report = load_stories(write(tmp_path / "qa8_test.txt", LISTS), candidates=("no", "milk"))
    assert [item.span is None for item in asked] == [False, True, False]
    assert dict(report.answers) == {"never seen in training": 1}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("Mary went.", "expected a number before the sentence"),
        ("2 Where is Mary?\t\t1", "expected a question, a tab and its answer"),
        ("2 Where is Mary?\tgarden\t7", "expected numbers of supporting sentences, found '7'"),
        ("2 Where is Mary?\tgarden\tone", "expected numbers of supporting sentences, found 'one'"),
        (b"2 \xe4", "not UTF-8: byte 0xe4"),
    ],
    ids=["number", "answer", "support", "word", "latin"],
)
def test_a_faulty_line_of_babi_is_an_error_with_its_place(tmp_path, line, fault):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.txt", b"1 Mary went to the garden.\n" + line + b"\n3 Where is Mary?\tgarden\t1\n")
    with pytest.raises(DataError) as caught:
        load_questions(path)
    assert str(caught.value).startswith(f"{path}:2: {fault}")
