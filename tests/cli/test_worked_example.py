"""Tests of the worked example: attention of the query for 汤姆 over the hidden states of "Tom chases Jerry"."""

import math

import pytest
import torch
from torch.testing import assert_close

import regard

QUERY = torch.tensor([[10.0, 5.0, 10.0]], dtype=torch.float64)
# Hidden states of Tom, chases and Jerry.
HIDDEN = torch.tensor([[5.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)

every_backend = pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked", "auto"])


def test_scores() -> None:
    """The scores are the sums of [50, 0, 10], [0, 5, 10] and [10, 5, 0]; scaled dot products are divided by √3."""
    assert_close(QUERY * HIDDEN, torch.tensor([[50.0, 0, 10], [0, 5, 10], [10, 5, 0]], dtype=torch.float64))
    assert_close(regard.Dot()(QUERY, HIDDEN), torch.tensor([[60.0, 15.0, 15.0]], dtype=torch.float64))
    scaled = [60 / math.sqrt(3), 15 / math.sqrt(3), 15 / math.sqrt(3)]
    assert_close(regard.ScaledDot()(QUERY, HIDDEN), torch.tensor([scaled], dtype=torch.float64))


@pytest.mark.parametrize(("score", "gap"), [(regard.Dot(), 45), (regard.ScaledDot(), 45 / math.sqrt(3))])
@every_backend
def test_weights_and_context(backend: str, score: object, gap: float) -> None:
    """The second and third scores are lower than the first by `gap`, so their weights are e^−gap / (1 + 2 e^−gap)."""
    far = math.exp(-gap) / (1 + 2 * math.exp(-gap))
    near = 1 / (1 + 2 * math.exp(-gap))
    attended = regard.attention(QUERY, HIDDEN, HIDDEN, score=score, weights=regard.full(), backend=backend)

    assert_close(attended.weights, torch.tensor([[near, far, far]], dtype=torch.float64), rtol=1e-9, atol=0)
    # The context, the weighted sum of the hidden states, is (5·near + far, far + far, near + far).
    context = torch.tensor([[5 * near + far, 2 * far, near + far]], dtype=torch.float64)
    assert_close(attended.output, context, rtol=1e-9, atol=0)


def test_three_stages_apart() -> None:
    """The score, the normaliser and the weighted sum, computed separately, equal the result of one call."""
    scores = regard.ScaledDot()(QUERY, HIDDEN)
    weights = regard.Softmax()(scores)
    assert_close(weights.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert_close(weights @ HIDDEN, regard.attention(QUERY, HIDDEN, HIDDEN).output)
