"""The answer of the interactive translator: hypotheses with the alternatives at each position.

This module does not import torch, so that the studio (`regard studio`) starts fast.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported only for type checking, because the studio imports this module without importing torch
    from torch import Tensor


@dataclass(frozen=True)
class Alternative:
    """One of the most likely tokens at one position of a translation, and its probability."""

    token: str
    probability: float


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A translation: its tokens, their total log-probability, attention weights (target tokens, source tokens).

    `alternatives` holds the most likely tokens at each position.
    """

    tokens: tuple[str, ...]
    log_prob: float
    weights: "Tensor"
    alternatives: tuple[tuple[Alternative, ...], ...]


@dataclass(frozen=True, eq=False)
class Answer:
    """The tokens of the source sentence, and the hypotheses of its translation, best first."""

    source: tuple[str, ...]
    beams: tuple[Hypothesis, ...]
