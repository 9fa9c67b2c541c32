"""User-defined scores: every learned tensor that a score uses gets its gradient, or an error explains why not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.kernels.additive import native_attention


def inputs() -> list[Tensor]:
    return [torch.randn(2, 3, 7, 5) for _ in range(3)]


def slope(weight: Tensor, make: Callable[[], dict], backend: str, tensors: list[Tensor]) -> Tensor:
    weight.grad = None
    regard.attention(*tensors, backend=backend, **make()).output.square().sum().backward()
    assert weight.grad is not None
    return weight.grad


def related(weight: Tensor, other: Callable[[Tensor], Tensor]) -> dict:
    made = other(weight)
    return {"score": lambda query, key: (query @ weight) @ key.mT + (query @ made) @ key.mT}


@pytest.mark.parametrize(
    "other",
    [lambda w: w.mT, lambda w: w + 1, lambda w: w.exp(), lambda w: w],
    ids=["its transpose", "a sum", "its exponential", "itself"],
)
def test_captured_tensors_made_from_each_other_learn_once(other: Callable[[Tensor], Tensor]) -> None:
    tensors, weight = inputs(), torch.randn(5, 5, requires_grad=True)
    plain, blocked = (slope(weight, lambda: related(weight, other), b, tensors) for b in ("reference", "blocked"))
    torch.testing.assert_close(blocked, plain, rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_also_in_the_bias_learns_once() -> None:
    tensors, weight = inputs(), torch.randn(7, 7, requires_grad=True)

    def make() -> dict:
        return {"score": regard.Bilinear(weight[:5, :5]), "bias": weight * 3}

    plain, blocked = (slope(weight, make, backend, tensors) for backend in ("reference", "blocked"))
    torch.testing.assert_close(blocked, plain, rtol=1e-4, atol=1e-4)


class Fickle(nn.Module):
    """A score with two layers: `few` for at most three queries, as in the call by which the library lists the tensors
    that a score uses, and `many` for more queries."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return (self.few if query.shape[-2] <= 3 else self.many)(query) @ key.mT


def test_a_module_s_parameters_are_known_even_if_the_first_pairs_do_not_use_them() -> None:
    tensors, fickle = inputs(), Fickle()
    plain, blocked = (
        slope(fickle.many.weight, lambda: {"score": fickle}, backend, tensors) for backend in ("reference", "blocked")
    )
    torch.testing.assert_close(blocked, plain, rtol=1e-4, atol=1e-4)


def test_parameters_nobody_can_know_of_are_an_error_and_not_a_silence() -> None:
    fickle = Fickle()
    output = regard.attention(*inputs(), score=lambda q, k: fickle(q, k), backend="blocked").output
    with pytest.raises(RuntimeError, match="their gradient would be lost"):
        output.sum().backward()


@pytest.mark.parametrize("backend", ["blocked", "additive"])
def test_second_derivatives_are_refused_where_they_would_vanish(backend: str, monkeypatch) -> None:
    # Calls with more than `_AGAIN` hidden units in all pairs have no second derivatives.
    monkeypatch.setattr(native_attention, "_AGAIN", 0)
    query, key, value = (tensor.requires_grad_() for tensor in inputs())
    output = regard.attention(query, key, value, score=regard.Additive(torch.ones(5)), backend=backend).output
    with pytest.raises(RuntimeError, match=r"differentiable once: use backend='reference'"):
        torch.autograd.grad(output.sum(), query, create_graph=True)


@pytest.mark.parametrize("shape", [(7, 7), (3, 7, 7), (1, 1, 7, 7)], ids=str)
def test_a_score_without_leading_axes_is_the_same_for_all(shape: tuple[int, ...]) -> None:
    scores = torch.randn(shape)
    full = [
        regard.attention(*inputs(), score=lambda q, k: scores[..., : q.shape[-2], : k.shape[-2]], weights=regard.full())
        for _ in range(2)
    ]
    assert full[0].weights.shape == (2, 3, 7, 7)
    torch.testing.assert_close(full[0].weights, torch.softmax(scores, -1).expand(2, 3, 7, 7))


@pytest.mark.parametrize("alpha", [1.001, 1.2, 1.5, 2.0, 3.0, 10.0])
@pytest.mark.parametrize("level", [0.0, 300.0, -1e4])
@pytest.mark.parametrize("count", [20, 1000])
def test_entmax_of_equal_scores_shares_equally(alpha: float, level: float, count: int) -> None:
    weights = regard.Entmax(alpha)(torch.full((count,), level))
    torch.testing.assert_close(weights, torch.full((count,), 1 / count), rtol=2e-4, atol=0.0)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
def test_a_relative_bias_of_minus_infinity_masks(backend: str) -> None:
    table = torch.tensor([0.0, 0.0, -torch.inf])  # -inf masks keys after the query's position
    tensors = inputs()
    found = regard.attention(*tensors, bias=regard.relative(table), backend=backend).output
    torch.testing.assert_close(found, regard.attention(*tensors, mask=regard.causal(), backend="reference").output)
    closed = regard.attention(*tensors, bias=regard.relative(torch.full((3,), -torch.inf)), backend=backend).output
    assert (closed == 0).all()


@pytest.mark.parametrize("scale", [1e-3, 1e-2, 1.0, 10.0])
def test_the_exponential_form_is_as_exact_as_tanh(scale: float) -> None:
    """The scores' inputs are small or large: for small x, tanh computed as 1 − 2 / (1 + e^{2x}) would lose digits."""
    query, key, value = (torch.randn(1, 2, 31, 16) * scale for _ in range(3))
    weight = torch.randn(16) / min(1.0, scale)
    tensors = (query, key, torch.randn_like(value))

    def error(backend: str) -> float:
        exact = regard.attention(
            *(tensor.double() for tensor in tensors), score=regard.Additive(weight.double()), backend="reference"
        ).output
        found = regard.attention(*tensors, score=regard.Additive(weight), backend=backend).output
        return float((found.double() - exact).norm() / exact.norm())

    assert error("additive") <= 2 * max(error("reference"), torch.finfo(torch.float32).eps)
