"""Tests of labels for a batch: each sequence has its own words, padding is not shown, and indices are checked."""

import base64
import json
import re

import pytest
import torch
from safetensors.torch import load, save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from regard.look.attention_records import Given, Record
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.look.viewer.page import page
from regard.look.viewer.page_data import about
from regard.look.watch import watch

WORDS = ["[PAD]", "the", "cat", "sat", "it", "rains", "[UNK]"]
TEXTS = ["the cat sat", "it rains"]


def tokenizer(side: str = "right"):
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="[PAD]",
        unk_token="[UNK]",
        padding_side=side,
        model_input_names=["input_ids", "attention_mask"],
    )


def two(length: int = 3) -> Trace:
    return Trace.from_weights({"layer": torch.rand(2, 2, length, length).softmax(-1)})


def told(text: str) -> list[dict]:
    """Return the descriptions that a page contains, one for each sequence of the batch."""
    return [json.loads(base64.b64decode(data)) for data in re.findall(r'data-about="[\d-]+">([^<]*)<', text)]


GIVEN = {
    "lists": lambda: [["the", "cat", "sat"], ["it", "rains", "[PAD]"]],
    "labels": lambda: [Labels("list", ("the", "cat", "sat")), Labels("list", ("it", "rains", "[PAD]"))],
    "ids": lambda: (tokenizer(), torch.tensor([[1, 2, 3], [4, 5, 0]])),
}


@pytest.mark.parametrize("given", GIVEN)
def test_each_sequence_has_labels_of_its_own(as_installed, given):
    record = two().label(rows=GIVEN[given](), columns=GIVEN[given]())["layer"]
    assert record.labels(batch=0).rows.items == ("the", "cat", "sat")
    assert record.labels(batch=1).rows.items == ("it", "rains", "[PAD]")
    assert record.labels(batch=1).columns.items == ("it", "rains", "[PAD]")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", ["encoding", "tokenizer and encoding", "texts and encoding"])
def test_the_mask_of_an_encoding_trims_the_padding(as_installed, side, form):
    coder = tokenizer(side)
    encoding = coder(TEXTS, padding=True, return_tensors="pt")
    forms = {"encoding": encoding, "tokenizer and encoding": (coder, encoding), "texts and encoding": (TEXTS, encoding)}
    trace = two()
    record = trace.label(rows=forms[form], columns=forms[form])["layer"]
    shown = slice(0, 2) if side == "right" else slice(1, 3)
    one = record.sequence(1)
    assert (one.row_labels.items, one.queries, one.keys) == (("it", "rains"), 2, 2)
    torch.testing.assert_close(one.weights(), record.weights(batch=1)[:, shown, shown])
    first, second = told(page(trace))
    assert first["labels"][0]["items"] == ["the", "cat", "sat"]
    assert second["labels"][0]["items"] == ["it", "rains"]
    assert (second["records"][0]["queries"], second["records"][0]["keys"]) == (2, 2)
    assert [one["text"] for one in first["sequences"]] == ["the cat sat", "it rains"]


def test_a_watched_batch_is_shown_under_its_own_words(as_installed, tmp_path):
    model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    encoding = tokenizer()(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad(), watch(model) as trace:
        model(torch.randn(2, 3, 8), src_key_padding_mask=encoding["attention_mask"] == 0)
    trace.label(rows=(tokenizer(), encoding), columns=(tokenizer(), encoding))
    [only] = told(trace.html(tmp_path / "a.html", batch=1).read_text())
    assert only["labels"][0]["items"] == ["it", "rains"]
    assert "it" in trace.svg(tmp_path / "a.svg", batch=1).read_text()
    assert "cat" not in trace.svg(tmp_path / "a.svg", batch=1).read_text()
    assert trace.records[0].sequence(1).check() < 1e-5


def test_labels_of_one_sequence_do_not_name_another(tmp_path):
    trace = two()
    with pytest.raises(ValueError, match=r"labels of one sequence, but 'layer' has 2: .*batch=0, or batch=range\(2\)"):
        trace.label(rows=["the", "cat", "sat"])
    trace.label(rows=["the", "cat", "sat"], batch=0)
    assert trace["layer"].labels(batch=0).rows.items == ("the", "cat", "sat")
    assert trace["layer"].labels(batch=1).rows is None
    assert told(page(trace, batch=1))[0]["labels"] == []
    trace.label(columns=["a", "b", "c"], batch=range(2))
    assert trace["layer"].labels(batch=1).columns.items == ("a", "b", "c")
    with pytest.raises(ValueError, match="labels for one sequence, but there are 2"):
        Record("layer", "given", Given(torch.rand(2, 1, 1, 1)), row_labels=Labels("list", ("a",)))


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([["a", "b"], ["a", "b", "c"]], {}, "from 2 to 3 labels for its sequences, which are padded to one length"),
        ([["a", "b", "c"]] * 3, {}, "labels for 3 sequences, but 'layer' has 2"),
        (["a", "b", "c"], {"batch": 2}, "batch 2 of 'layer': there are 2 sequences: batch must be from 0 to 1"),
        ([["a", "b", "c"]] * 2, {"batch": 0}, "labels for 2 sequences, but batch names 1"),
    ],
)
def test_labels_that_do_not_fit_the_batch_are_refused(labels, options, message):
    with pytest.raises((ValueError, IndexError), match=message):
        two().label(rows=labels, **options)


PICTURES = {
    "html": lambda trace, path, batch: trace.html(path, batch=batch),
    "svg": lambda trace, path, batch: trace.svg(path, batch=batch),
    "png": lambda trace, path, batch: trace.png(path, batch=batch),
    "show": lambda trace, path, batch: trace.show(batch=batch),
    "rollout": lambda trace, path, batch: trace.rollout(batch=batch),
    "weights": lambda trace, path, batch: trace.records[0].weights(batch=batch),
}


@pytest.mark.parametrize("batch", [5, 2, -1])
@pytest.mark.parametrize("what", PICTURES)
def test_a_sequence_that_is_not_there_is_refused_with_the_range(tmp_path, monkeypatch, what, batch):
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("a page was shown"))
    with pytest.raises((ValueError, IndexError), match="must be from 0 to 1"):
        PICTURES[what](two(), tmp_path / "a", batch)


def test_a_page_has_all_sequences_or_says_which_it_has_not(monkeypatch):
    trace = Trace.from_weights({"layer": torch.rand(5, 1, 2, 2)})
    assert [one["sequence"] for one in told(page(trace))] == [0, 1, 2, 3, 4]
    assert [one["sequence"] for one in told(page(trace, batch=[3, 1]))] == [3, 1]
    monkeypatch.setattr("regard.look.viewer.page.WEIGHTS", 8)
    first, second = told(page(trace))
    assert len(first["sequences"]) == 2
    assert "sequences 2 to 4 of the batch" in second["dropped"][0]


def test_a_call_of_fewer_sequences_says_so():
    trace = Trace.from_weights({"one": torch.rand(1, 1, 2, 2), "two": torch.rand(2, 1, 2, 2)})
    notes = [entry["note"] for entry in about(trace, batch=1)["records"]]
    assert notes == [
        "This call has no sequence 1: sequence 0 of its batch of 1 is shown.",
        "Sequence 1 of a batch of 2 is shown.",
    ]


def padded() -> tuple[Trace, torch.Tensor]:
    weights = torch.rand(2, 3, 5, 5).softmax(-1)
    labels = [Labels("tokens", tuple("abcde")), Labels("tokens", tuple("_xyz_"), shown=(1, 2, 3))]
    return Trace.from_weights({"layer": weights}, rows=labels, columns=labels), weights


def test_rollout_leaves_padding_out():
    trace, weights = padded()
    inner = weights[1, :, 1:4, 1:4].mean(0)
    layer = 0.5 * inner + 0.5 * torch.eye(3)
    torch.testing.assert_close(trace.rollout(batch=1), layer / layer.sum(-1, keepdim=True))
    assert trace.rollout(batch=0).shape == (5, 5)


@pytest.mark.parametrize("whole", [2**21, 0])
def test_labels_of_each_sequence_are_saved(tmp_path, whole):
    trace, weights = padded()
    found = Trace.load(trace.save(tmp_path / "a.safetensors", whole=whole, top=2))["layer"]
    assert [found.labels(batch=n).rows.items for n in range(2)] == [tuple("abcde"), tuple("_xyz_")]
    one = found.sequence(1)
    assert (one.row_labels.items, one.weights().shape) == (("x", "y", "z"), (3, 3, 3))
    assert one.entropy().shape == (3, 3)
    assert one.received().shape == (3, 3)
    assert page(Trace.load(tmp_path / "a.safetensors"), batch=1)
    if whole:
        torch.testing.assert_close(one.weights(), weights[1, :, 1:4, 1:4], rtol=1e-3, atol=1e-5)


def rewritten(path, edit):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    document = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["regard"])
    edit(document)
    path.write_bytes(save(load(data), {"regard": json.dumps(document)}))
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["records"][0].update(rows=[0]), "labels for 1 of 2 sequences"),
        (lambda d: d["records"][0].update(rows=[0, 7]), "names labels 7 of 2"),
        (lambda d: d["records"][0].update(rows=[0, -1]), "names labels -1 of 2"),
        (lambda d: d["records"][0].update(rows=[0, "x"]), "not a trace"),
        (lambda d: d["labels"][1].update(shown=[3, 2]), "shown positions .* ascending"),
        (lambda d: d["labels"][1].update(shown=[]), "shown positions .* at least one"),
        (lambda d: d["labels"][1].update(shown=[5]), "from 0 to 4"),
        (lambda d: d["labels"][1].update(shown=[-1]), "greater than or equal to 0"),
    ],
)
def test_labels_of_sequences_out_of_bounds_are_refused(tmp_path, edit, message):
    path = padded()[0].save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=message):
        Trace.load(rewritten(path, edit))


def test_a_file_of_before_is_read_and_its_shared_labels_are_told(tmp_path):
    path = padded()[0].save(tmp_path / "a.safetensors")
    record = Trace.load(rewritten(path, lambda d: d["records"][0].update(rows=0, columns=0)))["layer"]
    assert record.labels(batch=1).rows.items == tuple("abcde")
    assert "one list of labels for all sequences" in record.note


def test_labels_of_joined_calls():
    def call(n: int, queries: int, keys: int, rows: str) -> Record:
        labels = [Labels("tokens", tuple(rows)), Labels("tokens", tuple(rows.upper()))]
        columns = [Labels("tokens", tuple("abcd"[:keys]))] * 2
        weights = Given(torch.rand(2, 1, queries, keys))
        return Record("layer", "rows", weights, call=n, row_labels=labels, column_labels=columns)

    [record] = Trace(records=[call(0, 2, 3, "bc"), call(1, 1, 4, "d")]).joined()
    assert record.labels(batch=1).rows.items == ("B", "C", "D")
    assert record.labels(batch=0).columns.items == tuple("abcd")
