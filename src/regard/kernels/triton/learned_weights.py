"""Softmax attention that returns output and weights, with gradients.

The forward pass is the kernel of `full_weights`. For the backward pass the weights W are in memory, so it consists of
matrix products and one kernel. From the gradients dO of the output and dW of the weights it computes
dP = dO Vᵀ + dW, dS = scale · W ⊙ (dP − rowsum(W ⊙ dP) / rowsum(W)), dQ = dS K, dK = dSᵀ Q and dV = Wᵀ dO.
The results must equal `regard.core.backends.reference` and its gradients.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.additive.pairs import EVERY, Pairs, tile_allowed
from regard.kernels.triton.additive.plan import Block, Prepared
from regard.kernels.triton.full_weights import attended

_NUMBERS = 2048  # the number of pairs that a program computes, unless one row has more
# torch's products of half-precision matrices are slow if rows do not begin at a multiple of 16 bytes. From this number
# of pairs on, rows are padded to a multiple of _ROUND numbers, which costs the host a few more launches.
PADDED, _ROUND = 2**26, 16


@triton.jit
def score_gradients(
    changes, weights, added, gradients, padded, pairs, heads, n_q, n_k, wide, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dS of some rows to `gradients`, whose rows have `wide` numbers; 0 at masked pairs and after the last key.

    `changes` is dO Vᵀ in float32, with rows of `wide` numbers, and `added` is dW; at most one of them is None. Unless
    `padded` is None, it receives a copy of W with rows of `wide` numbers.
    """
    z = tl.program_id(1)
    b, h = z // heads, z % heads
    i, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    row = z.to(tl.int64) * n_q + i
    inside, room = (i < n_q) & (j < n_k), (i < n_q) & (j < wide)
    w = tl.load(weights + row * n_k + j, mask=inside, other=0.0)
    if padded is not None:
        tl.store(padded + row * wide + j, w, mask=room)
    change = tl.zeros((ROWS, BLOCK), tl.float32)
    if changes is not None:
        change += tl.load(changes + row * wide + j, mask=inside, other=0.0)
    if added is not None:
        change += tl.load(added + row * n_k + j, mask=inside, other=0.0).to(tl.float32)
    # A masked value of NaN makes `change` NaN, and a row with NaN has weights of NaN at masked pairs too.
    allowed = tile_allowed(pairs, b, h, i, j, n_q, n_k)
    w, change = tl.where(allowed, w.to(tl.float32), 0.0), tl.where(allowed, change, 0.0)
    # The weights of a row are rounded, so they may not add up to 1.
    total = tl.sum(w, 1)
    mean = tl.sum(w * change, 1) / tl.where(total == 0.0, 1.0, total)
    change = w * (change - mean[:, None]) * scale
    tl.store(gradients + row * wide + j, tl.where(allowed, change, 0.0).to(gradients.dtype.element_ty), mask=room)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The launches of calls with equal shapes, strides and dtypes of query (b, h, q, d), key and value (b, g, k, …)."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    scores: Prepared  # the launch of `score_gradients`
    heads: int  # number of key heads (g)
    wide: int  # number of keys, padded if that makes the matrix products faster
    scale: float
    masked: bool

    def gradients(
        self,
        wanted: tuple[bool, bool, bool],
        doutput: Tensor | None,
        dweights: Tensor | None,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        pairs: Pairs,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the `wanted` gradients of query, key and value; `tensors` are query, key, value and weights."""
        (query, key, value, weights), g, wide = tensors, self.heads, self.wide
        (b, h, q, k), dquery, dkey, dvalue = weights.shape, None, None, None
        # Matrices of one key head have the rows of all query heads that share it.
        links = weights.view(b * g, -1, k)
        change = None if doutput is None else _rows(doutput, b * g)
        if wanted[0] or wanted[1]:
            products, padded = None, None
            if change is not None:
                products = _in_float32(change, _rows(value, b * g, wide).mT)
                padded = weights.new_empty(*links.shape[:2], wide) if wide > k and wanted[2] else None
            dscores = weights.new_empty(*links.shape[:2], wide)
            dweights = None if dweights is None else dweights.contiguous()
            self.scores(products, weights, dweights, dscores, padded, pairs)
            links = links if padded is None else padded
            if wanted[0]:
                dquery = torch.bmm(dscores, _rows(key, b * g, wide, self.masked)).view(b, h, q, -1)
            if wanted[1]:
                dkey = _of_keys(torch.bmm(dscores.mT, _rows(query, b * g, clean=self.masked)), b, g, k)
        if wanted[2] and change is not None:
            dvalue = _of_keys(torch.bmm(links.mT, change), b, g, k)
        return dquery, dkey, dvalue

    def differentiable(
        self, doutput: Tensor | None, dweights: Tensor | None, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return all gradients by torch operations in float32, which autograd can differentiate again."""
        query, key, value, weights = (t.float() for t in tensors)
        if self.masked:
            query, key, value = (torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in (query, key, value))
        (b, h, q, _), g, dtype = weights.shape, self.heads, tensors[0].dtype
        query, weights = (t.reshape(b, g, h // g * q, -1) for t in (query, weights))
        change = torch.zeros_like(weights) if dweights is None else dweights.float().reshape(weights.shape)
        dvalue = None
        if doutput is not None:
            rows = doutput.float().reshape(b, g, h // g * q, -1)
            change, dvalue = change + rows @ value.mT, (weights.mT @ rows).to(dtype)
        total = weights.sum(-1, keepdim=True)
        mean = (weights * change).sum(-1, keepdim=True) / torch.where(total == 0.0, 1.0, total)
        dscores = weights * (change - mean) * self.scale
        return (dscores @ key).to(dtype).reshape(b, h, q, -1), (dscores.mT @ query).to(dtype), dvalue


def _rows(tensor: Tensor, batch: int, wide: int = 0, clean: bool = False) -> Tensor:
    """Return a tensor (b, h, n, size) as (batch, b · h · n / batch, size).

    If `wide` > n, zeros are appended so that each matrix has `wide` rows; `batch` must then be b · h. With `clean`, NaN
    and Inf are replaced by zeros. A copy is made only if one of these, or the memory order, requires it.
    """
    b, h, n, size = tensor.shape
    if wide > n:
        rows = tensor.new_zeros(b, h, wide, size)
        part = rows[:, :, :n]
    elif clean:
        part = rows = tensor.new_empty(b, h, n, size)
    else:
        return tensor.reshape(batch, b * h * n // batch, size)
    if clean:
        torch.nan_to_num(tensor, 0.0, 0.0, 0.0, out=part)
    else:
        part.copy_(tensor)
    return rows.view(batch, b * h * rows.shape[2] // batch, size)


def _in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32: in float16 a product of gradients could overflow, and differences of products
    lose digits."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def _of_keys(tensor: Tensor, b: int, g: int, keys: int) -> Tensor:
    """Return a tensor (b · g, n, size) as (b, g, keys, size), without the rows of padding."""
    tensor = tensor.view(b, g, *tensor.shape[1:])
    return tensor if tensor.shape[2] == keys else tensor[:, :, :keys]


class _Learned(torch.autograd.Function):
    """The autograd function of output and weights.

    With `create_graph=True` torch operations compute the gradients, so that second derivatives exist.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, pairs: Pairs, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        output, weights = plan.forward(query, key, value, pairs)
        # Saved tensors are checked for changes in place. Tensors made in inference mode cannot be saved.
        own = {} if pairs is EVERY else {name: x for name, x in pairs._asdict().items() if _can_be_saved(x)}
        ctx.plan, ctx.names, ctx.pairs = plan, tuple(own), pairs._replace(**dict.fromkeys(own)) if own else pairs
        ctx.save_for_backward(query, key, value, weights, *own.values())
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[2:4]):
            ctx.mark_non_differentiable(weights)
        return output, weights

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        (doutput, dweights), wanted = upstream, ctx.needs_input_grad[2:]
        if doutput is None and dweights is None:
            return (None,) * 5
        query, key, value, weights, *own = ctx.saved_tensors
        tensors = query, key, value, weights
        casting = torch.is_autocast_enabled(query.device.type)
        with torch.autocast(query.device.type, enabled=False) if casting else nullcontext():
            if torch.is_grad_enabled():
                grads = ctx.plan.differentiable(doutput, dweights, tensors)
                return None, None, *(grad if needed else None for grad, needed in zip(grads, wanted, strict=True))
            pairs = ctx.pairs._replace(**dict(zip(ctx.names, own, strict=True))) if own else ctx.pairs
            return None, None, *ctx.plan.gradients(wanted, doutput, dweights, tensors, pairs)


def _can_be_saved(thing: object) -> bool:
    return isinstance(thing, Tensor) and not thing.is_inference()


def learned(
    query: Tensor, key: Tensor, value: Tensor, scale: float, masked: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of (query, key, value, pairs) that returns output and weights, both differentiable.

    The function accepts tensors of the same shapes, strides and dtype as query (b, h, q, d), key (b, g, k, d) and value
    (b, g, k, e), all in half precision; d and e are at most 128, and the last axes are contiguous. A row of k numbers
    must fit the registers of a program (k ≤ 8192). `pairs` must be `EVERY` unless `masked`, and have no bias.
    """
    (b, h, q, _), (_, g, k, _) = query.shape, key.shape
    wide = k if b * h * q * k < PADDED else -(-k // _ROUND) * _ROUND
    numbers = max(16, triton.next_power_of_2(wide))
    rows = max(1, min(_NUMBERS // numbers, triton.next_power_of_2(q)))
    block = Block(rows, numbers, warps=8 if numbers > 2 * _NUMBERS else 4)
    constants = {"ROWS": block.rows, "BLOCK": block.columns}
    scores = Prepared(score_gradients, (-(-q // rows), b * h, 1), (h, q, k, wide, float(scale)), constants, block)
    plan = _Plan(attended(query, key, value, scale, query.dtype, masked), scores, g, wide, scale, masked)

    def computed(query: Tensor, key: Tensor, value: Tensor, pairs: Pairs = EVERY) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], _Learned.apply(plan, pairs, query, key, value))

    return computed
