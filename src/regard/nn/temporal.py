"""Temporal attention: one weight for each frame of a sequence."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.attended import Attended
from regard.core.attention import AnyScore
from regard.core.requests import Received, Request, Top, full
from regard.core.scores import float_tensor
from regard.nn.alignment_steps import clean_memory
from regard.nn.argument_checks import check_sizes
from regard.nn.attention import Attention

_FULL = full()


class TemporalAttention(nn.Module):
    """Σ_t α_t x_t with α = softmax_t score(q, x_t): one weight for each frame (Yao et al. 2015).

    Frames are vectors (b, t, d), or maps (b, t, d, height, width), which are scored by their mean over positions. The
    query is a learned parameter, or given as `query`. `score` and `hidden_size` are as for `Attention`.

    >>> layer = TemporalAttention(6, score="cosine")
    >>> out = layer(torch.randn(2, 5, 6, 4, 3), weights=full())
    >>> out.output.shape, out.weights.shape
    (torch.Size([2, 6, 4, 3]), torch.Size([2, 5]))
    """

    def __init__(self, size: int, *, score: str | AnyScore = "additive", hidden_size: int | None = None) -> None:
        super().__init__()
        check_sizes(size=size, hidden_size=hidden_size)
        self.size = size
        self.attention = Attention(size, size, score=score, hidden_size=hidden_size)
        self.query = nn.Parameter(torch.randn(size))

    def forward(
        self,
        frames: Float[Tensor, "b t d *space"],
        query: Float[Tensor, "b d"] | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        weights: Request | None = None,
    ) -> Attended:
        """Return the weighted sum of the real frames, (b, d) or (b, d, height, width); zeros where there are none.

        `weights=full()` gives (b, t); there is one query, so no request has an axis for it.
        """
        float_tensor(frames, "frames")
        if query is not None:
            float_tensor(query, "query")
        if frames.ndim not in (3, 5) or frames.shape[2] != self.size:
            raise ValueError(
                f"frames must be (b, t, {self.size}) or (b, t, {self.size}, height, width), got {tuple(frames.shape)}"
            )
        if query is not None and query.shape != (frames.shape[0], self.size):
            raise ValueError(f"query must be {(frames.shape[0], self.size)}, got {tuple(query.shape)}")
        flat = clean_memory(frames.flatten(2), math.prod(frames.shape[2:]), mask)
        described = flat.unflatten(2, (self.size, -1)).mean(-1) if frames.ndim == 5 else flat
        asks = self.query.expand(frames.shape[0], -1) if query is None else query
        projected = self.attention.project(described, mask=mask)
        attended, _ = self.attention.attend(asks.unsqueeze(1), projected, weights=_FULL)
        assert isinstance(attended.weights, Tensor)
        requested = None if weights is None else _of_one(weights, attended.weights)
        if frames.ndim == 3:
            return Attended(attended.output.squeeze(1), requested)
        output = (attended.weights.to(flat.dtype) @ flat).squeeze(1)
        return Attended(output.unflatten(1, frames.shape[2:]), requested)


def _of_one(request: Request, weights: Float[Tensor, "b 1 t"]) -> Tensor | Top:
    """Return the requested weights of the single query, without the axis of queries."""
    request.check(1)
    requested = request.of(weights)
    if isinstance(requested, Top):
        return Top(requested.values.squeeze(1), requested.indices.squeeze(1))
    return requested if isinstance(request, Received) else requested.squeeze(1)
