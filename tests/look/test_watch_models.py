"""Tests of `regard.watch`: recorded weights equal those that small versions of common models return."""

import importlib.util
import logging
import sys
import warnings
from pathlib import Path

import pytest
import torch

from regard.look.labels import Labels, patches
from regard.look.viewer.page_data import about
from regard.look.watch import watch

PATH = Path(__file__).parents[2] / "tools" / "works_with.py"
spec = importlib.util.spec_from_file_location("works_with", PATH)
works_with = importlib.util.module_from_spec(spec)
sys.modules["works_with"] = works_with
spec.loader.exec_module(works_with)

CASES = {f"{case.family}: {case.implementation}": case for case in works_with.CASES}


def outcome(name, **options):
    """Watch the model of one case and return the result; skip the test if the model's library is not installed."""
    try:
        return works_with.outcome(CASES[name], **options)
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "diffusers", "x_transformers"):
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.fixture(autouse=True)
def quiet():
    """Ignore the warnings of libraries about unusually small model configurations."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_call_is_seen_as_it_was(as_installed, name):
    found = outcome(name, compiling=False)
    assert found.calls == found.expected
    assert found.weights < 1e-5
    assert found.output < 1e-5
    assert found.check is not None
    assert found.check < 1e-5
    assert found.trace.dropped == []


@pytest.mark.parametrize("name", [name for name in CASES if "eager" in name or "by hand" in name])
def test_matrices_traced_to_queries_and_keys_are_the_same(as_installed, monkeypatch, name):
    monkeypatch.setattr("regard.look.capture.score_matrices.worth_it", lambda *_: True)
    found = outcome(name, compiling=False)
    assert found.calls == found.expected
    assert found.weights < 1e-5
    assert found.trace.dropped == []


def test_the_table_has_a_row_for_each(as_installed, monkeypatch):
    monkeypatch.setattr(works_with, "CASES", [CASES["by hand: matmul"], CASES["ViT: eager"]])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in works_with.table().splitlines()]
    assert len(lines[0]) == 6
    assert [line[:3] for line in lines[2:]] == [["by hand", "matmul", "1 of 1"], ["ViT", "eager", "2 of 2"]]
    for line in lines[2:]:  # the rounding errors depend on the processor and the version of torch
        assert max(float(error) for error in line[3:]) < 1e-6


def test_there_are_enough_of_them():
    assert len(CASES) == len(works_with.CASES) >= 20


@pytest.mark.parametrize("name", ["BERT: sdpa", "Llama, grouped heads: sdpa", "Marian: sdpa", "nn.Transformer: causal"])
def test_another_layer_would_not_pass(as_installed, name):
    """The comparison can detect wrong weights: those of one layer differ clearly from those of the next layer."""
    model, run, truth = CASES[name].build()
    with torch.no_grad(), watch(model) as trace:
        run(model)
    for pattern, expected in truth.items():
        records = trace.select(pattern).records
        if len(expected) > 1:
            wrong = works_with.difference(records[0].weights(), expected[1][0])
            assert wrong > 0.05


def tiny(name, config, implementation="sdpa"):
    import transformers

    family = getattr(transformers, name)
    settings = family.config_class(**config)
    settings._attn_implementation = implementation
    torch.manual_seed(1)
    model = family(settings).eval()
    works_with.spread_out(model)
    return model


def test_generation_gives_a_row_for_each_step(as_installed):
    model = tiny(*works_with.LLAMA[:2])
    ids = works_with._ids(5)[:1]
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        with watch(model) as trace:
            found = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(found, expected)
    name = "model.layers.1.self_attn"
    steps = [record for record in trace if record.name == name]
    assert [(record.queries, record.keys) for record in steps] == [(5, 5), (1, 6), (1, 7), (1, 8)]
    assert [record.kind for record in steps] == ["sdpa", "rows", "rows", "rows"]
    # The rows that are recorded during generation equal those of one forward pass over the whole text.
    with torch.no_grad(), watch(model) as whole:
        model(found[:, :-1])
    joined = trace.joined()[name]
    torch.testing.assert_close(joined.weights(), whole[name].weights(), rtol=0, atol=1e-5)
    assert joined.check() < 1e-5


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_beams": 2}])
def test_generation_with_a_static_cache_and_with_beams(as_installed, options):
    model = tiny(*works_with.LLAMA[:2])
    ids = works_with._ids(5)[:1]
    with torch.no_grad(), watch(model) as trace:
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, **options)
    records = [record for record in trace if record.name == "model.layers.0.self_attn"]
    assert len(records) == 3
    assert all(record.check(batch=item) < 1e-5 for record in records for item in range(record.batch))
    torch.testing.assert_close(records[0].weights()[..., :5].sum(-1), torch.ones(4, 5))
    torch.testing.assert_close(records[1].weights()[..., :6].sum(-1), torch.ones(4, 1))


def test_encoder_and_decoder_generate(as_installed):
    model = tiny("MarianMTModel", works_with.MARIAN[1])
    with torch.no_grad(), watch(model, keep="*encoder_attn") as trace:
        model.generate(works_with._ids(6), max_new_tokens=3, num_beams=1, do_sample=False, forced_eos_token_id=None)
    joined = trace.joined()["model.decoder.layers.1.encoder_attn"]
    assert (joined.batch, joined.queries, joined.keys) == (2, 3, 6)
    torch.testing.assert_close(joined.weights(batch=1).sum(-1), torch.ones(4, 3))


def test_gradients_of_a_model_against_eager(as_installed):
    name, config, inputs = works_with.BERT
    fused, plain = tiny(name, config), tiny(name, config, "eager")
    plain.load_state_dict(fused.state_dict())
    with watch(fused, gradients=True) as trace:
        fused(**inputs()).last_hidden_state[:, 0, :5].pow(3).sum().backward()
    found = plain(**inputs(), output_attentions=True)
    loss = found.last_hidden_state[:, 0, :5].pow(3).sum()
    for record, grad in zip(trace, torch.autograd.grad(loss, found.attentions), strict=True):
        for item in range(2):
            scale = float(grad[item].abs().max()) or 1.0
            torch.testing.assert_close(record.gradient(batch=item) / scale, grad[item] / scale, rtol=0, atol=1e-4)


def test_a_class_token_stands_before_the_patches_of_an_image(as_installed):
    from PIL import Image

    name, config, inputs = works_with.VIT
    model = tiny(name, config)
    with torch.no_grad(), watch(model) as trace:
        model(**inputs())
    high = config["image_size"] // config["patch_size"]
    labels = patches(Image.new("RGB", (32, 32)), (high, high), special=["[CLS]"])
    trace.label(rows=labels, columns=labels, batch=range(trace.sequences))
    assert all(record.labels(batch=item).columns == labels for record in trace for item in range(record.batch))
    assert trace.records[0].keys == high * high + 1
    assert about(trace)["labels"][0]["items"][:2] == ["[CLS]", "0,0"]
    with pytest.raises(ValueError, match=r"if the first 1 are no patches, say special=1"):
        Labels("patches", labels.items, {"grid": (high, high)})


def test_training_mode_of_a_model_says_that_dropout_was_active(as_installed):
    name, config, inputs = works_with.BERT
    model = tiny(name, {**config, "attention_probs_dropout_prob": 0.3}).train()
    with watch(model) as trace:
        model(**inputs())
    assert len(trace) == 2
    assert all("dropout was active" in record.note for record in trace)
    assert all(record.check() is None for record in trace)


def test_labels_from_a_tokenizer_of_the_hub_s_kind(as_installed):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {
        word: number for number, word in enumerate(["the", "cat", "sat", "on", "a", "mat", "of", "straw", "today"])
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "the")))
    name, config, _ = works_with.BERT
    model = tiny(name, config)
    ids = torch.tensor([[0, 1, 2, 3]])
    with torch.no_grad(), watch(model) as trace:
        model(ids)
    trace.label(rows=(tokenizer, ids), columns=(tokenizer, ids))
    assert trace.records[0].row_labels.items == ("the", "cat", "sat", "on")


@pytest.mark.slow
def test_compiled_models_give_what_they_give_unwatched(as_installed):
    for name in ("BERT: sdpa, compiled", "by hand: matmul, compiled"):
        found = outcome(name)
        assert found.calls == found.expected
        assert found.output < 1e-5
