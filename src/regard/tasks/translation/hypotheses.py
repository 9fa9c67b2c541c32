"""The answer of an interactive translator: hypotheses with the alternatives at each position. It imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the studio starts without torch
    from torch import Tensor


@dataclass(frozen=True)
class Alternative:
    """An alternative token at a position, and its probability."""

    token: str
    probability: float


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """Tokens, their log-probability, attention weights (t, k), and alternatives."""

    tokens: tuple[str, ...]
    log_prob: float
    weights: "Tensor"
    alternatives: tuple[tuple[Alternative, ...], ...]


@dataclass(frozen=True, eq=False)
class Answer:
    """The tokens of the source, and hypotheses, best first."""

    source: tuple[str, ...]
    beams: tuple[Hypothesis, ...]
