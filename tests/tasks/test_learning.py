"""Tests of the penalties on attention weights and of the gradient estimators of hard attention."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from regard.core.requests import full
from regard.nn.attention import Attention
from regard.tasks.attention_learning import asks_attention, hard, loss_of, with_baseline
from regard.tasks.config import LearningSettings, TaskConfig
from regard.tasks.sentiment.task import SENTIMENT
from regard.tasks.task import Outcome
from regard.tasks.training import TaskLoss
from regard.train.train_settings import TrainSettings

WEIGHTS = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
MASK = torch.tensor([[[True, True, False], [True, True, False]]])
LN2 = math.log(2)


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ("none", 0.0),
        # For the two queries, Σα² is 1/2 and 1, and −ln p = −Σ α ln α is ln 2 and 0. The penalty is the mean of their
        # products ln 2 / 2 and 0.
        ("squares", LN2 / 4),
        # The two keys get the weights 1.5 and 0.5, summed over the queries: (1 − 1.5)² + (1 − 0.5)².
        ("doubly_stochastic", 0.5),
        ("entropy", LN2 / 2),
    ],
)
def test_penalties_by_hand(penalty, expected):
    settings = LearningSettings(penalty=penalty, beta=0.3)
    found = loss_of(Outcome(torch.tensor(2.0), 5, [WEIGHTS], MASK), nn.Linear(1, 1), settings)
    torch.testing.assert_close(found.total, torch.tensor(2.0 + 5 * 0.3 * expected))
    assert found.count == 5
    assert asks_attention(nn.Linear(1, 1), settings) == (penalty != "none")


def test_the_entropy_penalty_sharpens_the_weights():
    scores = torch.tensor([[[0.3, 0.1, -0.2]]], requires_grad=True)
    settings = LearningSettings(penalty="entropy", beta=1.0)
    loss = loss_of(Outcome(torch.zeros(()), 1, [scores.softmax(-1)]), nn.Linear(1, 1), settings)
    (gradient,) = torch.autograd.grad(loss.total, scores)
    assert gradient[0, 0, 0] < 0 < gradient[0, 0, 2]


@pytest.mark.parametrize(("step", "acts"), [(0, False), (4, False), (5, True), (9, True)])
def test_a_penalty_that_begins_later(step, acts):
    """With `penalty_after` = 0.5 and ten steps, the penalty acts from the sixth update on, and always in validation."""
    config = TaskConfig(
        task="any",
        train=TrainSettings(steps=10),
        learning=LearningSettings(penalty="entropy", beta=0.3, penalty_after=0.5),
    )
    outcome = Outcome(torch.tensor(2.0), 5, [WEIGHTS], MASK)
    task = replace(SENTIMENT, outcome=lambda *_: outcome)
    network = nn.Linear(1, 1)
    loss = TaskLoss(task, config, network, torch.device("cpu"))
    loss.starting(step)
    with_penalty = torch.tensor(2.0 + 5 * 0.3 * LN2 / 2)
    torch.testing.assert_close(loss(network, torch.zeros(1)).total, with_penalty if acts else torch.tensor(2.0))
    torch.testing.assert_close(loss(network.eval(), torch.zeros(1)).total, with_penalty)


def test_reinforce_keeps_a_moving_baseline_in_the_network():
    settings = LearningSettings(estimator="reinforce", entropy_weight=0.0)
    network = with_baseline(nn.Linear(1, 1), settings, is_hard=True)
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    outcome = Outcome(torch.zeros(()), 2, [WEIGHTS], None, log_prob, torch.tensor([3.0, 1.0]))
    first = loss_of(outcome, network, settings)
    # The initial baseline is the mean reward, 2, so the loss is −½ [(3 − 2)(−1) + (1 − 2)(−2)] · 2.
    torch.testing.assert_close(first.total, torch.tensor(-1.0))
    assert network.state_dict()["baseline.value"] == 2.0
    later = Outcome(torch.zeros(()), 2, [WEIGHTS], None, log_prob, torch.tensor([7.0, 7.0]))
    loss_of(later, network, settings)
    torch.testing.assert_close(network.state_dict()["baseline.value"], torch.tensor(0.9 * 2.0 + 0.1 * 7.0))
    network.eval()
    loss_of(later, network, settings)
    torch.testing.assert_close(network.state_dict()["baseline.value"], torch.tensor(0.9 * 2.0 + 0.1 * 7.0))


def test_choices_that_do_not_count_have_no_part_in_reinforce():
    settings = LearningSettings(estimator="reinforce", entropy_weight=0.0)
    network = with_baseline(nn.Linear(1, 1), settings, is_hard=True)
    log_prob, reward = torch.tensor([[-1.0, -2.0], [-5.0, -5.0]]), torch.tensor([[3.0, 1.0], [-9.0, 9.0]])
    choices = torch.tensor([[True, True], [False, False]])
    found = loss_of(Outcome(torch.zeros(()), 2, (), None, log_prob, reward, choices), network, settings)
    # The loss of the first row; `choices` excludes the second row.
    torch.testing.assert_close(found.total, torch.tensor(-1.0))
    assert network.state_dict()["baseline.value"] == 2.0


def test_every_kind_of_choice_has_its_own_baseline():
    settings = LearningSettings(estimator="reinforce", entropy_weight=0.0)
    network = with_baseline(nn.Linear(1, 1), settings, is_hard=True, kinds=4)
    log_prob, kinds = torch.tensor([[-1.0, -2.0, -4.0]]), torch.tensor([[2, 0, 2]])
    outcome = Outcome(torch.zeros(()), 3, (), None, log_prob, torch.tensor([[3.0, 7.0, 1.0]]), None, kinds)
    # The initial baselines are the mean rewards: 2 for kind 2 and 7 for kind 0. The loss is
    # −[(3 − 2)(−1) + 0 · (−2) + (1 − 2)(−4)].
    torch.testing.assert_close(loss_of(outcome, network, settings).total, torch.tensor(-3.0))
    torch.testing.assert_close(network.baseline.value, torch.tensor([7.0, 0.0, 2.0, 0.0]))
    assert network.baseline.seen.tolist() == [True, False, True, False]
    # The third choice was not sampled (log-probability 0), and kind 1 occurs for the first time, so that its reward
    # equals its baseline. The loss is −[(4 − 2)(−1) + 0 · (−2)].
    later = torch.tensor([[4.0, 5.0, 9.0]]), None, torch.tensor([[2, 1, 2]])
    log_prob = torch.tensor([[-1.0, -2.0, 0.0]])
    outcome = Outcome(torch.zeros(()), 3, (), None, log_prob, *later)
    torch.testing.assert_close(loss_of(outcome, network, settings).total, torch.tensor(2.0))
    torch.testing.assert_close(network.baseline.value, torch.tensor([7.0, 5.0, 0.9 * 2.0 + 0.1 * 4.0, 0.0]))


@pytest.mark.parametrize("estimator", ["straight_through", "reinforce", "gumbel"])
@pytest.mark.parametrize(("step", "soft"), [(0, True), (2, True), (3, False), (9, False)])
def test_hard_attention_that_samples_later(estimator, step, soft):
    """With `hard_after` = 0.25 and ten steps, hard attention returns the expected value in the first three updates."""
    learning = LearningSettings(estimator=estimator, hard_after=0.25)
    config = TaskConfig(task="any", train=TrainSettings(steps=10), learning=learning)
    layer = Attention(3, 5, normalize=hard(learning))
    loss = TaskLoss(SENTIMENT, config, nn.Sequential(layer), torch.device("cpu"))
    loss.starting(step)
    query, memory = torch.randn(7, 2, 3), torch.randn(7, 4, 5)
    found = layer(query, memory, weights=full())
    assert bool(((found.weights == 0) | (found.weights == 1)).all()) == (not soft)
    assert bool((found.log_prob == 0).all()) == soft
    layer.eval()
    inference = layer(query, memory, weights=full()).weights
    assert ((inference == 0) | (inference == 1)).all()


@pytest.mark.parametrize(("estimator", "expected"), [("reinforce", 0.4), ("straight_through", 0.0), ("gumbel", 0.0)])
def test_reinforce_alone_reads_expected_values(estimator, expected):
    assert hard(LearningSettings(estimator=estimator, expected=0.4)).expected == expected


def test_without_hard_attention_there_is_no_baseline():
    settings = LearningSettings(estimator="reinforce")
    assert not list(with_baseline(nn.Linear(1, 1), settings, is_hard=False).buffers())
    assert hard(settings).estimator == "reinforce"


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("estimator", ["straight_through", "reinforce", "gumbel"])
def test_hard_attention_learns_by_every_estimator(estimator):
    """A classifier learns to attend to the one key of five whose value contains the class."""
    from regard.models.classifier import Classifier
    from regard.models.memory import Memory

    torch.manual_seed(1)
    settings = LearningSettings(estimator=estimator, entropy_weight=0.05)
    model = Classifier(2, memory_size=6, normalize=hard(settings))
    network = with_baseline(model, settings, is_hard=True)
    optimizer = torch.optim.Adam(network.parameters(), 0.02)

    def batch() -> tuple[Memory, torch.Tensor]:
        label, place = torch.randint(2, (64,)), torch.randint(5, (64,))
        states = torch.randn(64, 5, 6) * 0.3
        states[torch.arange(64), place, 0] = 2.0  # feature 0 marks the key whose value contains the class
        states[torch.arange(64), place, 1] = 2.0 * label - 1
        return Memory(states, states, None, states[:, 0]), label

    for _ in range(250):
        memory, label = batch()
        found = model(memory)
        losses = nn.functional.cross_entropy(found.logits, label, reduction="none")
        reward = -losses.detach()
        outcome = Outcome(losses.sum(), 64, (), None, found.log_prob.sum(-1), reward)
        optimizer.zero_grad()
        loss = loss_of(outcome, network, settings)
        (loss.total / 64).backward()
        optimizer.step()
    memory, label = batch()
    model.eval()
    assert (model(memory).logits.argmax(-1) == label).float().mean() > 0.9
