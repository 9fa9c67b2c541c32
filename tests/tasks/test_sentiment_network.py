"""Tests of the text classifier: every score and normaliser, padding, and the same-size model without attention."""

import pytest
import torch

from regard.core.requests import full
from regard.models.classifier import Classifier
from regard.models.memory import Memory
from regard.models.ngrams import NgramEncoder
from regard.tasks.config_overrides import configure, recorded
from regard.tasks.sentiment.config import ModelSettings, SentimentConfig
from regard.tasks.sentiment.network import build, stop_words
from regard.tasks.sentiment.presets import PRESETS
from regard.tasks.sentiment.task import SENTIMENT
from regard.tasks.task import SettingError
from regard.train.memory_check import count_parameters

WORDS, CLASSES = 41, 3
KINDS = ("recurrent", "transformer", "ngrams")
SCORES = ["dot", "scaled_dot", "cosine", "bilinear", "additive"]
SOURCE = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
LENGTHS = torch.tensor([5, 3])


def network(**settings):
    return build(ModelSettings(**{"size": 12, "heads": 3, "buckets": 101, **settings}), WORDS, CLASSES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", SCORES)
def test_every_score_learns_from_every_encoder(kind, attention):
    model = network(kind=kind, attention=attention, features=7)
    found = model(SOURCE, LENGTHS, weights=full())
    assert found.logits.shape == (2, CLASSES)
    assert found.weights.shape == (2, 1, 5)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(2, 1))
    assert not found.weights[1, :, 3:].any()
    found.logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("normalize", ["softmax", "sparsemax", "entmax", "sigmoid", "hard"])
def test_every_normaliser_with_two_looks(normalize):
    model = network(normalize=normalize, looks=2).eval()
    weights = model(SOURCE, LENGTHS, weights=full()).weights
    assert weights.shape == (2, 2, 5)
    assert not weights[1, :, 3:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["none", "additive"])
def test_padding_changes_nothing(kind, attention):
    model = network(kind=kind, attention=attention).eval()
    alone = model(SOURCE[1:, :3], LENGTHS[1:]).logits
    torch.testing.assert_close(model(SOURCE, LENGTHS).logits[1:], alone)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_without_attention_has_as_many_parameters(kind, name):
    settings = PRESETS[name].make().model.model_copy(update={"kind": kind, "buckets": 101})
    with torch.device("meta"):
        sizes = [
            count_parameters(build(settings.model_copy(update={"attention": attention}), 300, 2))
            for attention in ("none", "additive")
        ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_file(name):
    config = PRESETS[name].make()
    assert config.preset == name
    assert SentimentConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("name", PRESETS)
def test_the_twin_of_a_preset_is_recorded_whole(name):
    """The setting `attention=none` also disables the penalty, and the recorded configuration gives the same network."""
    config = configure(SENTIMENT, name, [], {"attention": "none"})
    assert configure(SENTIMENT, name, [], {"attention": "none", "penalty": "none"}).model == config.model
    again = SentimentConfig.model_validate(recorded(SENTIMENT, config))
    assert again.learning.penalty == "none"
    with torch.device("meta"):
        sizes = [count_parameters(build(one.model, 300, 2)) for one in (config, again)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("setting", ["keys", "values"])
def test_ngrams_have_states_alone(setting):
    with pytest.raises(SettingError, match=rf"model\.{setting} has no effect: .* model\.kind is ngrams"):
        configure(SENTIMENT, "tiny", [], {"model": "ngrams", f"model.{setting}": "words"})


def test_words_are_dropped_in_training_alone():
    model = network(word_dropout=0.9, dropout=0.0)
    assert not torch.equal(model(SOURCE, LENGTHS).logits, model(SOURCE, LENGTHS).logits)
    model.eval()
    assert torch.equal(model(SOURCE, LENGTHS).logits, model(SOURCE, LENGTHS).logits)


def test_stop_words_are_read_and_never_attended():
    stop = stop_words([[5, 6], [5, 7], [5, 10]], WORDS, 0.5)
    assert stop.nonzero().flatten().tolist() == [5]
    model = build(ModelSettings(size=12), WORDS, CLASSES, stop=stop).eval()
    weights = model(SOURCE, LENGTHS, weights=full()).weights
    assert weights[0, 0, 0] == 0
    assert (weights[0, 0, 1:] > 0).all()
    other = SOURCE.clone()
    other[0, 0] = 4
    assert not torch.equal(model(other, LENGTHS, weights=full()).weights[0, 0, 1:], weights[0, 0, 1:])
    assert torch.isfinite(model(torch.full((1, 3), 5)).logits).all()


def test_heads_must_divide_the_size():
    with pytest.raises(ValueError, match=r"model\.size must be a multiple of model\.heads: got 12 and 5"):
        network(kind="transformer", heads=5)


def test_the_products_of_the_hidden_layer():
    """The classifier computes logits = W (W_f r ⊙ (1 + W_g r)) + b; biases of the hidden layer are not shown."""
    classifier = Classifier(2, memory_size=3, attention=None, features=2).double()
    read = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    rows = classifier.features.weight @ read[0] + classifier.features.bias
    expected = classifier.output.weight @ (rows[:2] * (1 + rows[2:])) + classifier.output.bias
    empty = torch.zeros(1, 1, 3, dtype=torch.float64)
    torch.testing.assert_close(classifier(Memory(empty, empty, None, read)).logits[0], expected)


def test_ngrams_know_the_words_before_them_alone():
    encoder = NgramEncoder(WORDS, 6, order=3, buckets=997).double()
    torch.nn.init.normal_(encoder.grams.weight)
    first, other = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[4, 6, 7, 8, 3]])
    same = torch.isclose(encoder(first).keys, encoder(other).keys).all(-1)[0]
    assert same.tolist() == [False, False, False, True, False]
    with pytest.raises(ValueError, match="order must be from 1 to 3, got 4"):
        NgramEncoder(WORDS, 6, order=4)
