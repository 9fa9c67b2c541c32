"""Output layer and cross-entropy as one operation, so that the logits of a whole batch are never in memory at once."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.kernels.cross_entropy import summed


class Summed(NamedTuple):
    """A loss summed over tokens, and the number of tokens: `loss / count` is the mean."""

    loss: Float[Tensor, ""]
    count: Int[Tensor, ""]


def linear_cross_entropy(
    states: Float[Tensor, "... d"],
    weight: Float[Tensor, "v d"],
    target: Int[Tensor, "..."],
    *,
    bias: Float[Tensor, " v"] | None = None,
    smoothing: float = 0.0,
    ignore: int = -100,
    rows: int | None = None,
) -> Summed:
    """Return the summed cross-entropy of `states @ weight.T + bias` with the target, without all logits in memory.

    loss = Σ_i [ lse(z_i) − (1 − ε) z_i[target_i] − ε/v Σ_j z_ij ],  z_i = W s_i + b, ε = smoothing (Szegedy et al.
    2016, section 7). Targets equal to `ignore` are excluded. Under autocast the products are in its dtype; the loss is
    at least float32. `rows` is the number of rows of logits in memory at a time. Gradients are computed in the forward
    pass; there is no second derivative.

    >>> states, weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.eye(2)
    >>> linear_cross_entropy(states, weight, torch.tensor([0, -100]))
    Summed(loss=tensor(0.3133), count=tensor(1))
    """
    _check(states, weight, target, bias, smoothing, rows)
    flat, labels = states.reshape(-1, states.shape[-1]), target.reshape(-1)
    device = states.device.type
    if torch.is_autocast_enabled(device) and states.dtype != torch.float64:
        flat = flat.to(torch.get_autocast_dtype(device))
    real = labels != ignore
    flat = torch.where(real.unsqueeze(-1), flat, 0)  # values of ignored rows, even NaN, must not reach any gradient
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (flat, weight, bias)]
    loss, *_ = summed(flat, weight, bias, labels, smoothing, ignore, rows, wanted)
    return Summed(loss, real.sum())


def _check(
    states: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, smoothing: float, rows: int | None
) -> None:
    if states.shape[-1] != weight.shape[-1]:
        raise ValueError(f"states have size {states.shape[-1]}, weight has {weight.shape[-1]}: they must be equal")
    if states.shape[:-1] != target.shape:
        raise ValueError(f"target must have shape {tuple(states.shape[:-1])} as the states, got {tuple(target.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"smoothing must be between 0 and 1, got {smoothing}")
    if rows is not None and rows < 1:
        raise ValueError(f"rows must be 1 or more, got {rows}")
