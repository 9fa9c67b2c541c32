"""The log-sum-exp of the scores on every backend against the oracle, and merged attention over parts of the keys."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from cases import KEYS, PLACES, SCORES, answer, attend, paths, slopes_like

SOFTMAX_PATHS = paths(normalizers=["softmax"])
SOME_PLACES = ["open", "dense", "closed", "relative"]


def ask(path: str, place: str, inputs: list[Tensor], **arguments: object) -> regard.Attended:
    where = PLACES[place]
    bias = where.bias(inputs[0].dtype)
    return attend(path, inputs, mask=where.mask, bias=bias, weights=regard.logsumexp(), **arguments)


def plain_log_sum_exp(path: str, place: str, inputs: list[Tensor]) -> Tensor:
    """Return the log-sum-exp from score, mask and bias by torch's own functions; it is differentiable."""
    where = PLACES[place]
    query, key, _, *parameters = inputs
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = SCORES[path.split("/")[1]].build(*parameters)(query, key)
    shape = scores.shape
    open_ = [
        [[[where.allowed(b, h, i, j) for j in range(shape[3])] for i in range(shape[2])] for h in range(shape[1])]
        for b in range(shape[0])
    ]
    allowed = torch.tensor(open_)
    if where.added is not None:
        added = [
            [[[where.added(b, h, i, j) for j in range(shape[3])] for i in range(shape[2])] for h in range(shape[1])]
            for b in range(shape[0])
        ]
        bias = torch.tensor(added, dtype=scores.dtype)
        allowed, scores = allowed & (bias != -math.inf), scores + torch.where(bias == -math.inf, 0, bias)
    filled = allowed.any(-1)
    scores = torch.where(allowed | ~filled.unsqueeze(-1), scores, -math.inf)
    return torch.where(filled, scores.logsumexp(-1), -math.inf)


@pytest.mark.parametrize("place", SOME_PLACES)
@pytest.mark.parametrize("path", SOFTMAX_PATHS)
def test_log_sum_exp(path: str, place: str) -> None:
    attended = ask(path, place, SCORES[path.split("/")[1]].inputs())
    wanted = answer(*path.split("/")[1:], place)
    assert_close(attended.weights, wanted.log_sum_exp, rtol=1e-9, atol=1e-9)
    assert_close(attended.output, wanted.output, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("place", ["dense", "closed"])
@pytest.mark.parametrize("path", SOFTMAX_PATHS)
def test_gradient_of_log_sum_exp(path: str, place: str) -> None:
    """The loss uses log-sum-exp and output, so their gradients are summed; empty rows have a gradient of 0."""
    inputs = SCORES[path.split("/")[1]].inputs()

    def gradients(result: regard.Attended | Tensor, output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        total = result.weights if isinstance(result, regard.Attended) else result
        some = torch.where(total == -math.inf, 0, total)
        loss = (some * slopes_like(some)).sum() + (output * slopes_like(output)).sum()
        return list(torch.autograd.grad(loss, leaves, materialize_grads=True))

    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    attended = ask(path, place, leaves)
    found = gradients(attended, attended.output, leaves)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    where = PLACES[place]
    reference = path.replace(path.split("/")[0], "reference", 1)
    output = attend(reference, leaves, mask=where.mask, bias=where.bias(torch.float64)).output
    wanted = gradients(plain_log_sum_exp(path, place, leaves), output, leaves)
    assert_close(found, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("backend", ["sdpa", "blocked", "reference"])
def test_log_sum_exp_over_several_blocks(backend: str) -> None:
    query, key, value = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (907, 1301, 1301))
    mask = regard.window(300, 100, offset=200) & regard.padding(torch.tensor([1250]))
    attended = regard.attention(query, key, value, mask=mask, weights=regard.logsumexp(), backend=backend)
    place = torch.arange(1301) - torch.arange(907).unsqueeze(-1)
    allowed = (place >= -100) & (place <= 300) & (torch.arange(1301) < 1250)
    scores = torch.where(allowed, query @ key.mT / math.sqrt(3), -math.inf)
    assert_close(attended.weights, scores.logsumexp(-1))


@pytest.mark.parametrize("backend", ["sdpa", "blocked", "reference"])
def test_half_precision_keeps_its_log_sum_exp_in_float32(backend: str) -> None:
    query, key = torch.randn(2, 3, 5, 8).bfloat16(), torch.randn(2, 3, 40, 8).bfloat16()
    total = regard.attention(query, key, key, weights=regard.logsumexp(), backend=backend).weights
    assert total.dtype == torch.float32
    assert_close(total, (query.float() @ key.float().mT / math.sqrt(8)).logsumexp(-1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
def test_it_costs_no_second_pass_on_the_cpu(backend: str) -> None:
    x = torch.zeros(2, 3, 64, 8)
    plain, asked = (regard.explain(x, x, x, backend=backend, weights=w) for w in (None, regard.logsumexp()))
    assert asked.flops == plain.flops


def test_without_a_head_axis() -> None:
    x = torch.randn(5, 4)
    assert_close(regard.attention(x, x, x, weights=regard.logsumexp()).weights, (x @ x.T / 2).logsumexp(-1))


@pytest.mark.parametrize("normalize", [regard.Sparsemax(), regard.Entmax(1.5), regard.Sigmoid(), regard.Hard()])
def test_only_softmax_has_a_log_sum_exp(normalize: object) -> None:
    x = torch.randn(5, 4)
    with pytest.raises(ValueError, match=f"{normalize.name} has none"):
        regard.attention(x, x, x, normalize=normalize, weights=regard.logsumexp())


def test_a_layer_returns_it_for_each_head() -> None:
    """The log-sum-exp is that of scaled dot products, because the layer's tables of relative positions are set to 0."""
    positions = regard.nn.RelativePositions(4, 3)
    layer = regard.nn.MultiHeadAttention(8, heads=2, positions=positions)
    with torch.no_grad():
        for table in positions.parameters():
            table.zero_()
    x = torch.randn(3, 5, 8)
    query, key, _ = layer.projection(x).split(2, 1)
    total = layer(x, weights=regard.logsumexp()).weights
    assert_close(total, (query @ key.mT / 2).logsumexp(-1))


def parts_of(path: str, place: str, inputs: list[Tensor], cuts: list[list[int]]) -> list[regard.Attended]:
    """Return attention over each part of the keys (`cuts`), with the columns of the mask that belong to it."""
    where = PLACES[place]
    query, key, value, *parameters = inputs
    shape = (*query.shape[:3], key.shape[2])
    allowed = torch.tensor(
        [
            [[[where.allowed(b, h, i, j) for j in range(shape[3])] for i in range(shape[2])] for h in range(shape[1])]
            for b in range(shape[0])
        ]
    )
    return [
        attend(
            path,
            [query, key[:, :, cut], value[:, :, cut], *parameters],
            mask=allowed[..., cut],
            weights=regard.logsumexp(),
        )
        for cut in cuts
    ]


CUTS = {
    "one": [[*range(KEYS)]],
    "two": [[0, 1, 2], [3, 4, 5, 6]],
    "scattered": [[6, 0, 3], [5], [2, 1, 4]],
    "single keys": [[j] for j in range(KEYS)],
}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("place", ["open", "padding", "dense"])
@pytest.mark.parametrize("path", ["sdpa/scaled/softmax", "additive/additive/softmax", "blocked/mlp/softmax"])
def test_parts_merge_to_the_whole(path: str, place: str, cuts: str) -> None:
    inputs = SCORES[path.split("/")[1]].inputs()
    merged = regard.merge(parts_of(path, place, inputs, CUTS[cuts]))
    wanted = answer(*path.split("/")[1:], place)
    assert_close(merged.output, wanted.output, rtol=1e-9, atol=1e-9)
    assert_close(merged.weights, wanted.log_sum_exp, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("place", ["open", "padding", "dense"])
@pytest.mark.parametrize("path", ["sdpa/scaled/softmax", "additive/additive/softmax"])
def test_gradients_of_merged_parts(path: str, place: str) -> None:
    inputs = [tensor.requires_grad_() for tensor in SCORES[path.split("/")[1]].inputs()]
    merged = regard.merge(parts_of(path, place, inputs, CUTS["scattered"])).output
    found = torch.autograd.grad((merged * slopes_like(merged)).sum(), inputs)
    whole = attend(path.replace(path.split("/")[0], "reference", 1), inputs, mask=PLACES[place].mask).output
    wanted = torch.autograd.grad((whole * slopes_like(whole)).sum(), inputs)
    assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_worked_by_hand() -> None:
    """Two attention results over parts of the keys are merged with weights 3 : 1; one row attends only to the second
    part, one attends to nothing."""
    first = (torch.tensor([[4.0], [torch.nan], [0.0]]), torch.tensor([math.log(3.0), -math.inf, -math.inf]))
    second = (torch.tensor([[8.0], [7.0], [0.0]]), torch.tensor([0.0, 2.0, -math.inf]))
    merged = regard.merge([first, second])
    assert_close(merged.output, torch.tensor([[5.0], [7.0], [0.0]]))
    assert_close(merged.weights, torch.tensor([math.log(4.0), 2.0, -math.inf]))


def test_large_scores_do_not_overflow() -> None:
    part = torch.ones(1, 1), torch.tensor([1e4])
    merged = regard.merge([part, part])
    assert_close(merged.output, torch.ones(1, 1))
    assert_close(merged.weights, torch.tensor([1e4 + math.log(2.0)]))


def test_empty_rows_have_no_gradient() -> None:
    totals = torch.tensor([[0.5, -math.inf], [-math.inf, -math.inf]], requires_grad=True)
    outputs = torch.randn(2, 2, 3, requires_grad=True)
    merged = regard.merge([(outputs[0], totals[0]), (outputs[1], totals[1])])
    merged.output.sum().backward()
    assert_close(totals.grad, torch.zeros(2, 2))
    assert_close(outputs.grad, torch.tensor([[[1.0] * 3, [0.0] * 3], [[0.0] * 3] * 2]))


def test_merging_in_steps_is_merging_at_once() -> None:
    parts = [(torch.randn(2, 5, 3).double(), torch.randn(2, 5).double()) for _ in range(4)]
    steps = regard.merge([regard.merge(parts[:2]), regard.merge(parts[2:])])
    assert_close(steps.output, regard.merge(parts).output)
    assert_close(steps.weights, regard.merge(parts).weights)


X, L = torch.randn(2, 5, 3), torch.randn(2, 5)


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, "at least one part"),
        (regard.Attended(X, L), TypeError, "list of parts, got Attended"),
        ([X], TypeError, "part 0 must be an Attended or a pair"),
        ([(X, L), regard.Attended(X)], ValueError, "part 1 has no log-sum-exp"),
        ([(X, X)], ValueError, "part 0 has no log-sum-exp"),
        ([(X, L), (X[:, :4], L[:, :4])], ValueError, "part 1 has an output of"),
        ([(X, L), (X.double(), L)], ValueError, "part 1 is torch.float64"),
        ([(X, L.long())], TypeError, "float tensors"),
    ],
)
def test_what_is_no_part_is_an_error(parts: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        regard.merge(parts)
