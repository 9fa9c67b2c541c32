"""Length penalties, which divide the log-probability of a hypothesis, so that short hypotheses are not favoured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# A length penalty is any function from lengths (n,) to positive divisors (n,); a length includes the stop token.
LengthPenalty = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Gnmt:
    """The length penalty ((5 + n) / 6)^alpha of Wu et al. 2016, section 7.

    With alpha = 0 there is no penalty; values from 0.6 to 1 are usual.

    >>> Gnmt(alpha=1.0)(torch.tensor([1.0, 7.0]))
    tensor([1., 2.])
    """

    alpha: float = 0.6

    def __call__(self, length: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return ((5.0 + length) / 6.0) ** self.alpha


@dataclass(frozen=True)
class Average:
    """The length penalty n^power; with power 1 the score is the mean log-probability of the tokens.

    >>> Average()(torch.tensor([1.0, 7.0]))
    tensor([1., 7.])
    """

    power: float = 1.0

    def __call__(self, length: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return length**self.power


GNMT = Gnmt()


def divisors(penalty: LengthPenalty | None, longest: int, device: torch.device) -> Float[Tensor, "n"]:
    """Return the divisors of the lengths 0 to `longest`, in float64; the entry of length 0 is never used."""
    lengths = torch.arange(longest + 1, dtype=torch.float64, device=device)
    if penalty is None:
        return torch.ones_like(lengths)
    table = penalty(lengths.clamp(min=1.0)).to(torch.float64)
    if table.shape != lengths.shape or not bool((table > 0).all()):
        raise ValueError(f"length_penalty must give a positive number for every length; got {table.tolist()[:5]} …")
    return table


def best_divisors(table: Float[Tensor, "n"], limit: Tensor) -> Float[Tensor, "b n"]:
    """Return the largest divisor that a running hypothesis can still get after step n, counted from 0.

    After step n a running hypothesis has n + 1 tokens, so it stops with a length from n + 2 to limit + 1, including the
    stop token. Its log-probability only decreases, so the log-probability so far, divided by the largest divisor of
    these lengths, is an upper bound of its final score.
    """
    lengths = torch.arange(table.shape[0], device=table.device)
    reachable = torch.where(lengths <= limit[:, None] + 1, table, 0.0)
    # column n holds the largest divisor of all lengths of at least n
    ahead = reachable.flip(1).cummax(1).values.flip(1)
    ahead = torch.nn.functional.pad(ahead, (0, 2))[:, 2:]
    # If no length is reachable, the divisor is tiny, so that the bound is far below any score.
    return ahead.clamp(min=torch.finfo(table.dtype).tiny)
