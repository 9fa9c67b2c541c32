"""Channel attention: which of an image's features matter, by one gate for each channel."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.attention import Attended
from regard.core.problem import HALF
from regard.core.requests import Full, Request
from regard.core.scores import float_tensor


class ChannelAttention(nn.Module):
    """x_c · s_c with s = σ(W₂ relu(W₁ z)), z the mean of each channel (squeeze-excitation, Hu et al. 2018, section 3).

    `pool="both"` is CBAM's: s = σ(mlp(mean) + mlp(max)), one perceptron for the two (Woo et al. 2018, section 3). The
    hidden layer has channels / reduction units. Any number of axes may follow the channels: an image, a sound, a video.

    >>> from regard.core.requests import full
    >>> layer = ChannelAttention(32, pool="both")
    >>> seen = layer(torch.randn(2, 32, 7, 5), weights=full())
    >>> seen.output.shape, seen.weights.shape
    (torch.Size([2, 32, 7, 5]), torch.Size([2, 32]))
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
        self,
        x: Float[Tensor, "b c *space"],
        *,
        mask: Bool[Tensor, "b *space"] | None = None,
        weights: Request | None = None,
    ) -> Attended:
        """The gated input, in its own shape. `weights=full()` also gives the gates (b, c).

        `mask` says which positions are real: the others are left out of mean and maximum, and are 0 in the output.
        """
        float_tensor(x, "x")
        if x.ndim < 3 or x.shape[1] != self.channels:
            raise ValueError(f"x must be (b, {self.channels}, …), got {tuple(x.shape)}")
        only_full(weights, "ChannelAttention")
        real = real_positions(mask, x)
        if real is not None:
            x = torch.where(real, x, 0)
        gates = torch.sigmoid(self._scores(x, real)).to(x.dtype)
        output = x * gates.reshape(*gates.shape, *(1,) * (x.ndim - 2))
        return Attended(output, None if weights is None else gates)

    def _scores(self, x: Float[Tensor, "b c *space"], real: Bool[Tensor, "b 1 *space"] | None) -> Float[Tensor, "b c"]:
        flat = x.flatten(2)
        wide = flat.float() if flat.dtype in HALF else flat  # a mean in half precision would lose the small ones
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


def only_full(weights: Request | None, layer: str) -> None:
    """Raise unless the whole map, or nothing, is asked for: gates have no queries one could sum or choose from."""
    if weights is not None and not isinstance(weights, Full):
        raise ValueError(f"weights of {layer} are one map: expected full() or None, got {type(weights).__name__}")


def real_positions(
    mask: Bool[Tensor, "b *space"] | None, x: Float[Tensor, "b c *space"]
) -> Bool[Tensor, "b 1 *space"] | None:
    """The mask of an image with an axis for its channels."""
    if mask is None:
        return None
    expected = (x.shape[0], *x.shape[2:])
    if mask.dtype != torch.bool or mask.shape != expected:
        raise ValueError(
            f"mask must be a bool tensor {expected}, True for real positions, got {mask.dtype} {tuple(mask.shape)}"
        )
    return mask.unsqueeze(1)
