"""Attention over short sequences, one tile for each head.

P = softmax(scale · Q Kᵀ) and O = (P ⊙ M) V with the dropout mask M. Only the inputs and the seed are saved for the
backward pass, which computes P and M again.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.derivatives import REFERENCE, once_only
from regard.kernels.triton.additive.plan import Block, Prepared


@triton.jit
def _mixed(x):
    """Return a 32-bit hash of x: two multiplications make each of its bits depend on every bit of x."""
    x = x ^ (x >> 16)
    x = x * tl.full((), 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _kept(seed, head, BQ: tl.constexpr, BK: tl.constexpr, dropout):
    """Return the dropout mask of a head: 0 for the pairs (i, j) that are dropped, 1 / (1 - dropout) for all others.

    The mask is a hash of seed, head, i and j, because the forward and the backward kernel must drop the same pairs,
    whatever the layout of their tiles. Triton's generator with four random numbers per call, interleaved by join and
    reshape, was as fast and gave the same mask in both kernels in the interpreter, but on a GPU a model did not learn
    with it.
    """
    i = tl.arange(0, BQ)[:, None]
    j = tl.arange(0, BK)[None, :]
    pair = ((head * BQ + i) * BK + j).to(tl.uint32)
    low = seed.to(tl.uint32)
    drawn = _mixed(_mixed(pair + low) ^ (low * tl.full((), 0x9E3779B9, tl.uint32)))
    return tl.where((drawn >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _open(
    lengths, mask, b, queries, keys, CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BK: tl.constexpr
):
    """Return for each key whether some query may attend to it.

    Keys that no query may attend, and their values, are never loaded, so that not even NaN in them changes the output.
    """
    j = tl.arange(0, BK)
    inside = j < keys
    if CAUSAL:
        inside = inside & (j < queries)
    if PADDED:
        inside = inside & (j < tl.load(lengths + b))
    if MASKED:
        inside = inside & (tl.load(mask + b * keys + j, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _weights(q, k, inside, scale, CAUSAL: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    """Return the softmax of the scores, which is 0 for rows whose keys are all masked."""
    i = tl.arange(0, BQ)[:, None]
    j = tl.arange(0, BK)[None, :]
    seen = inside[None, :] & (i >= 0)
    if CAUSAL:
        seen = seen & (j <= i)
    s = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -float("inf"))
    high = tl.max(s, 1)
    high = tl.where(high == -float("inf"), 0.0, high)
    p = tl.exp(s - high[:, None])
    total = tl.sum(p, 1)
    return p / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _rows(base, stride, inside, D: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)[:, None]
    c = tl.arange(0, D)[None, :]
    return tl.load(base + i * stride + c, mask=inside[:, None] & (c < SIZE), other=0.0)


@triton.jit
def _put(base, stride, length, x, D: tl.constexpr, SIZE: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)[:, None]
    c = tl.arange(0, D)[None, :]
    tl.store(base + i * stride + c, x.to(base.dtype.element_ty), mask=(i < length) & (c < SIZE))


@triton.jit
def _forward(
    query, key, value, output, lengths, mask, seed,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    heads, queries, keys, scale, dropout,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, DROP: tl.constexpr,
    D: tl.constexpr, SIZE: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    asking = tl.arange(0, BQ) < queries
    inside = _open(lengths, mask, b, queries, keys, CAUSAL, PADDED, MASKED, BK)
    q = _rows(query + b * qb + h * qh, qn, asking, D, SIZE, BQ)
    k = _rows(key + b * kb + h * kh, kn, inside, D, SIZE, BK)
    v = _rows(value + b * vb + h * vh, vn, inside, D, SIZE, BK)
    p = _weights(q, k, inside, scale, CAUSAL, BQ, BK)
    if DROP:
        p = p * _kept(tl.load(seed), head, BQ, BK, dropout)
    _put(output + b * ob + h * oh, on, queries, tl.dot(p.to(v.dtype), v, input_precision="ieee"), D, SIZE, BQ)


@triton.jit
def _backward(
    query, key, value, grad, lengths, mask, seed, to_query, to_key, to_value,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, ab, ah, an, cb, ch, cn,
    heads, queries, keys, scale, dropout,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, DROP: tl.constexpr,
    D: tl.constexpr, SIZE: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    asking = tl.arange(0, BQ) < queries
    inside = _open(lengths, mask, b, queries, keys, CAUSAL, PADDED, MASKED, BK)
    q = _rows(query + b * qb + h * qh, qn, asking, D, SIZE, BQ)
    k = _rows(key + b * kb + h * kh, kn, inside, D, SIZE, BK)
    v = _rows(value + b * vb + h * vh, vn, inside, D, SIZE, BK)
    g = _rows(grad + b * gb + h * gh, gn, asking, D, SIZE, BQ)
    p = _weights(q, k, inside, scale, CAUSAL, BQ, BK)
    dp = tl.dot(g, tl.trans(v), input_precision="ieee")
    dropped = p
    if DROP:
        kept = _kept(tl.load(seed), head, BQ, BK, dropout)
        dp = dp * kept
        dropped = p * kept
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
    dv = tl.dot(tl.trans(dropped).to(g.dtype), g, input_precision="ieee")
    _put(to_query + b * ab + h * ah, an, queries, tl.dot(ds, k, input_precision="ieee"), D, SIZE, BQ)
    _put(to_key + b * cb + h * ch, cn, keys, tl.dot(tl.trans(ds), q, input_precision="ieee"), D, SIZE, BK)
    _put(to_value + b * cb + h * ch, cn, keys, dv, D, SIZE, BK)


def short_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    causal: bool,
    dropout: float,
) -> Tensor:
    """Return attention (b, h, q, d) of query (b, h, q, d) over key and value (b, h, k, d).

    lengths (b,) and mask (b, k) select the keys that may be attended; seed (1,) is that of dropout. A query whose keys
    are all masked gives zeros. Reference implementation: `torch.nn.functional.scaled_dot_product_attention`.
    """
    arguments = (query, key, value, lengths, mask, seed, float(scale), causal, float(dropout))
    if torch.compiler.is_compiling():
        return _operator(*arguments)
    learning = query.requires_grad or key.requires_grad or value.requires_grad
    return _Short.apply(*arguments) if learning and torch.is_grad_enabled() else _attended(*arguments)


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    causal: bool,
    dropout: float,
) -> Tensor:
    query, key, value = _plain(query), _plain(key), _plain(value)
    output, k = _like_rows(query), key.shape[2]
    lengths, mask = _packed(lengths), _bytes(mask)
    places = query.stride(), key.stride(), value.stride(), output.stride()
    run = _prepared(_forward, places, query.shape, k, scale, dropout, causal, lengths is not None, mask is not None)
    run(query, key, value, output, lengths, mask, seed, known=_known(lengths, mask, query, key, value))
    return output


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, grad = _plain(query), _plain(key), _plain(value), _plain(grad)
    to_query, to_key, to_value = _like_rows(query), _like_rows(key), _like_rows(value)
    lengths, mask, k = _packed(lengths), _bytes(mask), key.shape[2]
    places = query.stride(), key.stride(), value.stride(), grad.stride(), to_query.stride(), to_key.stride()
    run = _prepared(_backward, places, query.shape, k, scale, dropout, causal, lengths is not None, mask is not None)
    known = _known(lengths, mask, query, key, value, grad)
    run(query, key, value, grad, lengths, mask, seed, to_query, to_key, to_value, known=known)
    return to_query, to_key, to_value


class _Short(torch.autograd.Function):
    """Short attention for eager calls, which avoid the custom operator: calling it takes a tenth of a millisecond."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs[:6])
        ctx.settings = inputs[6:]
        return _attended(*inputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        once_only("backend 'short'", REFERENCE)
        query, key, value, lengths, mask, seed = ctx.saved_tensors
        return *_gradients(query, key, value, upstream[0], lengths, mask, seed, *ctx.settings), *(None,) * 6


_operator = torch.library.custom_op("regard::short_attention", _attended, mutates_args=())
_backward_operator = torch.library.custom_op("regard::short_attention_backward", _gradients, mutates_args=())


@_operator.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return _like_rows(query)


@_backward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like_rows(query), _like_rows(key), _like_rows(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, lengths, mask, seed = ctx.saved_tensors
    grads = _backward_operator(query, key, value, grad, lengths, mask, seed, *ctx.settings)
    return *grads, *(None,) * 6


_operator.register_autograd(_differentiate, setup_context=_keep)


@functools.lru_cache(maxsize=1024)
def _tiles(size: int, queries: int, keys: int) -> tuple[Block, dict[str, int]]:
    """Return launch options and tile sizes: powers of two, at least 16. Tiles of at most 32 rows use one warp."""
    sides = [max(16, triton.next_power_of_2(n)) for n in (size, queries, keys)]
    warps = 1 if max(sides[1:]) <= 32 else 4
    return Block(*sides[1:], warps=warps), {"D": sides[0], "SIZE": size, "BQ": sides[1], "BK": sides[2]}


@functools.lru_cache(maxsize=1024)
def _prepared(
    kernel: Any, places: tuple[tuple[int, ...], ...], shape: tuple[int, ...], keys: int, scale: float, dropout: float,
    causal: bool, padded: bool, masked: bool,
) -> Prepared:  # fmt: skip
    """Return the prepared launch of a kernel, for queries of this shape and tensors with the strides `places`."""
    b, h, q, d = shape
    block, sides = _tiles(d, q, keys)
    numbers = *(step for place in places for step in place[:3]), h, q, keys, scale, dropout
    flags = {"CAUSAL": causal, "PADDED": padded, "MASKED": masked, "DROP": dropout > 0.0}
    return Prepared(kernel, (b * h, 1, 1), numbers, flags | sides, block)


def _known(lengths: Tensor | None, mask: Tensor | None, *tensors: Tensor) -> tuple[Any, ...] | None:
    """Return a cache key for the properties of all tensors that select the compiled kernel.

    Return None if the launch must inspect the tensors: if `mask` is given, or one of `tensors` is not aligned to 16
    bytes. The cache key needs no entry for tensors that are allocated for the call, because they are always aligned.
    """
    if mask is not None or any(tensor.data_ptr() & 15 for tensor in tensors):
        return None
    return tensors[0].dtype, None if lengths is None else (lengths.dtype, lengths.data_ptr() & 15)


def _plain(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _packed(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor in contiguous memory, as the kernel requires."""
    return None if tensor is None else tensor.contiguous()


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _like_rows(x: Tensor) -> Tensor:
    """Return an empty tensor (b, h, n, d) in memory order (b, n, h, d), in which the next layer can merge the heads
    without a copy."""
    b, h, n, d = x.shape
    return torch.empty_strided((b, h, n, d), (n * h * d, d, h * d, 1), dtype=x.dtype, device=x.device)
