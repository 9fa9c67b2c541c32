"""An encoder of images: every cell of a convolutional feature map is a position of the memory."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.models.memory import Memory
from regard.models.vision.efficientnet import EfficientNetLite0
from regard.nn.channel import ChannelAttention
from regard.nn.saliency import Gate
from regard.nn.spatial import SpatialAttention

MAP_ATTENTIONS = ("none", "channel", "spatial", "both", "gate")
MapAttention = Literal["none", "channel", "spatial", "both", "gate"]


class ImageEncoder(nn.Module):
    """Encodes the cells of an image's feature map as keys and values (Xu et al. 2015, section 3.1.1).

    The state of cell j is h_j = norm(W a_j) + p_j, where a_j is the cell of the feature map that `backbone` computes,
    in row-major order, and p_j a fixed sinusoid of the cell's row and column, which `positions=None` omits. The summary
    is the mean of norm(W a_j). `backbone` is any module with attributes `channels` and `stride` that maps images (b, c,
    height, width) to a feature map; None means a small `ResidualNetwork`. `attention` multiplies the feature map by
    gates that depend on no query: for each channel, for each position, for both in sequence (CBAM), or for every entry
    of a cell.

    >>> encoder = ImageEncoder(32)
    >>> memory = encoder(torch.zeros(2, 3, 48, 64))
    >>> memory.values.shape, encoder.grid(48, 64)
    (torch.Size([2, 48, 32]), (6, 8))
    """

    def __init__(
        self,
        size: int = 128,
        *,
        backbone: nn.Module | None = None,
        positions: str | None = "sinusoidal",
        attention: MapAttention = "none",
    ) -> None:
        super().__init__()
        if attention not in MAP_ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(MAP_ATTENTIONS)}, got {attention!r}")
        if positions == "sinusoidal" and size % 4:
            raise ValueError(f"size must be a multiple of 4 for sinusoids of rows and columns, got {size}")
        if positions not in ("sinusoidal", None):
            raise ValueError(f"positions must be 'sinusoidal' or None, got {positions!r}")
        self.backbone = ResidualNetwork() if backbone is None else backbone
        channels = _whole(self.backbone, "channels")
        pool = "both" if attention == "both" else "average"
        self.channel = ChannelAttention(channels, pool=pool) if attention in ("channel", "both") else None
        self.spatial = SpatialAttention(3) if attention in ("spatial", "both") else None
        self.gate = Gate(channels) if attention == "gate" else None
        self.project = nn.Linear(channels, size)
        self.norm = nn.LayerNorm(size)
        self.size = self.memory_size = size
        self.positions = positions

    @classmethod
    def efficientnet(
        cls, size: int = 128, *, stage: int = 5, pretrained: bool = True, frozen: bool = True
    ) -> "ImageEncoder":
        """Return an encoder over EfficientNet-Lite0, by default with ImageNet weights (the extra `vision`).

        `stage` sets the resolution of the feature map: a cell represents 8 × 8 pixels with stage 3, 16 × 16 with stage
        5, and 32 × 32 with stage 8.
        """
        build = EfficientNetLite0.pretrained if pretrained else EfficientNetLite0
        return cls(size, backbone=build(stage=stage, frozen=frozen))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of cells in the memory of an image of this size."""
        stride = _whole(self.backbone, "stride")
        return math.ceil(height / stride), math.ceil(width / stride)

    def forward(self, images: Float[Tensor, "b c height width"], lengths: None = None) -> Memory:
        """Return the memory of images of one size; it has a position for each cell of the feature map."""
        if lengths is not None:
            raise ValueError("lengths must be None for images: all of a batch have one size")
        return self.memory(self.backbone(images))

    def memory(self, maps: Float[Tensor, "b c rows columns"]) -> Memory:
        """Return the memory of feature maps that the backbone has computed, for example of cached feature maps."""
        rows, columns = maps.shape[-2:]
        for gates in (self.channel, self.spatial):
            maps = maps if gates is None else gates(maps)
        vectors = maps.flatten(2).mT
        vectors = vectors if self.gate is None else self.gate(vectors).output
        cells = self.norm(self.project(vectors))
        placed = cells
        if self.positions is not None:
            placed = cells + grid_positions(rows, columns, self.size, device=cells.device).to(cells.dtype)
        return Memory(placed, placed, None, cells.mean(1))


def grid_positions(
    rows: int, columns: int, size: int, *, device: torch.device | None = None
) -> Float[Tensor, "cells {size}"]:
    """Return sinusoidal encodings of the cells of a grid, in row-major order: one half for the row, one for the column.

    A row or column number n is encoded as sin(n/ω) and cos(n/ω) for ω from 1 towards 10,000 (Vaswani et al. 2017,
    section 3.5, on each axis as in Parmar et al. 2018).

    >>> grid_positions(2, 3, 4)[4]  # row 1, column 1
    tensor([0.8415, 0.5403, 0.8415, 0.5403])
    """
    half = size // 2
    slow = 10_000 ** (-torch.arange(0, half, 2, device=device) / half)

    def axis(count: int) -> Tensor:
        angles = torch.arange(count, device=device)[:, None] * slow
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)

    down = axis(rows)[:, None].expand(-1, columns, -1)
    across = axis(columns)[None].expand(rows, -1, -1)
    return torch.cat([down, across], -1).flatten(0, 1)


class ResidualNetwork(nn.Module):
    """A small residual network (He et al. 2016, section 3.3), in which each stage halves the height and width.

    A block computes x ← relu(x' + norm(conv(relu(norm(conv(x)))))), where x' is x, or a strided 1 × 1 convolution of x
    if the shape changes. `widths` are the numbers of channels of the stages. Norms are over groups of channels (Wu & He
    2018), so they do not depend on the rest of the batch, and training and inference compute the same. The first
    convolution has stride `patch`; a larger stride makes the network faster and its feature map coarser.

    >>> ResidualNetwork(widths=(8, 16))(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 16, 8, 8])
    """

    def __init__(
        self, input_channels: int = 3, *, widths: Sequence[int] = (32, 64, 128), blocks: int = 1, patch: int = 1
    ) -> None:
        super().__init__()
        if not widths or blocks < 1:
            raise ValueError(f"widths and blocks must name at least one block, got {tuple(widths)} and {blocks}")
        if patch < 1:
            raise ValueError(f"patch must be at least 1, got {patch}")
        reach = max(1, patch - 1)
        self.stem = nn.Conv2d(input_channels, widths[0], 2 * reach + 1, patch, padding=reach, bias=False)
        self.norm = _group_norm(widths[0])
        layers: list[_Residual] = []
        size = widths[0]
        for width in widths:
            for index in range(blocks):
                layers.append(_Residual(size, width, stride=1 if index else 2))
                size = width
        self.blocks = nn.Sequential(*layers)
        self.channels, self.stride = size, patch * 2 ** len(widths)

    def forward(self, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b e rows columns"]:
        return self.blocks(F.relu(self.norm(self.stem(images))))


class _Residual(nn.Module):
    """A residual block: two 3 × 3 convolutions with a shortcut connection."""

    def __init__(self, size: int, output_size: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(size, output_size, 3, stride, padding=1, bias=False)
        self.first_norm = _group_norm(output_size)
        self.second = nn.Conv2d(output_size, output_size, 3, padding=1, bias=False)
        self.second_norm = _group_norm(output_size)
        same = size == output_size and stride == 1
        self.shortcut = None if same else nn.Conv2d(size, output_size, 1, stride, bias=False)

    def forward(self, x: Float[Tensor, "b c height width"]) -> Float[Tensor, "b e rows columns"]:
        hidden = F.relu(self.first_norm(self.first(x)))
        beside = x if self.shortcut is None else self.shortcut(x)
        return F.relu(beside + self.second_norm(self.second(hidden)))


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(8, channels), channels)


def _whole(module: nn.Module, name: str) -> int:
    """Return the attribute `name` of the backbone; raise a `TypeError` if it is not an integer."""
    value = getattr(module, name, None)
    if not isinstance(value, int):
        raise TypeError(f"backbone must have a whole number as {name}, {type(module).__name__} has {value!r}")
    return value
