"""A small convolutional network; each cell of its feature map is centred on the pixels that the cell represents."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn


class ConvolutionalNetwork(nn.Module):
    """Computes x ← relu(norm(conv(x))) once for each of `widths`; every layer halves the height and width.

    Kernels have 4 × 4 weights and stride 2, so an output is centred between the two middle rows and columns of its
    inputs. Cell i of a feature map with stride s is therefore centred on pixel s·i + (s − 1)/2, the middle of the
    pixels s·i to s·i + s − 1. With 3 × 3 kernels, the cell and the attention that is displayed on it would be centred
    on pixel s·i, half a cell away. Norms are over the batch (Ioffe & Szegedy 2015), because these need fewer training
    steps than norms of single images.

    `kernels` has the kernel size of each layer, 4 or 2. Kernels of 2 × 2 do not overlap, so receptive fields are
    smaller: three layers with kernels 4, 4, 4 have a receptive field of 22 × 22 pixels, 4, 2, 4 of 18 × 18 pixels, and
    2, 2, 2 of 8 × 8 pixels.

    >>> import torch
    >>> ConvolutionalNetwork(widths=(8, 16))(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 16, 8, 8])
    """

    def __init__(
        self, input_channels: int = 3, *, widths: Sequence[int] = (32, 64, 64), kernels: Sequence[int] = ()
    ) -> None:
        super().__init__()
        if not widths:
            raise ValueError("widths must name at least one layer")
        kernels = tuple(kernels) or (4,) * len(widths)
        if len(kernels) != len(widths) or not set(kernels) <= {2, 4}:
            raise ValueError(f"kernels must have 2 or 4 for each of the {len(widths)} layers, got {kernels}")
        layers: list[nn.Module] = []
        for before, width, kernel in zip((input_channels, *widths), widths, kernels, strict=False):
            convolution = nn.Conv2d(before, width, kernel, 2, padding=kernel // 2 - 1, bias=False)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.channels, self.stride = widths[-1], 2 ** len(widths)

    def forward(self, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b e rows columns"]:
        return self.layers(images)
