"""The words that the cells of a picture show: by hand, its gradient, and what becomes of it in training."""

import math

import pytest
import torch

from regard.tasks.captioning.config import CaptioningConfig, CaptionLearning, DataSettings, ModelSettings
from regard.tasks.captioning.detection import WordDetector
from regard.tasks.captioning.files import make_material
from regard.tasks.captioning.predictor import collate
from regard.tasks.captioning.task import CAPTIONING

VOCABULARY = 7  # four specials and the words 4, 5, 6
LN2 = math.log(2)


def detector(vocabulary: int = VOCABULARY) -> WordDetector:
    """One feature; every word is scored by that feature itself."""
    made = WordDetector(1, vocabulary)
    torch.nn.init.ones_(made.score.weight)
    torch.nn.init.zeros_(made.score.bias)
    return made


def test_the_loss_by_hand():
    """Two cells with score 0 show a word with probability 1 − ½ · ½ = ¾; with −∞ and 0 it is ½."""
    cells = torch.tensor([[[0.0], [0.0]], [[-1000.0], [0.0]]])
    target = torch.tensor([[4, 6, 2], [5, 2, -100]])
    expected = torch.tensor([-2 * math.log(0.75) - math.log(0.25), 3 * LN2])
    torch.testing.assert_close(detector().loss(cells, target), expected)


def test_a_word_counts_once_and_a_row_without_words_not_at_all():
    cells = torch.zeros(3, 2, 1)
    found = detector().loss(cells, torch.tensor([[4, 4, 2], [4, 2, -100], [-100, -100, -100]]))
    assert found[0] == found[1]
    assert found[2] == 0


def test_unknown_words_and_those_beyond_the_most_frequent_are_left_out():
    many = detector(2000)
    cells = torch.full((2, 3, 1), -2.0)
    target = torch.tensor([[4, 2], [4, 2]])
    beyond = torch.tensor([[4, 1999], [4, 3]])
    torch.testing.assert_close(many.loss(cells, beyond), many.loss(cells, target))


def test_the_cell_that_shows_a_word_best_is_raised_most():
    cells = torch.tensor([[[-1.0], [1.0], [-3.0]]], requires_grad=True)
    found = detector(5).loss(cells, torch.tensor([[4, 2]])).sum()  # word 4 is the only one
    (gradient,) = torch.autograd.grad(found, cells)
    # ∂/∂z_j of −ln(1 − e^{−S}) with S = Σ softplus(z) is −σ(z_j) / (e^S − 1).
    total = torch.nn.functional.softplus(cells.detach()).sum()
    torch.testing.assert_close(gradient, -cells.detach().sigmoid() / torch.expm1(total))


def test_a_word_that_no_cell_shows_keeps_a_finite_gradient():
    cells = torch.full((1, 3, 1), -80.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(detector().loss(cells, torch.tensor([[4, 2]])).sum(), cells)
    assert gradient.isfinite().all()


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(config(), tmp_path_factory.mktemp("world"), None, print)


def config(words: float = 0.0) -> CaptioningConfig:
    return CaptioningConfig(
        data=DataSettings(train=24, valid=3, test=4, longer=2, batch_tokens=80, longest=14),
        model=ModelSettings(widths=(4,), patch=4, size=12, dropout=0.0),
        learning=CaptionLearning(words=words),
    )


def test_training_adds_the_loss_of_the_words_and_validation_does_not(material):
    chosen = config(words=0.3)
    network = CAPTIONING.network(chosen, material.codec)
    batch = collate(material.records[:5], chosen, rows=6)
    shown = network.detector.loss(network.encoder(batch.image).values, batch.target).sum()
    totals = {}
    for training in (True, False):
        network.train(training)
        totals[training] = CAPTIONING.outcome(network, batch, chosen, False).total
    torch.testing.assert_close(totals[True] - totals[False], 0.3 * shown)
    totals[True].backward()
    assert network.detector.score.weight.grad.abs().sum() > 0


def test_without_the_second_loss_there_is_no_detector(material):
    assert not hasattr(CAPTIONING.network(config(), material.codec), "detector")
