"""Temporal attention, which has one weight for each frame of a video."""

import math

import pytest
import torch

from regard.core.requests import entropy, full, received, rows, top
from regard.core.scores import ScaledDot
from regard.nn.temporal import TemporalAttention

BATCH, FRAMES, SIZE, HEIGHT, WIDTH = 2, 5, 3, 7, 4
SCORES = ["dot", "scaled_dot", "cosine", "bilinear", "additive", ScaledDot(0.3)]


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    frames = torch.randn(BATCH, FRAMES, SIZE, dtype=torch.float64)
    video = torch.randn(BATCH, FRAMES, SIZE, HEIGHT, WIDTH, dtype=torch.float64)
    return frames, video, torch.arange(FRAMES) < torch.tensor([[FRAMES], [3]])


def test_by_hand():
    """The dot scores of the query are 0 and ln 3, so the weights are ¼ and ¾."""
    layer = TemporalAttention(2, score="dot")
    frames = torch.tensor([[[1.0, 0.0], [0.0, math.log(3.0)]]])
    found = layer(frames, torch.tensor([[0.0, 1.0]]), weights=full())
    torch.testing.assert_close(found.weights, torch.tensor([[0.25, 0.75]]))
    torch.testing.assert_close(found.output, torch.tensor([[0.25, 0.75 * math.log(3.0)]]))


def test_maps_are_scored_by_their_mean():
    layer = TemporalAttention(SIZE, score="additive", hidden_size=11).double()
    _, video, mask = inputs()
    found = layer(video, mask=mask, weights=full())
    assert found.output.shape == (BATCH, SIZE, HEIGHT, WIDTH)
    weights = layer(video.mean((-1, -2)), mask=mask, weights=full()).weights
    torch.testing.assert_close(found.weights, weights)
    expected = torch.zeros_like(found.output)
    for b in range(BATCH):
        for t in range(FRAMES):
            expected[b] += weights[b, t] * video[b, t]
    torch.testing.assert_close(found.output, expected)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", ["vectors", "maps"])
def test_padding_has_no_effect(score, kind):
    layer = TemporalAttention(SIZE, score=score).double()
    frames, video, mask = inputs()
    x = frames if kind == "vectors" else video
    alone = layer(x[1:, :3], weights=full())
    x[1, 3:] = torch.nan
    found = layer(x, mask=mask, weights=full())
    torch.testing.assert_close(found.output[1:], alone.output)
    torch.testing.assert_close(found.weights[1:, :3], alone.weights)
    assert not found.weights[1, 3:].any()
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(BATCH, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["vectors", "maps"])
def test_no_real_frame_gives_zeros(kind):
    layer = TemporalAttention(SIZE).double()
    frames, video, mask = inputs()
    x = (frames if kind == "vectors" else video).requires_grad_()
    mask[1] = False
    found = layer(x, mask=mask, weights=full())
    found.output.sum().backward()
    assert not found.output[1].any()
    assert not found.weights[1].any()
    assert not x.grad[1].any()
    none = layer(x[:, :0], weights=full())
    assert none.output.shape == found.output.shape
    assert not none.output.any()
    assert none.weights.shape == (BATCH, 0)


def test_the_order_of_frames_is_not_seen():
    layer = TemporalAttention(SIZE).double()
    frames, _, _ = inputs()
    order = torch.randperm(FRAMES)
    torch.testing.assert_close(layer(frames[:, order]).output, layer(frames).output)


@pytest.mark.parametrize("score", SCORES)
def test_gradients(score):
    layer = TemporalAttention(SIZE, score=score).double()
    frames, video, mask = inputs()
    video = video[..., :2, :3].clone()
    for x in (frames, video):
        leaves = (x.requires_grad_(), *layer.parameters())
        assert torch.autograd.gradcheck(lambda x, *_: layer(x, mask=mask).output, leaves, fast_mode=True)
    query = torch.randn(BATCH, SIZE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, q: layer(x, q, mask=mask).output, (frames, query), fast_mode=True)


def test_what_is_asked_learns():
    layer = TemporalAttention(SIZE, score="dot").double()
    layer(inputs()[0]).output.square().sum().backward()
    assert layer.query.grad.any()


def test_what_may_be_asked_of_the_weights():
    layer = TemporalAttention(SIZE).double()
    frames, _, mask = inputs()
    weights = layer(frames, mask=mask, weights=full()).weights
    assert weights.shape == (BATCH, FRAMES)
    assert layer(frames, mask=mask).weights is None
    torch.testing.assert_close(layer(frames, mask=mask, weights=received()).weights, weights)
    torch.testing.assert_close(layer(frames, mask=mask, weights=rows(0)).weights, weights)
    torch.testing.assert_close(layer(frames, mask=mask, weights=top(2)).weights.values, weights.topk(2).values)
    logs = torch.where(weights > 0, weights, 1).log()
    torch.testing.assert_close(layer(frames, mask=mask, weights=entropy()).weights, -(weights * logs).sum(-1))
    assert layer(frames[:, :1], weights=received()).weights.shape == (BATCH, 1)


@pytest.mark.parametrize("kind", ["vectors", "maps"])
def test_it_runs_under_autocast(kind):
    layer = TemporalAttention(SIZE)
    frames, video, mask = inputs()
    x = (frames if kind == "vectors" else video).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, mask=mask)
    torch.testing.assert_close(found.output.float(), layer(x, mask=mask).output, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("as_installed")
def test_bad_arguments_are_named():
    layer = TemporalAttention(SIZE).double()
    frames, _, mask = inputs()
    with pytest.raises(ValueError, match=r"frames must be \(b, t, 3\) or \(b, t, 3, height, width\), got \(2, 5, 2\)"):
        layer(frames[..., :2])
    with pytest.raises(ValueError, match=r"query must be \(2, 3\), got \(1, 3\)"):
        layer(frames, frames[:1, 0])
    with pytest.raises(ValueError, match=r"mask must be a bool tensor \(2, 5\), True for real positions"):
        layer(frames, mask=mask[:, :2])
