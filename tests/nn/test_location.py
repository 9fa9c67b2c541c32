"""Location-aware attention against a loop over queries, and tests of all attention layers that pass a state from one
query to the next."""

import math

import pytest
import torch

from regard.core.normalizers import Entmax, Hard
from regard.core.requests import entropy, full, received, rows, top
from regard.nn.coverage import CoverageAttention
from regard.nn.location import LocationAttention, Smooth
from regard.nn.losses import coverage_penalty
from regard.nn.monotonic import MonotonicAttention

BATCH, QUERIES, KEYS, SIZE, MEMORY, HIDDEN, FILTERS = 2, 5, 11, 3, 7, 4, 6


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(BATCH, QUERIES, SIZE, dtype=torch.float64)
    memory = torch.randn(BATCH, KEYS, MEMORY, dtype=torch.float64)
    return query, memory, torch.arange(KEYS) < torch.tensor([[KEYS], [8]])


def times(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [math.fsum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def by_hand(layer: LocationAttention, query: list, memory: list, normalize: str) -> tuple[list, list]:
    """Return outputs and weights of one sequence, computed query by query in Python numbers."""
    kernels = layer.convolution.weight.squeeze(1).tolist()
    half = len(kernels[0]) // 2
    last = [0.0] * len(memory)
    outputs, weights = [], []
    for s in query:
        scores = []
        for j, h in enumerate(memory):
            around = [
                math.fsum(w * last[j + u - half] for u, w in enumerate(kernel) if 0 <= j + u - half < len(memory))
                for kernel in kernels
            ]
            parts = zip(
                times(layer.query.weight.tolist(), s),
                times(layer.key.weight.tolist(), h),
                layer.key.bias.tolist(),
                times(layer.location.weight.tolist(), around),
                strict=True,
            )
            hidden = [math.tanh(math.fsum(part)) for part in parts]
            scores.append(
                layer.sharpness * math.fsum(w * x for w, x in zip(layer.weight.tolist(), hidden, strict=True))
            )
        up = [math.exp(x) if normalize == "softmax" else 1 / (1 + math.exp(-x)) for x in scores]
        last = [x / math.fsum(up) for x in up]
        weights.append(last)
        outputs.append([math.fsum(a * h[c] for a, h in zip(last, memory, strict=True)) for c in range(MEMORY)])
    return outputs, weights


@pytest.mark.parametrize("normalize", ["softmax", "smooth"])
def test_it_is_the_papers_loop(normalize):
    options = {"normalize": Smooth()} if normalize == "smooth" else {"sharpness": 2.5}
    layer = LocationAttention(SIZE, MEMORY, hidden_size=HIDDEN, filters=FILTERS, kernel_size=5, **options).double()
    query, memory, mask = inputs()
    with torch.no_grad():
        layer.location.weight.mul_(5)  # with larger weights, the previous alignment has a visible effect on the scores
    found = layer(query, memory, mask=mask, weights=full())
    for b in range(BATCH):
        length = int(mask[b].sum())
        outputs, weights = by_hand(layer, query[b].tolist(), memory[b, :length].tolist(), normalize)
        torch.testing.assert_close(found.output[b], torch.tensor(outputs, dtype=torch.float64))
        torch.testing.assert_close(found.weights[b, :, :length], torch.tensor(weights, dtype=torch.float64))
        assert not found.weights[b, :, length:].any()


def test_it_sees_where_it_looked_last():
    """Two equal queries get different weights, because the weights of the first are an input of the second."""
    layer = LocationAttention(SIZE, MEMORY, kernel_size=3).double()
    query, memory, _ = inputs()
    twice = layer(query[:, :1].expand(-1, 2, -1), memory, weights=full()).weights
    assert (twice[:, 0] - twice[:, 1]).abs().max() > 1e-4


def test_smoothing_is_finite_for_any_scores():
    scores = torch.tensor([[-200.0, -201.0, 0.0], [300.0, 299.0, 0.0]], requires_grad=True)
    weights = Smooth()(scores, torch.tensor([True, True, False]))
    expected = torch.tensor([[1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1)), 0.0], [0.5, 0.5, 0.0]])
    torch.testing.assert_close(weights, expected)
    weights[:, 0].sum().backward()
    assert scores.grad.isfinite().all()
    assert not Smooth()(scores, torch.zeros(1, 3, dtype=torch.bool)).any()


# Tests of every attention layer that passes a state (such as the previous alignment or a coverage) from one query to
# the next.

LAYERS = {
    "location": lambda: LocationAttention(SIZE, MEMORY, hidden_size=HIDDEN, filters=FILTERS, kernel_size=5),
    "location, entmax": lambda: LocationAttention(SIZE, MEMORY, kernel_size=3, normalize=Entmax()),
    "coverage": lambda: CoverageAttention(SIZE, MEMORY, hidden_size=HIDDEN),
    "coverage, fertility": lambda: CoverageAttention(SIZE, MEMORY, hidden_size=HIDDEN, fertility=2.0),
    "monotonic": lambda: MonotonicAttention(SIZE, MEMORY, hidden_size=HIDDEN, noise=0.0),
    "monotonic, hard": lambda: MonotonicAttention(SIZE, MEMORY, hidden_size=HIDDEN).eval(),
}
SOFT = [name for name in LAYERS if name != "monotonic, hard"]


@pytest.mark.parametrize("name", LAYERS)
def test_step_by_step_is_all_at_once(name):
    layer = LAYERS[name]().double()
    query, memory, mask = inputs()
    whole, end = layer.attend(query, projected := layer.project(memory, mask=mask), weights=full())
    state, outputs, weights = None, [], []
    for one in query.split(1, 1):
        found, state = layer.attend(one, projected, state=state, weights=full())
        outputs.append(found.output)
        weights.append(found.weights)
    torch.testing.assert_close(torch.cat(outputs, 1), whole.output, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat(weights, 1), whole.weights, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(state[0], end[0], rtol=1e-12, atol=1e-14)
    assert whole.output.shape == (BATCH, QUERIES, layer.output_size)
    assert layer.stateful


@pytest.mark.parametrize("name", LAYERS)
def test_a_later_query_leaves_the_earlier_ones_alone(name):
    layer = LAYERS[name]().double()
    query, memory, mask = inputs()
    before = layer(query, memory, mask=mask).output
    query[:, 3] += 1
    after = layer(query, memory, mask=mask).output
    torch.testing.assert_close(after[:, :3], before[:, :3], rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_padding_has_no_effect(name):
    layer = LAYERS[name]().double()
    query, memory, mask = inputs()
    memory[1, 8:] = torch.nan
    found = layer(query, memory, mask=mask, weights=full())
    alone = layer(query[1:], memory[1:, :8], weights=full())
    torch.testing.assert_close(found.output[1:], alone.output)
    torch.testing.assert_close(found.weights[1:, :, :8], alone.weights)
    assert not found.weights[1:, :, 8:].any()


@pytest.mark.parametrize("name", LAYERS)
def test_a_memory_without_a_real_place_gives_zeros(name):
    layer = LAYERS[name]().double()
    query, memory, mask = inputs()
    query.requires_grad_()
    mask[1] = False
    found = layer(query, memory.fill_(torch.nan).requires_grad_(), mask=mask & (torch.arange(BATCH) != 0)[:, None])
    found.output.sum().backward()
    assert not found.output.any()
    assert query.grad is None or not query.grad.any()  # hard monotonic alignment has no gradient
    assert not memory.grad.any()
    assert layer(query, memory[:, :0], weights=full()).weights.shape == (BATCH, QUERIES, 0)
    assert not layer(query, memory[:, :0]).output.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", SOFT)
def test_gradients(name):
    layer = LAYERS[name]().double()
    query, memory, mask = (t[:, :4] for t in inputs())
    mask[1, 3] = False
    leaves = query[:, :3].clone().requires_grad_(), memory.clone().requires_grad_(), *layer.parameters()
    assert torch.autograd.gradcheck(lambda q, m, *_: layer(q, m, mask=mask).output, leaves, fast_mode=True)


@pytest.mark.parametrize("name", LAYERS)
def test_what_may_be_asked_of_the_weights(name):
    layer = LAYERS[name]().double()
    query, memory, mask = inputs()
    weights = layer(query, memory, mask=mask, weights=full()).weights
    assert layer(query, memory, mask=mask).weights is None
    torch.testing.assert_close(layer(query, memory, mask=mask, weights=received()).weights, weights.sum(1))
    torch.testing.assert_close(layer(query, memory, mask=mask, weights=rows([3, 1])).weights, weights[:, [3, 1]])
    torch.testing.assert_close(layer(query, memory, mask=mask, weights=top(2)).weights.values, weights.topk(2).values)
    assert layer(query, memory, mask=mask, weights=entropy()).weights.shape == (BATCH, QUERIES)
    torch.testing.assert_close(
        layer(query, memory, mask=mask).output, weights @ torch.where(mask[..., None], memory, 0)
    )


@pytest.mark.parametrize("name", LAYERS)
def test_no_queries_read_nothing_and_keep_the_state(name):
    layer = LAYERS[name]().double()
    query, memory, _ = inputs()
    projected = layer.project(memory)
    _, state = layer.attend(query, projected)
    found, after = layer.attend(query[:, :0], projected, state=state, weights=full())
    assert found.output.shape == (BATCH, 0, MEMORY)
    assert found.weights.shape == (BATCH, 0, KEYS)
    torch.testing.assert_close(after[0], state[0])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_it_runs_in_half_precision(name, how):
    query, memory, mask = inputs()
    layer, query, memory = LAYERS[name]().float(), query.float(), memory.float()
    expected = layer(query, memory, mask=mask)
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(query, memory, mask=mask, weights=full())
    else:
        found = layer.bfloat16()(query.bfloat16(), memory.bfloat16(), mask=mask, weights=full())
    assert found.output.dtype == torch.bfloat16
    if "hard" not in name:
        torch.testing.assert_close(found.output.float(), expected.output, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", LAYERS)
def test_the_state_dict_makes_the_same_layer(name):
    layer, other = LAYERS[name](), LAYERS[name]()
    query, memory, mask = (t.float() if t.is_floating_point() else t for t in inputs())
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(query, memory, mask=mask).output, layer(query, memory, mask=mask).output)


def test_hard_choices_carry_their_log_probability():
    layer = LocationAttention(SIZE, MEMORY, kernel_size=3, normalize=Hard("reinforce")).double()
    query, memory, mask = inputs()
    drawn = layer(query, memory, mask=mask, weights=full(), generator=torch.Generator().manual_seed(1))
    assert drawn.log_prob.shape == (BATCH, QUERIES)
    assert drawn.log_prob.max() < 0
    assert set(drawn.weights.unique().tolist()) == {0.0, 1.0}
    drawn.log_prob.sum().backward()
    assert layer.location.weight.grad.any()
    first, second = (layer.eval()(query, memory, mask=mask).output for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_the_coverage_loss_of_a_layer_learns():
    layer = CoverageAttention(SIZE, MEMORY).double()
    query, memory, mask = inputs()
    loss = coverage_penalty(layer(query, memory, mask=mask, weights=full()).weights, mask[:, None])
    loss.backward()
    assert 0 < loss < 1
    assert all(p.grad.any() for p in layer.parameters())


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("name", LAYERS)
def test_bad_arguments_are_named(name):
    layer = LAYERS[name]().double()
    query, memory, mask = inputs()
    with pytest.raises(ValueError, match=r"memory must be \(b, k, 7\), got \(2, 11, 5\)"):
        layer(query, memory[..., :5])
    with pytest.raises(ValueError, match=r"query must be \(2, q, 3\), got \(2, 5, 2\)"):
        layer(query[..., :2], memory)
    with pytest.raises(ValueError, match=r"mask must be a bool tensor \(2, 11\), True for real positions, got"):
        layer(query, memory, mask=mask.float())


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="kernel_size must be odd, so that a kernel has a middle, got 4"):
        LocationAttention(3, kernel_size=4)
    with pytest.raises(ValueError, match="sharpness must be a finite number above 0, got 0"):
        LocationAttention(3, sharpness=0.0)
    with pytest.raises(ValueError, match="filters must be 1 or more, got 0"):
        LocationAttention(3, filters=0)
    with pytest.raises(ValueError, match="fertility must be above 0, or None, got 0"):
        CoverageAttention(3, fertility=0.0)
    with pytest.raises(ValueError, match="noise must be a finite number of at least 0, got -1"):
        MonotonicAttention(3, noise=-1.0)
