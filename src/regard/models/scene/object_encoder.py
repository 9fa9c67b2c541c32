"""An encoder of traffic scenes; a scene is an unordered set of objects, of which some may be absent."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.models.memory import Memory
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHeadAttention
from regard.nn.transformer import TransformerEncoderLayer


class SceneEncoder(nn.Module):
    """Encodes the objects of a scene as keys and values, all by the same network (Leurent & Mercat 2019, section 3).

    h_j = W₂ relu(W₁ x_j + b₁) + b₂, followed by `layers` of self-attention among the objects. There are no positional
    encodings, so a permutation of the objects permutes the memory. Absent objects (`present` False) do not affect the
    other objects and are zeros in the memory. The summary is the state of the first object, the ego vehicle
    (summary="ego"), or the mean of the objects that are present (summary="mean").

    >>> encoder = SceneEncoder(7, 16)
    >>> memory = encoder(torch.randn(2, 5, 7), torch.tensor([[True] * 5, [True, True, False, False, False]]))
    >>> memory.values.shape, torch.equal(memory.summary, memory.values[:, 0])
    (torch.Size([2, 5, 16]), True)
    """

    def __init__(
        self,
        features: int,
        size: int = 64,
        *,
        hidden_size: int | None = None,
        layers: int = 0,
        heads: int = 2,
        summary: str = "ego",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if summary not in ("ego", "mean"):
            raise ValueError(f"summary must be 'ego' or 'mean', got {summary!r}")
        hidden_size = size if hidden_size is None else hidden_size
        self.inner, self.outer = nn.Linear(features, hidden_size), nn.Linear(hidden_size, size)
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                MultiHeadAttention(size, heads, dropout=dropout),
                FeedForward(size, 2 * size, dropout=dropout),
                dropout=dropout,
            )
            for _ in range(layers)
        )
        self.size = self.memory_size = size
        self.summary = summary

    def forward(self, objects: Float[Tensor, "b n f"], present: Bool[Tensor, "b n"] | None = None) -> Memory:
        """Return the memory (object states) of scenes; `present` is False for absent objects (None: no absent ones)."""
        pairs = None
        if present is not None:
            objects = torch.where(present.unsqueeze(-1), objects, 0)
            pairs = present[:, None, None]
        states = self.outer(F.relu(self.inner(objects)))
        for layer in self.layers:
            states = layer(states, mask=pairs).output
        if present is not None:
            states = torch.where(present.unsqueeze(-1), states, 0)
        return Memory(states, states, present, self._summary(states, present))

    def _summary(self, states: Tensor, present: Tensor | None) -> Tensor:
        if self.summary == "ego":
            return states[:, 0]
        if present is None:
            return states.mean(1)
        return states.sum(1) / present.sum(1, keepdim=True).clamp(min=1)
