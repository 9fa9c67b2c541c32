"""Linear attention on the CPU: matrix products of blocks that stay in the caches, and their gradient.

With features φ and the sums S = Σ φ(k_j) v_jᵀ and z = Σ φ(k_j) the output is φ(q_i) S / φ(q_i)·z. Causal attention
divides the positions into chunks: it computes every pair of a query and a key of the same chunk, and uses S and z for
the keys of earlier chunks. Features are not rescaled, so the results are valid only if `sound` returns True; otherwise
`regard.core.linear`, the reference implementation, must compute them. Products of bfloat16 tensors are computed in
bfloat16; logarithms of features and sums over blocks are float32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.kernels import linear_loops
from regard.kernels.dtypes import HALF

# Products neither overflow nor underflow if the absolute values are less than _VALUE and the divisors Σ_j φ(q_i)·φ(k_j)
# are between _LEAST and _MOST.
_VALUE, _LEAST, _MOST = 1e12, 1e-25, 1e25
_EXPONENT = 80.0  # features whose logarithm is greater than −80 do not underflow in float32
Again = Callable[[Tensor, Tensor, Tensor], Tensor]


class Elu:
    """The feature map elu(x) + 1, computed without cancellation where elu(x) is near −1."""

    rows: Tensor | None = None

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, x: Tensor) -> Tensor:
        return x.clamp_max(0).exp_().add_(x.clamp_min(0))

    def gradient(self, x: Tensor, mapped: Tensor, change: Tensor) -> Tensor:
        """Return the gradient of x from `change`, the gradient of its features `mapped`; `change` is overwritten."""
        return change.mul_(mapped.clamp_max(1))

    def fits(self, x: Tensor) -> Tensor:
        """Return for each vector of x whether its features neither overflow nor underflow."""
        return (x < torch.inf).all(-1)  # underflow makes a divisor less than its bound, which `sound_rows` tests


class Performer:
    """The feature map exp(w·x' − |x'|²/2) / √m with x' = x / d^¼ and the rows w of `projection` (m, d)."""

    def __init__(self, projection: Tensor, dtype: torch.dtype) -> None:
        self.count, size = projection.shape
        self.rows = projection.to(_wide(dtype)) / size**0.25
        self.narrow, self.half = self.rows.to(dtype), 0.5 / math.sqrt(size)
        # The exponent of a feature is at least −|w| |x'| − |x'|²/2. For |x| <= reach it is at least −_EXPONENT.
        longest = float(torch.linalg.vector_norm(self.rows, dim=-1).max()) if projection.numel() else 0.0
        self.reach = (math.sqrt(longest**2 + 4 * self.half * _EXPONENT) - longest) / (2 * self.half)
        self.least = math.inf  # the smallest exponent computed so far in calls with a vector longer than `reach`

    def __call__(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.to(self.rows.dtype)
        logs = (x.reshape(-1, x.shape[-1]) @ self.rows.mT).view(*x.shape[:-1], self.count)
        squares = (x * x).sum(-1, keepdim=True).mul_(self.half).add_(math.log(self.count) / 2)
        logs.sub_(squares)
        if self.least > -_EXPONENT and not float(squares.max()) < self.half * self.reach**2:
            self.least = min(float(logs.min()), self.least)  # `min` returns its first argument if that is NaN
        return logs.exp_().to(dtype)

    def gradient(self, x: Tensor, mapped: Tensor, change: Tensor) -> Tensor:
        change = change.mul_(mapped)
        return (change @ self.narrow).addcmul_(x, change.sum(-1, keepdim=True), value=-2 * self.half)

    def fits(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=-1) < self.reach


Map = Elu | Performer


def sound(features: Map, value: Tensor, divisor: Tensor) -> bool:
    """Return whether all features computed so far, the values and the divisors are within the bounds; NaN is not."""
    ends = [float(end) for t in (value, divisor) for end in t.aminmax()]
    within = -_VALUE < ends[0] <= ends[1] < _VALUE and _LEAST < ends[2] <= ends[3] < _MOST
    return within and (isinstance(features, Elu) or features.least > -_EXPONENT)


def sound_rows(features: Map, query: Tensor, key: Tensor, value: Tensor, divisor: Tensor) -> int:
    """Return the number of leading positions whose features, values and divisors are in bounds in every sequence."""
    fine = features.fits(query) & features.fits(key) & (value.abs() < _VALUE).all(-1)
    fine &= ((divisor > _LEAST) & (divisor < _MOST)).squeeze(-1)
    return int(fine.flatten(0, -2).all(0).cumprod(0).sum())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def _spans(length: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]


def _forward(features: Map, query: Tensor, key: Tensor, value: Tensor, step: int) -> tuple[Tensor, ...]:
    """Return output, divisors, S and z of attention to all keys; if one block suffices, also φ(q) and φ(k)."""
    dtype, wide = value.dtype, _wide(value.dtype)
    if max(query.shape[1], key.shape[1]) <= step:  # all positions are in one block
        keys, queries = features(key), features(query)
        sums, total = torch.bmm(keys.mT, value), keys.sum(1, dtype=wide)
        divisor = torch.bmm(queries, total.to(dtype).unsqueeze(-1))
        return torch.bmm(queries, sums).div_(divisor), divisor, sums.to(wide), total, queries, keys
    sums = total = None
    for at in _spans(key.shape[1], step):
        keys = features(key[:, at])
        added, ones = torch.bmm(keys.mT, value[:, at]), keys.sum(1, dtype=wide)
        sums = added.to(wide) if sums is None else sums.add_(added)
        total = ones if total is None else total.add_(ones)
    assert sums is not None  # there is at least one block of keys
    assert total is not None
    output, divisor = query.new_empty(*query.shape[:2], value.shape[-1]), query.new_empty(*query.shape[:2], 1)
    near, ones = sums.to(dtype), total.to(dtype).unsqueeze(1)
    for at in _spans(query.shape[1], step):
        queries = features(query[:, at])
        torch.sum(queries * ones, -1, keepdim=True, out=divisor[:, at])
        torch.div(torch.bmm(queries, near), divisor[:, at], out=output[:, at])
    return output, divisor, sums, total


def _backward(
    features: Map, query: Tensor, key: Tensor, value: Tensor, saved: tuple[Tensor, ...], change: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    output, divisor, sums, total, *mapped = saved
    dtype, wide = value.dtype, _wide(value.dtype)
    near, ones = sums.to(dtype).mT, total.to(dtype).unsqueeze(1)
    grads = [t.new_empty(t.shape) for t in (query, key, value)]
    later, rest = torch.zeros_like(sums), torch.zeros_like(total)
    for at in _spans(query.shape[1], step):
        queries, above = mapped[0] if mapped else features(query[:, at]), change[:, at] / divisor[:, at]
        delta = (above * output[:, at]).sum(-1, keepdim=True)
        later += queries.mT @ above
        rest -= (queries * delta).sum(1, dtype=wide)
        grad = (above @ near).addcmul_(delta, ones, value=-1)
        grads[0][:, at] = features.gradient(query[:, at], queries, grad)
    near, ones = later.to(dtype), rest.to(dtype).unsqueeze(1)
    for at in _spans(key.shape[1], step):
        keys = mapped[1] if mapped else features(key[:, at])
        grads[2][:, at] = keys @ near
        grads[1][:, at] = features.gradient(key[:, at], keys, (value[:, at] @ near.mT).add_(ones))
    return grads[0], grads[1], grads[2]


def _segments(length: int, chunk: int, step: int) -> list[tuple[slice, int]]:
    """Return slices of at most `step` positions that contain whole chunks, each with its chunk length.

    Positions after the last whole chunk are one more slice, which is a chunk of its own.
    """
    whole = length // chunk * chunk
    runs = [(slice(first, min(first + step, whole)), chunk) for first in range(0, whole, step)]
    return runs + ([(slice(whole, length), length - whole)] if whole < length else [])


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Reshape (b, n, d) to (b · n / chunk, chunk, d)."""
    return x.reshape(-1, chunk, x.shape[-1])


def _running(before: Tensor, added: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """Return for each chunk of `added` (b, c, …) the sum of `before` and the chunks before it, and the total sum.

    With `backwards`, sum the chunks after each chunk instead of those before it.
    """
    order = range(added.shape[1] - 1, -1, -1) if backwards else range(added.shape[1])
    sums = before.new_empty(added.shape)
    for c in order:
        sums[:, c] = before
        before = before + added[:, c]
    return sums, before


def _pairs_forward(features: Map, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return output, divisors, φ(q) and φ(k) of causal attention over one chunk, from the products of all pairs."""
    queries, keys = features(query), features(key)
    pairs = torch.bmm(queries, keys.mT).tril_()
    divisor = pairs.sum(-1, keepdim=True)
    return torch.bmm(pairs, value).div_(divisor), divisor, queries, keys


def _pairs_backward(
    features: Map, query: Tensor, key: Tensor, value: Tensor, saved: tuple[Any, ...], change: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    output, divisor, *mapped = saved
    queries, keys = mapped or (features(query), features(key))
    above = change / divisor
    delta = (above * output).sum(-1, keepdim=True)
    dvalue = torch.bmm(torch.bmm(queries, keys.mT).tril_().mT, above)
    inner = torch.bmm(above, value.mT).sub_(delta).tril_()
    dquery, dkey = torch.bmm(inner, keys), torch.bmm(inner.mT, queries)
    return features.gradient(query, queries, dquery), features.gradient(key, keys, dkey), dvalue


def _causal_forward(features: Map, query: Tensor, key: Tensor, value: Tensor, chunk: int, step: int) -> tuple[Any, ...]:
    """Return output, divisors and, for each segment, S and z of the keys before each chunk of the segment; if one chunk
    suffices, return what `_pairs_forward` returns."""
    if query.shape[1] <= chunk:
        return _pairs_forward(features, query, key, value)
    dtype, wide, b = value.dtype, _wide(value.dtype), value.shape[0]
    sums = value.new_zeros(b, features.count, value.shape[-1], dtype=wide)
    total = key.new_zeros(b, features.count, dtype=wide)
    output, divisor = torch.empty_like(value), query.new_empty(*query.shape[:2], 1)
    states: list[Tensor] = []
    ones: list[Tensor] = []
    for at, size in _segments(query.shape[1], chunk, step):
        queries, keys, values = (_chunks(t, size) for t in (features(query[:, at]), features(key[:, at]), value[:, at]))
        before, sums = _running(sums, (keys.mT @ values).unflatten(0, (b, -1)))
        below, total = _running(total, keys.sum(1, dtype=wide).unflatten(0, (b, -1)))
        states.append(before.to(dtype).flatten(0, 1))
        ones.append(below.to(dtype).flatten(0, 1).unsqueeze(1))
        pairs = (queries @ keys.mT).tril_()
        count = (queries * ones[-1]).sum(-1, keepdim=True).add_(pairs.sum(-1, keepdim=True))
        rows = torch.baddbmm(queries @ states[-1], pairs, values).div_(count)
        output[:, at], divisor[:, at] = rows.view(b, -1, rows.shape[-1]), count.view(b, -1, 1)
    return output, divisor, states, ones


def _causal_backward(
    features: Map,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    saved: tuple[Any, ...],
    change: Tensor,
    chunk: int,
    step: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.shape[1] <= chunk:
        return _pairs_backward(features, query, key, value, saved, change)
    output, divisor, states, ones = saved
    dtype, wide, b = value.dtype, _wide(value.dtype), value.shape[0]
    later = value.new_zeros(b, features.count, value.shape[-1], dtype=wide)
    rest = key.new_zeros(b, features.count, dtype=wide)
    grads = [t.new_empty(t.shape) for t in (query, key, value)]
    runs = list(zip(_segments(query.shape[1], chunk, step), states, ones, strict=True))
    for (at, size), before, below in reversed(runs):
        queries, keys, values = (_chunks(t, size) for t in (features(query[:, at]), features(key[:, at]), value[:, at]))
        above = change[:, at] / divisor[:, at]
        delta = _chunks((above * output[:, at]).sum(-1, keepdim=True), size)
        above = _chunks(above, size)
        after, later = _running(later, (queries.mT @ above).unflatten(0, (b, -1)), backwards=True)
        behind, rest = _running(rest, -(queries * delta).sum(1, dtype=wide).unflatten(0, (b, -1)), backwards=True)
        after, behind = after.to(dtype).flatten(0, 1), behind.to(dtype).flatten(0, 1).unsqueeze(1)
        pairs, inner = (queries @ keys.mT).tril_(), (above @ values.mT).sub_(delta).tril_()
        grads[2][:, at] = torch.baddbmm(keys @ after, pairs.mT, above).view(b, -1, above.shape[-1])
        grad = torch.baddbmm(above @ before.mT, inner, keys).addcmul_(delta, below, value=-1)
        wise = torch.baddbmm(values @ after.mT, inner.mT, queries).add_(behind)
        for i, (x, mapped, grad_mapped) in enumerate(((query, queries, grad), (key, keys, wise))):
            shape = (b, -1, features.count)
            grads[i][:, at] = features.gradient(x[:, at], mapped.view(shape), grad_mapped.view(shape))
    return grads[0], grads[1], grads[2]


def _parts(query: Tensor, sequences: int) -> list[slice]:
    """Return slices of the first axis, each with about `sequences` sequences."""
    return _spans(query.shape[0], max(1, sequences // math.prod(query.shape[1:-2])))


def _flat(x: Tensor, at: slice) -> Tensor:
    """Return the slice `at` of the first axis of x (…, n, d), reshaped to (b, n, d)."""
    part = x if at.stop - at.start == x.shape[0] else x[at]
    return part if x.ndim == 3 else part.reshape(-1, *x.shape[-2:])


def _computed(
    features: Map, query: Tensor, key: Tensor, value: Tensor, plan: "Plan"
) -> tuple[Tensor, Tensor, list[tuple[Any, ...]], bool]:
    """Return outputs, divisors, for each group of sequences the other tensors that the backward pass needs (such as S
    and z), and whether all features, values and divisors are within the bounds."""
    if plan.native:
        done = linear_loops.forward(query, key, value, features.rows, plan.chunk is not None)
        return done.output, done.divisor, [], done.fine
    forward = _forward if plan.chunk is None else functools.partial(_causal_forward, chunk=plan.chunk)
    parts, shape, fine = _parts(query, plan.sequences), query.shape[:-1], True
    sums_of_parts: list[tuple[Any, ...]] = []
    if len(parts) == 1:  # the call is small enough to store the features too
        few = _flat(value, parts[0])
        rows, count, *sums = forward(features, _flat(query, parts[0]), _flat(key, parts[0]), few, step=plan.step)
        sums_of_parts.append(tuple(sums))
        return rows.view(*shape, -1), count.view(*shape, 1), sums_of_parts, sound(features, few, count)
    output, divisor = query.new_empty(*shape, value.shape[-1]), query.new_empty(*shape, 1)
    for at in parts:
        few = _flat(value, at)
        rows, count, *sums = forward(features, _flat(query, at), _flat(key, at), few, step=plan.step)
        fine = sound(features, few, count) and fine
        sums_of_parts.append(tuple(sums[: 0 if query.shape[-2] == plan.chunk else 2]))
        output[at], divisor[at] = rows.view(output[at].shape), count.view(divisor[at].shape)
    return output, divisor, sums_of_parts, fine


class Plan(NamedTuple):
    """How a call is divided into blocks that stay in the processor's caches."""

    chunk: int | None  # number of positions in a causal chunk; None for attention to all keys
    step: int  # largest number of positions in a block
    sequences: int  # number of sequences that are computed together
    native: bool = False  # whether the compiled loops of `linear_loops` compute the call, without torch operations


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Map, query: Tensor, key: Tensor, value: Tensor, plan: Plan, again: Again
    ) -> tuple[Tensor, Tensor, bool]:
        output, divisor, sums, fine = _computed(features, query, key, value, plan)
        ctx.save_for_backward(query, key, value, output, divisor)
        ctx.sums, ctx.settings = sums, (features, plan, again)
        ctx.mark_non_differentiable(divisor)
        return output, divisor, fine

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        change: Tensor = upstream[0]
        query, key, value, output, divisor = ctx.saved_tensors
        features, plan, again = ctx.settings
        with torch.autocast(query.device.type, enabled=False):  # backward() may be called inside autocast
            if torch.is_grad_enabled():  # for second derivatives, autograd differentiates `again`
                learned = [
                    t for t, needed in zip((query, key, value), ctx.needs_input_grad[1:4], strict=True) if needed
                ]
                leaf_grads = iter(torch.autograd.grad(again(query, key, value), learned, change, create_graph=True))
                grads = [next(leaf_grads) if needed else None for needed in ctx.needs_input_grad[1:4]]
                return None, *grads, None, None
            if plan.native:
                causal = plan.chunk is not None
                grads = linear_loops.backward(query, key, value, features.rows, output, divisor, change, causal)
                return None, *grads, None, None
            backward = _backward if plan.chunk is None else functools.partial(_causal_backward, chunk=plan.chunk)
            parts = _parts(query, plan.sequences)
            whole = [t.new_empty(t.shape) for t in (query, key, value)] if len(parts) > 1 else []
            for at, sums in zip(parts, ctx.sums, strict=True):
                some = (_flat(t, at) for t in (query, key, value))
                saved = _flat(output, at), _flat(divisor, at), *sums
                grads = backward(features, *some, saved=saved, change=_flat(change, at), step=plan.step)
                for t, grad in zip(whole, grads, strict=False):
                    t[at] = grad.view(t[at].shape)
                if not whole:
                    whole = [grad.view(t.shape) for t, grad in zip((query, key, value), grads, strict=True)]
        return None, *whole, None, None


def linear_attention(
    features: Map, query: Tensor, key: Tensor, value: Tensor, plan: Plan, again: Again
) -> tuple[Tensor, Tensor, bool]:
    """Return the output (…, q, e) of query (…, q, d), key (…, k, d) and value (…, k, e), and the divisors (…, q, 1).

    The third returned value is the result of `sound`, or of the same test in compiled C. With causal attention
    query i attends to the keys j ≤ i, and there are as many keys as queries. `again` is a function that returns the
    output by operations that autograd differentiates for second derivatives.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        return _Blocks.apply(features, query, key, value, plan, again)
    output, divisor, _, fine = _computed(features, query, key, value, plan)
    return output, divisor, fine
