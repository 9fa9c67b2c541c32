"""Tests of trace files: a loaded trace equals the saved one, and invalid files are rejected with a reason."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from regard.look.attention_records import Given, Record
from regard.look.labels import Labels
from regard.look.trace import Trace


@pytest.fixture
def trace() -> Trace:
    weights = {"encoder": torch.randn(2, 3, 5, 7).softmax(-1), "decoder": torch.randn(2, 4, 11, 7).softmax(-1)}
    trace = Trace.from_weights(weights, title="a <title> 题", columns=[f"列{n}" for n in range(7)], batch=range(2))
    trace.dropped.append("'x': 3 calls did not fit")
    patches = Labels("patches", tuple("abcde"), {"image": b"\x89PNG\x00", "grid": (1, 5)})
    return trace.label(rows=patches, of="encoder", batch=range(2))


def test_a_trace_comes_back(trace, tmp_path):
    found = Trace.load(trace.save(tmp_path / "a.safetensors"))
    assert (found.title, found.dropped) == (trace.title, trace.dropped)
    assert [(r.name, r.call, r.kind) for r in found] == [(r.name, r.call, r.kind) for r in trace]
    for a, b in zip(found, trace, strict=True):
        for batch in range(2):
            torch.testing.assert_close(a.weights(batch=batch), b.weights(batch=batch), rtol=1e-3, atol=1e-6)
    assert found["encoder"].column_labels.items == trace["encoder"].column_labels.items
    assert found["encoder"].row_labels.extra == {"image": b"\x89PNG\x00", "grid": (1, 5)}
    assert found["decoder"].row_labels is None
    again = Trace.load(found.save(tmp_path / "b.safetensors"))
    assert torch.equal(again["decoder"].weights(), found["decoder"].weights())


def test_notes_scale_and_checks_come_back(tmp_path):
    class Errors:
        def of(self, batch):
            return 0.25 * batch

        def holds(self):
            return []

    weights = torch.rand(2, 1, 3, 3)
    records = [
        Record("a", "sdpa", Given(weights), call=4, scale=0.5, note="so it is", checked=Errors()),
        Record("b", "sdpa", Given(weights)),
    ]
    found = Trace.load(Trace("t", records).save(tmp_path / "a.safetensors"))
    first, second = found
    assert (first.call, first.scale, first.note) == (4, 0.5, "so it is")
    assert (first.check(), first.check(batch=1)) == (0.0, 0.25)
    assert second.check() is None


def test_a_large_map_keeps_its_largest_weights_and_exact_summaries(tmp_path):
    weights = (torch.randn(2, 3, 61, 97) * 3).softmax(-1)
    trace = Trace.from_weights({"long": weights})
    path = trace.save(tmp_path / "a.safetensors", whole=1000, top=8, overview=16)
    [found] = Trace.load(path)
    values, indices = weights[1].topk(8, -1)
    torch.testing.assert_close(found.top(8, batch=1).values, values, rtol=1e-3, atol=1e-6)
    shown = found.weights(batch=1)
    torch.testing.assert_close(shown.gather(-1, indices), values, rtol=1e-3, atol=1e-6)
    assert int((shown > 0).sum()) <= 3 * 61 * 8
    torch.testing.assert_close(shown.sum(-1) + found.source.rest[1].float(), torch.ones(3, 61), rtol=0, atol=2e-3)
    torch.testing.assert_close(found.received(batch=1), weights[1].sum(-2))
    torch.testing.assert_close(found.entropy(batch=1), trace["long"].entropy(batch=1))
    overview = trace["long"].overview(16, head=2, batch=1)
    torch.testing.assert_close(found.overview(64, head=2, batch=1), overview, rtol=1e-3, atol=1e-5)
    half = overview.unflatten(0, (8, 2)).unflatten(-1, (8, 2)).mean((1, 3))
    torch.testing.assert_close(found.overview(8, head=2, batch=1), half, rtol=1e-3, atol=1e-5)
    assert "only the 8 largest weights were saved" in found.note
    assert path.stat().st_size < weights.numel() * 2


def test_saving_twice_says_once_what_is_missing(tmp_path):
    trace = Trace.from_weights({"long": torch.rand(1, 9, 99)})
    found = Trace.load(trace.save(tmp_path / "a.safetensors", whole=10, top=4))
    again = Trace.load(found.save(tmp_path / "b.safetensors", whole=10, top=4))
    assert again["long"].note.count("largest") == 1


def test_a_map_of_nothing_is_said_not_saved(tmp_path):
    trace = Trace("t", [Record("a", "sdpa", Given(torch.zeros(1, 2, 0, 3)))])
    found = Trace.load(trace.save(tmp_path / "a.safetensors"))
    assert len(found) == 0
    assert "has nothing to save" in found.dropped[0]


def test_a_failed_save_leaves_the_old_file(trace, tmp_path, monkeypatch):
    path = trace.save(tmp_path / "a.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        trace.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def changed(path, edit=None, tensors=None):
    """Change the description or the tensors of a trace file by the given functions, and return its path."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    document = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["regard"])
    found = load(data)
    if edit is not None:
        edit(document)
    if tensors is not None:
        tensors(found)
    path.write_bytes(save(found, {"regard": json.dumps(document)}))
    return path


DESCRIPTIONS = {
    "another format": (lambda d: d.update(format=2), "format: Input should be 1"),
    "a field of its own": (lambda d: d.update(run="rm"), "run: Extra inputs are not permitted"),
    "no records": (lambda d: d.pop("records"), "records: Field required"),
    "a long name": (lambda d: d["records"][0].update(name="x" * 1001), "at most 1000 characters"),
    "too large": (lambda d: d["records"][0].update(keys=2**21), "less than or equal to 1048576"),
    "too many weights": (
        lambda d: d["records"][0].update(batch=2**20, heads=2**20, queries=2**20),
        "at most 2\\^40 are read",
    ),
    "negative": (lambda d: d["records"][0].update(heads=-1), "greater than or equal to 1"),
    "other sizes": (lambda d: d["records"][0].update(keys=8), "tensor 0.weights is torch.float16 .*, expected"),
    "labels that are not there": (lambda d: d["records"][0].update(columns=9), "names labels 9 of 2"),
    "fewer labels": (lambda d: d["labels"][1]["items"].pop(), "7 positions and 6 labels"),
    "a grid that does not fit": (lambda d: d["labels"][0]["numbers"].update(grid=[2, 5]), "does not hold 5 patches"),
    "a part of a special item": (lambda d: d["labels"][0]["numbers"].update(special=0.5), "special .* whole number"),
    "special items that are not there": (lambda d: d["labels"][0]["numbers"].update(special=2), "2 special items"),
    "a grid of nothing": (lambda d: d["labels"][0]["numbers"].update(grid=[0]), "two whole numbers"),
    "a picture that is not there": (lambda d: d["labels"][0]["pictures"].update(image="x"), "missing or not bytes"),
    "a picture of weights": (lambda d: d["labels"][0]["pictures"].update(image="0.weights"), "missing or not bytes"),
    "fewer checks": (lambda d: d["records"][0]["check"].pop(), "1 checks for 2 sequences"),
    "a scale that is no number": (lambda d: d["records"][0].update(scale=float("nan")), "not a trace"),
    "text for a number": (lambda d: d["records"][0].update(heads="3"), "valid integer"),
    "labels of an unknown kind": (lambda d: d["labels"][0].update(kind="script"), "labels.0.kind"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_out_of_bounds_is_refused(trace, tmp_path, name):
    edit, message = DESCRIPTIONS[name]
    with pytest.raises(ValueError, match=message) as error:
        Trace.load(changed(trace.save(tmp_path / "a.safetensors"), edit))
    assert str(error.value).startswith("a.safetensors is not a trace: ")
    assert len(str(error.value)) < 500


TENSORS = {
    "missing": (lambda t: t.pop("0.weights"), "tensor 0.weights is missing"),
    "whole numbers": (lambda t: t.update({"0.weights": t["0.weights"].int()}), "is torch.int32"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_no_weights_are_refused(trace, tmp_path, name):
    edit, message = TENSORS[name]
    with pytest.raises(ValueError, match=message):
        Trace.load(changed(trace.save(tmp_path / "a.safetensors"), tensors=edit))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t["0.indices"].fill_(97), "names key 97 of 97"),
        (lambda t: t["0.indices"].fill_(-1), "names key -1 of 97"),
        (lambda t: t.update({"0.values": t["0.values"][..., :0].clone()}), "keeps 0 of 97 weights"),
        (lambda t: t.update({"0.overview": torch.zeros(1, 3, 98, 2)}), "an overview of 98 × 2"),
        (lambda t: t.pop("0.rest"), "tensor 0.rest is missing"),
        (lambda t: t.update({"0.received": t["0.received"][..., 1:].clone()}), "tensor 0.received is"),
    ],
)
def test_parts_of_a_large_map_are_checked(tmp_path, edit, message):
    trace = Trace.from_weights({"long": torch.rand(3, 61, 97)})
    path = trace.save(tmp_path / "a.safetensors", whole=10, top=4)
    with pytest.raises(ValueError, match=message):
        Trace.load(changed(path, tensors=edit))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "header does not fit"),
        (b"\xff" * 8, "header does not fit"),
        (b"\x02\0\0\0\0\0\0\0{}", "no description of a trace"),
        (b"\x02\0\0\0\0\0\0\0[]", "no description of a trace"),
        (b"\x02\0\0\0\0\0\0\0\xff\xff", "header is not text"),
        ((20000).to_bytes(8, "little") + b"[" * 20000, "not a trace"),
        (b"\x80\x04\x95" + b"x" * 60, "header does not fit"),
    ],
)
def test_other_files_are_refused(tmp_path, data, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Trace.load(path)


def test_a_file_that_is_too_large_is_not_read(trace, tmp_path):
    path = trace.save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="bytes: at most 100 are read"):
        Trace.load(path, limit=100)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(trace, tmp_path, place, byte, cut):
    path = trace.save(tmp_path / "a.safetensors")
    data = bytearray(path.read_bytes())
    place %= len(data)
    if cut:
        del data[place:]
    else:
        data[place] = byte
    path.write_bytes(data)
    try:
        found = Trace.load(path)
    except ValueError:
        return
    for record in found:
        assert record.weights().shape == (record.heads, record.queries, record.keys)
