"""The gates of a GRU for the loops on the CPU, forward and backward, each as one pass over the numbers where compiled.

States and gradients go in the dtype of the state; matrix products come, and gradients for them leave, in theirs, which
under autocast is narrower.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core.backends.additive.exponential import compiler
from regard.models.recurrent_scores import built

_WORTH = 2**22  # gates of all steps from which compiled forms earn their compilation


class Forms(NamedTuple):
    """`forth` and `back`, as they are or compiled."""

    forth: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], Tensor]
    back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def forms(inputs: Tensor) -> Forms:
    """The forms for input gates (t, b, 3d) of all steps."""
    if inputs.numel() < _WORTH or inputs.dtype == torch.float64 or min(inputs.shape) < 2 or not compiler():
        return Forms(forth, back)
    return Forms(built(forth), built(back))


def forth(
    inputs: Tensor, read: Tensor | None, product: Tensor, before: Tensor, gates: Tensor, hidden: Tensor
) -> Tensor:
    """The next state from the input's gates (b, 3d), what adds to them, W_hh s + b and the state before, (b, d).

    The product (b, 3d + …) may be wider: the rest is left alone. For the way back r, z, n are written side by side to
    `gates` (b, 3d), and the product's last part, which r gates, to `hidden` (b, d).
    """
    size = before.shape[-1]
    inputs = inputs.to(before.dtype)
    if read is not None:
        inputs = inputs + read
    both = torch.sigmoid(inputs[:, : 2 * size] + product[:, : 2 * size])
    last = product[:, 2 * size : 3 * size].to(before.dtype)
    new = torch.tanh(inputs[:, 2 * size :] + both[:, :size] * last)
    gates.copy_(torch.cat((both, new), -1))
    hidden.copy_(last)
    return new + both[:, size:] * (before - new)


def back(
    gates: Tensor, hidden: Tensor, before: Tensor, dstate: Tensor, upstream: Tensor, dgates: Tensor, dproduct: Tensor
) -> Tensor:
    """Write the gradients of input gates and product, both (b, 3d); return that of the state before, the direct way."""
    size = before.shape[-1]
    reset, update, new = gates.split(size, -1)
    dstate = dstate + upstream
    share = dstate * update
    dnew = (dstate - share) * (1 - new * new)
    dreset = dnew * hidden * (reset * (1 - reset))
    dupdate = dstate * (before - new) * (update * (1 - update))
    dgates.copy_(torch.cat((dreset, dupdate, dnew), -1))
    dproduct.copy_(torch.cat((dreset, dupdate, dnew * reset), -1))
    return share
