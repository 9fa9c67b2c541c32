"""Tests of the studio's HTTP responses: the playground (compared with loops over lists), examples, traces,
translations."""

import contextlib
import io
import json
import math
import struct
from typing import Any

import pytest
import torch
from conftest_studio import Studio, running

from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.studio.limits import Limits
from regard.studio.playground import Question, Sentence, answer, embed
from regard.studio.toy_translator import Toy, toys
from regard.studio.translation_api import Translates
from regard.tasks.hypotheses import Alternative, Answer, Hypothesis

TOM = {"query": [[10.0, 5.0, 10.0]], "key": [[5.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(scores):
    most = max(scores)
    parts = [math.exp(score - most) for score in scores]
    return [part / sum(parts) for part in parts]


def close(found, expected, tolerance=1e-5):
    assert found == pytest.approx(expected, abs=tolerance, rel=1e-4)


def test_the_worked_example(studio: Studio):
    answer = studio.post("/api/playground", {**TOM, "score": "dot"}).json
    assert answer["scores"] == [[[60.0, 15.0, 15.0]]]
    close(answer["weights"][0][0], softmax([60, 15, 15]))
    close(answer["output"][0][0], [5.0, 0.0, 1.0])
    assert answer["allowed"] == [[True, True, True]]
    assert "score=regard.Dot()" in answer["code"]


def test_scaled_and_warm(studio: Studio):
    answer = studio.post("/api/playground", {**TOM, "temperature": 20}).json
    scores = [dot(TOM["query"][0], key) / math.sqrt(3) / 20 for key in TOM["key"]]
    close(answer["scores"][0][0], scores)
    weights = softmax(scores)
    close(answer["weights"][0][0], weights)
    close(answer["output"][0][0], [dot(weights, column) for column in zip(*TOM["key"], strict=True)])
    close(answer["sums"][0], [1.0])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_every_score(studio: Studio, temperature):
    query, keys = TOM["query"][0], TOM["key"]
    for score in ("dot", "scaled_dot", "cosine", "bilinear", "additive"):
        answer = studio.post("/api/playground", {**TOM, "score": score, "temperature": temperature}).json
        learned = answer["parameters"]
        expected = {
            "dot": lambda key, _: dot(query, key),
            "scaled_dot": lambda key, _: dot(query, key) / math.sqrt(3),
            "cosine": lambda key, _: dot(query, key) / math.sqrt(dot(query, query) * dot(key, key)),
            "bilinear": lambda key, p: dot([dot(query, column) for column in zip(*p["W"], strict=True)], key),
            "additive": lambda key, p: sum(
                w * math.tanh(dot(query, q) + dot(key, k))
                for w, q, k in zip(p["w"], zip(*p["W_q"], strict=True), zip(*p["W_k"], strict=True), strict=True)
            ),
        }[score]
        close(answer["scores"][0][0], [expected(key, learned) / temperature for key in keys], 1e-4)


def test_every_normaliser(studio: Studio):
    question = {**TOM, "score": "cosine"}
    found = {
        name: studio.post("/api/playground", {**question, "normalize": name}).json
        for name in ("softmax", "sparsemax", "entmax", "sigmoid", "hard")
    }
    scores = found["softmax"]["scores"][0][0]
    weights = {name: answer["weights"][0][0] for name, answer in found.items()}
    close(weights["softmax"], softmax(scores))
    close(weights["sigmoid"], [1 / (1 + math.exp(-score)) for score in scores])
    assert weights["hard"] == [1.0, 0.0, 0.0]
    close(sum(weights["sparsemax"]), 1.0)
    threshold = scores[0] - weights["sparsemax"][0]
    close(weights["sparsemax"], [max(0.0, score - threshold) for score in scores])
    root = scores[0] / 2 - math.sqrt(weights["entmax"][0])
    close(weights["entmax"], [max(0.0, score / 2 - root) ** 2 for score in scores])
    close(sum(weights["entmax"]), 1.0)


def test_masks(studio: Studio):
    question = {"query": [[1.0, 0.0]] * 3, "key": [[1.0, 1.0]] * 4}
    rows = {
        "causal": [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
        "window": [[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]],
        "padding": [[0, 0, 0, 0]] * 3,
    }
    for kind, allowed in rows.items():
        mask = {"kind": kind, "before": 0, "after": 2, "length": 0}
        answer = studio.post("/api/playground", {**question, "mask": mask}).json
        assert answer["allowed"] == [[bool(flag) for flag in row] for row in allowed]
        for weights, row in zip(answer["weights"][0], allowed, strict=True):
            close(weights, [flag / max(1, sum(row)) for flag in row])


def test_heads_read_their_own_part(studio: Studio):
    question = {"query": [[1.0, 2.0, 3.0, 4.0]], "key": [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]], "heads": 2}
    answer = studio.post("/api/playground", {**question, "score": "dot"}).json
    assert answer["scores"] == [[[1.0, 2.0]], [[4.0, 3.0]]]
    first, second = softmax([1, 2]), softmax([4, 3])
    close(answer["output"][0][0], first)
    close(answer["output"][1][0], [second[1], second[0]])


def test_values_of_their_own(studio: Studio):
    answer = studio.post("/api/playground", {**TOM, "normalize": "hard", "value": [[7.0], [8.0], [9.0]]}).json
    assert answer["output"] == [[[7.0]]]


WINDOW = {"kind": "window", "before": 0, "after": 1}
SHOWN = {
    "worked example": {**TOM, "score": "dot"},
    "warm": {**TOM, "temperature": 7, "normalize": "sparsemax"},
    "cosine": {**TOM, "score": "cosine", "temperature": 0.3, "mask": {"kind": "padding", "length": 2}},
    "bilinear": {**TOM, "score": "bilinear", "temperature": 3, "mask": {"kind": "causal"}},
    "additive": {**TOM, "score": "additive", "temperature": 3, "mask": WINDOW},
    "heads and values": {
        "query": [[1, 2, 3, 0.1], [0, 1, 0, 2]],
        "key": [[1, 0, 0, 1], [0, 1, 1, 0]],
        "value": [[1, 2], [3, 5]],
        "heads": 2,
        "score": "additive",
        "normalize": "entmax",
    },
    "hard": {**TOM, "normalize": "hard", "value": [[7.0], [8.0], [9.0]]},
    "sigmoid": {**TOM, "normalize": "sigmoid", "temperature": 50},
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_code_shown_runs_as_it_is_and_gives_the_numbers_shown(name):
    question = Question.model_validate(SHOWN[name])
    shown: dict[str, Any] = answer(question)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(shown["code"], names)
    assert "tensor(" in printed.getvalue()
    output, weights = (shown[what] if question.heads > 1 else shown[what][0] for what in ("output", "weights"))
    torch.testing.assert_close(names["attended"].output, torch.tensor(output))
    torch.testing.assert_close(names["attended"].weights, torch.tensor(weights))


def test_words_become_vectors_by_their_letters():
    made = embed(Sentence(text="chases chased 老鼠, zoo", size=16))
    assert made["tokens"] == ["chases", "chased", "老", "鼠", ",", "zoo"]
    vectors = made["vectors"]
    assert all(math.sqrt(dot(vector, vector)) == pytest.approx(2, abs=0.05) for vector in vectors)
    assert dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[5]) + 1
    assert embed(Sentence(text="Chases", size=16))["vectors"][0] == vectors[0]


def test_the_examples_are_listed_and_described(studio: Studio):
    listed = studio.get("/api/traces").json["traces"]
    assert [trace["id"] for trace in listed] == ["image", "sound", "sentiment", "reading", "scene"]
    for trace in listed:
        about = studio.get(f"/api/traces/{trace['id']}/records").json
        for record in about["records"]:
            assert record["model"] is True
            assert len(about["labels"][record["columns"]]["items"]) == record["keys"]


def test_what_ought_to_be_looked_at_is(studio: Studio):
    def best(id: str, row: int) -> str:
        about = studio.get(f"/api/traces/{id}/records").json
        body = studio.get(f"/api/traces/{id}/rows?row={row}").body
        weights = struct.unpack(f"<{len(body) // 4}f", body)
        assert sum(weights) == pytest.approx(1, abs=1e-5)
        return about["labels"][about["records"][0]["columns"]]["items"][weights.index(max(weights))]

    assert best("sentiment", 0) == "wonderful"
    assert best("sentiment", 1) == "thin"
    assert best("reading", 1) == "Montreal"
    assert best("scene", 0) == "lorry, braking"
    assert best("image", 2) in ("(10, 8)", "(11, 8)", "(10, 9)", "(11, 9)")
    assert 0.06 <= float(best("sound", 0).removesuffix(" s")) <= 0.24


def test_pictures_are_pngs(studio: Studio):
    answer = studio.get("/api/traces/image/picture?label=1")
    assert answer.headers["content-type"] == "image/png"
    assert answer.body.startswith(b"\x89PNG")
    assert studio.get("/api/traces/image/picture?label=0").status == 404
    assert studio.get("/api/traces/image/picture?label=../1").status == 404


def test_a_picture_that_claims_too_many_pixels_is_refused():
    def trace(picture: bytes) -> Trace:
        labels = Labels("patches", ("a", "b"), {"image": picture, "grid": (1, 2)})
        return Trace.from_weights({"x": torch.rand(1, 1, 2)}, columns=labels)

    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    bomb = head + struct.pack(">II", 60_000, 60_000) + b"\x08\x02\x00\x00\x00"
    with running((), [trace(bomb), trace(b"<svg onload=alert(1)>")]) as found:
        answer = found.get("/api/traces/trace-1/picture?label=0")
        assert (answer.status, answer.json["error"][:42]) == (413, "a picture must have at most 16777216 pixel")
        answer = found.get("/api/traces/trace-2/picture?label=0")
        assert (answer.status, answer.json["error"]) == (400, "a picture of a trace must be a PNG file")


@pytest.mark.parametrize("id", ["image", "sound", "sentiment", "reading", "scene"])
def test_the_examples_are_faithful(studio: Studio, id):
    found = studio.get(f"/api/traces/{id}/faithfulness?row=1").json
    assert found["gain"]["random"] > 0.1
    assert set(found["deletion"]) == {"map", "random", "gradient × input"}
    for curve in found["deletion"].values():
        assert curve["fractions"][0] == 0
        assert curve["fractions"][-1] == 1
        assert curve["scores"][0] == found["sufficiency"]["map"]["scores"][-1]


@pytest.fixture
def trace_file(tmp_path):
    weights = torch.rand(2, 3, 5)
    trace = Trace.from_weights({"cross": weights}, title="mine", rows=["a", "b", "c"])
    return trace.save(tmp_path / "mine.trace").read_bytes(), weights


def hand(studio: Studio, body: bytes):
    return studio.ask("POST", "/api/traces", body, content_type="application/octet-stream")


def test_a_trace_is_handed_in_and_removed(studio: Studio, trace_file):
    body, weights = trace_file
    opened = hand(studio, body)
    assert opened.json == {"id": opened.json["id"], "title": "mine", "origin": "handed in"}
    base = f"/api/traces/{opened.json['id']}"
    assert studio.get(f"{base}/records").json["labels"][0]["items"] == ["a", "b", "c"]
    row = struct.unpack("<5f", studio.get(f"{base}/rows?head=1&row=2").body)
    close(list(row), weights[1, 2].tolist(), 1e-3)
    answer = studio.get(f"{base}/faithfulness")
    assert (answer.status, "not the model" in answer.json["error"]) == (404, True)
    assert studio.ask("DELETE", base).json == {"removed": opened.json["id"]}
    assert studio.get(f"{base}/records").status == 404
    assert studio.ask("DELETE", "/api/traces/image").status == 404  # built-in examples cannot be removed


def test_only_the_last_few_handed_in_are_held(trace_file):
    with running(limits=Limits(traces=2)) as small:
        ids = [hand(small, trace_file[0]).json["id"] for _ in range(4)]
        held = [trace["id"] for trace in small.get("/api/traces").json["traces"] if trace["origin"] == "handed in"]
    assert held == ids[2:]


def lying(body: bytes, change) -> bytes:
    """Return the bytes of a trace file after `change` has modified its JSON header."""
    (length,) = struct.unpack("<Q", body[:8])
    header = json.loads(body[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body[8 + length :]


def test_files_of_strangers_are_refused(studio: Studio, trace_file):
    body, _ = trace_file

    def described(**changes):
        def change(header):
            name, text = next((n, t) for n, t in header["__metadata__"].items() if t.startswith("{"))
            about = json.loads(text)
            about["records"][0].update(changes)
            header["__metadata__"][name] = json.dumps(about)

        return lying(body, change)

    wrong = [
        b"", b"PK\x03\x04", b"\x80\x04\x95pickle", body[:-7], body[: len(body) // 2], b"\xff" * 64,
        struct.pack("<Q", 2**62) + b"{}", described(queries=10**6), described(heads=-1), described(kind=7),
        described(keys=2**40), lying(body, lambda header: header.pop("__metadata__")),
    ]  # fmt: skip
    for file in wrong:
        answer = hand(studio, file)
        assert answer.status == 400, (file[:60], answer.body)
        assert answer.json["error"].startswith("this is not a trace that can be opened: ")
        assert "/tmp" not in answer.json["error"]
    assert [trace for trace in studio.get("/api/traces").json["traces"] if trace["origin"] == "handed in"] == []


def test_too_large_a_file_is_refused(trace_file):
    with running(limits=Limits(trace=100)) as small:
        answer = hand(small, trace_file[0])
    assert answer.status == 413
    assert answer.json["error"].startswith("the body must have at most 100 bytes, got ")


def test_traces_given_at_the_start(tmp_path, trace_file):
    path = tmp_path / "given.trace"
    path.write_bytes(trace_file[0])
    with running((), [path, Trace.from_weights({"x": torch.eye(2)[None]}, title="in memory")]) as found:
        listed = found.get("/api/traces").json["traces"]
        assert [(trace["title"], trace["origin"]) for trace in listed[:2]] == [
            ("given.trace", "given"),
            ("in memory", "given"),
        ]
        assert found.get("/api/traces/trace-1/records").json["title"] == "mine"
        assert found.get("/api/traces/trace-2/map").status == 200


class Fake:
    """A stand-in for a trained translator: the translation is the input in capitals."""

    name = "fake"

    def translate(self, text, *, beams, forced=()):
        tokens = (*forced, text.upper())
        weights = torch.full((len(tokens), 2), 0.5)
        others = tuple((Alternative("<b>", 0.75),) for _ in tokens)
        return Answer((text, "."), tuple(Hypothesis(tokens, -float(n), weights, others) for n in range(beams)))


class Broken(Fake):
    """A stand-in for a trained translator whose attention weights are NaN."""

    def translate(self, text, *, beams, forced=()):
        found = super().translate(text, beams=1, forced=forced)
        [beam] = found.beams
        return Answer(found.source, (Hypothesis(beam.tokens, -1.0, beam.weights * math.nan, beam.alternatives),))


def test_a_run_of_nan_is_said_to_be():
    with running([Broken()]) as found:
        answer = found.post("/api/translate", {"text": "hello"})
    assert answer.status == 400
    assert "NaN or infinite" in answer.json["error"]


def test_sequences_of_a_batch_are_told_with_their_own_labels():
    words = [Labels("tokens", ("a", "b")), Labels("tokens", ("c", "[PAD]"), shown=(0,))]
    trace = Trace.from_weights({"layer": torch.rand(2, 1, 2, 2)}, rows=words, columns=words)
    with running([], [trace]) as found:
        [id] = [one["id"] for one in found.get("/api/traces").json["traces"] if one["origin"] == "given"]
        second = found.get(f"/api/traces/{id}/records?batch=1").json
        refused = [found.get(f"/api/traces/{id}/{what}batch=2") for what in ("records?", "map?", "picture?label=0&")]
    assert second["labels"][0]["items"] == ["c"]
    assert [one["text"] for one in second["sequences"]] == ["a b", "c"]
    assert (second["records"][0]["queries"], second["records"][0]["item"]) == (1, 1)
    assert [(one.status, one.json["error"]) for one in refused] == [(400, "batch must be from 0 to 1, got 2")] * 3


def test_a_trace_with_nan_is_told_in_json():
    weights = torch.rand(1, 2, 3)
    weights[0, 1] = math.nan
    with running([], [Trace.from_weights({"layer": weights})]) as found:
        [id] = [one["id"] for one in found.get("/api/traces").json["traces"] if one["origin"] == "given"]
        [record] = found.get(f"/api/traces/{id}/records").json["records"]
        grid = found.get(f"/api/traces/{id}/thumbnail")
    assert record["entropy"] == [None]
    assert "3 are NaN" in record["note"]
    sent = torch.tensor(struct.unpack("<6e", grid.body))
    assert sent.isnan().tolist() == [False] * 3 + [True] * 3


def test_a_run_is_asked_what_the_reader_chose():
    assert isinstance(Fake(), Translates)
    with running([Fake()]) as found:
        listed = {"name": "fake", "translates": True, "scores": False}
        assert found.get("/api/runs").json == {"runs": [listed], "toys": False}
        answer = found.post("/api/translate", {"text": "hello", "beams": 2, "forced": ["x"]}).json
        judged = found.post("/api/faithfulness", {"text": "hello", "target": ["x"], "place": 0})
    assert (judged.status, judged.json["error"]) == (404, "this run cannot be asked again with words left out")
    assert answer["source"] == ["hello", "."]
    assert [beam["tokens"] for beam in answer["beams"]] == [["x", "HELLO"]] * 2
    assert answer["beams"][1]["logProb"] == -1
    assert answer["beams"][0]["weights"] == [[0.5, 0.5]] * 2
    assert answer["beams"][0]["alternatives"][0] == [{"token": "<b>", "probability": 0.75}]


def test_the_toys_translate():
    soft, sparse = toys()
    for toy in (soft, sparse):
        found = toy.translate("Tom chases Jerry", beams=3)
        assert found.beams[0].tokens == ("汤姆", "追逐", "杰瑞")
        assert [int(row.argmax()) for row in found.beams[0].weights] == [0, 1, 2]
        assert len(found.beams) == 3
        assert found.beams[0].log_prob >= found.beams[1].log_prob
        torch.testing.assert_close(found.beams[0].weights.sum(1), torch.ones(3))
        moved = toy.translate("The big dog saw a small cat yesterday .", beams=1).beams[0]
        assert moved.tokens == ("昨天", "大", "狗", "看见了", "小", "猫")
        assert int(moved.weights[0].argmax()) == 7
    assert bool((sparse.translate("Tom chases Jerry", beams=1).beams[0].weights == 0).any())


def test_a_toy_says_what_it_is_forced_to():
    found = Toy().translate("Tom chases Jerry", beams=2, forced=["杰瑞"]).beams[0]
    assert found.tokens == ("杰瑞", "追逐", "汤姆")
    assert Toy().translate("Tom chases Jerry", beams=2, forced=["汤姆", "追"]).beams[0].tokens == ("汤姆", "追", "杰瑞")
    assert Toy().translate("Tom", beams=1, forced=["foo"]).beams[0].tokens[0] == "foo"
    alternatives = found.alternatives[0]
    assert [other.token for other in alternatives[:2]] == ["汤姆", "追逐"]
    assert sum(other.probability for other in alternatives) == pytest.approx(1, abs=0.01)
    with pytest.raises(ValueError, match="cannot be forced to end"):
        Toy().translate("Tom", beams=1, forced=["。"])


def test_an_alignment_is_judged(studio: Studio):
    question = {"text": "Tom chases Jerry", "target": ["汤姆", "追逐", "杰瑞"], "place": 0}
    found = studio.post("/api/faithfulness", question).json
    assert found["deletion"]["map"]["fractions"] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    chances = found["deletion"]["map"]["scores"]
    # The probability of the target word 汤姆 before any source word is deleted.
    assert chances[0] == pytest.approx(0.76, abs=0.02)
    assert max(chances[1:]) < 0.01  # after the source word Tom is deleted, the translation 汤姆 is unlikely
    assert found["sufficiency"]["map"]["scores"][1] > 0.9
    assert found["gain"]["random"] > 0.3
    answer = studio.post("/api/faithfulness", {**question, "place": 3})
    assert (answer.status, answer.json["error"]) == (400, "place must be from 0 to 2, got 3")
