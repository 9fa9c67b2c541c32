"""User-defined scores: any function of queries and keys, computed in blocks, has the gradients of `reference`."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import forked
import regard


@pytest.mark.parametrize("asked", [None, regard.entropy()], ids=["output", "entropy"])
def test_a_score_may_keep_statistics(asked: object) -> None:
    """A buffer that the score itself modifies at every call does not raise the error for tensors changed in place."""
    calls = torch.zeros(())
    x = torch.randn(1, 1, 40, 8, requires_grad=True)

    def score(query: Tensor, key: Tensor) -> Tensor:
        calls.add_(1)
        return query @ key.mT

    found = regard.attention(x, x, x, score=score, weights=asked, backend="blocked")
    total = (found.output if asked is None else found.weights).square().sum()
    first, second = (torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(2))
    assert_close(first, second)
    assert calls > 0


def of_pairs_in_one_axis(query: Tensor, key: Tensor) -> Tensor:
    """Return scores of all pairs from a hidden layer that receives the pairs flattened to one axis."""
    pairs = (query.unsqueeze(-2) + key.unsqueeze(-3)).reshape(-1, query.shape[-1])
    return pairs.tanh().sum(-1).reshape(*query.shape[:-1], key.shape[-2])


@pytest.mark.parametrize(
    ("score", "floats"),
    [
        (lambda query, key: query @ key.mT, 1),
        (lambda query, key: (query / query.norm(dim=-1, keepdim=True)) @ (2 * key).mT, 1),
        (lambda query, key: (query @ key.mT).expand(query.shape[0], -1, -1, -1).relu(), 2),
        (lambda query, key: (query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1), 2 * 8 + 1),
        (of_pairs_in_one_axis, 2 * 8 + 1),
    ],
    ids=["product", "cosine", "relu", "distance", "one axis"],
)
def test_memory_counts_what_is_stored_for_each_pair_and_no_views_or_rows(score: object, floats: int) -> None:
    """The estimated bytes are three (q, k) matrices of scores and weights, and the tensors that the score stores."""
    query, key = torch.randn(2, 4, 20, 8), torch.randn(2, 4, 30, 8)
    plan = regard.explain(query, key, key, score=score, backend="reference")
    assert plan.bytes == (3 + floats) * 2 * 4 * 20 * 30 * 4


def with_attributes() -> Callable[[Tensor, Tensor], Tensor]:
    factor = torch.ones(())

    def inner(rows: Tensor) -> Tensor:
        inner.calls += 1
        return rows * factor * inner.gain

    inner.calls, inner.gain = 0, 0.5
    return lambda query, key: inner(query) @ key.mT


def by_identity() -> Callable[[Tensor, Tensor], Tensor]:
    factor = torch.ones(())

    def inner(rows: Tensor) -> Tensor:
        return rows * factor

    table = {inner: 0.5}
    chosen = nn.functional.relu
    return lambda query, key: table[inner] * inner(query) @ key.mT * (1 if chosen is nn.functional.relu else -1)


def of_a_shared_variable() -> Callable[[Tensor, Tensor], Tensor]:
    state = None

    def prepare(rows: Tensor) -> None:
        nonlocal state
        state = rows.tanh()

    def score(query: Tensor, key: Tensor) -> Tensor:
        prepare(query)
        return state @ key.mT

    return score


@pytest.mark.parametrize("make", [with_attributes, by_identity, of_a_shared_variable])
def test_a_score_of_functions_learns_as_on_reference(make: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> None:
    x = torch.randn(1, 2, 60, 8, requires_grad=True)

    def learned(backend: str) -> Tensor:
        found = regard.attention(x, x, x, score=make(), weights=regard.entropy(), backend=backend)
        return torch.autograd.grad(found.output.square().sum() + found.weights.sum(), x)[0]

    assert_close(learned("blocked"), learned("reference"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_score_that_draws_runs_whole_and_is_tried_without_a_draw(device: str) -> None:
    x = torch.randn(1, 4, 1500, 8, device=device)
    torch.manual_seed(3)
    wanted = torch.rand(3, device=device)
    torch.manual_seed(3)
    plan = regard.explain(x, x, x, score=lambda query, key: (query + 0.01 * torch.randn_like(query)) @ key.mT)
    assert torch.equal(torch.rand(3, device=device), wanted)
    assert plan.backend == "reference"
    assert "draws random numbers" in plan.refused["blocked"]


def test_a_score_that_gives_keys_by_queries_is_told() -> None:
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match=r"queries, keys\) = \(1, 2, 3, 5\).*got \(1, 2, 5, 3\)"):
        regard.attention(x, x, x, score=lambda query, key: key @ query.mT)


def positive(query: Tensor, key: Tensor) -> Tensor:
    assert query.min() >= 0
    return query @ key.mT


def test_a_score_that_does_not_take_any_numbers_runs_as_it_is() -> None:
    x = torch.rand(1, 1, 2000, 8)
    assert regard.explain(x, x, x, score=positive).backend == "blocked"
    norm = nn.BatchNorm1d(8)  # in training, batch norm raises an error for a single row
    score = lambda query, key: norm(query.flatten(0, -2)).view_as(query) @ key.mT  # noqa: E731
    assert regard.attention(x[..., :9, :], x, x, score=score).output.shape == (1, 1, 9, 8)


NO_DERIVATIVE = {
    "bits": lambda query, key: (query > 0).float() @ (key > 0).float().mT,
    "nothing": lambda query, key: query.new_zeros(*query.shape[:-1], key.shape[-2]),
    "detached": lambda query, key: (query @ key.mT).detach(),
    "integers": lambda query, key: (query @ key.mT).long(),
}


@pytest.mark.parametrize("name", NO_DERIVATIVE)
def test_a_score_without_a_derivative_lets_the_values_learn(name: str) -> None:
    x, value = torch.randn(1, 2, 60, 8, requires_grad=True), torch.randn(1, 2, 60, 8, requires_grad=True)

    def learned(backend: str) -> list[Tensor]:
        output = regard.attention(x, x, value, score=NO_DERIVATIVE[name], backend=backend).output
        found = torch.autograd.grad(output.square().sum(), (x, value), allow_unused=True)
        return [torch.zeros_like(x) if gradient is None else gradient for gradient in found]

    for found, wanted in zip(learned("blocked"), learned("reference"), strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_the_query_of_an_empty_row_does_not_reach_a_score(backend: str) -> None:
    """The score divides by the norm of the query; the query that may attend to no key is 0."""
    mask = torch.ones(60, 60, dtype=torch.bool)
    mask[5] = False
    query, key = torch.rand(1, 2, 60, 8) + 0.1, torch.rand(1, 2, 60, 8) + 0.1
    query[..., 5, :] = 0
    query.requires_grad_()
    key.requires_grad_()
    layer = nn.Linear(8, 8, bias=False)

    def score(query: Tensor, key: Tensor) -> Tensor:
        rows = layer(query)
        return rows / rows.norm(dim=-1, keepdim=True) @ key.mT

    output = regard.attention(query, key, key, score=score, mask=mask, backend=backend).output
    found = torch.autograd.grad(output.square().sum(), (query, key, layer.weight))
    rows = torch.arange(60) != 5
    fewer = regard.attention(query[..., rows, :], key, key, score=score, backend="reference").output
    wanted = torch.autograd.grad(fewer.square().sum(), (query, key, layer.weight))
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4)


COMPILED = """
import torch, regard
weight = torch.nn.Linear(8, 8).weight  # written to when it was made
x = torch.randn(1, 2, 300, 8, requires_grad=True)
def learned(call):
    found = call(x)
    return torch.autograd.grad(found.output.square().sum() + found.weights.sum(), (x, weight))
def call(x):
    score = lambda query, key: query @ weight @ key.mT
    return regard.attention(x, x, x, score=score, weights=regard.entropy(), backend="blocked")
for a, b in zip(learned(torch.compile(call, backend="eager")), learned(call)):
    torch.testing.assert_close(a, b)
"""


@pytest.mark.process
def test_compiled_calls_do_not_take_a_tensor_for_changed() -> None:
    """Runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests."""
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr
