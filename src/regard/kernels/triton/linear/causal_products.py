"""Causal linear attention with elu features by PyTorch's matrix products, in chunks of positions.

The weights of all pairs within a chunk are computed, and those of a query with later keys are set to 0; the keys of
earlier chunks enter as their sum. The kernels of `elu_rows` and `elu_chunks` run between the matrix products. Query
features are divided by the largest of their row, so that they never overflow. The results must equal
`regard.core.linear.linear_attention`.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.linear.elu_chunks import causal_pairs, causal_quotients, key_chunks, sums_before
from regard.kernels.triton.linear.elu_rows import elu_features, elu_gradients, upstream

_BLOCK, _NUMBERS = Block(16, 128, warps=4, stages=1), 4096  # _NUMBERS is the number of entries of a tile
_SUMS = Block(1, 128, warps=1, stages=1)
CHUNK = 128  # largest number of positions of a chunk


class _Signature(NamedTuple):
    """The properties of a call that determine its kernel launches."""

    query: torch.Size
    value: torch.Size
    strides: tuple[tuple[int, ...], ...]  # strides of query, key and value
    keep: tuple[int, ...] | None  # strides of the mask of keys
    chunk: int


class _Plan:
    """The prepared kernel launches of all calls with the same signature."""

    def __init__(self, call: _Signature) -> None:
        (b, h, q, d), (_, _, k, e), c = call.query, call.value, min(call.chunk, 1 << (call.query[2] - 1).bit_length())
        self.chunk = c = max(16, c)
        self.chunks, self.heads, self.sizes = -(-q // c), b * h, (d, e)
        padded, masked = self.chunks * c, call.keep is not None
        wide = [max(16, 1 << (n - 1).bit_length()) for n in (d, e)]
        tile = max(1, min(c, _NUMBERS // max(*wide, c)))
        key, value, size = {"SIZE": d, "D": wide[0]}, {"E": e, "EB": wide[1]}, {"C": c, "R": tile}
        of_queries = {"QUERIES": True, "KEEP": False, **key, "R": tile}
        of_keys = {"QUERIES": False, "KEEP": masked, **key, "R": tile}
        tiles, keep = (padded // tile, self.heads, 1), call.keep or (0, 0)
        at_query, at_key = (h, *call.strides[0][:3], 0, 0, q), (h, *call.strides[1][:3], *keep, k)
        at_value = (h, *call.strides[2][:3], *keep)
        self.queries = Prepared(elu_features, tiles, (*at_query, padded), of_queries, _BLOCK)
        self.keys = Prepared(
            key_chunks, (self.chunks, self.heads, 1), (*at_key[:4], *at_value[1:4], *keep, k, self.chunks),
            {"KEEP": masked, **key, **value, **size}, _BLOCK,
        )  # fmt: skip
        pairs = (self.heads * padded // tile, 1, 1)
        self.pairs, self.inner = (
            Prepared(causal_pairs, pairs, (), {"FORWARD": forward, **key, "E": e, **size}, _BLOCK)
            for forward in (True, False)
        )
        self.divide = Prepared(
            causal_quotients, tiles, (*at_value, q, k, self.chunks), {"KEEP": masked, "SIZE": d, **value, **size},
            _BLOCK,
        )  # fmt: skip
        self.query_gradients = Prepared(elu_gradients, tiles, (*at_query, padded, 1, c, d + e), of_queries, _BLOCK)
        self.key_gradients = Prepared(elu_gradients, tiles, (*at_key, padded, 1, c, d), of_keys, _BLOCK)
        self.before = {width: self._before(width, False) for width in (d * e, d + e)}
        self.after = {width: self._before(width, True) for width in (d * e, d)}
        # The kernel launches are cached by the strides of the output's gradient.
        self.upstream = functools.lru_cache(maxsize=16)(
            lambda change: Prepared(upstream, tiles, (h, *change, q, padded), {**value, "R": tile}, _BLOCK)
        )

    def _before(self, width: int, reverse: bool) -> Prepared:
        block = min(512, max(32, 1 << (width - 1).bit_length()))
        grid = (-(-width // block), self.heads, 1)
        return Prepared(sums_before, grid, (self.chunks, width), {"REVERSE": reverse, "W": block}, _SUMS)


_plan = functools.lru_cache(maxsize=512)(_Plan)


def _forward(plan: _Plan, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> tuple[Tensor, ...]:
    """Return the output, and the tensors that the backward pass needs, divided into chunks.

    The tensors for the backward pass are φ(q), φ(k), the values with NaN and Inf as 0, the weights of all pairs within
    each chunk, the sums of the keys before each chunk (matrices, or None if there is a single chunk, and totals), and
    the divisors of the queries.
    """
    (d, e), c, chunks, heads = plan.sizes, plan.chunk, plan.chunks, plan.heads
    count, hidden = heads * chunks, key if keep is None else keep
    # New tensors are aligned to 16 bytes. If the others are too, the dtype suffices to select the compiled kernels.
    fresh = (query.dtype,)
    known = fresh if keep is None and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15 else None
    queries, keys, values = (query.new_empty(count, c, n) for n in (d, d, e))
    # The sums of each chunk, and of all chunks before it.
    stats, earlier = (torch.empty(count, d + e, device=query.device) for _ in range(2))
    divisor = torch.empty(count, c, device=query.device)
    plan.queries(query, query, queries, known=known)
    plan.keys(key, value, hidden, keys, values, stats, known=known)
    plan.before[d + e](stats, earlier, known=(stats.dtype,))
    pairs = torch.bmm(queries, keys.mT)
    plan.pairs(pairs, queries, earlier, divisor, divisor, known=fresh)
    if chunks == 1:
        before, sums = None, torch.bmm(pairs, values)
    else:
        before = torch.bmm(keys.mT, values)
        plan.before[d * e](before, before, known=fresh)
        sums = torch.bmm(queries, before).baddbmm_(pairs, values)
    output = torch.empty(*query.shape[:-1], e, device=query.device, dtype=query.dtype)
    plan.divide(sums, divisor, stats, earlier, value, hidden, output, known=known)
    return output, queries, keys, values, pairs, before, earlier, divisor


def _backward(
    plan: _Plan, inputs: tuple[Tensor, Tensor, Tensor | None], saved: tuple[Any, ...], change: Tensor
) -> list[Tensor]:
    query, key, keep = inputs
    output, queries, keys, values, pairs, before, earlier, divisor = saved
    (d, e), c, chunks = plan.sizes, plan.chunk, plan.chunks
    above, delta = torch.empty_like(values), torch.empty_like(divisor)
    plan.upstream(change.stride()[:3])(change, output, divisor, above, delta)
    inner = torch.bmm(above, values.mT)
    plan.inner(inner, queries, earlier, divisor, delta)
    grads = [torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (query, key)]
    of_queries, of_keys, of_values = torch.bmm(inner, keys), torch.bmm(inner.mT, queries), torch.bmm(pairs.mT, above)
    rest = torch.bmm(delta.to(queries.dtype).unsqueeze(1), queries)
    if chunks > 1:
        later = torch.bmm(queries.mT, above)
        plan.after[d * e](later, later)
        of_queries.baddbmm_(above, before.mT)
        of_keys.baddbmm_(values, later.mT)
        of_values.baddbmm_(keys, later)
    plan.after[d](rest, rest)
    plan.query_gradients(query, query, of_queries, delta, earlier, grads[0])
    plan.key_gradients(key, key if keep is None else keep, of_keys, delta, rest, grads[1])
    shape = (query.shape[0], query.shape[1], chunks * c, e)
    return [*grads, of_values.view(shape)[:, :, : key.shape[2]]]


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, plan: _Plan) -> Tensor:
        output, *rest = _forward(plan, query, key, value, keep)
        ctx.save_for_backward(query, key, keep, output, *rest)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        query, key, keep, *saved = ctx.saved_tensors
        change = change if change.stride(-1) == 1 else change.contiguous()
        with torch.autocast(query.device.type, enabled=False):  # backward() may be called inside autocast
            return *_backward(ctx.plan, (query, key, keep), tuple(saved), change), None, None


def linear_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    """Return causal linear attention of query (b, h, q, d) over key (b, h, k, d) and value (b, h, k, e), k ≤ q.

    Query i attends to the keys j ≤ i. `keep` (b, h, k) masks keys where it is False.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    keep = None if keep is None else keep.contiguous().view(torch.uint8)
    strides = (query.stride(), key.stride(), value.stride())
    steps = None if keep is None else keep.stride()[:2]
    plan = _plan(_Signature(query.shape, value.shape, strides, steps, CHUNK))
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Products.apply(query, key, value, keep, plan)
    return _forward(plan, query, key, value, keep)[0]
