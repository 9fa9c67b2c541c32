"""Losses and penalties on attention weights against numbers computed by hand."""

import math

import pytest
import torch

from regard.nn.losses import (
    coverage_penalty,
    cross_entropy,
    doubly_stochastic,
    entropy_penalty,
    guided_alignment,
    squared_error,
    weight_penalty,
)

BATCH, QUERIES, KEYS = 2, 3, 5


def number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def some_weights() -> torch.Tensor:
    return torch.randn(BATCH, QUERIES, KEYS, dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_is_the_sum_over_a_smoothed_target(smoothing):
    logits = torch.tensor([[[2.0, 0.0, -1.0], [1.0, 1.0, 1.0], [0.0, 3.0, 0.0]]], dtype=torch.float64)
    target = [2, 0, -100]
    total = 0.0
    for row, gold in zip(logits[0].tolist()[:2], target[:2], strict=True):
        normal = math.log(sum(math.exp(x) for x in row))
        for v, x in enumerate(row):
            wanted = (1 - smoothing) * (v == gold) + smoothing / 3
            total -= wanted * (x - normal)
    found = cross_entropy(logits, torch.tensor([target]), smoothing=smoothing)
    torch.testing.assert_close(found, number(total / 2))


def test_cross_entropy_of_nothing_is_zero_with_zero_gradient():
    logits = torch.randn(2, 7, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([3, 3]), ignore=3)
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_squared_error_by_hand():
    output = torch.tensor([[1.0, 2.0], [3.0, torch.nan]], dtype=torch.float64)
    target = torch.tensor([[0.0, 4.0], [3.5, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    torch.testing.assert_close(squared_error(output, target, mask), number((1 + 4 + 0.25) / 3))
    torch.testing.assert_close(squared_error(output[:1], target[:1]), number(2.5))


def test_doubly_stochastic_by_hand():
    weights = torch.tensor([[[0.2, 0.8, 0.0], [0.6, 0.4, 0.0]], [[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]])
    first = 0.2**2 + 0.2**2 + 1
    second = 0.5**2 + 0.75**2 + 0.75**2
    torch.testing.assert_close(doubly_stochastic(weights), torch.tensor((first + second) / 2))
    # The last key of the first sequence is padding.
    keys = torch.tensor([[True, True, False], [True, True, True]])[:, None, :]
    torch.testing.assert_close(doubly_stochastic(weights, keys), torch.tensor((first - 1 + second) / 2))
    queries = torch.tensor([[True, True], [True, False]])[:, :, None]
    torch.testing.assert_close(doubly_stochastic(weights, queries), torch.tensor((first + 2.0) / 2))


def test_weight_penalty_by_hand():
    weights = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    log_prob = torch.tensor([[-3.0, -1.0]])
    torch.testing.assert_close(weight_penalty(weights, log_prob, 0.2), torch.tensor(0.2 * (3 * 0.5 + 1 * 1) / 2))
    torch.testing.assert_close(weight_penalty(weights, None, 0.2), torch.tensor(0.2 * 1.5 / 2))
    only_first = torch.tensor([[[True], [False]]])
    found = weight_penalty(weights, log_prob.masked_fill(~only_first[..., 0], -torch.inf), 0.2, only_first)
    torch.testing.assert_close(found, torch.tensor(0.2 * 1.5))


def test_weight_penalty_with_squares_in_bars_is_the_same():
    """The two formulas Σ α² and Σ |α²| give the same penalty, because weights are real numbers."""
    weights, log_prob = some_weights(), -torch.rand(BATCH, QUERIES, dtype=torch.float64)
    bars = (-log_prob * weights.square().abs().sum(-1)).mean()
    torch.testing.assert_close(weight_penalty(weights, log_prob), bars)


def test_entropy_penalty_by_hand():
    weights = torch.tensor([[0.25, 0.25, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(entropy_penalty(weights), number(1.5 * math.log(2) / 2))
    rows = torch.tensor([[True], [False]])
    torch.testing.assert_close(entropy_penalty(weights, rows), number(1.5 * math.log(2)))


def test_guided_alignment_by_hand():
    weights = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.9, 0.0], [0.3, 0.3, 0.4]]], dtype=torch.float64)
    gold = torch.tensor([[[0.0, 1.0, 1.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(guided_alignment(weights, gold), number((math.log(4) - math.log(0.9)) / 2))


def test_guided_alignment_is_finite_where_a_gold_key_got_nothing():
    weights = torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = guided_alignment(weights, torch.tensor([[0.0, 1.0]]))
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(-math.log(1e-8)))
    assert weights.grad is not None
    assert weights.grad.isfinite().all()


def test_coverage_penalty_by_hand():
    weights = torch.tensor([[[0.6, 0.4], [0.5, 0.5], [0.9, 0.1]]], dtype=torch.float64)
    # The coverage (sum of earlier weights) before each query is (0, 0), (0.6, 0.4), (1.1, 0.9).
    torch.testing.assert_close(coverage_penalty(weights), number((0 + 0.9 + 1.0) / 3))
    began = torch.tensor([[0.1, 1.0]], dtype=torch.float64)
    # With an initial coverage of (0.1, 1), the coverage before each query is (0.1, 1), (0.7, 1.4), (1.2, 1.9).
    torch.testing.assert_close(coverage_penalty(weights, coverage=began), number((0.5 + 1.0 + 1.0) / 3))


PENALTIES = {
    "doubly_stochastic": doubly_stochastic,
    "weight_penalty": lambda w, mask=None: weight_penalty(w, w.new_full(w.shape[:-1], -1.5), 0.3, mask),
    "entropy_penalty": entropy_penalty,
    "guided_alignment": lambda w, mask=None: guided_alignment(w, torch.ones_like(w), mask),
    "coverage_penalty": coverage_penalty,
}


@pytest.mark.parametrize("name", PENALTIES)
def test_what_does_not_count_has_no_effect(name):
    """Padded keys and queries, even with NaN, change neither a penalty's value nor its gradient."""
    weights = some_weights().requires_grad_()
    clean = PENALTIES[name](weights)
    (expected,) = torch.autograd.grad(clean, weights)
    larger = torch.full((BATCH, QUERIES + 2, KEYS + 3), torch.nan, dtype=torch.float64)
    larger[:, :QUERIES, :KEYS] = weights.detach()
    larger.requires_grad_()
    real = torch.zeros(1, QUERIES + 2, KEYS + 3, dtype=torch.bool)
    real[:, :QUERIES, :KEYS] = True
    found = PENALTIES[name](larger, mask=real)
    (grad,) = torch.autograd.grad(found, larger)
    torch.testing.assert_close(found, clean)
    torch.testing.assert_close(grad[:, :QUERIES, :KEYS], expected)
    assert not grad[:, QUERIES:].any()
    assert not grad[..., KEYS:].any()


@pytest.mark.parametrize("name", PENALTIES)
def test_gradients(name):
    scores = torch.randn(BATCH, QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: PENALTIES[name](s.softmax(-1)), scores)


@pytest.mark.parametrize("name", PENALTIES)
def test_half_precision_is_computed_in_float32(name):
    weights = some_weights().bfloat16()
    found = PENALTIES[name](weights)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, PENALTIES[name](weights.float()))


@pytest.mark.parametrize("name", PENALTIES)
def test_nothing_that_counts_is_zero(name):
    assert PENALTIES[name](some_weights(), mask=torch.zeros(1, 1, 1, dtype=torch.bool)) == 0


@pytest.mark.usefixtures("as_installed")
def test_bad_arguments_are_named():
    weights = some_weights()
    with pytest.raises(ValueError, match=r"smoothing must be between 0 and 1, got 1\.5"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), smoothing=1.5)
    with pytest.raises(ValueError, match=r"target must have the shape of logits without the last axis, \(2,\)"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"target must have the output's shape \(2, 3\), got \(3,\)"):
        squared_error(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 5\): it does not broadcast to the weights \(2, 3, 5\)"):
        entropy_penalty(weights, torch.ones(BATCH, KEYS, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask must be a bool tensor \(True = counts\), got torch.float32"):
        entropy_penalty(weights, torch.ones(BATCH, 1, KEYS))
    with pytest.raises(ValueError, match=r"log_prob must have one number for each query, \(2, 3\), got \(2,\)"):
        weight_penalty(weights, torch.zeros(BATCH))
    with pytest.raises(ValueError, match="gold must have the shape of weights"):
        guided_alignment(weights, weights[:1])
