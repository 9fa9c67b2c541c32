"""Requested weights on every backend against the oracle, and dropout, which the returned weights do not include."""

import gc

import pytest
import torch
from torch.testing import assert_close

import oracles
import regard
from cases import FUSED_PATHS, PLACES, QUERIES, SCORES, TYPICAL_PATHS, answer, attend, slopes_like

# Masks of each kind: no mask, a causal one, one for each sequence, one for each head, and a bias with −inf.
SOME_PLACES = ["open", "causal", "padding", "dense", "closed"]

every_path = pytest.mark.parametrize("path", TYPICAL_PATHS)
every_place = pytest.mark.parametrize("place", SOME_PLACES)
without_hard = pytest.mark.parametrize("path", [path for path in TYPICAL_PATHS if not path.endswith("hard")])


def expected(path: str, place: str) -> oracles.Answer:
    return answer(*path.split("/")[1:], place)


def ask(path: str, place: str, request: object, **arguments: object) -> regard.Attended:
    where = PLACES[place]
    inputs = SCORES[path.split("/")[1]].inputs()
    return attend(path, inputs, mask=where.mask, bias=where.bias(torch.float64), weights=request, **arguments)


@every_path
def test_nothing_asked_nothing_returned(path: str) -> None:
    attended = ask(path, "causal", None)
    assert attended.weights is None
    assert_close(attended.output, ask(path, "causal", regard.full()).output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (3, [3]),
        (-1, [QUERIES - 1]),
        ([4, 0, 2], [4, 0, 2]),
        ([1, 1], [1, 1]),
        ([], []),
        (torch.tensor([2, 3]), [2, 3]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(None, None, -1), [*reversed(range(QUERIES))]),
        (slice(-2, 0, -2), [QUERIES - 2, QUERIES - 4]),
    ],
    ids=["int", "last", "list", "twice", "none", "tensor", "slice", "step", "backwards", "step back"],
)
@every_path
def test_rows(path: str, index: object, rows: list[int]) -> None:
    weights = ask(path, "dense", regard.rows(index)).weights
    assert_close(weights, expected(path, "dense").weights[:, :, rows])


@pytest.mark.slow
@every_place
@every_path
def test_received(path: str, place: str) -> None:
    assert_close(ask(path, place, regard.received()).weights, expected(path, place).received)


@pytest.mark.slow
@every_place
@without_hard  # without hard attention, which returns the entropy of the sampling distribution: see test_hard.py
def test_entropy(path: str, place: str) -> None:
    assert_close(ask(path, place, regard.entropy()).weights, expected(path, place).entropy)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 7, 50])
@every_place
@every_path
def test_top(path: str, place: str, count: int) -> None:
    top = ask(path, place, regard.top(count)).weights
    weights = expected(path, place).weights
    wanted = [oracles.top(row, count) for row in weights.flatten(0, 2).tolist()]
    values, indices = (torch.tensor(list(part)) for part in zip(*wanted, strict=True))
    kept = min(count, weights.shape[-1])

    assert isinstance(top, regard.Top)
    assert top.indices.dtype == torch.int64
    assert_close(top.values, values.double().reshape(*weights.shape[:3], kept), rtol=1e-5, atol=1e-6)
    # `top` returns the index −1 where the weight is 0.
    assert torch.equal(top.indices, indices.reshape(top.indices.shape))


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
def test_top_names_no_key_that_may_not_be_attended(backend: str) -> None:
    x = torch.randn(2, 5, 4)
    top = regard.attention(x, x, x, mask=regard.causal(-1), weights=regard.top(3), backend=backend).weights
    assert isinstance(top, regard.Top)
    assert (top.indices >= 0).sum(-1).tolist() == [[0, 1, 2, 3, 3]] * 2
    assert torch.equal(top.indices < 0, top.values == 0)
    rows = torch.arange(5).reshape(1, 5, 1)
    assert (top.indices < rows).all()


@every_path
def test_requests_leave_the_output_alone(path: str) -> None:
    plain = ask(path, "closed", None).output
    for request in (regard.rows(0), regard.top(2), regard.received(), regard.entropy()):
        assert_close(ask(path, "closed", request).output, plain)


@pytest.mark.slow
@pytest.mark.parametrize("path", FUSED_PATHS)
def test_requests_over_several_blocks(path: str) -> None:
    score = path.split("/")[1]
    inputs = SCORES[score].inputs(batch=1, queries=907, keys=1301, size=3, value_size=2, heads=2, groups=1)
    mask = regard.window(300, 100, offset=200) & regard.padding(torch.tensor([1250]))
    reference = path.replace(path.split("/")[0], "reference", 1)
    full = attend(reference, inputs, mask=mask, weights=regard.full()).weights
    requests = [regard.full(), regard.rows([900, 5]), regard.received(), regard.top(4)]
    everything, rows, received, top = (attend(path, inputs, mask=mask, weights=r).weights for r in requests)
    assert_close(everything, full)
    assert_close(rows, full[:, :, [900, 5]])
    assert_close(received, full.sum(dim=-2))
    assert_close(top.values, full.topk(4).values)
    named = top.indices >= 0
    assert torch.equal(named, top.values > 0)
    assert_close(full.gather(-1, top.indices.clamp_min(0))[named], top.values[named])
    if not path.endswith("hard"):
        assert_close(
            attend(path, inputs, mask=mask, weights=regard.entropy()).weights, torch.special.entr(full).sum(-1)
        )


# Tests of dropout of attention weights.


def dropped(path: str, probability: float, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights after dropout (the output for one-hot values), the values' gradient, and returned weights."""
    query, key, _, *parameters = SCORES[path.split("/")[1]].inputs()
    value = torch.eye(7, dtype=torch.float64).repeat(2, 3, 1, 1).requires_grad_()
    torch.manual_seed(seed)
    attended = attend(path, [query, key, value, *parameters], dropout=probability, weights=regard.full())
    (gradient,) = torch.autograd.grad((attended.output * slopes_like(attended.output)).sum(), value)
    return attended.output.detach(), gradient, attended.weights


@without_hard
def test_dropout_keeps_or_drops_each_weight(path: str) -> None:
    used, gradient, weights = dropped(path, 0.25)
    kept = used != 0
    assert_close(weights, expected(path, "open").weights)  # the call returns the weights before dropout
    assert_close(used[kept], weights[kept] / 0.75)
    assert 0.15 < (~kept & (weights > 0)).sum() / (weights > 0).sum() < 0.35
    assert not torch.equal(kept[0], kept[1])

    # The gradient of the values shows that the backward pass drops the same weights as the forward pass.
    by_head = used.mT @ slopes_like(used)
    assert_close(gradient, by_head.unflatten(1, (3, 2)).sum(dim=2))


@pytest.mark.slow
@without_hard
def test_dropout_follows_the_seed_and_ends_at_nothing(path: str) -> None:
    assert torch.equal(dropped(path, 0.5)[0], dropped(path, 0.5)[0])
    assert not torch.equal(dropped(path, 0.5)[0], dropped(path, 0.5, seed=4)[0])
    assert torch.count_nonzero(dropped(path, 1.0)[0]) == 0
    assert_close(dropped(path, 0.0)[0], expected(path, "open").weights)


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_dropout_takes_a_generator(backend: str) -> None:
    def output(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return ask(f"{backend}/scaled/softmax", "open", None, dropout=0.5, generator=generator).output

    assert torch.equal(output(1), output(1))
    assert not torch.equal(output(1), output(2))


def test_sdpa_cannot_seed_its_dropout() -> None:
    with pytest.raises(ValueError, match=r"sdpa.*generator"):
        ask("sdpa/scaled/softmax", "open", None, dropout=0.5, generator=torch.Generator())


def closing(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return scores that are −inf for every key if the first entry of the query is negative."""
    return (query @ key.mT).masked_fill(query[..., :1] < 0, -torch.inf)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Sparsemax(), regard.Sigmoid(), regard.Hard()], ids=str)
def test_a_score_of_minus_infinity_closes_in_the_weights_too(normalize: object, backend: str) -> None:
    x = torch.tensor([[1.0, 2.0], [-1.0, 2.0], [3.0, 0.0]])

    def ask(request: object, rows: torch.Tensor) -> object:
        arguments = {"score": closing, "normalize": normalize, "weights": request, "backend": backend}
        return regard.attention(rows, x, x, **arguments).weights

    for empty in (ask(regard.full(), x)[1], ask(regard.rows([1]), x), ask(regard.entropy(), x)[1]):
        assert torch.count_nonzero(empty) == 0
    assert torch.count_nonzero(ask(regard.top(2), x).values[1]) == 0
    assert_close(ask(regard.received(), x), ask(regard.received(), x[[0, 2]]))
    assert_close(ask(regard.full(), x)[[0, 2]], ask(regard.full(), x[[0, 2]]))


@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
def test_the_log_sum_exp_beside_an_output_of_transposed_tensors(place: int) -> None:
    """torch's CPU kernel that returns a log-sum-exp reads rows as if their numbers were adjacent in memory."""
    tensors = [torch.randn(2, 3, 17, 16) for _ in range(3)]
    tensors[place] = tensors[place].mT.contiguous().mT
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    options = {"mask": regard.padding([7, 17]), "weights": regard.logsumexp()}
    found = regard.attention(*leaves, **options)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = regard.attention(*exact, **options, backend="reference")
    torch.testing.assert_close(found.output.double(), expected.output, rtol=0, atol=1e-5)
    # The gradient of the output is a transposed tensor, too, like one of the inputs.
    change = torch.randn(2, 3, 16, 17).mT
    grads = torch.autograd.grad(found.output, leaves, change)
    for one, other in zip(grads, torch.autograd.grad(expected.output, exact, change.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [slice(0, 5, -1), slice(5, 0), slice(8, None)], ids=str)
def test_a_slice_without_rows_gives_no_weights(rows: slice) -> None:
    tensor = torch.randn(1, 2, 8, 4)
    assert regard.attention(tensor, tensor, tensor, weights=regard.rows(rows)).weights.shape == (1, 2, 0, 8)


def test_calls_with_requested_rows_keep_no_tensor_of_all_queries() -> None:
    """A long call with other rows each time would otherwise fill the memory."""
    queries = 30_011
    query, key = torch.randn(1, 1, queries, 4), torch.randn(1, 1, 3, 4)
    for row in range(5):
        weights = regard.attention(query, key, key, weights=regard.rows([row])).weights
        assert_close(weights[0, 0, 0], torch.softmax(query[0, 0, row] @ key[0, 0].T / 2, -1))
    del query, weights
    gc.collect()
    kept = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and queries in thing.shape]
    assert not kept
