"""Readable names of layers, for the module paths of common models."""

import pytest
import torch

from regard.look.attention_records import Given, Record
from regard.look.layer_names import layer_names
from regard.look.rollout_records import with_rollouts
from regard.look.trace import Trace
from regard.look.viewer.page_data import about

T5 = [f"encoder.block.{n}.layer.0.SelfAttention" for n in range(2)] + [
    f"decoder.block.{n}.layer.{m}.{kind}"
    for n in range(2)
    for m, kind in enumerate(("SelfAttention", "EncDecAttention"))
]
DECODED = ["decoder 0 self", "decoder 0 cross", "decoder 1 self", "decoder 1 cross"]
CASES = {
    "BERT": (
        ["bert.encoder.layer.0.attention.self", "bert.encoder.layer.11.attention.self"],
        ["encoder 0", "encoder 11"],
    ),
    "BERT, decoder": (
        ["bert.encoder.layer.0.attention.self", "bert.encoder.layer.0.crossattention.self"],
        ["encoder 0 self", "encoder 0 cross"],
    ),
    "GPT-2": (["transformer.h.0.attn", "transformer.h.1.attn"], ["layer 0", "layer 1"]),
    "Llama": (["model.layers.0.self_attn", "model.layers.31.self_attn"], ["layer 0", "layer 31"]),
    "ViT": (["vit.encoder.layer.0.attention.attention"], ["encoder 0"]),
    "ViT, today's": (["layers.0.attention", "layers.1.attention"], ["layer 0", "layer 1"]),
    "T5": (T5, ["encoder 0", "encoder 1", *DECODED]),
    "BART, Marian, Whisper": (
        ["model.encoder.layers.0.self_attn"]
        + [f"model.decoder.layers.{n}.{kind}" for n in range(2) for kind in ("self_attn", "encoder_attn")],
        ["encoder 0", *DECODED],
    ),
    "nn.Transformer": (
        ["encoder.layers.0.self_attn"]
        + [f"decoder.layers.{n}.{kind}" for n in range(2) for kind in ("self_attn", "multihead_attn")],
        ["encoder 0", *DECODED],
    ),
    "regard": (
        ["encoder.stack.layers.0.attention"]
        + [f"decoder.stack.layers.{n}.{kind}_attention" for n in range(2) for kind in ("self", "cross")],
        ["encoder 0", *DECODED],
    ),
    "self-attention called multihead_attn": (["layers.0.multihead_attn"], ["layer 0"]),
    "CLIP": (
        ["text_model.encoder.layers.0.self_attn", "vision_model.encoder.layers.0.self_attn"],
        ["text model encoder 0", "vision model encoder 0"],
    ),
    "Swin": (
        ["encoder.layers.0.blocks.0.attention.self", "encoder.layers.0.blocks.1.attention.self"],
        ["encoder 0.0", "encoder 0.1"],
    ),
    "no path": (["Tom chases Jerry.", "0. 汤姆", "", "cross", "self_attn"], [None] * 5),
}


@pytest.mark.parametrize("family", CASES)
def test_paths_are_said_in_words(family):
    names, expected = CASES[family]
    assert [None if words is None else " ".join(words) for words in layer_names(names)] == expected


@pytest.mark.parametrize(
    "names",
    [
        ["a.0.b.1", "a.0.b.2", "a.1.b.1", "c.0.b.1"],
        ["x.0.attn", "y.0.attn", "x.0.inner.attn"],
        ["encoder.0.a.0", "encoder.0.b.0", "decoder.0.a.0"],
        ["blocks.0.q.attn", "blocks.0.k.attn", "blocks.0.q.k.attn", "blocks.0.k.q.attn"],
    ],
)
def test_two_paths_never_get_one_name(names):
    found = [name if words is None else " ".join(words) for name, words in zip(names, layer_names(names), strict=True)]
    assert len(set(found)) == len(names)


def test_a_page_knows_the_answer_and_the_layer_of_each_map():
    names = ["0. Tom runs", "0. Tom runs · encoder.layers.0.self_attention", "1. a · b"]
    found = about(Trace.from_weights({name: torch.eye(3)[None] for name in names}))["records"]
    assert [(entry["group"], entry["layer"]) for entry in found] == [
        ("", None), ("0. Tom runs", ("encoder", "0")), ("1. a", None),
    ]  # fmt: skip


def layer(name: str, weights: list[list[float]], **options) -> Record:
    return Record(name, "given", Given(torch.tensor(weights)[None, None]), **options)


def test_a_rollout_by_hand():
    """With residual 1/2, the rollout of weights A and B is the product of (B + I) / 2 and (A + I) / 2, here [[0.75,
    0.25], [0.5, 0.5]] and [[0.5, 0.5], [0, 1]]."""
    first = layer("layers.0.attention", [[0.0, 1.0], [0.0, 1.0]])
    second = layer("layers.1.attention", [[0.5, 0.5], [1.0, 0.0]])
    *_, rolled = with_rollouts([first, second])
    assert (rolled.name, rolled.kind, rolled.heads) == ("rollout", "rollout", 1)
    torch.testing.assert_close(rolled.weights(head=0), torch.tensor([[0.375, 0.625], [0.25, 0.75]]))


def test_a_rollout_leaves_padding_out():
    from regard.look.labels import Labels

    labels = Labels("tokens", ("a", "b", "[PAD]"), shown=(0, 1))
    weights = [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.9, 0.0, 0.1]]
    layers = [layer(f"layers.{n}.attention", weights, row_labels=labels, column_labels=labels) for n in range(2)]
    *_, rolled = with_rollouts(layers)
    torch.testing.assert_close(rolled.sequence(0).weights(head=0), torch.tensor([[0.25, 0.75], [0.0, 1.0]]))


@pytest.mark.parametrize(
    "names",
    [
        ["layers.0.attention"],
        ["cross", "self"],
        ["decoder.layers.0.encoder_attn", "decoder.layers.1.encoder_attn"],
        ["layers.0.attention", "layers.0.attention"],
    ],
)
def test_no_rollout_of_one_layer_of_cross_attention_or_of_several_calls(names):
    records = [layer(name, [[0.0, 1.0], [1.0, 0.0]], call=n) for n, name in enumerate(names)]
    assert with_rollouts(records) == records
