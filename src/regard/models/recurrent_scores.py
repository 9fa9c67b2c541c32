"""Additive scores of one query for each row of a batch, and their gradients, without keeping the hidden layer.

e_j = v · tanh(q + k_j). A loop over steps asks `scores`, the loop back asks `slope`, and what the keys and v get from
all steps together is asked once, after it: `sums`.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.backends.additive.exponential import compiler

_log = logging.getLogger("regard")

_WORTH = 2**24  # pair-features of all steps from which a compiled loop earns its compilation
_REACH = 43.0  # e^{2x} and its inverse are normal float32 numbers up to here
_SMALL = 0.05  # below, 1 − 2 / (1 + e^{2x}) has fewer right digits than tanh x ≈ x


class Keys(NamedTuple):
    """Keys (b, k, f), the score's weight (f,), and e^{2 keys} where the exponential form serves."""

    keys: Tensor
    weight: Tensor
    powers: Tensor | None


def prepare(keys: Tensor, weight: Tensor, steps: int) -> Keys:
    """Choose the form for as many steps: tanh, or on the CPU tanh(q + k) = 1 − 2 / (1 + e^{2q} e^{2k}), compiled."""
    plain = keys.device.type != "cpu" or keys.dtype != torch.float32 or keys.numel() * steps < _WORTH
    if plain or min(keys.shape) < 2 or not compiler():
        return Keys(keys, weight, None)
    low, high = (float(bound) for bound in torch.aminmax(keys))
    return Keys(keys, weight, torch.exp(2 * keys) if _SMALL < max(-low, high) <= _REACH else None)


def _within(query: Tensor) -> bool:
    low, high = (float(bound) for bound in torch.aminmax(query))
    return max(-low, high) <= _REACH


def scores(query: Tensor, keys: Keys) -> Tensor:
    """e (b, k) of the queries (b, f)."""
    if keys.powers is not None and _within(query):
        return _forms().scores(torch.exp(2 * query), keys.powers, keys.weight)
    return torch.tanh(query.unsqueeze(1) + keys.keys) @ keys.weight


def slope(query: Tensor, keys: Keys, dscores: Tensor) -> Tensor:
    """de/dq (b, f) for the gradient (b, k) of the scores: v Σ_j de_j (1 − tanh²)."""
    if keys.powers is not None and _within(query):
        return _forms().slope(torch.exp(2 * query), keys.powers, dscores) * (4 * keys.weight)
    hidden = torch.tanh(query.unsqueeze(1) + keys.keys)
    return torch.bmm(dscores.unsqueeze(1), 1 - hidden * hidden).squeeze(1) * keys.weight


def sums(queries: Tensor, keys: Keys, dscores: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the keys (b, k, f) and of the weight (f,), from all queries (t, b, f) and dscores (t, b, k)."""
    if keys.powers is not None and _within(queries):
        slopes, inverses = _forms().sums(torch.exp(2 * queries), keys.powers, dscores)
        # tanh = 1 − 2 r, and the ones add up to the sum of all dscores.
        return slopes * (4 * keys.weight), dscores.sum() - 2 * inverses.sum((0, 1))
    slopes = torch.zeros_like(keys.keys)
    along = torch.zeros_like(keys.keys[:, 0])
    for query, dscore in zip(queries, dscores, strict=True):
        hidden = torch.tanh(query.unsqueeze(1) + keys.keys)
        along += torch.bmm(dscore.unsqueeze(1), hidden).squeeze(1)
        slopes += torch.addcmul(dscore.unsqueeze(-1), dscore.unsqueeze(-1) * hidden, hidden, value=-1)
    return slopes * keys.weight, along.sum(0)


class _Forms(NamedTuple):
    scores: Callable[[Tensor, Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _scores(query: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    return weight.sum() - 2 * (weight / (1 + query.unsqueeze(1) * keys)).sum(-1)


def _slope(query: Tensor, keys: Tensor, dscores: Tensor) -> Tensor:
    inverse = 1 / (1 + query.unsqueeze(1) * keys)
    return (dscores.unsqueeze(-1) * inverse * (1 - inverse)).sum(1)


def _sums(query: Tensor, keys: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor]:
    inverse = 1 / (1 + query.unsqueeze(2) * keys)
    weighted = dscores.unsqueeze(-1) * inverse
    return (weighted * (1 - inverse)).sum(0), weighted.sum(0)


@functools.cache
def _forms() -> _Forms:
    """The loops as C++, built when first used and kept by torch on disk."""
    return _Forms(*(_told(torch.compile(form, dynamic=True)) for form in (_scores, _slope, _sums)))


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a word about the wait when it is first called."""
    first = True

    def call(*arguments: Tensor) -> Any:
        nonlocal first
        if not first:
            return function(*arguments)
        first = False
        start = time.perf_counter()
        found = function(*arguments)
        _log.warning("compiled a loop of additive attention for this CPU in %.1f s", time.perf_counter() - start)
        return found

    return call
