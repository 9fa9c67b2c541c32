"""Channel attention: one gate for each channel of an image."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.problem import HALF
from regard.core.scores import float_tensor


class ChannelAttention(nn.Module):
    """x_c · s_c with s = σ(W₂ relu(W₁ z)), z the mean of each channel (squeeze-excitation, Hu et al. 2018, section 3).

    `pool="both"` is the channel attention of CBAM: s = σ(mlp(mean) + mlp(max)), with one perceptron for mean and
    maximum (Woo et al. 2018, section 3). The hidden layer has channels / reduction units. Any number of axes may follow
    the channels: an image, a sound, a video.

    >>> layer = ChannelAttention(32, pool="both")
    >>> x = torch.randn(2, 32, 7, 5)
    >>> layer(x).shape, layer.gates(x).shape
    (torch.Size([2, 32, 7, 5]), torch.Size([2, 32]))
    >>> nn.Sequential(nn.Conv2d(3, 32, 3), layer, nn.ReLU())(torch.randn(2, 3, 9, 7)).shape
    torch.Size([2, 32, 7, 5])
    """

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        *,
        pool: Literal["average", "both"] = "average",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if channels < 1 or reduction < 1:
            raise ValueError(f"channels and reduction must be 1 or more, got {channels} and {reduction}")
        if pool not in ("average", "both"):
            raise ValueError(f"pool must be average or both, got {pool!r}")
        self.channels, self.pool = channels, pool
        hidden = max(1, channels // reduction)
        self.squeeze = nn.Linear(channels, hidden, bias=bias)
        self.excite = nn.Linear(hidden, channels, bias=bias)

    def forward(
        self, x: Float[Tensor, "b c *space"], *, mask: Bool[Tensor, "b *space"] | None = None
    ) -> Float[Tensor, "b c *space"]:
        """Return the gated input, a tensor in the input's shape, so that the layer fits into `nn.Sequential`.

        `mask` is True at real positions: positions where it is False are excluded from mean and maximum, and are 0 in
        the output.
        """
        gates = self.gates(x, mask=mask)
        real = real_positions(mask, x)
        return (x if real is None else torch.where(real, x, 0)) * gates.reshape(*gates.shape, *(1,) * (x.ndim - 2))

    def gates(
        self, x: Float[Tensor, "b c *space"], *, mask: Bool[Tensor, "b *space"] | None = None
    ) -> Float[Tensor, "b c"]:
        """Return the gates s, a factor between 0 and 1 for each channel."""
        float_tensor(x, "x")
        if x.ndim < 3 or x.shape[1] != self.channels:
            raise ValueError(f"x must be (b, {self.channels}, …), got {tuple(x.shape)}")
        real = real_positions(mask, x)
        return torch.sigmoid(self._scores(x if real is None else torch.where(real, x, 0), real)).to(x.dtype)

    def _scores(self, x: Float[Tensor, "b c *space"], real: Bool[Tensor, "b 1 *space"] | None) -> Float[Tensor, "b c"]:
        flat = x.flatten(2)
        wide = flat.float() if flat.dtype in HALF else flat  # means are computed in float32
        if real is None:
            average, largest = wide.mean(-1), wide.amax(-1)
        else:
            counts = real.flatten(2)
            average = wide.sum(-1) / counts.sum(-1).clamp_min(1)
            largest = torch.where(counts, wide, -torch.inf).amax(-1)
            largest = torch.where(counts.any(-1), largest, 0)
        scores = self._perceptron(average.to(x.dtype))
        return scores if self.pool == "average" else scores + self._perceptron(largest.to(x.dtype))

    def _perceptron(self, pooled: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        return self.excite(torch.relu(self.squeeze(pooled)))


def real_positions(
    mask: Bool[Tensor, "b *space"] | None, x: Float[Tensor, "b c *space"]
) -> Bool[Tensor, "b 1 *space"] | None:
    """Return the mask of the positions of an image, with an axis of size 1 for channels."""
    if mask is None:
        return None
    expected = (x.shape[0], *x.shape[2:])
    if mask.dtype != torch.bool or mask.shape != expected:
        raise ValueError(
            f"mask must be a bool tensor {expected}, True for real positions, got {mask.dtype} {tuple(mask.shape)}"
        )
    return mask.unsqueeze(1)
