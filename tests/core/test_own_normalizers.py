"""User-defined normalisers: masks mean the same whether or not a normaliser reads its argument `allowed`; invalid
weights raise."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import regard


class Own(regard.Normalizer):
    name = "own"

    def __init__(self, function: Callable[[Tensor, Tensor | None], object]) -> None:
        self.function = function

    def __call__(self, scores, allowed=None):
        return self.function(scores, allowed)


LEAKY = Own(lambda scores, allowed: scores.softmax(-1))
NAN_IN_EMPTY_ROWS = Own(lambda scores, allowed: scores.masked_fill(~allowed, -math.inf).softmax(-1))
SOME = torch.tensor([[True, False, True], [False, False, False]])


def test_masked_keys_have_no_weight_though_the_normaliser_ignores_the_mask() -> None:
    """Two queries and three keys of equal scores: each weight is a third, and those of masked keys are 0."""
    zeros, value = torch.zeros(2, 4), torch.tensor([[3.0], [math.pi], [6.0]])
    found = regard.attention(zeros, torch.zeros(3, 4), value, normalize=LEAKY, mask=SOME, weights=regard.full())
    assert_close(found.weights, torch.tensor([[1 / 3, 0, 1 / 3], [0, 0, 0]]))
    assert_close(found.output, torch.tensor([[3.0], [0.0]]))


@pytest.mark.parametrize("part", ["mask", "bias"])
def test_an_empty_row_is_zero_and_has_no_nan_in_its_gradient(part: str) -> None:
    mask = {"mask": SOME} if part == "mask" else {"bias": torch.where(SOME, 0.0, -math.inf)}
    query, key, value = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True), torch.randn(3, 5)
    found = regard.attention(query, key, value, normalize=NAN_IN_EMPTY_ROWS, weights=regard.full(), **mask)
    expected = regard.attention(query, key, value, weights=regard.full(), **mask)
    assert_close(found.output, expected.output)
    assert_close(found.weights, expected.weights)
    wanted = torch.autograd.grad(expected.output.square().sum(), (query, key))
    assert_close(torch.autograd.grad(found.output.square().sum(), (query, key)), wanted)


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (lambda scores, _: scores.softmax(-1).sum(-1), ValueError, r"Own .* the scores, \(1, 2, 3\), got \(1, 2\)"),
        (lambda scores, _: scores.softmax(-1)[..., :1], ValueError, r"\(1, 2, 3\), got \(1, 2, 1\)"),
        (lambda scores, _: scores > 0, TypeError, "as real numbers, got torch.bool"),
        (lambda scores, _: scores.to(torch.complex64), TypeError, "as real numbers, got torch.complex64"),
        (lambda scores, _: None, TypeError, "got NoneType"),
    ],
    ids=["no keys", "one key", "bool", "complex", "nothing"],
)
@pytest.mark.parametrize("mask", [None, SOME], ids=["unmasked", "masked"])
def test_what_a_normaliser_returns_is_checked(function, error, said, mask) -> None:
    with pytest.raises(error, match=said):
        regard.attention(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3, 4), normalize=Own(function), mask=mask)


def test_a_module_whose_first_base_is_the_normaliser_says_what_to_define() -> None:
    class Wrong(regard.Normalizer, nn.Module):
        def forward(self, scores, allowed=None):
            return scores

    with pytest.raises(NotImplementedError, match=r"Wrong must define __call__.* nn\.Module as its first base"):
        Wrong()(torch.ones(2))


class Sharper(regard.Softmax):
    def __call__(self, scores, allowed=None):
        return super().__call__(2 * scores, allowed)


class SharperSparse(regard.Sparsemax):
    def __call__(self, scores, allowed=None):
        return super().__call__(2 * scores, allowed)


class SharperGate(regard.Sigmoid):
    def __call__(self, scores, allowed=None):
        return super().__call__(2 * scores, allowed)


@pytest.mark.parametrize("mask", [None, regard.causal()], ids=["all", "causal"])
@pytest.mark.parametrize("made", [Sharper, SharperSparse, SharperGate])
def test_a_subclass_of_a_normaliser_is_called(made: type[regard.Normalizer], mask: regard.Mask | None) -> None:
    """No fused kernel may replace a subclass of a normaliser. The subclasses of this test double the scores."""
    query, key, value = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    found = regard.attention(query, key, value, normalize=made(), mask=mask).output
    plain = made.__base__()
    assert_close(found, regard.attention(2 * query, key, value, normalize=plain, mask=mask).output)
    with pytest.raises(ValueError, match="no blockwise form"):
        regard.attention(query, key, value, normalize=made(), backend="blocked")
