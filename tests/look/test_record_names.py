"""Tests that a record is selected by its exact name, even if the name contains pattern characters such as `*`."""

import pytest
import torch

from regard.look.trace import Trace
from regard.look.viewer.page import page
from regard.tasks.joined_traces import joined_trace
from regard.tasks.translation.codec import Reading
from regard.tasks.translation.predictor import Translation
from regard.tasks.translation.task import TRANSLATION

NAMES = ["a [b] c", "[…]", "*", "?", "[!a]*", "[[]", "a*[", "]["]


@pytest.mark.parametrize("name", NAMES)
def test_an_exact_name_is_not_a_pattern(name):
    weights = {other: torch.rand(1, 2, 2) for other in NAMES}
    trace = Trace.from_weights(weights).label(rows=["x", "y"], of=name)
    assert [record.name for record in trace if record.row_labels is not None] == [name]
    assert [record.name for record in trace.select(name)] == [name]
    assert trace.rollout(of=name).shape == (2, 2)


def test_a_record_or_a_call_can_be_named():
    trace = Trace.from_weights({"a": torch.rand(1, 2, 2), "b": torch.rand(1, 2, 2)})
    trace.label(rows=["x", "y"], of=trace.records[1]).label(columns=["v", "w"], of=("a", 0))
    assert trace["b"].row_labels.items == ("x", "y")
    assert trace["a"].row_labels is None
    assert trace["a"].column_labels.items == ("v", "w")


def translation(text: str, *words: str) -> Translation:
    source = Reading([3, 4], ("Tom", "[runs]"), [0, 1], ("Tom", "[runs]"))
    return Translation(source, text, (5,) * len(words), words, torch.rand(len(words), 2), 0.0)


@pytest.mark.parametrize("text", [*NAMES, "1. [x]", "same"])
def test_translations_full_of_signs_are_shown(text):
    found = [translation(text, "a", "[b]"), translation(text, "c", "d", "e"), translation("other", "*")]
    trace = joined_trace(found, TRANSLATION.view)
    assert [record.row_labels.items for record in trace] == [("a", "[b]"), ("c", "d", "e"), ("*",)]
    assert [record.column_labels.items for record in trace] == [("Tom", "[runs]")] * 3
    assert page(trace)
