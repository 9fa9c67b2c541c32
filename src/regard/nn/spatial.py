"""Spatial attention: which places of an image matter, by one gate for each position."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.attention import Attended
from regard.core.requests import Request
from regard.core.scores import float_tensor
from regard.nn.channel import only_full, real_positions


class SpatialAttention(nn.Module):
    """x · σ(conv([mean_c x; max_c x])): one gate for each position of an image (CBAM, Woo et al. 2018, section 3).

    The convolution sees the mean and the maximum over the channels and pads with zeros; `kernel_size` is odd.

    >>> from regard.core.requests import full
    >>> layer = SpatialAttention(7)
    >>> seen = layer(torch.randn(2, 16, 11, 13), weights=full())
    >>> seen.output.shape, seen.weights.shape
    (torch.Size([2, 16, 11, 13]), torch.Size([2, 11, 13]))
    """

    def __init__(self, kernel_size: int = 7) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that a gate has a middle, got {kernel_size}")
        self.kernel_size = kernel_size
        self.convolution = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)

    def forward(
        self,
        x: Float[Tensor, "b c height width"],
        *,
        mask: Bool[Tensor, "b height width"] | None = None,
        weights: Request | None = None,
    ) -> Attended:
        """The gated image, in its own shape. `weights=full()` also gives the gates (b, height, width).

        Positions the mask calls unreal look to the others like the outside of the image, and are 0 in output and gates.
        """
        float_tensor(x, "x")
        if x.ndim != 4:
            raise ValueError(f"x must be (b, c, height, width), got {tuple(x.shape)}")
        only_full(weights, "SpatialAttention")
        real = real_positions(mask, x)
        if real is not None:
            x = torch.where(real, x, 0)
        pooled = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        gates = torch.sigmoid(self.convolution(pooled)).to(x.dtype)
        if real is not None:
            gates = torch.where(real, gates, 0)
        return Attended(x * gates, None if weights is None else gates.squeeze(1))
