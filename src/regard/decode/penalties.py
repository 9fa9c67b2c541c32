"""Length penalties: divisors of the log-probability, so that short hypotheses are not favoured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# Any function from lengths to positive divisors; a length includes the stop token.
LengthPenalty = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Gnmt:
    """((5 + n) / 6)^alpha, of Wu et al. 2016, section 7: alpha 0 is no penalty, 0.6 to 1 is usual.

    >>> Gnmt(alpha=1.0)(torch.tensor([1.0, 7.0]))
    tensor([1., 2.])
    """

    alpha: float = 0.6

    def __call__(self, length: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return ((5.0 + length) / 6.0) ** self.alpha


@dataclass(frozen=True)
class Average:
    """n^power: with power 1 it is the mean log-probability of the tokens.

    >>> Average()(torch.tensor([1.0, 7.0]))
    tensor([1., 7.])
    """

    power: float = 1.0

    def __call__(self, length: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return length**self.power


GNMT = Gnmt()


def divisors(penalty: LengthPenalty | None, longest: int, device: torch.device) -> Float[Tensor, "n"]:
    """Return the divisor of every length from 0 (never used) to `longest`, in float64."""
    lengths = torch.arange(longest + 1, dtype=torch.float64, device=device)
    if penalty is None:
        return torch.ones_like(lengths)
    table = penalty(lengths.clamp(min=1.0)).to(torch.float64)
    if table.shape != lengths.shape or not bool((table > 0).all()):
        raise ValueError(f"length_penalty must give a positive number for every length; got {table.tolist()[:5]} …")
    return table


def best_divisors(table: Float[Tensor, "n"], limit: Tensor) -> Float[Tensor, "b n"]:
    """Return the largest divisor that a row may still get, once a hypothesis is longer than n tokens.

    Log-probabilities only decrease, so sum / divisor bounds the score of any continuation: the largest divisor among
    the lengths n+2 (one more token, and stop) to limit+1.
    """
    lengths = torch.arange(table.shape[0], device=table.device)
    reachable = torch.where(lengths <= limit[:, None] + 1, table, 0.0)
    ahead = reachable.flip(1).cummax(1).values.flip(1)  # the largest divisor of any length from n on
    ahead = torch.nn.functional.pad(ahead, (0, 2))[:, 2:]
    return ahead.clamp(min=torch.finfo(table.dtype).tiny)  # if no length is reachable, the bound is far below 0
