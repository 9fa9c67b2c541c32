"""Additive scores of one query for each row of a batch, and their gradients, without keeping the hidden layer.

e_j = v · tanh(q + k_j). A loop over steps asks `scores`, the loop back asks `slope`, and what the keys and v get from
all steps together is asked once, after it: `sums`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels import compilation
from regard.kernels.compilation import compiled

_WORTH = 2**24  # pair-features of all steps from which a compiled loop earns its compilation
_REACH = 43.0  # e^{2x} and its inverse are normal float32 numbers up to here
_LANES = 16  # float32 numbers in the widest register
_SMALL = 0.05  # below, 1 − 2 / (1 + e^{2x}) has fewer right digits than tanh x ≈ x


class Keys(NamedTuple):
    """Keys (b, k, f), the score's weight (f,), and e^{2 keys} where the exponential form serves.

    `blocks` (b, f / 16, k, 16) are the same powers for the loop back, which adds over keys: as they lie one after the
    other, a sum of 16 features at a time reads memory in its order, three times faster.
    """

    keys: Tensor
    weight: Tensor
    powers: Tensor | None
    blocks: Tensor | None


def prepare(keys: Tensor, weight: Tensor, steps: int, *, back: bool = False) -> Keys:
    """Choose the form for as many steps: tanh, or on the CPU tanh(q + k) = 1 − 2 / (1 + e^{2q} e^{2k}), compiled."""
    plain = keys.device.type != "cpu" or keys.dtype != torch.float32 or keys.numel() * steps < _WORTH
    if plain or min(keys.shape) < 2 or not compilation.compiler():
        return Keys(keys, weight, None, None)
    low, high = (float(bound) for bound in torch.aminmax(keys))
    powers = torch.exp(2 * keys) if _SMALL < max(-low, high) <= _REACH else None
    return Keys(keys, weight, powers, blocked(powers) if back and powers is not None else None)


def blocked(rows: Tensor) -> Tensor | None:
    """(b, k, f) as (b, f / 16, k, 16), where 16 divides f."""
    if rows.shape[-1] % _LANES:
        return None
    return rows.unflatten(-1, (-1, _LANES)).transpose(1, 2).contiguous()


def _within(query: Tensor) -> bool:
    low, high = (float(bound) for bound in torch.aminmax(query))
    return max(-low, high) <= _REACH


def scores(query: Tensor, keys: Keys) -> Tensor:
    """e (b, k) of the queries (b, f): `torch.tanh(query[:, None] + keys) @ weight`."""
    if keys.powers is not None and _within(query):
        return compiled(_scores)(torch.exp(2 * query), keys.powers, keys.weight)
    return torch.tanh(query.unsqueeze(1) + keys.keys) @ keys.weight


def slope(query: Tensor, keys: Keys, dscores: Tensor) -> Tensor:
    """de/dq (b, f) for the gradient (b, k) of the scores: v Σ_j de_j (1 − tanh²)."""
    if keys.powers is not None and _within(query):
        power = torch.exp(2 * query)
        if keys.blocks is not None:
            return compiled(_slope_in_blocks)(power, keys.blocks, dscores) * (4 * keys.weight)
        return compiled(_slope)(power, keys.powers, dscores) * (4 * keys.weight)
    hidden = torch.tanh(query.unsqueeze(1) + keys.keys)
    return torch.bmm(dscores.unsqueeze(1), 1 - hidden * hidden).squeeze(1) * keys.weight


def sums(queries: Tensor, keys: Keys, dscores: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the keys (b, k, f) and of the weight (f,), from all queries (t, b, f) and dscores (t, b, k)."""
    if keys.powers is not None and _within(queries):
        slopes, inverses = compiled(_sums)(torch.exp(2 * queries), keys.powers, dscores)
        # tanh = 1 − 2 r, and the ones add up to the sum of all dscores.
        return slopes * (4 * keys.weight), dscores.sum() - 2 * inverses.sum((0, 1))
    slopes = torch.zeros_like(keys.keys)
    along = torch.zeros_like(keys.keys[:, 0])
    for query, dscore in zip(queries, dscores, strict=True):
        hidden = torch.tanh(query.unsqueeze(1) + keys.keys)
        along += torch.bmm(dscore.unsqueeze(1), hidden).squeeze(1)
        slopes += torch.addcmul(dscore.unsqueeze(-1), dscore.unsqueeze(-1) * hidden, hidden, value=-1)
    return slopes * keys.weight, along.sum(0)


def _scores(query: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    return weight.sum() - 2 * (weight / (1 + query.unsqueeze(1) * keys)).sum(-1)


def _slope(query: Tensor, keys: Tensor, dscores: Tensor) -> Tensor:
    inverse = 1 / (1 + query.unsqueeze(1) * keys)
    return (dscores.unsqueeze(-1) * inverse * (1 - inverse)).sum(1)


def _slope_in_blocks(query: Tensor, keys: Tensor, dscores: Tensor) -> Tensor:
    inverse = 1 / (1 + query.unflatten(-1, (-1, keys.shape[-1])).unsqueeze(2) * keys)
    return (dscores[:, None, :, None] * inverse * (1 - inverse)).sum(2).flatten(1)


def _sums(query: Tensor, keys: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor]:
    inverse = 1 / (1 + query.unsqueeze(2) * keys)
    weighted = dscores.unsqueeze(-1) * inverse
    return (weighted * (1 - inverse)).sum(0), weighted.sum(0)
