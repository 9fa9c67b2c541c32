"""Attention of a beam's hypotheses over the keys of their sequence: a program computes one head of one sequence.

The hypotheses share their keys, so keys are loaded once; a bias masks those that a hypothesis may not attend. If the
time step is given as a tensor on the device, keys of later steps are not loaded. `added_norm` adds a residual and
applies layer norm.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS = 64  # number of keys that a program loads at a time
_LEAST = 16  # smallest number of rows of a matrix product in Triton


@triton.jit
def _attend(
    query, key, value, bias, time, out, scale, heads, slots, keys,
    qb, qh, qs, kb, kh, kn, vb, vh, vn, bb, bs,
    SIZE: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, BIASED: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = tl.program_id(0) % heads
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, BK)
    c = tl.arange(0, D)[None, :]
    q = tl.load(query + b * qb + h * qh + i * qs + c, mask=(i < slots) & (c < SIZE), other=0.0)
    written = keys
    if TIMED:
        written = tl.minimum(keys, (tl.load(time).to(tl.int32) + 1) * slots)
    high = tl.full([S], -float("inf"), tl.float32)
    total = tl.zeros([S], tl.float32)
    found = tl.zeros([S, D], tl.float32)
    for start in range(0, written, BK):
        n = start + j
        inside = n < written
        cells = n[:, None].to(tl.int64)
        real = inside[:, None] & (c < SIZE)
        k = tl.load(key + b * kb + h * kh + cells * kn + c, mask=real, other=0.0)
        v = tl.load(value + b * vb + h * vh + cells * vn + c, mask=real, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if BIASED:
            s += tl.load(bias + b * bb + i * bs + n[None, :], mask=(i < slots) & inside[None, :], other=0.0)
        s = tl.where(inside[None, :], s, -float("inf"))
        top = tl.maximum(high, tl.max(s, 1))
        base = tl.where(top == -float("inf"), 0.0, top)  # `top` is -inf if all keys so far are masked
        p = tl.exp(s - base[:, None])
        faded = tl.exp(high - base)
        total = total * faded + tl.sum(p, 1)
        found = found * faded[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        high = top
    found = found / total[:, None]
    place = out + ((b * slots + i) * heads + h) * SIZE + c
    tl.store(place, found.to(out.dtype.element_ty), mask=(i < slots) & (c < SIZE))


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, scale: float, time: Tensor | None = None
) -> Tensor:
    """Return attention (b, s, h·d) of query (b, h, s, d) over key and value (b, h, n, d), with bias (b, 1, s or 1, n).

    With `time`, only the first (time + 1) · s keys are used: s for each step up to and including `time`. Reference
    implementation: `torch.nn.functional.scaled_dot_product_attention` with the bias as its mask.
    """
    rows, heads, slots, size = query.shape
    keys = key.shape[2]
    query, key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (query, key, value))
    out = torch.empty(rows, slots, heads * size, dtype=query.dtype, device=query.device)
    biased = query if bias is None else bias
    shared = bias is None or bias.shape[2] == 1
    _attend[(rows * heads,)](
        *(query, key, value, biased, query if time is None else time, out, scale, heads, slots, keys),
        *(query.stride(0), query.stride(1), query.stride(2)),
        *(key.stride(0), key.stride(1), key.stride(2), value.stride(0), value.stride(1), value.stride(2)),
        *(biased.stride(0), 0 if shared else biased.stride(2)),
        SIZE=size, D=max(_LEAST, triton.next_power_of_2(size)), S=max(_LEAST, triton.next_power_of_2(slots)),
        BK=_KEYS, BIASED=bias is not None, TIMED=time is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _added_norm(x, added, weight, bias, out, size, eps, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < size
    s = tl.load(x + row * size + c, mask=inside, other=0.0).to(tl.float32)
    s += tl.load(added + row * size + c, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(s, 0) / size
    centred = tl.where(inside, s - mean, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, 0) / size + eps)
    y = centred / deviation * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        y += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + c, y.to(out.dtype.element_ty), mask=inside)


def added_norm(x: Tensor, added: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    """Return norm(x + added) over the last axis; the sum is not rounded to the input's dtype."""
    x, added = x.contiguous(), added.contiguous()
    out, size = torch.empty_like(added), x.shape[-1]
    biased = norm.bias is not None
    _added_norm[(x.numel() // size,)](
        *(x, added, norm.weight, norm.bias if biased else norm.weight, out, size, norm.eps),
        BIASED=biased, BLOCK=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    return out
