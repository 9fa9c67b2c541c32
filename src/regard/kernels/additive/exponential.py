"""The additive score on the CPU without a tanh for each pair: tanh(a + b) = 1 − 2 / (1 + e^{2a} e^{2b}).

Here a is a feature of a query, and b the same feature of a key. The exponentials are computed once for each query and
each key; each feature of a pair then takes a multiply-add and a division. The compiled loops never store the hidden
layer of the pairs, forward or backward: with r = 1 / (1 + e^{2a} e^{2b}) the derivative of tanh is 4 r (1 − r), so the
backward pass needs only r.

For small arguments x, 1 − 2 r loses digits, because tanh x ≈ x is close to 0. For small arguments the formula is
therefore tanh(a + b) = u / (u + 2) with u = e^{2(a + b)} − 1 = A + B (1 + A), where A = e^{2a} − 1 and B = e^{2b} − 1,
which loses no digits.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from torch import Tensor

from regard.kernels.additive import pair_loops
from regard.kernels.derivatives import REFERENCE, once_only

# e^{2a} and its inverse are normal float32 numbers up to this |a|. The product e^{2a} e^{2b} may overflow or underflow;
# then tanh(a + b) is ±1, and the formula gives ±1 too.
REACH = 43.0
NEAR = 2.0  # the largest |q| + |k| for which the formula for small arguments is used


def scores(query: Tensor, key: Tensor, weight: Tensor, build: bool) -> Tensor:
    """Return w · tanh(q + k) (…, q, k) by exponentials, in compiled C if `build`, with its own backward pass.

    Reference implementation: `regard.core.scores.Additive`.
    """
    return _Scores.apply(query, key, weight, build)


class _Scores(torch.autograd.Function):
    """The autograd function: scores (…, q, k) from query (…, q, f) and key (…, k, f)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, weight: Tensor, build: bool) -> Tensor:
        ctx.save_for_backward(query, key, weight)
        ctx.build = build
        scores = None
        if build and worth_building(query.dtype, query.shape[-2], key.shape[-2]):
            one = weight.detach() if weight.ndim == 1 else _row_weight(weight, query)
            scores = pair_loops.all_scores(_slices(query), _slices(key), one.contiguous(), REACH, NEAR)
        if scores is None:
            rows, columns, forms = _form(query, key, build)
            scores = forms.scores(rows, columns, _row_weight(weight, query))
        return scores.reshape(*query.shape[:-1], key.shape[-2])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        once_only("backend 'additive'", REFERENCE)
        query, key, weight = ctx.saved_tensors
        dscores = _slices(upstream[0])
        rows, columns, forms = _form(query, key, ctx.build)
        query_slope, dweight, key_slope = forms.sums(rows, columns, dscores)
        vector = weight if weight.ndim == 1 else weight.unsqueeze(-2)
        return (
            vector * query_slope.reshape(query.shape),
            vector * key_slope.reshape(key.shape),
            dweight.sum(-2).reshape(*query.shape[:-2], weight.shape[-1]).sum_to_size(weight.shape),
            None,
        )


def _form(query: Tensor, key: Tensor, build: bool) -> tuple[Tensor, Tensor, "_Forms"]:
    """Return query and key in the form that the loops need (exponentials, if these are finite), and the loops for this
    form.
    """
    query, key = _slices(query), _slices(key)
    reach = _largest(query) + _largest(key)
    if reach <= NEAR:
        rows, columns, forms = torch.expm1(2 * query), torch.expm1(2 * key), (_eager_near, _compiled_near)
    elif (factors := _factors(query, key)) is not None:
        rows, columns, forms = *factors, (_eager_far, _compiled_far)
    else:
        return query, key, _TANH
    wanted = build and worth_building(rows.dtype, rows.shape[-2], columns.shape[-2])
    return rows, columns, forms[wanted]()


def worth_building(dtype: torch.dtype, queries: int, keys: int) -> bool:
    """Return whether the compiled loops are used: they need float32, and save little time for single rows."""
    return dtype == torch.float32 and min(queries, keys) > 1


def _slices(tensor: Tensor) -> Tensor:
    """Return the tensor with leading axes flattened, contiguous, so that the compiled loops see one layout."""
    return tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:]).contiguous()


def _row_weight(weight: Tensor, query: Tensor) -> Tensor:
    """Return the weight (f,) or (h, f) as (slices, f), one row for each slice of the query's leading axes."""
    lead = query.shape[:-2]
    return weight.detach().expand(*lead, -1).reshape(math.prod(lead), weight.shape[-1]).contiguous()


def _factors(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return e^{2(q + c)} and e^{2(k − c)}, or None if a number is NaN or still too large after the shift by c.

    c cancels in tanh(q + k). It is 0 if query and key are in range without a shift, because adding c
    would cause rounding errors.
    """
    largest = _largest(query), _largest(key)
    if any(map(math.isnan, largest)):
        return None
    if max(largest) > REACH:
        middles = [(t.amin(-2, keepdim=True) + t.amax(-2, keepdim=True)) / 2 for t in (query, key)]
        shift = (middles[1] - middles[0]) / 2
        query, key = query + shift, key - shift
        if not max(_largest(query), _largest(key)) <= REACH:
            return None
    return torch.exp(2 * query), torch.exp(2 * key)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@dataclass(frozen=True)
class _Forms:
    """The loops over all pairs (i, j) of query and key.

    `scores` returns the scores; `sums` returns Σ_j ds tanh', Σ_j ds tanh and Σ_i ds tanh' for their gradient ds.
    """

    scores: Callable[[Tensor, Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _both_ways(
    sums: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a function that computes the results of `sums`, and Σ_i ds tanh' by `sums` with swapped arguments."""

    def run(rows: Tensor, columns: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *sums(rows, columns, dscores), sums(columns, rows, dscores.mT.contiguous())[0]

    return run


# @no_type_check: torch.compile cannot compile the shape checks that the tests add to annotated functions.
@no_type_check
def pair_scores(large_query: Tensor, large_key: Tensor, weight: Tensor) -> Tensor:
    """Return scores (z, q, k) of z slices from e^{2 query} (z, q, f), e^{2 key} (z, k, f) and the weight (z, f)."""
    pairs = weight[:, None, None] / (1 + large_query.unsqueeze(-2) * large_key.unsqueeze(-3))
    return weight.sum(-1)[:, None, None] - 2 * pairs.sum(-1)


@no_type_check
def pair_sums(large_query: Tensor, large_key: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_j ds r (1 − r) and Σ_j ds r over keys j, (z, q, f) each, with ds = `dscores` (z, q, k) for z slices and
    r = 1 / (1 + e^{2 query} e^{2 key})."""
    inverse = 1 / (1 + large_query.unsqueeze(-2) * large_key.unsqueeze(-3))
    weighted = dscores.unsqueeze(-1) * inverse
    return (weighted * (1 - inverse)).sum(-2), weighted.sum(-2)


def _compiled_far() -> _Forms:
    return _Forms(pair_loops.scores(near=False), pair_loops.sums(near=False))


def _compiled_near() -> _Forms:
    return _Forms(pair_loops.scores(near=True), pair_loops.sums(near=True))


# Where the compiled loops are not used, the following functions compute one feature at a time for all pairs, in a
# matrix that stays in the cache.


def _by_feature(rows: Tensor, columns: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each feature its index, its values in all rows, (z, q, 1), and in all columns, (z, 1, k)."""
    left, right = rows.mT.unsqueeze(-1), columns.mT.contiguous().unsqueeze(-2)
    return ((f, left[:, f], right[:, f]) for f in range(rows.shape[-1]))


def _eager_far() -> _Forms:
    return _Forms(_eager_scores, _both_ways(_eager_sums))


def _eager_near() -> _Forms:
    return _Forms(_eager_small_scores, _both_ways(_eager_small_sums))


def _eager_scores(large_query: Tensor, large_key: Tensor, weight: Tensor) -> Tensor:
    shape = (*large_query.shape[:-1], large_key.shape[-2])
    total = weight.sum(-1)[:, None, None].expand(shape).clone()
    one, room = torch.ones((), dtype=total.dtype), torch.empty_like(total)
    for f, left, right in _by_feature(large_query, large_key):
        torch.addcmul(one, left, right, out=room)
        total.addcdiv_(-2 * weight[:, f, None, None], room)
    return total


def _eager_sums(large_query: Tensor, large_key: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor]:
    slope, plain = torch.empty_like(large_query), torch.empty_like(large_query)
    room, weighted = torch.empty_like(dscores), torch.empty_like(dscores)
    one, whole = torch.ones((), dtype=dscores.dtype), dscores.sum(-1)
    for f, left, right in _by_feature(large_query, large_key):
        torch.addcmul(one, left, right, out=room)
        torch.div(dscores, room, out=weighted)
        plain[..., f] = whole - 2 * weighted.sum(-1)
        slope[..., f] = 4 * torch.addcdiv(weighted, weighted, room, value=-1, out=room).sum(-1)
    return slope, plain


def _eager_small_scores(small_query: Tensor, small_key: Tensor, weight: Tensor) -> Tensor:
    total = small_query.new_zeros((*small_query.shape[:-1], small_key.shape[-2]))
    room, below = torch.empty_like(total), torch.empty_like(total)
    for f, left, right in _by_feature(small_query, small_key):
        torch.addcmul(left, right, 1 + left, out=room)
        torch.add(room, 2, out=below)
        total.addcdiv_(room.mul_(weight[:, f, None, None]), below)
    return total


def _eager_small_sums(small_query: Tensor, small_key: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor]:
    slope, plain = torch.empty_like(small_query), torch.empty_like(small_query)
    room, below = torch.empty_like(dscores), torch.empty_like(dscores)
    for f, left, right in _by_feature(small_query, small_key):
        torch.addcmul(left, right, 1 + left, out=room)
        torch.add(room, 2, out=below)
        plain[..., f], slope[..., f] = _hidden_sums(room.div_(below), dscores, below)
    return slope, plain


def _tanh_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    total = query.new_zeros((*query.shape[:-1], key.shape[-2]))
    room = torch.empty_like(total)
    for f, left, right in _by_feature(query, key):
        total.addcmul_(torch.add(left, right, out=room).tanh_(), weight[:, f, None, None])
    return total


def _tanh_sums(query: Tensor, key: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor]:
    slope, plain = torch.empty_like(query), torch.empty_like(query)
    room, other = torch.empty_like(dscores), torch.empty_like(dscores)
    for f, left, right in _by_feature(query, key):
        plain[..., f], slope[..., f] = _hidden_sums(torch.add(left, right, out=room).tanh_(), dscores, other)
    return slope, plain


def _hidden_sums(hidden: Tensor, dscores: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_j ds tanh and Σ_j ds (1 − tanh²) of one feature; `hidden` and `room` are overwritten."""
    weighted = torch.mul(dscores, hidden, out=room)
    return weighted.sum(-1), torch.addcmul(dscores, weighted, hidden, value=-1, out=hidden).sum(-1)


_TANH = _Forms(_tanh_scores, _both_ways(_tanh_sums))
