"""Received weights and entropy of softmax attention on the CPU, from the log-sum-exp of each row of scores.

With the scores s and their log-sum-exp L, the weights are p = exp(s − L); key j receives R_j = Σ_i p_ij, and row i has
the entropy H_i = Σ_j p_ij (L_i − s_ij). One block of rows of one head is computed at a time, over the keys of its band
only, so that the block stays in the processor's cache. The results must equal `Request.of` applied to the weights of
the reference implementation (`regard.core.requests`).
"""

import torch
from torch import Tensor

_NUMBERS = 2**18  # the number of scores in a block: 1 MiB of float32


def weight_sums(
    query: Tensor, key: Tensor, lse: Tensor, low: int | None, high: int | None, lengths: list[int], entropy: bool
) -> Tensor:
    """Return the entropy (b, q) or the received weights (b, k) of softmax over the scores query keyᵀ.

    Query i attends to the keys j with low ≤ j − i ≤ high and j < lengths. query (b, q, d) is scaled already; key is
    (b, k, d); lse (b, q) is −inf for a query that attends to no key. All scores must be finite.
    """
    (b, queries, _), keys = query.shape, key.shape[1]
    result = query.new_zeros(b, queries if entropy else keys)
    rows = max(16, min(queries, _NUMBERS // keys))
    scores, weights = query.new_empty(rows * keys), query.new_empty(rows * keys if entropy else 0)
    lse = torch.where(lse == -torch.inf, torch.inf, lse).unsqueeze(-1)
    for n in range(b):
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            start = 0 if low is None else min(max(0, first + low), keys)
            stop = min(lengths[n], keys if high is None else last + high)
            if stop <= start:
                continue
            shape = (last - first, stop - start)
            x = torch.mm(query[n, first:last], key[n, start:stop].mT, out=scores[: shape[0] * shape[1]].view(shape))
            x -= lse[n, first:last]
            p = torch.exp(x, out=weights[: x.numel()].view(shape)) if entropy else x.exp_()
            _cut(p, first, start, low, high)
            if entropy:
                torch.sum(p.mul_(x), 1, out=result[n, first:last])
            else:
                result[n, start:stop] += p.sum(0)
    return torch.where(lse.squeeze(-1) == torch.inf, 0, -result) if entropy else result


def _cut(p: Tensor, first: int, start: int, low: int | None, high: int | None) -> None:
    """Set the weights `p` outside the band to 0; the tile `p` begins at query `first` and key `start`."""
    rows, columns = p.shape
    if high is not None:
        seen = max(0, first + high + 1 - start)  # the number of columns that satisfy the upper bound in every row
        if seen < columns:
            p[:, seen:].tril_(first + high - start - seen)
    if low is not None:
        late = min(columns, first + rows - 1 + low - start)  # number of columns to the left of the last row's band
        if late > 0:
            p[:, :late].triu_(first + low - start)
