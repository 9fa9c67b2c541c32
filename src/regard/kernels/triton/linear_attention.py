"""Linear attention with elu features, full and causal, forward and backward, in chunks of positions.

With φ(x) = elu(x) + 1, weights a_ij = φ(q_i)·φ(k_j) and sums over the keys that query i attends,

    n_i = Σ_j a_ij v_j    d_i = Σ_j a_ij    output_i = n_i / d_i

The keys before a chunk enter as their sum S = Σ φ(k_j) v_jᵀ, z = Σ φ(k_j); those of the chunk itself pair by pair. In
the backward pass, with δ_i = do_i · output_i, the gradients of earlier keys use the sums over the queries,
T = Σ φ(q_i)/d_i do_iᵀ and t = −Σ φ(q_i)/d_i δ_i. Sums are in float32; a query's features are divided by the largest of
them, which cancels. Must equal `regard.core.linear.linear_attention`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.triton.additive.pairs import product
from regard.kernels.triton.additive.plan import Block, launch

_STATE_BYTES = 256 << 20  # limit for the sums of all chunks; beyond it, chunks become larger
_BLOCK = Block(64, 64, warps=4, stages=2)


@triton.jit
def _features(x):
    """Return elu(x) + 1 without cancellation near −1."""
    return tl.exp(tl.minimum(x, 0.0)) + tl.maximum(x, 0.0)


@triton.jit
def _load(base, row, inside, step, SIZE: tl.constexpr, D: tl.constexpr):
    """Return rows of a matrix in float32, 0 outside of its bounds."""
    c = tl.arange(0, D)
    at = base + row.to(tl.int64)[:, None] * step + c[None, :]
    return tl.load(at, mask=inside[:, None] & (c < SIZE)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _key_rows(base, keep, row, n, step, KEEP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr):
    """Return keys or values of some positions, and which positions exist and are not masked."""
    inside = row < n
    if KEEP:
        inside = inside & (tl.load(keep + row, mask=inside, other=0) != 0)
    return _load(base, row, inside, step, SIZE, D), inside


@triton.jit
def _mapped_keys(x, inside, SIZE: tl.constexpr, D: tl.constexpr):
    c = tl.arange(0, D)
    return tl.where(inside[:, None] & (c < SIZE)[None, :], _features(x), 0.0)


@triton.jit
def _mapped_queries(x, SIZE: tl.constexpr, D: tl.constexpr):
    """Return features of queries scaled so that the largest of each row is 1, and the divisor."""
    c = tl.arange(0, D)
    mapped = tl.where((c < SIZE)[None, :], _features(x), 0.0)
    largest = tl.max(mapped, 1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    return mapped / largest[:, None], largest


@triton.jit
def _state(sums, totals, slot, M: tl.constexpr, E: tl.constexpr, D: tl.constexpr, EB: tl.constexpr):
    """Return the sum of some chunks: (D, EB) and (D,)."""
    m = tl.arange(0, D)
    e = tl.arange(0, EB)
    at = sums + slot.to(tl.int64) * (M * E) + m[:, None] * E + e[None, :]
    state = tl.load(at, mask=(m < M)[:, None] & (e < E)[None, :], other=0.0)
    return state, tl.load(totals + slot.to(tl.int64) * M + m, mask=m < M, other=0.0)


@triton.jit
def _put_state(sums, totals, slot, state, total, M: tl.constexpr, E: tl.constexpr, D: tl.constexpr, EB: tl.constexpr):
    m = tl.arange(0, D)
    e = tl.arange(0, EB)
    at = sums + slot.to(tl.int64) * (M * E) + m[:, None] * E + e[None, :]
    tl.store(at, state, mask=(m < M)[:, None] & (e < E)[None, :])
    tl.store(totals + slot.to(tl.int64) * M + m, total, mask=m < M)


@triton.jit
def key_sums(
    key, value, keep, sums, totals, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h, groups, n_k, chunk, slots, first,
    KEEP: tl.constexpr, M: tl.constexpr, E: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, EB: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute S and z of each chunk of keys, stored from slot `first` on."""
    c, y = tl.program_id(0), tl.program_id(1)
    b, g = (y // groups).to(tl.int64), y % groups
    key += b * k_b + g * k_h
    value += b * v_b + g * v_h
    keep += b * m_b + g * m_h
    state = tl.zeros((D, EB), tl.float32)
    total = tl.zeros((D,), tl.float32)
    for j0 in range(c * chunk, tl.minimum(c * chunk + chunk, n_k), BN):
        j = j0 + tl.arange(0, BN)
        k, inside = _key_rows(key, keep, j, n_k, k_n, KEEP, M, D)
        v, _present = _key_rows(value, keep, j, n_k, v_n, KEEP, E, EB)
        k = _mapped_keys(k, inside, M, D)
        total += tl.sum(k, 0)
        state = product(tl.trans(k.to(DOT)), v.to(DOT), state, PRECISION)
    _put_state(sums, totals, y * slots + first + c, state, total, M, E, D, EB)


@triton.jit
def read(
    query, key, value, keep, sums, totals, output, divisor, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h,
    heads, group, n_q, n_k, chunk, chunks, slots,
    CAUSAL: tl.constexpr, KEEP: tl.constexpr, M: tl.constexpr, E: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute output_i and d_i."""
    i0, z = tl.program_id(0) * BM, tl.program_id(1)
    b, h = z // heads, z % heads
    y = b * (heads // group) + h // group
    i = i0 + tl.arange(0, BM)
    q = _load(query + b.to(tl.int64) * q_b + h * q_h, i, i < n_q, q_n, M, D)
    q, _largest = _mapped_queries(q, M, D)
    c = 0
    if CAUSAL:
        c = tl.minimum(i0 // chunk, chunks)
    state, total = _state(sums, totals, y * slots + c, M, E, D, EB)
    acc = product(q, state, tl.zeros((BM, EB), tl.float32), WHOLE)
    d = tl.sum(q * total[None, :], 1)
    if CAUSAL:
        key += b.to(tl.int64) * k_b + (h // group) * k_h
        value += b.to(tl.int64) * v_b + (h // group) * v_h
        keep += b.to(tl.int64) * m_b + (h // group) * m_h
        for j0 in range(c * chunk, tl.minimum(i0 + BM, n_k), BN):
            j = j0 + tl.arange(0, BN)
            k, inside = _key_rows(key, keep, j, n_k, k_n, KEEP, M, D)
            v, _present = _key_rows(value, keep, j, n_k, v_n, KEEP, E, EB)
            a = product(q.to(DOT), tl.trans(_mapped_keys(k, inside, M, D).to(DOT)), tl.zeros((BM, BN), tl.float32),
                        PRECISION)  # fmt: skip
            a = tl.where(j[None, :] <= i[:, None], a, 0.0)
            d += tl.sum(a, 1)
            acc = product(a.to(DOT), v.to(DOT), acc, PRECISION)
    acc = tl.where((d == 0.0)[:, None], 0.0, acc / tl.where(d == 0.0, 1.0, d)[:, None])
    e = tl.arange(0, EB)
    row = z.to(tl.int64) * n_q + i
    inside = (i < n_q)[:, None] & (e < E)[None, :]
    tl.store(output + row[:, None] * E + e[None, :], acc.to(output.dtype.element_ty), mask=inside)
    tl.store(divisor + row, d, mask=i < n_q)


@triton.jit
def _upstream(change, output, at, row, inside, c_n, E: tl.constexpr, EB: tl.constexpr):
    """Return do and δ of some rows."""
    do = _load(change, at, inside, c_n, E, EB)
    o = _load(output, row, inside, E, E, EB)
    return do, tl.sum(do * o, 1)


@triton.jit
def query_sums(
    query, change, output, divisor, sums, totals, q_b, q_h, q_n, c_b, c_h, c_n, heads, group, n_q, chunk, chunks, slots,
    first, CAUSAL: tl.constexpr, M: tl.constexpr, E: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute T and t of each chunk of queries; for a causal mask in reverse order, for a running sum from the end."""
    c, y = tl.program_id(0), tl.program_id(1)
    groups = heads // group
    b, g = y // groups, y % groups
    state = tl.zeros((D, EB), tl.float32)
    total = tl.zeros((D,), tl.float32)
    for r in range(group):
        h = g * group + r
        own = query + b.to(tl.int64) * q_b + h * q_h
        above = change + b.to(tl.int64) * c_b + h * c_h
        for i0 in range(c * chunk, tl.minimum(c * chunk + chunk, n_q), BM):
            i = i0 + tl.arange(0, BM)
            row = (b * heads + h).to(tl.int64) * n_q + i
            q, _largest = _mapped_queries(_load(own, i, i < n_q, q_n, M, D), M, D)
            d = tl.load(divisor + row, mask=i < n_q, other=0.0)
            q = tl.where((d == 0.0)[:, None], 0.0, q / tl.where(d == 0.0, 1.0, d)[:, None])
            do, delta = _upstream(above, output, i, row, i < n_q, c_n, E, EB)
            total -= tl.sum(q * delta[:, None], 0)
            state = product(tl.trans(q.to(DOT)), do.to(DOT), state, PRECISION)
    slot = c
    if CAUSAL:
        slot = chunks - 1 - c
    _put_state(sums, totals, y * slots + first + slot, state, total, M, E, D, EB)


@triton.jit
def query_gradients(
    query, key, value, keep, change, output, divisor, sums, totals, grad, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    m_b, m_h, c_b, c_h, c_n, heads, group, n_q, n_k, chunk, chunks, slots,
    CAUSAL: tl.constexpr, KEEP: tl.constexpr, M: tl.constexpr, E: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i0, z = tl.program_id(0) * BM, tl.program_id(1)
    b, h = z // heads, z % heads
    y = b * (heads // group) + h // group
    i = i0 + tl.arange(0, BM)
    row = z.to(tl.int64) * n_q + i
    x = _load(query + b.to(tl.int64) * q_b + h * q_h, i, i < n_q, q_n, M, D)
    _mapped, largest = _mapped_queries(x, M, D)
    do, delta = _upstream(change + b.to(tl.int64) * c_b + h * c_h, output, i, row, i < n_q, c_n, E, EB)
    c = 0
    if CAUSAL:
        c = tl.minimum(i0 // chunk, chunks)
    state, total = _state(sums, totals, y * slots + c, M, E, D, EB)
    acc = product(do, tl.trans(state), tl.zeros((BM, D), tl.float32), WHOLE) - delta[:, None] * total[None, :]
    if CAUSAL:
        key += b.to(tl.int64) * k_b + (h // group) * k_h
        value += b.to(tl.int64) * v_b + (h // group) * v_h
        keep += b.to(tl.int64) * m_b + (h // group) * m_h
        for j0 in range(c * chunk, tl.minimum(i0 + BM, n_k), BN):
            j = j0 + tl.arange(0, BN)
            k, inside = _key_rows(key, keep, j, n_k, k_n, KEEP, M, D)
            v, _present = _key_rows(value, keep, j, n_k, v_n, KEEP, E, EB)
            da = product(do.to(DOT), tl.trans(v.to(DOT)), tl.zeros((BM, BN), tl.float32), PRECISION) - delta[:, None]
            da = tl.where(j[None, :] <= i[:, None], da, 0.0)
            acc = product(da.to(DOT), _mapped_keys(k, inside, M, D).to(DOT), acc, PRECISION)
    d = tl.load(divisor + row, mask=i < n_q, other=0.0)
    # The largest feature divides the features, so it divides d too: (acc / d) / largest is the gradient of φ(q).
    acc = tl.where((d == 0.0)[:, None], 0.0, acc / (tl.where(d == 0.0, 1.0, d) * largest)[:, None])
    acc *= tl.exp(tl.minimum(x, 0.0))
    m = tl.arange(0, D)
    inside = (i < n_q)[:, None] & (m < M)[None, :]
    tl.store(grad + row[:, None] * M + m[None, :], acc.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def key_gradients(
    query, key, value, keep, change, output, divisor, sums, totals, key_grad, value_grad, q_b, q_h, q_n, k_b, k_h, k_n,
    v_b, v_h, v_n, m_b, m_h, c_b, c_h, c_n, heads, group, n_q, n_k, chunk, chunks, slots,
    CAUSAL: tl.constexpr, KEEP: tl.constexpr, M: tl.constexpr, E: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, EB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    j0, y = tl.program_id(0) * BN, tl.program_id(1)
    groups = heads // group
    b, g = y // groups, y % groups
    j = j0 + tl.arange(0, BN)
    keep += b.to(tl.int64) * m_b + g * m_h
    x, inside = _key_rows(key + b.to(tl.int64) * k_b + g * k_h, keep, j, n_k, k_n, KEEP, M, D)
    v, _present = _key_rows(value + b.to(tl.int64) * v_b + g * v_h, keep, j, n_k, v_n, KEEP, E, EB)
    k = _mapped_keys(x, inside, M, D)
    slot = 0
    c = j0 // chunk
    if CAUSAL:  # add the sum of later chunks; there is none if there are fewer queries than keys
        slot = tl.maximum(chunks - 1 - c, 0)
    state, total = _state(sums, totals, y * slots + slot, M, E, D, EB)
    grad_k = product(v, tl.trans(state), tl.zeros((BN, D), tl.float32), WHOLE) + total[None, :]
    grad_v = product(k, state, tl.zeros((BN, EB), tl.float32), WHOLE)
    if CAUSAL:
        for r in range(group):
            h = g * group + r
            own = query + b.to(tl.int64) * q_b + h * q_h
            above = change + b.to(tl.int64) * c_b + h * c_h
            for i0 in range(j0 // BM * BM, tl.minimum(c * chunk + chunk, n_q), BM):
                i = i0 + tl.arange(0, BM)
                row = (b * heads + h).to(tl.int64) * n_q + i
                q, _largest = _mapped_queries(_load(own, i, i < n_q, q_n, M, D), M, D)
                d = tl.load(divisor + row, mask=i < n_q, other=0.0)
                q = tl.where((d == 0.0)[:, None], 0.0, q / tl.where(d == 0.0, 1.0, d)[:, None])
                do, delta = _upstream(above, output, i, row, i < n_q, c_n, E, EB)
                seen = j[:, None] <= i[None, :]
                a = product(k.to(DOT), tl.trans(q.to(DOT)), tl.zeros((BN, BM), tl.float32), PRECISION)
                grad_v = product(tl.where(seen, a, 0.0).to(DOT), do.to(DOT), grad_v, PRECISION)
                da = product(v.to(DOT), tl.trans(do.to(DOT)), tl.zeros((BN, BM), tl.float32), PRECISION)
                da = tl.where(seen, da - delta[None, :], 0.0)
                grad_k = product(da.to(DOT), q.to(DOT), grad_k, PRECISION)
    grad_k = tl.where(inside[:, None], grad_k * tl.exp(tl.minimum(x, 0.0)), 0.0)
    grad_v = tl.where(inside[:, None], grad_v, 0.0)
    m, e = tl.arange(0, D), tl.arange(0, EB)
    row = y.to(tl.int64) * n_k + j
    at = key_grad + row[:, None] * M + m[None, :]
    tl.store(at, grad_k.to(key_grad.dtype.element_ty), mask=(j < n_k)[:, None] & (m < M)[None, :])
    at = value_grad + row[:, None] * E + e[None, :]
    tl.store(at, grad_v.to(value_grad.dtype.element_ty), mask=(j < n_k)[:, None] & (e < E)[None, :])


class _Sizes(NamedTuple):
    """The lengths of a call and the sizes of its chunks."""

    b: int
    h: int
    g: int
    q: int
    k: int
    chunk: int
    causal: bool

    @classmethod
    def of(cls, query: Tensor, value: Tensor, causal: bool) -> "_Sizes":
        (b, h, q, d), (_, g, k, e) = query.shape, value.shape
        longest = max(q, k)
        if not causal:  # a few large chunks, enough to keep the device busy
            return cls(b, h, g, q, k, max(256, -(-longest // 64 // 64) * 64), causal)
        chunk = 128
        while b * g * (longest // chunk + 1) * d * e * 4 > _STATE_BYTES and chunk < longest:
            chunk *= 2
        return cls(b, h, g, q, k, chunk, causal)

    def chunks(self, length: int) -> int:
        return -(-length // self.chunk)


def _summed(sums: Tensor, causal: bool) -> Tensor:
    """Return running sums over the chunks before each, or one sum if every query attends all keys."""
    return sums.cumsum(1) if causal else sums.sum(1, keepdim=True)


def _rooms(sizes: _Sizes, length: int, m: int, e: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the sums of chunks; for a causal mask the first one is 0."""
    slots = sizes.chunks(length) + sizes.causal
    rooms = [torch.empty(sizes.b * sizes.g, slots, *shape, device=like.device) for shape in ((m, e), (m,))]
    if sizes.causal:
        for room in rooms:
            room[:, 0] = 0
    return rooms[0], rooms[1]


def _constants(query: Tensor, value: Tensor) -> dict[str, Any]:
    dot, precision = tl.float32, "ieee"
    if not query.is_cuda:
        precision = "interpreted"
    elif query.dtype == torch.bfloat16:
        dot = tl.bfloat16
    elif query.dtype == torch.float16:  # the sums would overflow float16
        precision = "tf32"
    whole = "interpreted" if not query.is_cuda else "ieee" if query.dtype == torch.float32 else "tf32"
    m, e = query.shape[-1], value.shape[-1]
    wide = [max(16, 1 << (n - 1).bit_length()) for n in (m, e)]
    return {"M": m, "E": e, "DOT": dot, "PRECISION": precision, "WHOLE": whole, "D": wide[0], "EB": wide[1]}


def _place(*tensors: Tensor) -> list[int]:
    return [step for t in tensors for step in t.stride()[:3]]


def _without(constants: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in constants.items() if name not in names}


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        sizes, constants, block = _Sizes.of(query, value, causal), _constants(query, value), _BLOCK
        (b, h, g, q, k), m, e = sizes[:5], query.shape[-1], value.shape[-1]
        hidden = key if keep is None else keep
        steps = (0, 0) if keep is None else keep.stride()[:2]
        chunks = sizes.chunks(k)
        sums, totals = _rooms(sizes, k, m, e, query)
        launch(
            key_sums, (chunks, b * g, 1), key, value, hidden, sums, totals, *_place(key, value), *steps, g, k,
            sizes.chunk, sums.shape[1], int(causal), **_without(constants, "WHOLE"), KEEP=keep is not None,
            BN=block.columns, block=block,
        )  # fmt: skip
        sums, totals = _summed(sums, causal), _summed(totals, causal)
        output = torch.empty(b, h, q, e, device=query.device, dtype=query.dtype)
        divisor = torch.empty(b, h, q, device=query.device)
        launch(
            read, (-(-q // block.rows), b * h, 1), query, key, value, hidden, sums, totals, output, divisor,
            *_place(query, key, value), *steps, h, h // g, q, k, sizes.chunk, chunks, sums.shape[1], **constants,
            CAUSAL=causal, KEEP=keep is not None, BM=block.rows, BN=block.columns, block=block,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, keep, output, divisor, sums, totals)
        ctx.sizes = sizes
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep, output, divisor, sums, totals = ctx.saved_tensors
        sizes, constants, block = ctx.sizes, _constants(query, value), _BLOCK
        (b, h, g, q, k), causal, m, e = sizes[:5], sizes.causal, query.shape[-1], value.shape[-1]
        change = change if change.stride(-1) == 1 else change.contiguous()
        hidden = key if keep is None else keep
        steps = (0, 0) if keep is None else keep.stride()[:2]
        grads = [torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (query, key, value)]
        given = (query, key, value, hidden, change, output, divisor)
        places = (*_place(query, key, value), *steps, *_place(change), h, h // g, q, k, sizes.chunk)
        options = {**constants, "CAUSAL": causal, "KEEP": keep is not None, "BM": block.rows, "BN": block.columns}
        launch(
            query_gradients, (-(-q // block.rows), b * h, 1), *given, sums, totals, grads[0], *places, sizes.chunks(k),
            sums.shape[1], **options, block=block,
        )  # fmt: skip
        chunks = sizes.chunks(q)
        sums, totals = _rooms(sizes, q, m, e, query)
        launch(
            query_sums, (chunks, b * g, 1), query, change, output, divisor, sums, totals, *_place(query, change), h,
            h // g, q, sizes.chunk, chunks, sums.shape[1], int(causal), CAUSAL=causal, **_without(constants, "WHOLE"),
            BM=block.rows, block=block,
        )  # fmt: skip
        sums, totals = _summed(sums, causal), _summed(totals, causal)
        launch(
            key_gradients, (-(-k // block.columns), b * g, 1), *given, sums, totals, *grads[1:], *places, chunks,
            sums.shape[1], **options, block=block,
        )  # fmt: skip
        return *grads, None, None


def linear_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
    """Return φ(Q) (φ(K)ᵀ V) / φ(Q) (φ(K)ᵀ 1), φ = elu + 1: query (b, h, q, d), key (b, g, k, d), value (b, g, k, e).

    `keep` (b, g, k) masks keys where it is False; with `causal`, query i attends keys j ≤ i, and there are no more keys
    than queries.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    keep = None if keep is None else keep.contiguous().view(torch.uint8)
    return _Linear.apply(query, key, value, keep, causal)
