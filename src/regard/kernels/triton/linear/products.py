"""Linear attention with elu features by PyTorch's matrix products, where every query attends to all keys.

The products S = φ(K)ᵀ V and φ(Q) S take most of the time, and PyTorch computes them fast in float32 and for every size.
The kernels of `elu_rows` run between these products. Query features are divided by the largest of their row, so that
they never overflow. The results must equal `regard.core.linear.linear_attention`.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.linear.elu_rows import elu_features, elu_gradients, quotients, upstream

_BLOCK, _NUMBERS = Block(16, 128, warps=4, stages=1), 4096  # _NUMBERS is the number of entries of a tile


class _Signature(NamedTuple):
    """The properties of a call that determine its kernel launches."""

    query: torch.Size
    value: torch.Size
    strides: tuple[tuple[int, ...], ...]  # strides of query and key
    keep: tuple[int, ...] | None  # strides of the mask of keys


class _Plan:
    """The prepared kernel launches of all calls with the same signature."""

    def __init__(self, call: _Signature) -> None:
        (b, h, q, d), (_, g, k, e) = call.query, call.value
        self.call, self.rows, masked = call, h // g * q, call.keep is not None
        wide = [max(16, 1 << (n - 1).bit_length()) for n in (d, e)]
        tile = max(1, min(64, _NUMBERS // max(wide)))
        key, value = {"SIZE": d, "D": wide[0]}, {"E": e, "EB": wide[1]}
        of_queries = {"QUERIES": True, "KEEP": False, **key, "R": tile}
        of_keys = {"QUERIES": False, "KEEP": masked, **key, "R": tile}
        queries, keys = (-(-q // tile), b * h, 1), (-(-k // tile), b * g, 1)
        whole = (-(-self.rows // tile), b * g, 1)
        at_query = (h, *call.strides[0][:3], 0, 0, q)
        at_key = (g, *call.strides[1][:3], *(call.keep or (0, 0)), k)
        self.queries = Prepared(elu_features, queries, (*at_query, q), of_queries, _BLOCK)
        self.keys = Prepared(elu_features, keys, (*at_key, k), of_keys, _BLOCK)
        self.divide = Prepared(quotients, whole, (self.rows,), {**value, **key, "R": tile}, _BLOCK)
        self.query_gradients = Prepared(elu_gradients, queries, (*at_query, q, h // g, q, d), of_queries, _BLOCK)
        self.key_gradients = Prepared(elu_gradients, keys, (*at_key, k, 1, k, d), of_keys, _BLOCK)
        self.rest = queries, (h, q), {**value, "R": tile}
        # The kernel launches are cached by the strides of the output's gradient.
        self.upstream = functools.lru_cache(maxsize=16)(self._upstream)

    def _upstream(self, change: tuple[int, ...]) -> Prepared:
        grid, (h, q), constants = self.rest
        return Prepared(upstream, grid, (h, *change, q, q), constants, _BLOCK)


_plan = functools.lru_cache(maxsize=512)(_Plan)


def _forward(plan: _Plan, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> tuple[Tensor, ...]:
    """Return the output, φ(q), φ(k), S = Σ φ(k) vᵀ, z = Σ φ(k) and the divisors.

    In all tensors but the output, the query heads that share a key head are joined to one sequence.
    """
    (b, h, q, d), (_, g, k, e) = plan.call.query, plan.call.value
    queries, keys = query.new_empty(b * g, plan.rows, d), key.new_empty(b * g, k, d)
    plan.keys(key, key if keep is None else keep, keys)
    plan.queries(query, query, queries)
    sums, total = torch.bmm(keys.mT, value.reshape(b * g, k, e)), keys.sum(1, dtype=torch.float32)
    above = torch.bmm(queries, sums)
    divisor = total.new_empty(b * g, plan.rows)
    plan.divide(above, queries, total, divisor, above)
    return above.view(b, h, q, e), queries, keys, sums, total, divisor


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, plan: _Plan) -> Tensor:
        output, *rest = _forward(plan, query, key, value, keep)
        ctx.save_for_backward(query, key, value, keep, output, *rest)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep, output, queries, keys, sums, total, divisor = ctx.saved_tensors
        plan: _Plan = ctx.plan
        b, g, k, e = plan.call.value
        change = change if change.stride(-1) == 1 else change.contiguous()
        above, delta = value.new_empty(b * g, plan.rows, e), divisor.new_empty(b * g, 1, plan.rows)
        with torch.autocast(query.device.type, enabled=False):  # backward() may be called inside autocast
            plan.upstream(change.stride()[:3])(change, output, divisor, above, delta)
            grads = [torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (query, key)]
            plan.query_gradients(query, query, torch.bmm(above, sums.mT), delta, total, grads[0])
            later, rest = torch.bmm(queries.mT, above), torch.bmm(delta.to(queries.dtype), queries)
            slope = torch.bmm(value.reshape(b * g, k, e), later.mT)
            plan.key_gradients(key, key if keep is None else keep, slope, delta, rest, grads[1])
            return *grads, torch.bmm(keys, later).view(b, g, k, e), None, None


def linear_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    """Return φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1) for query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e).

    `keep` (b, g, k) masks keys where it is False; the values of masked keys must be finite.
    """
    query, key = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    keep = None if keep is None else keep.contiguous().view(torch.uint8)
    strides = (query.stride(), key.stride())
    plan = _plan(_Signature(query.shape, value.shape, strides, None if keep is None else keep.stride()[:2]))
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _Products.apply(query, key, value, keep, plan)
    return _forward(plan, query, key, value, keep)[0]
