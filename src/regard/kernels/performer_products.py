"""Linear attention with Performer features by torch's matrix products; every query attends to all keys.

Features are exponentials, which must not overflow. Each feature of the keys is divided by its largest value over all
keys, and the features of the queries are multiplied by the same numbers, which leaves φ(q)·φ(k) unchanged. Then the
features of each query are divided by the largest of them. No feature exceeds 1. Reference implementation:
`regard.core.linear.linear_attention`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.kernels.derivatives import once_only

Logarithms = Callable[[Tensor], Tensor]


def _forward(
    logarithms: Logarithms, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the output, φ(q), φ(k), S = Σ φ(k_j) v_jᵀ, z = Σ φ(k_j) and the divisors φ(q)·z."""
    keys = logarithms(key)
    if keep is not None:
        keys.masked_fill_(~keep.unsqueeze(-1), -torch.inf)
    shift = keys.amax(1, keepdim=True).clamp_min_(torch.finfo(keys.dtype).min / 4)  # finite even if all keys are masked
    keys.sub_(shift).exp_()
    queries = logarithms(query).add_(shift)
    queries.sub_(queries.amax(-1, keepdim=True)).exp_()
    sums, total = torch.bmm(keys.mT, value), keys.sum(1).unsqueeze(-1)
    divisor = torch.bmm(queries, total)
    divisor.masked_fill_(divisor == 0, torch.inf)  # if all keys are masked, the output is 0
    return torch.bmm(queries, sums).div_(divisor), queries, keys, sums, total, divisor


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logarithms: Logarithms,
        projection: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keep: Tensor | None,
    ) -> Tensor:
        output, *rest = _forward(logarithms, query, key, value, keep)
        ctx.save_for_backward(projection, key, value, output, *rest)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        once_only("linear attention by products on CUDA")
        change: Tensor = upstream[0]
        projection, key, value, output, queries, keys, sums, total, divisor = ctx.saved_tensors
        size = key.shape[-1]
        rows = projection.to(key.dtype) / size**0.25
        with torch.autocast(key.device.type, enabled=False):  # backward() may be called inside autocast
            above = change / divisor
            delta = (above * output).sum(-1, keepdim=True)
            # The output does not change if all features of a query are scaled, so the gradients of their logarithms sum
            # to 0, and the term −|q|²/2, which is equal in all logarithms of a query, has the gradient 0.
            of_queries = torch.bmm(above, sums.mT).addcmul_(delta, total.mT, value=-1).mul_(queries)
            later, rest = torch.bmm(queries.mT, above), torch.bmm(queries.mT, delta)
            of_keys = torch.bmm(value, later.mT).sub_(rest.mT).mul_(keys)
            lengths = of_keys.sum(-1, keepdim=True)
            key_grad = (of_keys @ rows).addcmul_(key, lengths, value=-1 / math.sqrt(size))
            return None, None, of_queries @ rows, key_grad, torch.bmm(keys, later), None


def linear_attention(
    logarithms: Logarithms, projection: Tensor, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None
) -> Tensor:
    """Return the output (b, q, e) of query (b, q, d), key (b, k, d) and value (b, k, e), all of one dtype.

    `logarithms` is a function that returns the logarithms of the features, (b, n, m) for (b, n, d); `projection` (m, d)
    are its directions. `keep` (b, k) is False for masked keys; masked keys and values must be finite.
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Products.apply(logarithms, projection, query, key, value, keep)
    return _forward(logarithms, query, key, value, keep)[0]
