"""An encoder of speech: a pyramid of recurrent layers, each of which halves the length of the recording."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core import sharding
from regard.models.memory import Memory


class SpeechEncoder(nn.Module):
    """A pyramid of bidirectional LSTMs, the listener of Listen, Attend and Spell (Chan et al. 2016, section 3.1).

    h⁰_t = BLSTM(x_t), followed by `layers` layers h^l_t = BLSTM([h^{l−1}_{2t}; h^{l−1}_{2t+1}]). Frames (b, t,
    features) are encoded as a memory (b, ⌈t / 2^layers⌉, 2 · size). An odd last step is joined with zeros. Padding
    changes no result: the memory of a recording does not depend on the rest of the batch, and padded positions are
    zeros. The summary is the last state of the top layer in both directions. With `stack`, that many neighbouring
    frames are joined before the first layer, which makes every layer faster: with stack=2, a step of the memory
    represents 2 · 2^layers frames.

    >>> encoder = SpeechEncoder(5, 4, layers=2)
    >>> memory = encoder(torch.randn(2, 11, 5), torch.tensor([11, 6]))
    >>> memory.values.shape, memory.mask.sum(1)
    (torch.Size([2, 3, 8]), tensor([3, 2]))
    """

    def __init__(
        self, features: int, size: int = 256, *, layers: int = 3, stack: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if layers < 0:
            raise ValueError(f"layers must be at least 0, got {layers}")
        if stack < 1:
            raise ValueError(f"stack must be at least 1, got {stack}")
        features *= stack
        self.base = BothWays(nn.LSTM(features, size, batch_first=True), nn.LSTM(features, size, batch_first=True))
        self.pyramid = nn.ModuleList(
            BothWays(nn.LSTM(4 * size, size, batch_first=True), nn.LSTM(4 * size, size, batch_first=True))
            for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.size = size
        self.memory_size = 2 * size
        self.stack = stack
        self.reduction = stack * 2**layers  # number of audio frames that one position of the memory represents

    def forward(self, frames: Float[Tensor, "b t f"], lengths: Int[Tensor, "b"] | None = None) -> Memory:
        """Return the memory (states) of recordings; `lengths` are their numbers of frames (None: no padding)."""
        sharding.refuse("a pyramidal encoder")
        if lengths is not None:
            _check(frames, lengths)
            lengths = lengths.to(frames.device)
            if self.stack > 1:  # padding is set to zero, because the last frame may be joined with padding
                frames = torch.where(_real(frames.shape[1], lengths).unsqueeze(-1), frames, 0)
                lengths = (lengths + self.stack - 1) // self.stack
        frames = _joined(frames, self.stack)
        steps = frames.shape[1]
        mask = None
        if lengths is not None:
            mask = _real(steps, lengths)
        states = self.base(frames, mask)
        for layer in self.pyramid:
            states = _joined(states, 2)
            steps = states.shape[1]
            if lengths is not None:
                lengths = (lengths + 1) // 2
                mask = _real(steps, lengths)
            states = layer(self.dropout(states), mask)
        last = states[:, -1] if lengths is None else _at(states, (lengths - 1).clamp(0, steps - 1))
        first = states[:, 0]
        return Memory(states, states, mask, torch.cat([last[:, : self.size], first[:, self.size :]], -1))


class BothWays(nn.Module):
    """A bidirectional recurrent network for sequences with a mask: states are [→h_t; ←h_t], and 0 at masked steps.

    Masked steps are skipped wherever they are in the sequence. Unlike a packed sequence, this needs no copy of the
    lengths to the CPU.

    >>> both = BothWays(nn.GRU(3, 2, batch_first=True), nn.GRU(3, 2, batch_first=True))
    >>> both(torch.randn(1, 4, 3), torch.tensor([[True, False, True, False]]))[0, 1]
    tensor([0., 0., 0., 0.], grad_fn=<SelectBackward0>)
    """

    def __init__(self, forwards: nn.GRU | nn.LSTM, backwards: nn.GRU | nn.LSTM) -> None:
        super().__init__()
        self.forwards, self.backwards = forwards, backwards

    def forward(self, x: Float[Tensor, "b t i"], mask: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, "b t two_d"]:
        if mask is None:
            return torch.cat([self.forwards(x)[0], self.backwards(x.flip(1))[0].flip(1)], -1)
        x = torch.where(mask.unsqueeze(-1), x, 0)
        # Steps are sorted so that unmasked steps come first, in order for the forward network and in reverse order for
        # the backward network. In both orders, masked steps are last.
        order = (~mask).byte().sort(stable=True, dim=1).indices
        steps = torch.arange(x.shape[1], device=x.device)
        count = mask.sum(1, keepdim=True)
        turned = order.gather(1, torch.where(steps < count, count - 1 - steps, steps))
        there = _gathered(self.forwards(_gathered(x, order))[0], order.argsort(1))
        back = _gathered(self.backwards(_gathered(x, turned))[0], turned.argsort(1))
        return torch.where(mask.unsqueeze(-1), torch.cat([there, back], -1), 0)


def _joined(x: Tensor, count: int) -> Tensor:
    """Return x (b, t, d) with every `count` neighbouring steps concatenated: (b, ⌈t / count⌉, count · d).

    If t is not a multiple of `count`, the last concatenated group of steps is padded with zeros.
    """
    if count == 1:
        return x
    return F.pad(x, (0, 0, 0, -x.shape[1] % count)).unflatten(1, (-1, count)).flatten(2)


def _gathered(x: Tensor, order: Tensor) -> Tensor:
    """Return x (b, t, d) with the steps of each row in the order of the indices `order` (b, t)."""
    return x.gather(1, order.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Return from x (b, t, d) the step `index` (b,) of each sequence, (b, d)."""
    return _gathered(x, index.unsqueeze(-1)).squeeze(1)


def _real(steps: int, lengths: Tensor) -> Tensor:
    return torch.arange(steps, device=lengths.device) < lengths.unsqueeze(-1)


def _check(frames: Tensor, lengths: Tensor) -> None:
    if lengths.shape != frames.shape[:1]:
        raise ValueError(
            f"lengths must have one number for each of the {len(frames)} recordings, got shape {tuple(lengths.shape)}"
        )
    # Lengths on a GPU are not checked, because a check would wait for the device.
    if lengths.device.type == "cpu" and lengths.numel():
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > frames.shape[1]:
            raise ValueError(f"lengths must be between 0 and {frames.shape[1]}, got {low} to {high}")
