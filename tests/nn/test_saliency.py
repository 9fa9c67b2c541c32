"""Saliency (bottom-up attention, without a query): max pooling as attention, and gates."""

import math

import pytest
import torch

from regard.core.requests import entropy, full, received, top
from regard.nn.saliency import Gate, MaxSaliency

BATCH, POSITIONS, SIZE = 2, 5, 7


def inputs() -> torch.Tensor:
    return torch.randn(BATCH, POSITIONS, SIZE, dtype=torch.float64)


def test_the_largest_and_where_it_was():
    x = inputs()
    seen = MaxSaliency()(x, weights=full())
    for b in range(BATCH):
        for c in range(SIZE):
            column = x[b, :, c].tolist()
            assert seen.output[b, c] == max(column)
            assert seen.weights[b, c].tolist() == [float(j == column.index(max(column))) for j in range(POSITIONS)]
    assert MaxSaliency()(x).weights is None


def test_max_pooling_is_attention():
    """The output of max pooling is a weighted sum of the values, with separate weights for each feature."""
    x = inputs()
    seen = MaxSaliency()(x, weights=full())
    torch.testing.assert_close(torch.einsum("bdk,bkd->bd", seen.weights, x), seen.output)


def test_what_may_be_asked_about_the_winners():
    x = inputs()
    everything = MaxSaliency()(x, weights=full()).weights
    torch.testing.assert_close(MaxSaliency()(x, weights=received()).weights, everything.sum(1))
    assert not MaxSaliency()(x, weights=entropy()).weights.any()
    found = MaxSaliency()(x, weights=top(1)).weights
    torch.testing.assert_close(found.indices.squeeze(-1), everything.argmax(-1))


def test_the_first_wins_a_tie():
    x = torch.zeros(1, POSITIONS, 1)
    x[0, 2] = x[0, 4] = 3.0
    assert MaxSaliency()(x, weights=full()).weights[0, 0].tolist() == [0, 0, 1, 0, 0]


def test_padding_never_wins():
    x = -inputs().abs() - 1  # all inputs are negative, so a zero in the padding would be the maximum
    alone = MaxSaliency()(x, weights=full())
    larger = torch.full((BATCH, POSITIONS + 3, SIZE), torch.nan, dtype=torch.float64)
    larger[:, :POSITIONS] = x
    real = torch.arange(POSITIONS + 3).expand(BATCH, -1) < POSITIONS
    padded = MaxSaliency()(larger, mask=real, weights=full())
    torch.testing.assert_close(padded.output, alone.output)
    torch.testing.assert_close(padded.weights[..., :POSITIONS], alone.weights)
    assert not padded.weights[..., POSITIONS:].any()


def test_nothing_real_gives_zeros():
    x = inputs().requires_grad_()
    real = torch.tensor([[True] * POSITIONS, [False] * POSITIONS])
    seen = MaxSaliency()(x, mask=real, weights=full())
    seen.output.sum().backward()
    assert not seen.output[1].any()
    assert not seen.weights[1].any()
    assert not x.grad[1].any()
    assert x.grad[0].sum() == SIZE  # for each feature, only the maximum has a gradient
    none = MaxSaliency()(x[:, :0], weights=full())
    assert none.output.shape == (BATCH, SIZE)
    assert not none.output.any()
    assert none.weights.shape == (BATCH, SIZE, 0)


def test_a_gate_by_hand():
    gate = Gate(2)
    with torch.no_grad():
        gate.linear.weight.copy_(torch.tensor([[1.0, 0.0], [2.0, -1.0]]))
        gate.linear.bias.copy_(torch.tensor([0.0, 1.0]))
    seen = gate(torch.tensor([[3.0, 4.0]]), weights=full())
    # The gates are the sigmoids of 1 · 3 + 0 · 4 + 0 = 3 and of 2 · 3 − 1 · 4 + 1 = 3.
    expected = torch.tensor([[1 / (1 + math.exp(-3)), 1 / (1 + math.exp(-3))]])
    torch.testing.assert_close(seen.weights, expected)
    torch.testing.assert_close(seen.output, expected * torch.tensor([[3.0, 4.0]]))
    assert gate(torch.zeros(1, 2)).weights is None


def test_gradients():
    x, gate = inputs().requires_grad_(), Gate(SIZE).double()
    assert torch.autograd.gradcheck(lambda x: MaxSaliency()(x).output, x)
    assert torch.autograd.gradcheck(lambda x: gate(x).output, x)


def test_a_gate_runs_under_autocast():
    x, gate = inputs().float(), Gate(SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        seen = gate(x)
    assert seen.output.dtype == torch.float32
    torch.testing.assert_close(seen.output, gate(x).output, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("as_installed")
def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"x must be \(b, positions, size\), got \(5, 7\)"):
        MaxSaliency()(inputs()[0])
    with pytest.raises(ValueError, match=r"mask must be a bool tensor \(2, 5\), True for real positions"):
        MaxSaliency()(inputs(), mask=torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"x must be \(…, n, 3\), got \(2, 5, 7\)"):
        Gate(3)(inputs())
