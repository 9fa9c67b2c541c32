"""Coverage attention against a loop over Python numbers."""

import math

import pytest
import torch

from regard.core.requests import full
from regard.nn.coverage import CoverageAttention
from regard.nn.losses import coverage_penalty

BATCH, QUERIES, KEYS, SIZE, MEMORY, HIDDEN = 2, 5, 11, 3, 7, 4


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(BATCH, QUERIES, SIZE, dtype=torch.float64)
    memory = torch.randn(BATCH, KEYS, MEMORY, dtype=torch.float64)
    return query, memory, torch.arange(KEYS) < torch.tensor([[8], [KEYS]])


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def by_hand(layer: CoverageAttention, query: list, memory: list) -> tuple[list, list, float]:
    """Return outputs, final coverage, and the coverage loss (See et al. 2017, equation 12) for one sequence."""
    covered = [0.0] * len(memory)
    allowed = [1.0] * len(memory)
    if layer.fertile is not None:
        allowed = [layer.fertility / (1 + math.exp(-dot(layer.fertile.weight[0].tolist(), h))) for h in memory]
    outputs, loss = [], 0.0
    for s in query:
        scores = []
        for h, c in zip(memory, covered, strict=True):
            rows = zip(
                layer.query.weight.tolist(),
                layer.key.weight.tolist(),
                layer.key.bias.tolist(),
                layer.coverage.weight[:, 0].tolist(),
                strict=True,
            )
            hidden = [math.tanh(dot(w_q, s) + dot(w_k, h) + bias + u * c) for w_q, w_k, bias, u in rows]
            scores.append(dot(layer.weight.tolist(), hidden))
        total = math.fsum(math.exp(x) for x in scores)
        weights = [math.exp(x) / total for x in scores]
        loss += math.fsum(min(a, c) for a, c in zip(weights, covered, strict=True))
        covered = [c + a / n for c, a, n in zip(covered, weights, allowed, strict=True)]
        outputs.append([math.fsum(a * h[i] for a, h in zip(weights, memory, strict=True)) for i in range(MEMORY)])
    return outputs, covered, loss


@pytest.mark.parametrize("fertility", [None, 2.0])
def test_it_is_the_papers_loop(fertility):
    layer = CoverageAttention(SIZE, MEMORY, hidden_size=HIDDEN, fertility=fertility).double()
    query, memory, mask = inputs()
    found, (covered,) = layer.attend(query, layer.project(memory, mask=mask), weights=full())
    losses = []
    for b in range(BATCH):
        length = int(mask[b].sum())
        outputs, coverage, loss = by_hand(layer, query[b].tolist(), memory[b, :length].tolist())
        torch.testing.assert_close(found.output[b], torch.tensor(outputs, dtype=torch.float64))
        torch.testing.assert_close(covered[b, :length], torch.tensor(coverage, dtype=torch.float64))
        assert not covered[b, length:].any()
        losses.append(loss)
    if fertility is None:
        penalty = coverage_penalty(found.weights, mask[:, None])
        torch.testing.assert_close(penalty, torch.tensor(sum(losses) / (BATCH * QUERIES), dtype=torch.float64))


def test_coverage_turns_attention_away_from_what_was_read():
    """With negative coverage weights and a positive w, a key that was attended gets a lower score."""
    layer = CoverageAttention(1, 2, hidden_size=1)
    with torch.no_grad():
        layer.query.weight.zero_()
        layer.key.weight.copy_(torch.tensor([[1.0, 0.0]]))
        layer.key.bias.zero_()
        layer.coverage.weight.fill_(-10.0)
        layer.weight.fill_(20.0)
    memory = torch.tensor([[[1.0, 5.0], [0.5, 7.0]]])
    weights = layer(torch.zeros(1, 2, 1), memory, weights=full()).weights[0]
    assert weights[0].argmax() == 0
    assert weights[1].argmax() == 1


@pytest.mark.slow
def test_a_long_sum_keeps_small_readings_in_half_precision():
    """The coverage sums 600 weights of 2⁻⁸ per key; in bfloat16 the sum would stop at 256 · 2⁻⁸ = 1."""
    layer = CoverageAttention(2, 2).bfloat16()
    memory, query = torch.zeros(1, 256, 2).bfloat16(), torch.zeros(1, 600, 2).bfloat16()
    with torch.no_grad():
        _, (covered,) = layer.attend(query, layer.project(memory))
    torch.testing.assert_close(covered, torch.full((1, 256), 600 / 256))
