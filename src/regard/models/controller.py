"""A driver as a decoder: it asks the scene what matters now, and acts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.requests import Request, Top
from regard.models.memory import Memory
from regard.nn.multihead import MultiHeadAttention


@dataclass(frozen=True, eq=False)
class Controlled:
    """What to do, and what it was decided by.

    `logits` are scores of the discrete actions, `controls` continuous ones in [−1, 1]; what was not built is None.
    `weights` are those asked for, of one query and averaged over heads: all of them are (b, 1, k). A `Top` cannot be
    averaged and stays (b, h, 1, n).
    """

    logits: Float[Tensor, "b actions"] | None
    controls: Float[Tensor, "b controls"] | None
    weights: Tensor | Top | None = None


class Controller(nn.Module):
    """Social attention: the ego vehicle asks all objects at once, and acts on what it reads (Leurent & Mercat 2019).

    With the summary s of the memory as the ego: q = relu(W s), r = norm(q + MultiHead(q, keys, values)), then
    h = relu(W₁ r) and logits = W_a h for `actions` (which may also serve as values of actions), controls =
    tanh(W_c h) for `controls` such as steering and throttle. A memory of image cells serves as well as one of objects.

    >>> controller = Controller(16, actions=5, controls=1)
    >>> memory = Memory(torch.randn(2, 3, 16), torch.randn(2, 3, 16), None, torch.randn(2, 16))
    >>> done = controller(memory)
    >>> done.logits.shape, done.controls.shape
    (torch.Size([2, 5]), torch.Size([2, 1]))
    """

    def __init__(
        self,
        memory_size: int,
        *,
        actions: int | None = None,
        controls: int | None = None,
        summary_size: int | None = None,
        size: int = 64,
        heads: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if actions is None and controls is None:
            raise ValueError("give actions, controls or both: there is nothing to decide")
        self.ego = nn.Linear(memory_size if summary_size is None else summary_size, size)
        self.attention = MultiHeadAttention(size, heads, key_size=memory_size, dropout=dropout)
        self.norm = nn.LayerNorm(size)
        self.hidden = nn.Linear(size, size)
        self.actions = None if actions is None else nn.Linear(size, actions)
        self.controls = None if controls is None else nn.Linear(size, controls)

    def forward(
        self, memory: Memory, *, weights: Request | None = None, generator: torch.Generator | None = None
    ) -> Controlled:
        """The action for each scene, and the weights of objects if asked."""
        query = F.relu(self.ego(memory.summary)).unsqueeze(1)
        mask = None if memory.mask is None else memory.mask[:, None, None]
        read = self.attention(query, memory.keys, memory.values, mask=mask, weights=weights, generator=generator)
        hidden = F.relu(self.hidden(self.norm(query + read.output).squeeze(1)))
        return Controlled(
            None if self.actions is None else self.actions(hidden),
            None if self.controls is None else torch.tanh(self.controls(hidden)),
            read.weights.mean(1) if isinstance(read.weights, Tensor) else read.weights,
        )
