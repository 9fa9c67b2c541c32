"""Gradients with `create_graph=True` of attention calls whose query, key and value are the same tensor."""

import pytest
import torch

import regard


@pytest.mark.parametrize(
    "score", [regard.ScaledDot(), regard.Additive(torch.linspace(-1, 1, 8))], ids=["dot", "additive"]
)
def test_a_graph_of_the_gradient_does_not_change_it(score: regard.Score) -> None:
    x = torch.randn(1, 2, 9, 8).requires_grad_()
    first, again = (
        torch.autograd.grad(regard.attention(x, x, x, score=score).output.square().sum(), x, create_graph=graph)[0]
        for graph in (False, True)
    )
    torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-4)
