"""Tests that pages of a run show the self-attention of its network in addition to the attention map of the task."""

import base64
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import regard, tiny, tiny_settings

import regard as package
from regard.core.requests import full
from regard.look.trace import Trace
from regard.nn.multihead import MultiHeadAttention
from regard.tasks import watched_predictions as module
from regard.tasks.watched_predictions import watched

TRANSFORMERS = ("translation", "sentiment")
LAYERS = ["encoder.stack.layers.0.attention", "encoder.stack.layers.1.attention"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train a Transformer with two layers of two heads for each of two tasks; return the run directories by task."""
    folder, made = tmp_path_factory.mktemp("watched"), {}
    settings = [word for one in ("model=transformer", "heads=2", "layers=2") for word in ("--set", one)]
    for name in TRANSFORMERS:
        done = regard("train", name, *tiny_settings(name), *settings, "--set", "steps=2", "--out", folder / name)
        assert done.exit_code == 0, done.output
        made[name] = folder / name
    return made


def shown(page: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the attention records of an HTML page, and their labels."""
    [about] = re.findall(r'data-about="0-0">([^<]*)<', page.read_text(encoding="utf-8"))
    data = json.loads(base64.b64decode(about))
    return data["records"], data["labels"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_page_of_a_run_has_the_layers_of_the_encoder(runs, name, tmp_path):
    done = regard("look", runs[name], "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    records, labels = shown(tmp_path / "page.html")
    numbers = [record["name"].partition(".")[0] for record in records]
    # Each prediction has first the attention map of its task, then the layers of self-attention.
    for number in set(numbers):
        own = [record for record, its in zip(records, numbers, strict=True) if its == number]
        assert [record["name"].rpartition(" · ")[2] for record in own] == ["attention", *LAYERS]
        assert [record["heads"] for record in own] == [1, 2, 2]
        assert labels[own[1]["rows"]]["items"] == labels[own[0]["columns"]]["items"]


@pytest.mark.slow
def test_the_page_of_an_answer_has_them_too(runs, tmp_path):
    done = regard("predict", runs["translation"], "Tom chases Jerry", "Tom", "--look", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    names = [record["name"].rpartition(" · ")[2] for record in shown(tmp_path / "page.html")[0]]
    assert names[:3] == ["attention", *LAYERS]


def test_the_weights_are_those_of_the_encoder(runs):
    loaded = package.load(runs["sentiment"])
    text = tiny("sentiment").asked[0]
    [found] = watched(loaded, [text])
    numbers, _ = loaded.codec.encode(text)
    with torch.no_grad():
        read = loaded.predictor.network.encoder.read(torch.tensor([numbers]), weights=full())
    trace = found.trace()
    assert [record.name for record in trace.records] == ["attention", *LAYERS]
    for record, weights in zip(trace.records[1:], read.weights, strict=True):
        torch.testing.assert_close(record.weights(), weights[0], atol=1e-5, rtol=0)
    assert found.answer in found.line
    assert found.record() == loaded.predict([text])[0].record()


def test_layers_beyond_the_bound_are_named_as_left_out(runs, monkeypatch):
    # Room for the weights of one layer with two heads and six words.
    monkeypatch.setattr(module, "MOST_WEIGHTS", 2 * 6 * 6)
    [found] = watched(package.load(runs["sentiment"]), ["The film is not bad."])
    trace = found.trace()
    assert [record.name for record in trace.records] == ["attention", LAYERS[0]]
    [why] = trace.dropped
    assert why.startswith(f"{LAYERS[1]!r} did not fit")


@dataclass
class Stub:
    """A stand-in for a predictor; its trace is the self-attention of its network if `own` is true, else None."""

    network: MultiHeadAttention
    own: bool
    line = answer = "yes"

    def answers(self, inputs: list[Any]) -> list[Any]:
        x = torch.ones(1, 3, 4)
        self.weights = self.network(x, weights=full()).weights
        return [self]

    def record(self) -> dict[str, Any]:
        return {}

    def trace(self) -> Trace | None:
        return Trace.from_weights({"own": self.weights}) if self.own else None


@pytest.mark.parametrize(("own", "names"), [(True, ["own"]), (False, [""])])
def test_a_map_that_the_task_shows_itself_is_not_shown_twice(runs, own, names):
    loaded = replace(package.load(runs["sentiment"]), predictor=Stub(MultiHeadAttention(4, 2), own))
    with torch.no_grad():
        [found] = watched(loaded, ["?"])
    assert [record.name for record in found.trace().records] == names


def test_a_trace_can_be_asked_for_twice(runs):
    """Renaming the records of a trace, as a page does, must not change later traces of the prediction."""
    [found] = watched(package.load(runs["sentiment"]), ["The film is not bad."])
    for record in found.trace().records:
        record.name = "changed"
    assert [record.name for record in found.trace().records] == ["attention", *LAYERS]
