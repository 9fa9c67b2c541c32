"""Monotonic attention: expected alignment against its definition, hard alignment against the paper's algorithm."""

import math
import sys

import pytest
import torch

import forked
from regard.core.requests import full
from regard.nn.monotonic import MonotonicAttention, expected_alignment

BATCH, QUERIES, KEYS, SIZE, MEMORY, HIDDEN = 2, 5, 11, 3, 7, 4


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query = torch.randn(BATCH, QUERIES, SIZE, dtype=torch.float64)
    memory = torch.randn(BATCH, KEYS, MEMORY, dtype=torch.float64)
    return query, memory, torch.arange(KEYS) < torch.tensor([[KEYS], [8]])


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def energy(layer: MonotonicAttention, s: list[float], h: list[float]) -> float:
    """Return g · (w / |w|) · tanh(W s + V h + b) + r in Python numbers."""
    rows = zip(layer.query.weight.tolist(), layer.key.weight.tolist(), layer.key.bias.tolist(), strict=True)
    hidden = [math.tanh(dot(w_q, s) + dot(w_k, h) + bias) for w_q, w_k, bias in rows]
    weight = layer.weight.tolist()
    return layer.gain.item() * dot(weight, hidden) / math.sqrt(dot(weight, weight)) + layer.offset.item()


def soft(energies: list[list[float]]) -> list[list[float]]:
    """Return the expected alignment α_ij = p_ij Σ_{l≤j} α_{i−1,l} Π_{l≤m<j} (1 − p_im), by explicit loops."""
    last = [1.0] + [0.0] * (len(energies[0]) - 1)
    rows = []
    for row in energies:
        p = [1 / (1 + math.exp(-e)) for e in row]
        last = [
            p[j] * math.fsum(last[m] * math.prod(1 - p[n] for n in range(m, j)) for m in range(j + 1))
            for j in range(len(p))
        ]
        rows.append(last)
    return rows


def hard(energies: list[list[float]]) -> list[int | None]:
    """Return the key of each query by the paper's algorithm 1: from the last key on, the first with p > ½; None if no
    key is left, also for all later queries."""
    at: int | None = 0
    stops = []
    for row in energies:
        at = None if at is None else next((j for j in range(at, len(row)) if row[j] > 0), None)
        stops.append(at)
    return stops


def a_layer(**options: float) -> MonotonicAttention:
    layer = MonotonicAttention(SIZE, MEMORY, hidden_size=HIDDEN, **options).double()
    with torch.no_grad():
        layer.gain.fill_(3.0)
    return layer


def test_in_training_it_is_the_expected_alignment():
    layer = a_layer(noise=0.0, offset=-0.5)
    query, memory, mask = inputs()
    found = layer(query, memory, mask=mask, weights=full())
    for b in range(BATCH):
        length = int(mask[b].sum())
        real = memory[b, :length].tolist()
        weights = soft([[energy(layer, s, h) for h in real] for s in query[b].tolist()])
        torch.testing.assert_close(found.weights[b, :, :length], torch.tensor(weights, dtype=torch.float64))
        expected = [
            [math.fsum(a * h[c] for a, h in zip(row, real, strict=True)) for c in range(MEMORY)] for row in weights
        ]
        torch.testing.assert_close(found.output[b], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("offset", [0.5, -0.5, -1.5, -9.0])
def test_in_evaluation_it_is_the_papers_algorithm(offset):
    layer = a_layer(offset=offset).eval()
    query, memory, mask = inputs()
    found = layer(query, memory, mask=mask, weights=full())
    for b in range(BATCH):
        real = memory[b, : int(mask[b].sum())].tolist()
        stops = hard([[energy(layer, s, h) for h in real] for s in query[b].tolist()])
        for i, stop in enumerate(stops):
            assert found.weights[b, i].tolist() == [float(j == stop) for j in range(KEYS)]
            expected = torch.zeros(MEMORY, dtype=torch.float64) if stop is None else memory[b, stop]
            torch.testing.assert_close(found.output[b, i], expected, rtol=0, atol=0)


def test_it_stops_where_the_chance_is_above_a_half():
    """The energies of the keys are −0.1, 0, 0.1 and 0.2: the third key is the first whose probability exceeds one
    half."""
    layer = MonotonicAttention(1, hidden_size=1, offset=0.0).eval()
    with torch.no_grad():
        layer.query.weight.zero_()
        layer.key.weight.fill_(1.0)
        layer.key.bias.zero_()
        layer.weight.fill_(1.0)
    memory = torch.tensor([-0.1, 0.0, 0.1, 0.2]).atanh().reshape(1, 4, 1)
    weights = layer(torch.zeros(1, 2, 1), memory, weights=full()).weights
    assert weights[0].tolist() == [[0, 0, 1, 0], [0, 0, 1, 0]]


def test_a_hard_reader_never_goes_back_and_stops_at_the_end():
    layer = a_layer(offset=-1.0).eval()
    memory, query = torch.randn(7, 40, MEMORY).double(), torch.randn(7, 30, SIZE).double()
    weights = layer(query, memory, weights=full()).weights
    places = torch.where(weights.sum(-1) > 0, weights.argmax(-1), 40)
    assert (places.diff(dim=1) >= 0).all()
    assert 0 < (places == 40).double().mean() < 1  # some queries, but not all, reached the end without selecting a key
    assert set(weights.sum(-1).unique().tolist()) == {0.0, 1.0}


def test_holes_and_padding_in_front_are_passed_over():
    query, memory, _ = inputs()
    mask = torch.tensor([False, False, True, True, False, True, False, True, True, False, True])
    for layer in (a_layer(noise=0.0), a_layer(offset=0.2).eval()):
        found = layer(query, memory, mask=mask.expand(BATCH, -1), weights=full())
        alone = layer(query, memory[:, mask], weights=full())
        torch.testing.assert_close(found.output, alone.output)
        torch.testing.assert_close(found.weights[..., mask], alone.weights)


@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_a_thousand_steps_stay_finite_and_right(scale):
    """Alignments and gradients over 1,009 keys, with probabilities down to e⁻¹⁰⁰, agree in float32 and float64."""
    energies = torch.randn(3, 1009) * scale
    last = torch.rand(3, 1009)
    last = last / last.sum(-1, keepdim=True)
    found = {}
    for dtype in (torch.float32, torch.float64):
        e, a = energies.to(dtype).requires_grad_(), last.to(dtype).requires_grad_()
        row = expected_alignment(torch.sigmoid(e), torch.sigmoid(-e), a)
        grads = torch.autograd.grad((row * torch.linspace(-1, 1, 1009, dtype=dtype)).sum(), (e, a))
        found[dtype] = (row, *grads)
    for narrow, wide in zip(found[torch.float32], found[torch.float64], strict=True):
        assert narrow.isfinite().all()
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_thousand_queries_over_a_thousand_keys_are_finite_in_float32():
    layer = MonotonicAttention(4, hidden_size=2, offset=-1.0)
    query, memory = torch.randn(1, 1009, 4), torch.randn(1, 1013, 4, requires_grad=True)
    found = layer(query, memory, weights=full())
    found.output.square().sum().backward()
    assert found.weights.isfinite().all()
    assert (found.weights.sum(-1) < 1 + 1e-4).all()
    assert all(t.grad.isfinite().all() for t in (memory, *layer.parameters()))


def test_the_recurrence_differentiates_twice():
    p = torch.rand(2, 7, dtype=torch.float64, requires_grad=True)
    last = torch.rand(2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p, last: expected_alignment(p, 1 - p, last), (p, last))
    assert torch.autograd.gradgradcheck(lambda p, last: expected_alignment(p, 1 - p, last), (p, last))


def test_noise_is_drawn_in_training_alone_and_from_the_generator():
    layer = a_layer(noise=2.0)
    query, memory, mask = inputs()

    def draw(seed: int) -> torch.Tensor:
        return layer(query, memory, mask=mask, generator=torch.Generator().manual_seed(seed)).output

    torch.testing.assert_close(draw(1), draw(1), rtol=0, atol=0)
    assert (draw(1) - draw(2)).abs().max() > 1e-3
    # Steps of one query each sample the same noise as a call with all queries.
    generator, projected, state, outputs = torch.Generator().manual_seed(1), layer.project(memory, mask=mask), None, []
    for one in query.split(1, 1):
        found, state = layer.attend(one, projected, state=state, generator=generator)
        outputs.append(found.output)
    torch.testing.assert_close(torch.cat(outputs, 1), draw(1))
    layer.eval()
    torch.testing.assert_close(draw(1), draw(2), rtol=0, atol=0)


def test_energies_in_parts_are_the_energies(monkeypatch):
    layer = a_layer(noise=0.0)
    query, memory, _ = inputs()
    memory.requires_grad_()
    whole = layer(query, memory).output
    (expected,) = torch.autograd.grad(whole.sum(), memory)
    monkeypatch.setattr("regard.nn.monotonic.HIDDEN_NUMBERS", 2 * BATCH * KEYS * HIDDEN)
    parts = layer(query, memory).output
    (grad,) = torch.autograd.grad(parts.sum(), memory)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(grad, expected)


COMPILED = """
import torch
from regard.core.requests import full
from regard.nn import CoverageAttention, LocationAttention, MonotonicAttention
query, memory = torch.randn(2, 2, 6), torch.randn(2, 5, 6)
mask = torch.arange(5) < torch.tensor([[5], [3]])
for layer in (MonotonicAttention(6, noise=0.0), LocationAttention(6, kernel_size=3), CoverageAttention(6)):
    plain = layer(query, memory, mask=mask, weights=full())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(query, memory, mask=mask, weights=full())
    query = query[:, :1]
    torch.testing.assert_close((compiled.output, compiled.weights), (plain.output, plain.weights))
"""


@pytest.mark.process
@pytest.mark.slow
def test_the_layers_that_step_compile_whole():
    """Runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests."""
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr
