"""Queries and keys in three bytes per number instead of four, for attention calls too large to be stored exactly.

The sign, the exponent and 15 bits of the fraction of each float32 are stored, rounded to nearest. The relative error of
a number is at most 2⁻¹⁶. The error of the dot product of a query q and a key k is about 2⁻¹⁵ · Σ |qᵢ kᵢ| ≤
2⁻¹⁵ · ‖q‖ ‖k‖.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.look.attention_records import nbytes

ROUNDING = 2.0**-16  # the largest relative error of a stored number, except for numbers below 10⁻³⁸


class Exact:
    """A tensor that is stored exactly, with the same interface as `Short`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape, self.device = tensor.shape, tensor.device

    def take(self, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `part(tensor)`; `part` may only index the tensor, because `Short` applies it to encoded numbers."""
        return part(self._tensor)

    def holds(self) -> list[Tensor]:
        return [self._tensor]


class Short:
    """A float32 tensor (b, h, n, d) that is stored in three bytes per number.

    >>> x = torch.tensor([1.0, -3.0, 1 / 3]).expand(1, 1, 1, 3)
    >>> short = Short(x)
    >>> short.take(lambda part: part[..., :2])
    tensor([[[[ 1., -3.]]]])
    >>> bool((short.take(lambda part: part) - x).abs().max() <= ROUNDING / 3)
    True
    """

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.device = tensor.shape, tensor.device
        self._high = torch.empty(tensor.shape, dtype=torch.int16, device=tensor.device)
        self._low = torch.empty(tensor.shape, dtype=torch.uint8, device=tensor.device)
        for item in range(tensor.shape[0]):
            # the tensor is encoded one head at a time, so that temporary tensors stay small
            for head in range(tensor.shape[1]):
                self._high[item, head], self._low[item, head] = _split(tensor[item, head])

    def take(self, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `part(tensor)` in float32; `part` may only index the tensor."""
        return _joined(part(self._high), part(self._low))

    def holds(self) -> list[Tensor]:
        return [self._high, self._low]


Numbers = Exact | Short


class _Halves(NamedTuple):
    high: Tensor  # `high` is int16: sign, exponent and the first 7 bits of the fraction of each number
    low: Tensor  # `low` is uint8: the next 8 bits of the fraction of each number


def _split(tensor: Tensor) -> _Halves:
    bits = tensor.contiguous().view(torch.int32)
    # Adding half of the last stored bit rounds to nearest; a carry into the exponent gives the next power of two, which
    # is correct. Infinite numbers and NaN are not rounded.
    bits = torch.where(tensor.isfinite(), bits + 0x80, bits)
    return _Halves((bits >> 16).to(torch.int16), ((bits >> 8) & 0xFF).to(torch.uint8))


def _joined(high: Tensor, low: Tensor) -> Tensor:
    bits = (high.to(torch.int32) << 16).add_(low.to(torch.int32) << 8)
    return bits.view(torch.float32)


class Shorter(NamedTuple):
    """Queries and keys in 24 bits per number, and a note that states the largest error."""

    query: Short
    key: Short
    note: str


def shorter(query: Numbers, key: Numbers, scale: float | None) -> Shorter | None:
    """Return the queries and keys in 24 bits per number; None if they are not exact float32, or 24 bits save nothing.

    `scale` is the factor of the scores if they are dot products, otherwise None.
    """
    if not isinstance(query, Exact) or not isinstance(key, Exact):
        return None
    [old_query], [old_key] = query.holds(), key.holds()
    if old_query.dtype != torch.float32 or old_key.dtype != torch.float32:
        return None
    shared = old_query.data_ptr() == old_key.data_ptr() and old_query.stride() == old_key.stride()
    new_query = Short(old_query)
    new_key = new_query if shared and query.shape == key.shape else Short(old_key)
    before, after = nbytes([old_query, old_key]), nbytes([*new_query.holds(), *new_key.holds()])
    if after >= before:
        return None
    cost = "each is off by at most 2⁻¹⁶ of itself"
    if scale is not None:
        cost = f"no score is off by more than {worst_score(old_query, old_key, scale):.2g}"
    sizes = f"{after / 2**20:.3g} MiB instead of {before / 2**20:.3g}"
    return Shorter(new_query, new_key, f"queries and keys are kept in 24 bits a number, {sizes}: {cost}")


def worst_score(query: Tensor, key: Tensor, scale: float) -> float:
    """Return a bound of the error of scale · q·k in 24 bits: |scale| · 2⁻¹⁵ · largest ‖q‖ · largest ‖k‖ · 1.1."""
    sizes = [float(torch.linalg.vector_norm(tensor.nan_to_num(0, 0, 0), dim=-1).max()) for tensor in (query, key)]
    # The query and the key are both rounded, which gives 2 · ROUNDING. The factor 1.1 covers the product of the two
    # rounding errors and the rounding of the returned number.
    return abs(scale) * 2.2 * ROUNDING * sizes[0] * sizes[1]
