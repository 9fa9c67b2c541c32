"""Errors of every layer name what was expected and what was given, if an input or a size does not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import nn

SIZE = 6
LAYERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], object], str]] = {
    "Attention": (lambda: nn.Attention(SIZE), lambda layer, x: layer(x, torch.randn(2, 4, SIZE)), "query"),
    "memory": (lambda: nn.Attention(SIZE), lambda layer, x: layer(torch.randn(2, 4, SIZE), x), "memory"),
    "SelfAttention": (lambda: nn.SelfAttention(SIZE, 4, 3), lambda layer, x: layer(x), "x"),
    "MultiHeadAttention": (lambda: nn.MultiHeadAttention(SIZE, 2), lambda layer, x: layer(x), "query"),
    "key": (lambda: nn.MultiHeadAttention(SIZE, 2), lambda layer, x: layer(torch.randn(2, 4, SIZE), x), "key"),
    "LinearAttention": (lambda: nn.LinearAttention(SIZE, 2), lambda layer, x: layer(x), "query"),
    "LocalAttention": (
        lambda: nn.LocalAttention(SIZE, reach=2),
        lambda layer, x: layer(x, torch.randn(2, 4, SIZE)),
        "query",
    ),
    "LocationAttention": (
        lambda: nn.LocationAttention(SIZE),
        lambda layer, x: layer(torch.randn(2, 4, SIZE), x),
        "memory",
    ),
    "MonotonicAttention": (
        lambda: nn.MonotonicAttention(SIZE),
        lambda layer, x: layer(x, torch.randn(2, 4, SIZE)),
        "query",
    ),
    "CoverageAttention": (
        lambda: nn.CoverageAttention(SIZE),
        lambda layer, x: layer(torch.randn(2, 4, SIZE), x),
        "memory",
    ),
    "TemporalAttention": (lambda: nn.TemporalAttention(SIZE), lambda layer, x: layer(x), "frames"),
    "Gate": (lambda: nn.Gate(SIZE), lambda layer, x: layer(x), "x"),
    "FeedForward": (lambda: nn.FeedForward(SIZE), lambda layer, x: layer(x), "x"),
    "SinusoidalPositions": (lambda: nn.SinusoidalPositions(SIZE), lambda layer, x: layer(x), "x"),
    "LearnedPositions": (lambda: nn.LearnedPositions(SIZE, 9), lambda layer, x: layer(x), "x"),
    "Rotary": (lambda: nn.Rotary(SIZE), lambda layer, x: layer(x[:, None]), "x"),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(nn.MultiHeadAttention(SIZE, 2), nn.FeedForward(SIZE)),
        lambda layer, x: layer(x),
        "x",
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(
            nn.MultiHeadAttention(SIZE, 2), nn.MultiHeadAttention(SIZE, 2), nn.FeedForward(SIZE)
        ),
        lambda layer, x: layer(x, torch.randn(2, 4, SIZE)),
        "x",
    ),
    "ChannelAttention": (lambda: nn.ChannelAttention(5), lambda layer, x: layer(x), "x"),
}


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("name", [*LAYERS, "MaxSaliency", "SpatialAttention", "Glimpse"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_numbers_that_are_no_floats_are_refused(name: str, dtype: torch.dtype) -> None:
    others: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], object], str]] = {
        "MaxSaliency": (nn.MaxSaliency, lambda layer, x: layer(x), "x"),
        "SpatialAttention": (nn.SpatialAttention, lambda layer, x: layer(x[None]), "x"),
        "Glimpse": (lambda: nn.Glimpse(2), lambda layer, x: layer(x[None], torch.zeros(1, 2)), "image"),
    }
    make, call, argument = (LAYERS | others)[name]
    x = torch.zeros(2, 5, SIZE).to(dtype)
    with pytest.raises(TypeError, match=rf"^{argument} must be a float tensor .*got {dtype}"):
        call(make(), x)


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("name", LAYERS)
def test_another_size_is_refused(name: str) -> None:
    make, call, argument = LAYERS[name]
    x = torch.zeros(2, 7, SIZE + 3)
    with pytest.raises(ValueError, match=rf"^{argument} .*(\b{SIZE}\b|5).*\b({SIZE + 3}|7)\b|^{argument} .*{SIZE + 3}"):
        call(make(), x)


SIZES: dict[str, tuple[Callable[[int], object], str]] = {
    "Attention query": (lambda size: nn.Attention(size), "query_size"),
    "Attention memory": (lambda size: nn.Attention(4, size), "memory_size"),
    "Attention hidden": (lambda size: nn.Attention(4, hidden_size=size), "hidden_size"),
    "Attention value": (lambda size: nn.Attention(4, value_size=size), "value_size"),
    "SelfAttention": (lambda size: nn.SelfAttention(4, size, 3), "dim_k"),
    "MultiHeadAttention": (lambda size: nn.MultiHeadAttention(size, 2), "size"),
    "MultiHeadAttention key": (lambda size: nn.MultiHeadAttention(4, 2, key_size=size), "key_size"),
    "MultiHeadAttention head": (lambda size: nn.MultiHeadAttention(4, 2, head_size=size), "head_size"),
    "LinearAttention": (lambda size: nn.LinearAttention(size, 2), "size"),
    "LocalAttention": (lambda size: nn.LocalAttention(size, reach=2), "query_size"),
    "LocationAttention": (lambda size: nn.LocationAttention(4, size), "memory_size"),
    "MonotonicAttention": (lambda size: nn.MonotonicAttention(4, hidden_size=size), "hidden_size"),
    "CoverageAttention": (lambda size: nn.CoverageAttention(size), "query_size"),
    "TemporalAttention": (lambda size: nn.TemporalAttention(size), "size"),
    "Gate": (lambda size: nn.Gate(size), "size"),
    "FeedForward": (lambda size: nn.FeedForward(size), "size"),
    "FeedForward hidden": (lambda size: nn.FeedForward(4, size), "hidden_size"),
}


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("size", [0, -4])
@pytest.mark.parametrize("name", SIZES)
def test_a_layer_without_size_is_refused(name: str, size: int) -> None:
    make, argument = SIZES[name]
    with pytest.raises(ValueError, match=f"^{argument} must be 1 or more, got {size}"):
        make(size)


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("name", SIZES)
def test_half_a_size_is_refused(name: str) -> None:
    make, argument = SIZES[name]
    with pytest.raises(TypeError, match=f"^{argument} must be an int, got float"):
        make(4.0)  # type: ignore[arg-type]
