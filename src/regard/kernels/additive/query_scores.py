"""Additive scores of one query for each row of a batch, and their gradients, without storing the hidden layer.

The scores are e_j = v · tanh(q + k_j). A loop over steps calls `scores` at each step; its backward pass calls `slope`
at each step, and then `sums` once for the gradients of the keys and of v from all steps. The compiled functions are
those of `exponential`; the exponentials of the keys are computed once for all steps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels import compilation
from regard.kernels.additive.exponential import REACH, pair_scores, pair_sums
from regard.kernels.compilation import compiled

# From this number of features of all pairs in all steps, the compiled loop saves more time than compiling takes.
_WORTH = 2**24
_LANES = 16  # float32 numbers in the widest SIMD register
_SMALL = 0.05  # below this |x|, 1 − 2 / (1 + e^{2x}) is less accurate than tanh x ≈ x


class Keys(NamedTuple):
    """Keys (b, k, f), the score's weight (f,), and e^{2 keys} if the scores are computed from exponentials.

    `powers` is e^{2 keys}, and `rows` (b, f) is the weight repeated for each row of the batch. `blocks`
    (b, f / 16, k, 16) holds the numbers of `powers` for the backward pass, which sums over keys: summing 16 features at
    a time loads memory sequentially and is three times faster.
    """

    keys: Tensor
    weight: Tensor
    powers: Tensor | None = None
    rows: Tensor | None = None
    blocks: Tensor | None = None


def prepare(keys: Tensor, weight: Tensor, steps: int, *, back: bool = False) -> Keys:
    """Return the keys prepared for this number of steps, with `blocks` for a backward pass if `back`.

    For float32 keys on the CPU and enough steps, `powers` are computed and the scores use the compiled form
    tanh(q + k) = 1 − 2 / (1 + e^{2q} e^{2k}); otherwise the scores use torch.tanh.
    """
    plain = keys.device.type != "cpu" or keys.dtype != torch.float32 or keys.numel() * steps < _WORTH
    if plain or min(keys.shape) < 2 or not compilation.compiler():
        return Keys(keys, weight)
    low, high = (float(bound) for bound in torch.aminmax(keys))
    if not _SMALL < max(-low, high) <= REACH:
        return Keys(keys, weight)
    powers = torch.exp(2 * keys)
    return Keys(keys, weight, powers, weight.expand(len(keys), -1).contiguous(), blocked(powers) if back else None)


def blocked(rows: Tensor) -> Tensor | None:
    """Return a tensor (b, k, f) rearranged as (b, f / 16, k, 16), or None if 16 does not divide f."""
    if rows.shape[-1] % _LANES:
        return None
    return rows.unflatten(-1, (-1, _LANES)).transpose(1, 2).contiguous()


def _within(query: Tensor) -> bool:
    low, high = (float(bound) for bound in torch.aminmax(query))
    return max(-low, high) <= REACH


def scores(query: Tensor, keys: Keys) -> Tensor:
    """Return the scores (b, k) of the queries (b, f): `torch.tanh(query[:, None] + keys) @ weight`."""
    if keys.powers is not None and _within(query):
        return compiled(pair_scores)(torch.exp(2 * query).unsqueeze(1), keys.powers, keys.rows).squeeze(1)
    return torch.tanh(query.unsqueeze(1) + keys.keys) @ keys.weight


def slope(query: Tensor, keys: Keys, dscores: Tensor) -> Tensor:
    """Return the gradient (b, f) of the queries, weight · Σ_j dscores_j (1 − tanh²(query + key_j)), from the gradient
    (b, k) of the scores."""
    if keys.powers is not None and _within(query):
        power = torch.exp(2 * query)
        if keys.blocks is not None:
            return compiled(_slope_in_blocks)(power, keys.blocks, dscores) * (4 * keys.weight)
        slope_sums, _ = compiled(pair_sums)(power.unsqueeze(1), keys.powers, dscores.unsqueeze(1))
        return slope_sums.squeeze(1) * (4 * keys.weight)
    hidden = torch.tanh(query.unsqueeze(1) + keys.keys)
    return torch.bmm(dscores.unsqueeze(1), 1 - hidden * hidden).squeeze(1) * keys.weight


def sums(queries: Tensor, keys: Keys, dscores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys (b, k, f) and weight (f,) from queries (t, b, f) and dscores (t, b, k), t steps."""
    if keys.powers is not None and _within(queries):
        powers, changes = torch.exp(2 * queries).transpose(0, 1).contiguous(), dscores.permute(1, 2, 0).contiguous()
        slopes, inverses = compiled(pair_sums)(keys.powers, powers, changes)
        # tanh is 1 − 2 r with the r of `pair_sums`: Σ dscores · tanh is the sum of all dscores minus 2 Σ dscores · r.
        return slopes * (4 * keys.weight), dscores.sum() - 2 * inverses.sum((0, 1))
    slopes = torch.zeros_like(keys.keys)
    along = torch.zeros_like(keys.keys[:, 0])
    for query, dscore in zip(queries, dscores, strict=True):
        hidden = torch.tanh(query.unsqueeze(1) + keys.keys)
        along += torch.bmm(dscore.unsqueeze(1), hidden).squeeze(1)
        slopes += torch.addcmul(dscore.unsqueeze(-1), dscore.unsqueeze(-1) * hidden, hidden, value=-1)
    return slopes * keys.weight, along.sum(0)


def _slope_in_blocks(query: Tensor, keys: Tensor, dscores: Tensor) -> Tensor:
    inverse = 1 / (1 + query.unflatten(-1, (-1, keys.shape[-1])).unsqueeze(2) * keys)
    return (dscores[:, None, :, None] * inverse * (1 - inverse)).sum(2).flatten(1)
