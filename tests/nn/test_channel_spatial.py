"""Channel and spatial attention, which multiply an image by gates, against their formulas in Python numbers."""

import math
import sys

import pytest
import torch
from torch import nn

import forked
from regard.nn.channel import ChannelAttention
from regard.nn.spatial import SpatialAttention

BATCH, CHANNELS, HEIGHT, WIDTH = 2, 7, 5, 3


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (BATCH, CHANNELS, HEIGHT, WIDTH)), dtype=torch.float64)


def perceptron(layer: ChannelAttention, pooled: list[float]) -> list[float]:
    """Return W₂ relu(W₁ z + b₁) + b₂ in Python numbers."""
    for linear, bend in ((layer.squeeze, True), (layer.excite, False)):
        rows = zip(linear.weight.tolist(), linear.bias.tolist(), strict=True)
        pooled = [math.fsum(w * z for w, z in zip(row, pooled, strict=True)) + shift for row, shift in rows]
        pooled = [max(0.0, x) for x in pooled] if bend else pooled
    return pooled


@pytest.mark.parametrize("pool", ["average", "both"])
def test_channel_gates_are_the_papers(pool):
    layer = ChannelAttention(CHANNELS, 2, pool=pool).double()
    x = image()
    output, gates = layer(x), layer.gates(x)
    assert layer.squeeze.out_features == 3
    for b in range(BATCH):
        places = [x[b, c].flatten().tolist() for c in range(CHANNELS)]
        scores = perceptron(layer, [math.fsum(place) / len(place) for place in places])
        if pool == "both":
            scores = [s + m for s, m in zip(scores, perceptron(layer, [max(place) for place in places]), strict=True)]
        for c in range(CHANNELS):
            gate = torch.tensor(sigmoid(scores[c]), dtype=torch.float64)
            torch.testing.assert_close(gates[b, c], gate)
            torch.testing.assert_close(output[b, c], x[b, c] * gate)


def test_a_channel_layer_worked_by_hand():
    layer = ChannelAttention(2, 2, pool="both", bias=False)
    with torch.no_grad():
        layer.squeeze.weight.copy_(torch.tensor([[1.0, -1.0]]))
        layer.excite.weight.copy_(torch.tensor([[1.0], [-2.0]]))
    # The channels have the means 2, ½ and the maxima 3, 1, so the hidden unit is (2 − ½) + (3 − 1) = 3.5.
    x = torch.tensor([[[1.0, 3.0], [0.0, 1.0]]])
    gates = torch.tensor([[sigmoid(3.5), sigmoid(-7.0)]])
    torch.testing.assert_close(layer.gates(x), gates)
    torch.testing.assert_close(layer(x), x * gates[..., None])


def test_spatial_gates_are_the_papers():
    layer = SpatialAttention(3).double()
    x = image()
    output, gates = layer(x), layer.gates(x)
    kernel = layer.convolution.weight[0].tolist()
    for b in range(BATCH):
        for i in range(HEIGHT):
            for j in range(WIDTH):
                score = 0.0
                for u in range(3):
                    for v in range(3):
                        y, z = i + u - 1, j + v - 1
                        if 0 <= y < HEIGHT and 0 <= z < WIDTH:
                            column = x[b, :, y, z].tolist()
                            score += kernel[0][u][v] * sum(column) / CHANNELS + kernel[1][u][v] * max(column)
                gate = torch.tensor(sigmoid(score), dtype=torch.float64)
                torch.testing.assert_close(gates[b, i, j], gate)
                torch.testing.assert_close(output[b, :, i, j], x[b, :, i, j] * gate)


LAYERS = {
    "squeeze-excitation": lambda: ChannelAttention(CHANNELS, 3).double(),
    "channel, both": lambda: ChannelAttention(CHANNELS, 3, pool="both").double(),
    "spatial": lambda: SpatialAttention(5).double(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_padded_image_gives_what_the_image_gives(name):
    layer, x = LAYERS[name](), image() - 5  # all inputs are negative, so a zero in the padding would be the maximum
    alone = layer.gates(x)
    larger = torch.full((BATCH, CHANNELS, HEIGHT + 2, WIDTH + 4), torch.nan, dtype=torch.float64)
    larger[..., :HEIGHT, :WIDTH] = x
    real = torch.zeros(BATCH, HEIGHT + 2, WIDTH + 4, dtype=torch.bool)
    real[:, :HEIGHT, :WIDTH] = True
    padded, gates = layer(larger, mask=real), layer.gates(larger, mask=real)
    torch.testing.assert_close(padded[..., :HEIGHT, :WIDTH], layer(x))
    assert not padded[..., HEIGHT:, :].any()
    assert not padded[..., WIDTH:].any()
    torch.testing.assert_close(gates if gates.ndim == 2 else gates[:, :HEIGHT, :WIDTH], alone)
    torch.testing.assert_close(gates.sum(), alone.sum())  # the gates of padded positions are 0


@pytest.mark.parametrize("name", LAYERS)
def test_an_image_without_a_real_place_gives_zeros(name):
    layer = LAYERS[name]()
    x = image().fill_(torch.nan).requires_grad_()
    output = layer(x, mask=torch.zeros(BATCH, HEIGHT, WIDTH, dtype=torch.bool))
    output.sum().backward()
    assert not output.any()
    assert not x.grad.any()


@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name):
    layer, x = LAYERS[name](), image(1, CHANNELS, 3, 2).requires_grad_()
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradcheck(layer.gates, x)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_the_layers_fit_into_a_sequence_of_modules(name):
    before, layer, after = nn.Conv2d(2, CHANNELS, 3).double(), LAYERS[name](), nn.Flatten()
    x = image(BATCH, 2, 6, 4)
    output = nn.Sequential(before, layer, after)(x)
    torch.testing.assert_close(output, layer(before(x)).flatten(1))


def test_channels_of_sounds_and_videos():
    layer = ChannelAttention(CHANNELS).double()
    for shape in ((BATCH, CHANNELS, 11), (BATCH, CHANNELS, 2, 5, 3)):
        x = image(*shape)
        torch.testing.assert_close(layer(x), layer(x.flatten(2)).reshape(shape))


@pytest.mark.parametrize("name", LAYERS)
def test_it_runs_under_autocast(name):
    layer, x = LAYERS[name]().float(), image().float()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, layer(x), rtol=0.02, atol=0.02)


COMPILED = """
import torch
from regard.core.requests import full
from regard.nn import ChannelAttention, Gate, Glimpse, MaxSaliency, SpatialAttention
image, sequence, location = torch.randn(2, 7, 5, 3), torch.randn(2, 5, 7), torch.rand(2, 2)
for layer in (ChannelAttention(7, 2, pool="both"), SpatialAttention(3)):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(image), layer(image))
layers = [(MaxSaliency(), sequence), (Gate(7), sequence), (Glimpse(3, 2), image, location)]
for layer, *inputs in layers:
    plain = layer(*inputs, weights=full())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs, weights=full())
    torch.testing.assert_close((compiled.output, compiled.weights), (plain.output, plain.weights))
"""


@pytest.mark.process
@pytest.mark.slow
def test_the_layers_of_vision_compile_whole():
    """Runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests."""
    done = forked.run([sys.executable, "-c", COMPILED])
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("as_installed")
def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="pool must be average or both, got 'max'"):
        ChannelAttention(4, pool="max")
    with pytest.raises(ValueError, match="channels and reduction must be 1 or more, got 4 and 0"):
        ChannelAttention(4, 0)
    with pytest.raises(ValueError, match="kernel_size must be odd, so that a gate has a middle, got 4"):
        SpatialAttention(4)
    with pytest.raises(ValueError, match=r"x must be \(b, 4, …\), got \(2, 7, 5, 3\)"):
        ChannelAttention(4)(image())
    with pytest.raises(ValueError, match=r"x must be \(b, c, height, width\)"):
        SpatialAttention()(image(2, 3, 5))
    with pytest.raises(ValueError, match=r"mask must be a bool tensor \(2, 5, 3\), True for real positions"):
        SpatialAttention().double()(image(), mask=torch.ones(2, 5, dtype=torch.bool))
