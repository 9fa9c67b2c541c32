"""Summaries of softmax weights in one pass over the pairs: log-sum-exp, entropy, and received weight.

The summaries do not need the values, so each costs about half of a forward pass of attention. With the scores s, their
log-sum-exp L and the weights p = exp(s − L), the entropy of row i is H_i = Σ_j p_ij (L_i − s_ij), and key j receives
the weight R_j = Σ_i p_ij. Given the gradients dR, dH and dL of the summaries, the gradient of s_ij is
p_ij (a_ij − c_i), with a and c as follows:

    received    a = dR_j               c = Σ_j p_ij dR_j
    entropy     a = dH_i (L_i − s_ij)  c = dH_i H_i
    logsumexp   a = dL_i               c = 0

The summaries must equal those that `Request.of` computes from the full weights (`regard.core.requests`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels.triton.additive.pairs import Pairs, key_range, power_of_two, product, query_range, tile_state
from regard.kernels.triton.additive.plan import Block
from regard.kernels.triton.score_tiles import (
    Scored,
    known_sums,
    lost_sums,
    over_rows,
    pair_scores,
    row_sums,
    tile_rows,
    tile_scores,
)

LN2 = tl.constexpr(0.6931471805599453)
ROWS = tl.constexpr(1024)  # number of rows whose log-sum-exps `column_sums` tests for NaN at a time


@triton.jit
def row_summaries(
    query, key, pairs, known, lse, entropy, q_b, q_h, q_n, k_b, k_h, k_n, heads, group, n_q, n_k, scale,
    SIZE: tl.constexpr, KNOWN: tl.constexpr, ENTROPY: tl.constexpr, WEIGHTS: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp of each row and, with ENTROPY, its entropy.

    With KNOWN, the log-sum-exp is given and only the entropy is computed. With WEIGHTS, the log-sum-exp is NaN for rows
    whose weights are NaN, because the caller computes weights from it.
    """
    # With a causal mask, the last rows attend to the most keys: their programs start first, so that the launch does not
    # end with a few long programs.
    i0, z = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM, tl.program_id(1)
    b, h = z // heads, z % heads
    i = i0 + tl.arange(0, BM)
    q = tile_rows(query + b.to(tl.int64) * q_b + h * q_h, i, n_q, q_n, SIZE, D)
    key += b.to(tl.int64) * k_b + (h // group) * k_h
    at = z.to(tl.int64) * n_q + i
    start, stop = key_range(pairs, b, i0, n_k, BM, BN)
    if KNOWN:
        row = known_sums(known, at, i < n_q)
        spread = tl.zeros((BM,), tl.float32)
        for j0 in range(start, stop, BN):
            some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
            if some:
                s = tile_scores(q, key, pairs, b, h, i0, j0, n_q, n_k, k_n, scale, every, SIZE, PRECISION, D, BM, BN)
                x = s - row[:, None]
                p = power_of_two(x, PRECISION != "interpreted")
                spread -= tl.sum(tl.where(p == 0.0, 0.0, p * x), 1)
        tl.store(entropy + at, spread * LN2, mask=i < n_q)
    else:
        most, total, spread = row_sums(
            q, key, pairs, b, h, i0, start, stop, n_q, n_k, k_n, scale, ENTROPY, SIZE, PRECISION, D, BM, BN
        )
        if WEIGHTS:
            total = lost_sums(total, pairs, b, h, i0, start, stop, n_q, n_k, BM, BN)
        empty = total == 0.0
        safe = tl.where(empty, 1.0, total)
        tl.store(lse + at, tl.where(empty, float("-inf"), (most + tl.log2(safe)) * LN2), mask=i < n_q)
        if ENTROPY:
            tl.store(entropy + at, tl.where(empty, 0.0, (tl.log2(safe) - spread / safe) * LN2), mask=i < n_q)


@triton.jit
def column_sums(
    query, key, pairs, lse, received, q_b, q_h, q_n, k_b, k_h, k_n, heads, group, n_q, n_k, scale,
    SIZE: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the weight that each key receives from all queries of a head.

    If the log-sum-exp of a query is NaN, the sums of all keys are NaN, even of keys in tiles that are skipped.
    """
    j0, z = tl.program_id(0) * BN, tl.program_id(1)
    b, h = z // heads, z % heads
    j = j0 + tl.arange(0, BN)
    k = tile_rows(key + b.to(tl.int64) * k_b + (h // group) * k_h, j, n_k, k_n, SIZE, D)
    query += b.to(tl.int64) * q_b + h * q_h
    acc = tl.zeros((BM, BN), tl.float32)  # the sum of all tiles of weights; its BM rows are summed after the loop
    spoilt = tl.zeros((ROWS,), tl.float32)
    for i0 in range(0, n_q, ROWS):
        i = i0 + tl.arange(0, ROWS)
        row = known_sums(lse, z.to(tl.int64) * n_q + i, i < n_q)
        spoilt += tl.where(row == row, 0.0, float("nan"))
    start, stop = query_range(pairs, b, j0, n_q, n_k, BN, BM)
    for i0 in range(start, stop, BM):
        some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
        if some:
            i = i0 + tl.arange(0, BM)
            q = tile_rows(query, i, n_q, q_n, SIZE, D)
            s = pair_scores(q, k, pairs, b, h, i, j, n_q, n_k, scale, every, PRECISION, BM, BN)
            row = known_sums(lse, z.to(tl.int64) * n_q + i, i < n_q)
            acc += power_of_two(s - row[:, None], PRECISION != "interpreted")
    tl.store(received + z.to(tl.int64) * n_k + j, tl.sum(acc, 0) + tl.sum(spoilt, 0), mask=j < n_k)


@triton.jit
def _gradient(s, row, change, key_change, entropy, centre, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Return the gradient of a tile of scores: p (a − c), as in the module's docstring."""
    x = s - row[:, None]
    p = power_of_two(x, PRECISION != "interpreted")
    if KIND == "received":
        ds = p * (key_change[None, :] - centre[:, None])
    elif KIND == "entropy":
        ds = p * change[:, None] * (-x * LN2 - entropy[:, None])
    else:
        ds = p * change[:, None]
    # The gradient of masked pairs is 0, also in rows with NaN.
    return tl.where((p == 0.0) | (s == float("-inf")), 0.0, ds)


@triton.jit
def row_gradients(
    query, key, pairs, lse, change, entropy, centre, grad, q_b, q_h, q_n, k_b, k_h, k_n, heads, group, n_q, n_k, scale,
    KIND: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries; for received weights also c_i = Σ_j p_ij dR_j, which key gradients need."""
    i0, z = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM, tl.program_id(1)
    b, h = z // heads, z % heads
    i = i0 + tl.arange(0, BM)
    q = tile_rows(query + b.to(tl.int64) * q_b + h * q_h, i, n_q, q_n, SIZE, D)
    key += b.to(tl.int64) * k_b + (h // group) * k_h
    at = z.to(tl.int64) * n_q + i
    row = known_sums(lse, at, i < n_q)
    own = tl.zeros((BM,), tl.float32)
    spread = tl.zeros((BM,), tl.float32)
    mean = tl.zeros((BM,), tl.float32)
    start, stop = key_range(pairs, b, i0, n_k, BM, BN)
    if KIND == "received":
        for j0 in range(start, stop, BN):
            j = j0 + tl.arange(0, BN)
            k = tile_rows(key, j, n_k, k_n, SIZE, D)
            s = pair_scores(q, k, pairs, b, h, i, j, n_q, n_k, scale, False, PRECISION, BM, BN)
            p = power_of_two(s - row[:, None], PRECISION != "interpreted")
            mean += tl.sum(p * tl.load(change + z.to(tl.int64) * n_k + j, mask=j < n_k, other=0.0)[None, :], 1)
        tl.store(centre + at, mean, mask=i < n_q)
    else:
        own = tl.load(change + at, mask=i < n_q, other=0.0)
        if KIND == "entropy":
            spread = tl.load(entropy + at, mask=i < n_q, other=0.0)
    acc = tl.zeros((BM, D), tl.float32)
    for j0 in range(start, stop, BN):
        some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
        if some:
            j = j0 + tl.arange(0, BN)
            k = tile_rows(key, j, n_k, k_n, SIZE, D)
            s = pair_scores(q, k, pairs, b, h, i, j, n_q, n_k, scale, every, PRECISION, BM, BN)
            of_keys = tl.zeros((BN,), tl.float32)
            if KIND == "received":
                of_keys = tl.load(change + z.to(tl.int64) * n_k + j, mask=j < n_k, other=0.0)
            ds = _gradient(s, row, own, of_keys, spread, mean, KIND, PRECISION)
            acc = product(ds.to(k.dtype), k, acc, PRECISION)
    c = tl.arange(0, D)
    to = grad + at[:, None] * SIZE + c[None, :]
    tl.store(to, (acc * scale).to(grad.dtype.element_ty), mask=(i < n_q)[:, None] & (c < SIZE)[None, :])


@triton.jit
def key_gradients(
    query, key, pairs, lse, change, entropy, centre, grad, q_b, q_h, q_n, k_b, k_h, k_n, heads, group, n_q, n_k, scale,
    KIND: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the keys, summed over all query heads that share them."""
    j0, y = tl.program_id(0) * BN, tl.program_id(1)
    groups = heads // group
    b, g = y // groups, y % groups
    j = j0 + tl.arange(0, BN)
    k = tile_rows(key + b.to(tl.int64) * k_b + g * k_h, j, n_k, k_n, SIZE, D)
    acc = tl.zeros((BN, D), tl.float32)
    start, stop = query_range(pairs, b, j0, n_q, n_k, BN, BM)
    for r in range(group):
        h = g * group + r
        z = b * heads + h
        rows = z.to(tl.int64) * n_q
        own = query + b.to(tl.int64) * q_b + h * q_h
        of_keys = tl.zeros((BN,), tl.float32)
        if KIND == "received":
            of_keys = tl.load(change + z.to(tl.int64) * n_k + j, mask=j < n_k, other=0.0)
        for i0 in range(start, stop, BM):
            some, every = tile_state(pairs, b, i0, j0, n_q, n_k, BM, BN)
            if some:
                i = i0 + tl.arange(0, BM)
                q = tile_rows(own, i, n_q, q_n, SIZE, D)
                s = pair_scores(q, k, pairs, b, h, i, j, n_q, n_k, scale, every, PRECISION, BM, BN)
                row = known_sums(lse, rows + i, i < n_q)
                of_rows = tl.zeros((BM,), tl.float32)
                spread = tl.zeros((BM,), tl.float32)
                mean = tl.zeros((BM,), tl.float32)
                if KIND == "received":
                    mean = tl.load(centre + rows + i, mask=i < n_q, other=0.0)
                else:
                    of_rows = tl.load(change + rows + i, mask=i < n_q, other=0.0)
                    if KIND == "entropy":
                        spread = tl.load(entropy + rows + i, mask=i < n_q, other=0.0)
                ds = _gradient(s, row, of_rows, of_keys, spread, mean, KIND, PRECISION)
                acc = product(tl.trans(ds.to(q.dtype)), q, acc, PRECISION)
    c = tl.arange(0, D)
    to = grad + (y.to(tl.int64) * n_k + j)[:, None] * SIZE + c[None, :]
    tl.store(to, (acc * scale).to(grad.dtype.element_ty), mask=(j < n_k)[:, None] & (c < SIZE)[None, :])


_ROWS = Block(128, 64, warps=8, stages=3), Block(64, 32, warps=4, stages=2)
_COLUMNS = Block(64, 128, warps=8, stages=3), Block(32, 64, warps=4, stages=2)
_GRADIENT = Block(64, 64, warps=4, stages=2), Block(32, 32, warps=4, stages=2)


def log_sum_exp(scored: Scored, *, entropy: bool = False, weights: bool = True) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row and, if requested, its entropy; (b, h, q) each, float32.

    With `weights`, the log-sum-exp of a row whose attended scores are all −inf is NaN, because its weights are NaN.
    Without `entropy`, the second tensor is the log-sum-exp again.
    """
    lse, block = scored.rows(), scored.block(*_ROWS)
    spread = scored.rows() if entropy else lse
    constants = {"KNOWN": False, "ENTROPY": entropy, "WEIGHTS": weights}
    scored.run(row_summaries, over_rows(scored, block), block, lse, lse, spread, **constants)
    return lse, spread


def row_entropy(scored: Scored, lse: Tensor) -> Tensor:
    """Return the entropy of each row, (b, h, q), from its log-sum-exp."""
    spread, block = scored.rows(), scored.block(*_ROWS)
    constants = {"KNOWN": True, "ENTROPY": True, "WEIGHTS": True}
    scored.run(row_summaries, over_rows(scored, block), block, lse, lse, spread, **constants)
    return spread


def received(scored: Scored, lse: Tensor) -> Tensor:
    """Return the weight that each key receives, summed over the queries, (b, h, k)."""
    (b, h, _, _), k, block = scored.query.shape, scored.key.shape[2], scored.block(*_COLUMNS)
    sums = torch.empty(b, h, k, device=lse.device, dtype=torch.float32)
    scored.run(column_sums, (-(-k // block.columns), b * h, 1), block, lse, sums)
    return sums


def _summed(scored: Scored, lse: Tensor | None, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the summary named `kind`, the log-sum-exp, and the entropy if it was computed."""
    if kind == "entropy":
        lse, spread = log_sum_exp(scored, entropy=True) if lse is None else (lse, row_entropy(scored, lse))
        return spread, lse, spread
    if lse is None:
        lse, _ = log_sum_exp(scored, weights=kind != "logsumexp")
    if kind == "received":
        return received(scored, lse), lse, None
    # A log-sum-exp of +inf, which PyTorch's flash attention returns for a row with NaN, becomes NaN.
    return lse.nan_to_num(torch.nan, torch.nan, -torch.inf), lse, None


class _Summary(torch.autograd.Function):
    """The summary named `kind`, with a hand-written backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, pairs: Pairs, scale: float, lse: Tensor | None, kind: str) -> Any:
        result, lse, spread = _summed(Scored(query, key, pairs, scale), lse, kind)
        ctx.save_for_backward(query, key, lse, spread)
        ctx.settings = (pairs, scale, kind)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        query, key, lse, spread = ctx.saved_tensors
        pairs, scale, kind = ctx.settings
        scored, block = Scored(query, key, pairs, scale), Scored(query, key, pairs, scale).block(*_GRADIENT)
        centre, change = torch.empty_like(lse), change.float().contiguous()
        grads = [torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (query, key)]
        given = (lse, change, lse if spread is None else spread, centre)
        scored.run(row_gradients, over_rows(scored, block), block, *given, grads[0], KIND=kind)
        b, g, k, _ = key.shape
        scored.run(key_gradients, (-(-k // block.columns), b * g, 1), block, *given, grads[1], KIND=kind)
        return *grads, None, None, None, None


def summary(scored: Scored, lse: Tensor | None, kind: str) -> Tensor:
    """Return `received` (b, h, k), `entropy` or `logsumexp` (b, h, q) of softmax(scale · query keyᵀ + bias), float32.

    `lse` is the log-sum-exp of the rows, if the caller has computed it. The gradients of query and key are complete: no
    gradient flows through `lse`.
    """
    if torch.is_grad_enabled() and (scored.query.requires_grad or scored.key.requires_grad):
        return _Summary.apply(*scored, lse, kind)
    return _summed(scored, lse, kind)[0]
