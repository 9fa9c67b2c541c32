"""Spatial attention: one gate for each position of an image."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.scores import float_tensor
from regard.nn.channel import real_positions


class SpatialAttention(nn.Module):
    """x · σ(conv([mean_c x; max_c x])): one gate for each position of an image (CBAM, Woo et al. 2018, section 3).

    The input of the convolution is the mean and the maximum over the channels, padded with zeros; `kernel_size` is odd.

    >>> layer = SpatialAttention(7)
    >>> x = torch.randn(2, 16, 11, 13)
    >>> layer(x).shape, layer.gates(x).shape
    (torch.Size([2, 16, 11, 13]), torch.Size([2, 11, 13]))
    """

    def __init__(self, kernel_size: int = 7) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that a gate has a middle, got {kernel_size}")
        self.kernel_size = kernel_size
        self.convolution = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)

    def forward(
        self, x: Float[Tensor, "b c height width"], *, mask: Bool[Tensor, "b height width"] | None = None
    ) -> Float[Tensor, "b c height width"]:
        """Return the gated image, a tensor in the input's shape, so that the layer fits into `nn.Sequential`.

        Positions where the mask is False are treated as outside of the image, and are 0 in output and gates.
        """
        gates = self.gates(x, mask=mask)
        real = real_positions(mask, x)
        return (x if real is None else torch.where(real, x, 0)) * gates.unsqueeze(1)

    def gates(
        self, x: Float[Tensor, "b c height width"], *, mask: Bool[Tensor, "b height width"] | None = None
    ) -> Float[Tensor, "b height width"]:
        """Return the gates: a factor between 0 and 1 for each position of the image."""
        float_tensor(x, "x")
        if x.ndim != 4:
            raise ValueError(f"x must be (b, c, height, width), got {tuple(x.shape)}")
        real = real_positions(mask, x)
        x = x if real is None else torch.where(real, x, 0)
        pooled = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        gates = torch.sigmoid(self.convolution(pooled)).to(x.dtype)
        return (gates if real is None else torch.where(real, gates, 0)).squeeze(1)
