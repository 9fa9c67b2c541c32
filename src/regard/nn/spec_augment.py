"""SpecAugment: in training, random frequency bands and time spans of the features are masked."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class SpecAugment(nn.Module):
    """Random masks on bands of features and spans of frames (Park et al. 2019, section 2), different for each
    recording.

    There are `bands` masks of up to `band_width` neighbouring features, and `spans` masks of up to `span_width` frames,
    each of at most the fraction `share` of a recording's frames. Masked entries become `fill`. In evaluation nothing is
    masked.

    >>> layer = SpecAugment(bands=1, band_width=2, spans=0)
    >>> bool((layer(torch.ones(1, 9, 8)) == 0).any(1).sum() <= 2)
    True
    """

    def __init__(
        self,
        *,
        bands: int = 2,
        band_width: int = 8,
        spans: int = 2,
        span_width: int = 10,
        share: float = 0.2,
        fill: float = 0.0,
    ) -> None:
        super().__init__()
        if min(bands, band_width, spans, span_width) < 0:
            raise ValueError("numbers and widths of masks must not be negative")
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, got {share}")
        self.bands, self.band_width = bands, band_width
        self.spans, self.span_width = spans, span_width
        self.share, self.fill = share, fill

    def forward(self, frames: Float[Tensor, "b t f"], lengths: Int[Tensor, "b"] | None = None) -> Tensor:
        """Return the frames with parts of them masked; `lengths` are the numbers of frames of the recordings."""
        if not self.training:
            return frames
        rows, steps, features = frames.shape
        if self.bands and self.band_width:
            sizes = torch.full((rows,), features, device=frames.device)
            hidden = _masked(sizes, self.bands, self.band_width, 1.0, features)
            frames = frames.masked_fill(hidden.unsqueeze(1), self.fill)
        if self.spans and self.span_width:
            sizes = torch.full((rows,), steps, device=frames.device) if lengths is None else lengths.to(frames.device)
            hidden = _masked(sizes, self.spans, self.span_width, self.share, steps)
            frames = frames.masked_fill(hidden.unsqueeze(-1), self.fill)
        return frames


def _masked(sizes: Tensor, count: int, width: int, share: float, total: int) -> Tensor:
    """Return which positions are masked, (b, total): `count` spans of 0 to `width` within the first `sizes` positions.

    A span has at most the fraction `share` of these positions. The computation needs no device synchronisation.
    """
    uniform = torch.rand(2, len(sizes), count, device=sizes.device)
    most = (sizes * share).clamp_max(width).unsqueeze(1)
    wide = (uniform[0] * (most + 1)).floor().minimum(most.floor())
    first = (uniform[1] * (sizes.unsqueeze(1) - wide + 1)).floor()
    places = torch.arange(total, device=sizes.device)
    inside = (places >= first.unsqueeze(-1)) & (places < (first + wide).unsqueeze(-1))
    return inside.any(1)
