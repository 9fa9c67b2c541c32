"""A decoder that drives: the ego vehicle attends to the objects of the scene and chooses an action."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.attention import AnyScore
from regard.core.normalizers import Normalizer, Softmax
from regard.core.requests import Request, Top
from regard.models.memory import Memory
from regard.nn.multihead import MultiHeadAttention


@dataclass(frozen=True, eq=False)
class Controlled:
    """The output of a `Controller`: scores of actions, continuous controls, or both, and the attention weights.

    `logits` are the scores of discrete actions, and `controls` are continuous values in [−1, 1], such as steering; each
    is None if the controller was built without it. `weights` are the requested attention weights of the ego vehicle,
    averaged over heads; in full they are (b, 1, k). A `Top` of n keys is not averaged: it has all heads, (b, h, 1, n).
    `log_prob` is the log-probability of the keys that hard attention sampled, summed over heads.
    """

    logits: Float[Tensor, "b actions"] | None
    controls: Float[Tensor, "b controls"] | None
    weights: Tensor | Top | None = None
    log_prob: Float[Tensor, " b"] | None = None


class Controller(nn.Module):
    """Drives by social attention: the ego vehicle attends to all objects of the scene (Leurent & Mercat 2019).

    The memory's summary s is the ego vehicle: q = relu(W s), r = norm(q + MultiHead(q, keys, values)) and h =
    relu(W₁ r). The logits of `actions` are W_a h, which may also be used as action values of reinforcement learning;
    `controls` such as steering and throttle are tanh(W_c h). The memory may hold image cells instead of objects.

    `attention` is the name of a score, a score record or function, or None. With None, the two-layer network W''
    relu(W' m) of the mean m of the memory replaces attention; its hidden size is chosen so that it has about as many
    parameters as the attention.

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
        attention: str | AnyScore | None = "scaled_dot",
        normalize: Normalizer = Softmax(),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if actions is None and controls is None:
            raise ValueError("give actions, controls or both: there is nothing to decide")
        self.ego = nn.Linear(memory_size if summary_size is None else summary_size, size)
        self.attention = self.mean = None
        if attention is None:
            self.mean = _mean_reader(memory_size, size, heads)
        else:
            self.attention = MultiHeadAttention(
                size, heads, key_size=memory_size, score=attention, normalize=normalize, dropout=dropout
            )
        self.norm = nn.LayerNorm(size)
        self.hidden = nn.Linear(size, size)
        self.actions = None if actions is None else nn.Linear(size, actions)
        self.controls = None if controls is None else nn.Linear(size, controls)

    def forward(
        self, memory: Memory, *, weights: Request | None = None, generator: torch.Generator | None = None
    ) -> Controlled:
        """Return the actions or controls of each scene, and the requested attention weights of its objects."""
        query = F.relu(self.ego(memory.summary)).unsqueeze(1)
        if self.attention is None:
            assert self.mean is not None
            return self._decided(query.squeeze(1) + self.mean(_mean(memory)))
        mask = None if memory.mask is None else memory.mask[:, None, None]
        read = self.attention(query, memory.keys, memory.values, mask=mask, weights=weights, generator=generator)
        return self._decided(
            (query + read.output).squeeze(1),
            read.weights.mean(1) if isinstance(read.weights, Tensor) else read.weights,
            None if read.log_prob is None else read.log_prob.flatten(1).sum(1),
        )

    def _decided(self, read: Tensor, weights: Tensor | Top | None = None, log_prob: Tensor | None = None) -> Controlled:
        hidden = F.relu(self.hidden(self.norm(read)))
        return Controlled(
            None if self.actions is None else self.actions(hidden),
            None if self.controls is None else torch.tanh(self.controls(hidden)),
            weights,
            log_prob,
        )


def _mean(memory: Memory) -> Tensor:
    """Return the mean over the memory's positions of the values that are not masked; zeros if all are masked."""
    if memory.mask is None:
        return memory.values.mean(1)
    real = memory.mask.unsqueeze(-1)
    return torch.where(real, memory.values, 0).sum(1) / real.sum(1).clamp_min(1)


def _mean_reader(memory_size: int, size: int, heads: int) -> nn.Sequential:
    """Return a two-layer network that is applied to the mean of a memory's values, in place of attention.

    The network has about as many parameters as multi-head attention of the given size.
    """
    with torch.device("meta"):
        twin = MultiHeadAttention(size, heads, key_size=memory_size)
    wanted = sum(parameter.numel() for parameter in twin.parameters())
    hidden = max(1, round((wanted - size) / (memory_size + 1 + size)))
    return nn.Sequential(nn.Linear(memory_size, hidden), nn.ReLU(), nn.Linear(hidden, size))
