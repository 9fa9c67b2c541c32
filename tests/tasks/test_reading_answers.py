"""Tests of the answers computed from the output of the span pointer, compared with hand-computed probabilities."""

import json
import math

import pytest
import torch

from regard.data.text.passages import Passage
from regard.models.span_pointer import Pointed
from regard.tasks.reading.answers import answers

LOW = torch.finfo(torch.float32).min / 2
FIRST = Passage.of("Emma ran. She is in the kitchen.")  # words: Emma ran . She is in the kitchen .
SECOND = Passage.of("他在厨房。")


def logs(*chances):
    return [math.log(chance) if chance else LOW for chance in chances]


POINTED = Pointed(
    torch.tensor([logs(0.1, 0, 0, 0, 0, 0, 0.8, 0.1, 0), logs(0.1, 0.1, 0.7, 0.1, 0, 0, 0, 0, 0)]),
    torch.tensor([logs(0.5, 0, 0, 0, 0, 0, 0.1, 0.4, 0), logs(0, 0, 0.2, 0.8, 0, 0, 0, 0, 0)]),
)


def test_text_place_sentence_and_probability():
    english, chinese = answers(POINTED, [FIRST, SECOND], longest=3)
    assert (english.text, english.span, english.offsets, english.sentence) == ("the kitchen", (6, 7), (20, 31), 1)
    assert english.probability == pytest.approx(0.8 * 0.4)
    assert (chinese.text, chinese.span, chinese.offsets, chinese.sentence) == ("厨房", (2, 3), (2, 4), 0)
    assert chinese.probability == pytest.approx(0.7 * 0.8)


def test_weights_are_those_of_the_first_word():
    english, chinese = answers(POINTED, [FIRST, SECOND], longest=3)
    assert english.weights == pytest.approx([0.1, 0, 0, 0, 0, 0, 0.8, 0.1, 0], abs=1e-6)
    assert (english.pointed, chinese.pointed) == (6, 2)
    assert len(chinese.weights) == 5


def test_a_span_is_no_longer_than_allowed():
    [english] = answers(Pointed(POINTED.start_logits[:1], POINTED.end_logits[:1]), [FIRST], longest=1)
    # The probability of word 6, 0.8 · 0.1, exceeds those of the words 0 and 7, 0.1 · 0.5 and 0.1 · 0.4.
    assert english.span == (6, 6)


def test_the_record_is_json():
    record = answers(POINTED, [FIRST, SECOND], longest=3)[0].record()
    assert json.loads(json.dumps(record)) == record
    assert FIRST.text[record["start"] : record["end"]] == record["answer"]
    assert record["sentence_text"] == "She is in the kitchen."
