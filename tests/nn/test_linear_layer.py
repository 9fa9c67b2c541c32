"""The layer of linear attention: against its definition over pairs, one position at a time, and in a Transformer."""

import sys

import pytest
import torch

import forked
from regard.core.features import EluFeatures, PerformerFeatures
from regard.core.masks import causal, padding, window
from regard.core.requests import entropy, full, received
from regard.nn.feedforward import FeedForward
from regard.nn.linear import LinearAttention
from regard.nn.multihead import MultiHeadAttention
from regard.nn.transformer import TransformerEncoderLayer

BATCH, LENGTH, KEYS, HEADS, HEAD = 2, 7, 11, 3, 5
SIZE = HEADS * HEAD


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, LENGTH, SIZE, dtype=torch.float64)
    return x, torch.randn(BATCH, KEYS, SIZE, dtype=torch.float64)


def a_layer(**options: object) -> LinearAttention:
    return LinearAttention(SIZE, HEADS, **options).double()


def by_hand(layer, query, key, allowed):
    """Return the layer's output from the weights φ(q)·φ(k) / Σ φ(q)·φ(k), computed pair by pair for each head."""
    parts = zip(layer.projection.weight.chunk(3), layer.projection.bias.chunk(3), (query, key, key), strict=True)
    q, k, v = (x @ weight.T + bias for weight, bias, x in parts)
    weights = torch.zeros(BATCH, HEADS, query.shape[1], key.shape[1], dtype=torch.float64)
    read = torch.zeros_like(q)
    for b in range(BATCH):
        for h in range(HEADS):
            part = slice(h * HEAD, (h + 1) * HEAD)
            for i in range(query.shape[1]):
                row = [
                    float((layer.features(q[b, i, part]) * layer.features(k[b, j, part])).sum().detach())
                    if allowed(b, i, j)
                    else 0.0
                    for j in range(key.shape[1])
                ]
                total = sum(row)
                for j, x in enumerate(row):
                    weights[b, h, i, j] = x / total if total else 0.0
                    read[b, i, part] = read[b, i, part] + weights[b, h, i, j] * v[b, j, part]
    return read @ layer.output.weight.T + layer.output.bias, weights


FEATURES = {
    "performer": lambda: None,
    "elu": EluFeatures,
    "own": lambda: torch.nn.Sequential(torch.nn.Linear(HEAD, 4), torch.nn.Softplus()),
}
MASKS = {
    "none": (None, lambda b, i, j: True),
    "padding": (padding(torch.tensor([LENGTH, 4])), lambda b, i, j: j < (LENGTH, 4)[b]),
    "causal": (causal(), lambda b, i, j: j <= i),
    "padding and causal": (
        padding(torch.tensor([LENGTH, 4])) & causal(),
        lambda b, i, j: j <= i and j < (LENGTH, 4)[b],
    ),
    "both": (
        causal() & padding(torch.tensor([LENGTH, 4])) & padding(torch.tensor([5, LENGTH])),
        lambda b, i, j: j <= i and j < (5, 4)[b],
    ),
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("mask", MASKS)
def test_it_is_the_quotient_of_features(features, mask):
    layer, (x, _) = a_layer(features=FEATURES[features]()), inputs()
    described, allowed = MASKS[mask]
    found = layer(x, mask=described, weights=full())
    with torch.no_grad():
        output, weights = by_hand(layer, x, x, allowed)
    torch.testing.assert_close(found.output, output)
    torch.testing.assert_close(found.weights, weights)
    assert layer(x, mask=described).weights is None


def test_causal_by_the_layer_is_causal_by_the_mask():
    layer, (x, _) = a_layer(), inputs()
    always = a_layer(causal=True)
    always.load_state_dict(layer.state_dict())
    torch.testing.assert_close(always(x).output, layer(x, mask=causal()).output)


def test_it_reads_another_sequence_too():
    layer, (x, memory) = a_layer(), inputs()
    with torch.no_grad():
        output, weights = by_hand(layer, x, memory, lambda b, i, j: j != 3)
    keep = (torch.arange(KEYS) != 3).expand(BATCH, 1, 1, KEYS)
    found = layer(x, memory, mask=keep, weights=full())
    torch.testing.assert_close(found.output, output)
    torch.testing.assert_close(found.weights, weights)
    torch.testing.assert_close(layer(x, memory, memory.clone(), mask=keep).output, output)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("cuts", [[1] * LENGTH, [4, 1, 2]])
def test_steps_are_one_causal_pass(features, cuts):
    layer, (x, _) = a_layer(features=FEATURES[features](), causal=True), inputs()
    state, outputs = None, []
    for part in x.split(cuts, 1):
        output, state = layer.step(part, state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x).output)


def test_the_state_follows_beams():
    layer, (x, _) = a_layer(causal=True), inputs()
    order = torch.tensor([1, 1, 0])
    _, state = layer.step(x[:, :4])
    moved = type(state)(*(tensor.index_select(0, order) for tensor in state))
    found, _ = layer.step(x[order, 4:], moved)
    torch.testing.assert_close(found, layer(x[order]).output[:, 4:])


def test_a_changed_future_leaves_the_past_alone():
    layer, (x, _) = a_layer(causal=True), inputs()
    before = layer(x).output
    x[:, 5] = 1e3
    torch.testing.assert_close(layer(x).output[:, :5], before[:, :5], rtol=0, atol=0)


def test_padding_has_no_effect():
    layer, (x, _) = a_layer(), inputs()
    alone = layer(x[:, :4]).output
    x[:, 4:] = torch.nan
    found = layer(x, mask=padding(torch.tensor([4, 4])), weights=full())
    torch.testing.assert_close(found.output[:, :4], alone)
    assert not found.weights[..., :4, 4:].any()


def test_a_memory_without_a_real_place_reads_nothing():
    layer, (x, memory) = a_layer(bias=False), inputs()
    found = layer(x, memory, mask=padding(torch.tensor([KEYS, 0])), weights=full())
    assert not found.output[1].any()
    assert not found.weights[1].any()
    assert found.output[0].all()


def test_with_many_features_it_comes_near_softmax_attention():
    features = PerformerFeatures.draw(HEAD, 20_000, generator=torch.Generator().manual_seed(3))
    exact, (x, _) = MultiHeadAttention(SIZE, HEADS).double(), inputs()
    x = x / 2  # inputs are halved, because the variance of Performer features grows exponentially with |x|²
    layer = a_layer(features=features)
    missing = layer.load_state_dict(exact.state_dict(), strict=False)
    assert missing.missing_keys == ["directions"]
    assert not missing.unexpected_keys
    for mask in (None, causal()):
        wanted = exact(x, mask=mask, weights=full())
        found = layer(x, mask=mask, weights=full())
        torch.testing.assert_close(found.weights, wanted.weights, rtol=0, atol=0.02)
        torch.testing.assert_close(found.output, wanted.output, rtol=0, atol=0.02)


def test_features_are_saved_and_drawn_anew():
    layer, other, (x, _) = a_layer(), a_layer(), inputs()
    before = layer(x).output
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x).output, before, rtol=0, atol=0)
    layer.redraw(torch.Generator().manual_seed(1))
    after = layer(x).output
    assert (after - before).abs().max() > 1e-4
    other.redraw(torch.Generator().manual_seed(1))
    torch.testing.assert_close(other(x).output, after, rtol=0, atol=0)
    other.load_state_dict(layer.state_dict())
    with pytest.raises(ValueError, match="only PerformerFeatures can be drawn anew, this layer has EluFeatures"):
        a_layer(features=EluFeatures()).redraw()


def test_a_map_of_ones_own_learns():
    layer, (x, _) = a_layer(features=FEATURES["own"]()), inputs()
    layer(x).output.square().sum().backward()
    assert all(p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("mask", MASKS)
def test_gradients(mask):
    layer, (x, _) = a_layer(), inputs()
    leaves = (x.requires_grad_(), *layer.parameters())
    described, _ = MASKS[mask]
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, mask=described).output, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda x, *_: layer(x, mask=described, weights=entropy()).weights, leaves[0], fast_mode=True
    )


def test_what_may_be_asked_of_the_weights():
    layer, (x, _) = a_layer(), inputs()
    weights = layer(x, weights=full()).weights
    torch.testing.assert_close(layer(x, weights=received()).weights, weights.sum(-2))


def test_it_stands_in_a_transformer():
    layer = TransformerEncoderLayer(a_layer(), FeedForward(SIZE, 17).double()).double()
    x, _ = inputs()
    found = layer(x, mask=padding(torch.tensor([LENGTH, 4])), weights=full())
    assert found.output.shape == x.shape
    assert found.weights.shape == (BATCH, HEADS, LENGTH, LENGTH)
    alone = layer(x[1:, :4])
    torch.testing.assert_close(found.output[1:, :4], alone.output)


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_it_runs_in_half_precision(how):
    layer, x = a_layer(causal=True).float(), inputs()[0].float()
    expected = layer(x).output
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(x, weights=full()).output
    else:
        found = layer.bfloat16()(x.bfloat16(), weights=full()).output
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


COMPILED = """
import torch
from regard.nn import LinearAttention
torch.manual_seed(0)
layer, x = LinearAttention(6, 2, causal=True), torch.randn(2, 5, 6)
plain = torch.autograd.grad(layer(x).output.square().sum(), list(layer.parameters()))
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
found = torch.autograd.grad(compiled(x).output.square().sum(), list(layer.parameters()))
torch.testing.assert_close(found, plain)
"""


@pytest.mark.process
@pytest.mark.slow
def test_it_compiles_whole():
    """Runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests."""
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("as_installed")
def test_bad_arguments_are_named():
    layer, (x, memory) = a_layer(), inputs()
    with pytest.raises(TypeError, match="causal must be True or False, got the str 'no'"):
        LinearAttention(16, 4, causal="no")
    with pytest.raises(ValueError, match="size must be a multiple of heads, got 16 and 3"):
        LinearAttention(16, 3)
    with pytest.raises(ValueError, match="features are drawn for vectors of size 4, heads have size 5"):
        a_layer(features=PerformerFeatures.draw(4))
    with pytest.raises(ValueError, match="step needs causal=True"):
        layer.step(x)
    with pytest.raises(ValueError, match="bias must be None"):
        layer(x, bias=torch.zeros(()))
    with pytest.raises(ValueError, match="cache must be None: linear attention keeps a LinearState"):
        layer(x, cache=object())
    with pytest.raises(ValueError, match="value was given without key"):
        layer(x, value=memory)
    with pytest.raises(ValueError, match="key has size 4, the layer expects 15"):
        layer(x, memory[..., :4])
    with pytest.raises(ValueError, match="mask of linear_attention must hide the same keys from every query"):
        layer(x, mask=window(2, 0))
