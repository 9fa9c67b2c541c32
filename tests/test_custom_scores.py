"""Scores of the caller's own: tried without a trace, cut into blocks only where they may be, and held as they are."""

import functools
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
    """What it changes itself at every call is nobody's change in between."""
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


state = torch.ones(())

OTHERS = {
    "keys": lambda query, key: (query @ key.mT).softmax(-1) * 10,
    "queries": lambda query, key: query @ key.mT - (query @ key.mT).mean(-2, keepdim=True),
    "itself": lambda query, key: state.mul_(1.1) * (query @ key.mT),
}


@pytest.mark.parametrize("asked", [None, regard.entropy()], ids=["output", "entropy"])
@pytest.mark.parametrize("frozen", [False, True], ids=["learned", "frozen"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["function", "autocast"])
def test_scores_written_in_a_loop_keep_their_layers(wrapped: bool, frozen: bool, asked: object) -> None:
    """By the way back the loop's variable is its last layer, for all of them."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).requires_grad_(not frozen)
    x = torch.randn(1, 1, 40, 8, requires_grad=True)

    def learned(backend: str) -> tuple[Tensor, ...]:
        rows, total = x, torch.zeros(())
        for layer in layers:
            score = lambda query, key: layer(query) @ key.mT  # noqa: B023, E731
            with torch.autocast("cpu", enabled=wrapped):
                found = regard.attention(rows, rows, rows, score=score, weights=asked, backend=backend)
            rows = found.output
            total = total if asked is None else total + found.weights.float().sum()
        return torch.autograd.grad(rows.float().square().sum() + total, [x, *(() if frozen else layers.parameters())])

    near = 5e-2 if wrapped else 1e-5
    for found, wanted in zip(learned("blocked"), learned("reference"), strict=True):
        assert (found - wanted).norm() <= near * wanted.norm() + 1e-6


WRAPPED = {
    "partial": lambda score: functools.partial(score, factor=1.0),
    "called by another": lambda score: lambda query, key: score(query, key),
    "an argument": lambda score: functools.partial(lambda inner, query, key: inner(query, key), score),
    "a keyword": lambda score: functools.partial(lambda query, key, inner: inner(query, key), inner=score),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_scores_held_by_others_keep_their_layers_too(wrapped: str) -> None:
    layers = [nn.Linear(8, 8).requires_grad_(False) for _ in range(2)]
    x = torch.randn(1, 1, 40, 8, requires_grad=True)

    def learned(backend: str) -> Tensor:
        total = torch.zeros(())
        for layer in layers:
            score = WRAPPED[wrapped](lambda query, key, factor=1.0: layer(query) @ key.mT * factor)  # noqa: B023
            total = total + regard.attention(x, x, x, score=score, backend=backend).output.square().sum()
        return torch.autograd.grad(total, x)[0]

    assert_close(learned("blocked"), learned("reference"), rtol=1e-4, atol=1e-4)


class Sharp(nn.Module):
    """A score with settings that are no tensors, and a layer that may be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.centred, self.layer = 1.0, False, nn.Linear(8, 8).requires_grad_(False)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores = self.layer(query) @ key.mT * self.factor
        return scores - scores.mean(-1, keepdim=True) if self.centred else scores


@pytest.mark.parametrize("asked", [None, regard.entropy()], ids=["output", "entropy"])
@pytest.mark.parametrize("held", ["module", "bound method"])
@pytest.mark.parametrize("what", ["factor", "layer"])
def test_a_score_that_is_another_by_the_way_back_is_an_error(what: str, held: str, asked: object) -> None:
    """Its gradients would be those of another function."""
    x, module = torch.randn(1, 1, 40, 8, requires_grad=True), Sharp()
    score = module if held == "module" else module.forward
    found = regard.attention(x, x, x, score=score, weights=asked, backend="blocked")
    total = (found.output if asked is None else found.weights).square().sum()
    torch.autograd.grad(total, x, retain_graph=True)
    if what == "factor":
        module.factor = 0.1
    else:
        module.layer = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"^score is another function by now"):
        torch.autograd.grad(total, x)


def test_a_score_is_asked_again_whether_it_looks_at_pairs_alone() -> None:
    x, score = torch.randn(1, 4, 1500, 8), Sharp()
    assert regard.explain(x, x, x, score=score).backend == "blocked"
    score.centred = True
    assert regard.explain(x, x, x, score=score).backend == "reference"


def test_a_score_that_takes_no_single_pair_is_asked_with_more() -> None:
    """Statistics over the keys of a block are others than those over all."""
    norm = nn.BatchNorm1d(8)
    score = lambda query, key: query @ norm(key.flatten(0, -2)).view_as(key).mT  # noqa: E731
    x = torch.randn(1, 1, 3000, 8)
    assert regard.explain(x, x, x, score=score).backend == "reference"
    norm.eval()
    assert regard.explain(x, x, x, score=score).backend == "blocked"


class Counting(nn.Module):
    """A score that keeps statistics in several ways, and through views."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        self.calls.add_(1)
        self.calls[0] += 1
        self.calls[1].add_(1)
        self.calls.view(2, 2).mul_(2)
        self.calls.data.add_(1)
        torch.mean(query.detach().flatten(0, -2), 0, out=self.last)
        return self.norm(query.flatten(0, -2)).view_as(query) @ key.mT


def test_trying_a_score_leaves_no_trace() -> None:
    x, score, alone = torch.randn(2, 2, 64, 8) + 3, Counting(), Counting()
    state = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in score.named_buffers()}
    regard.explain(x, x, x, score=score)
    assert all(torch.equal(tensor, before[name]) for name, tensor in score.named_buffers())
    regard.attention(x, x, x, score=score)
    alone(x, x)
    assert_close(dict(score.named_buffers()), dict(alone.named_buffers()))
    with pytest.raises(RuntimeError, match="by itself"):
        regard.attention(x, x, x, score=lambda query, key: fail(score(query, key)))
    assert_close(dict(score.named_buffers()), dict(alone.named_buffers()))
    assert torch.equal(torch.get_rng_state(), state)


def fail(scores: Tensor) -> Tensor:
    raise RuntimeError("by itself")


def by_distance(query: Tensor, key: Tensor) -> Tensor:
    i, j = torch.arange(query.shape[-2])[:, None], torch.arange(key.shape[-2])
    return query @ key.mT - (i - j).abs()


def not_itself(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT).masked_fill(torch.eye(query.shape[-2], key.shape[-2], dtype=torch.bool), -torch.inf)


def inside_a_ball(query: Tensor, key: Tensor) -> Tensor:
    """NaN for the numbers that it would be asked with."""
    return 40 * query @ (key - key.mean(-2, keepdim=True)).mT + (1 - query.square().sum(-1, keepdim=True)).sqrt()


def places(query: Tensor, key: Tensor) -> Tensor:
    return torch.arange(query.shape[-2])[:, None] - torch.arange(key.shape[-2])


def turned(rows: Tensor) -> Tensor:
    return rows * torch.cos(torch.arange(rows.shape[-2])[:, None] * 0.001)


def of_the_best(query: Tensor, key: Tensor) -> Tensor:
    scores = query @ key.mT
    return scores.masked_fill(scores < scores.topk(min(32, scores.shape[-1])).values[..., -1:], -torch.inf)


SLIGHTLY = {
    "a gentle slope": lambda query, key: query @ key.mT - 0.004 * places(query, key).abs(),
    "a window": lambda query, key: (query @ key.mT).masked_fill(places(query, key).abs() > 10, -torch.inf),
    "the best of many": of_the_best,
    "turned by place": lambda query, key: turned(query) @ turned(key).mT,
    "by the number of keys": lambda query, key: query @ key.mT * torch.tensor(key.shape[-2]).log(),
}


@pytest.mark.parametrize("score", [by_distance, not_itself, inside_a_ball, *SLIGHTLY.values()])
def test_a_score_of_positions_or_of_all_keys_runs_whole(score: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.rand(1, 4, 1500, 8) * 0.2
    assert regard.explain(x, x, x, score=score).backend == "reference"


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


def test_scores_written_at_one_place_are_not_taken_for_one() -> None:
    x = torch.randn(1, 4, 1500, 8)
    chosen = [
        regard.explain(x, x, x, score=lambda query, key: inner(query, key)).backend  # noqa: B023
        for inner in (lambda query, key: query @ key.mT, lambda query, key: (query @ key.mT).softmax(-1))
    ]
    assert chosen == ["blocked", "reference"]


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
    with pytest.raises(ValueError, match=r"queries, keys\) = \(1, 2, 2, 3\).*got \(1, 2, 3, 2\)"):
        regard.attention(x, x, x, score=lambda query, key: key @ query.mT)


def positive(query: Tensor, key: Tensor) -> Tensor:
    assert query.min() >= 0
    return query @ key.mT


def test_a_score_that_does_not_take_any_numbers_runs_as_it_is() -> None:
    x = torch.rand(1, 1, 2000, 8)
    assert regard.explain(x, x, x, score=positive).backend == "blocked"
    norm = nn.BatchNorm1d(8)  # in training it takes no single row
    score = lambda query, key: norm(query.flatten(0, -2)).view_as(query) @ key.mT  # noqa: E731
    assert regard.attention(x[..., :9, :], x, x, score=score).output.shape == (1, 1, 9, 8)


@pytest.mark.parametrize("looks_at", OTHERS)
def test_a_score_that_is_not_of_its_pair_alone_runs_whole(looks_at: str) -> None:
    """Cut into blocks it would be another score: `auto` takes the plain form, and `blocked` says why not."""
    score, x = OTHERS[looks_at], torch.randn(1, 1, 2000, 8)
    assert regard.explain(x, x, x, score=score).backend == "reference"
    assert regard.explain(x, x, x, score=lambda query, key: query @ key.mT).backend == "blocked"
    with pytest.raises(ValueError, match=r"depends on the other pairs|changes what it reads"):
        regard.attention(x[..., :9, :], x[..., :9, :], x[..., :9, :], score=score, backend="blocked")


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
    """Zeros, as padding has them, which the score divides by."""
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
    """In a process of its own: the checks of shapes in these tests cannot be compiled."""
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr
