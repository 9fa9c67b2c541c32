"""A step of a GRU decoder with additive attention: a forward and a backward kernel, with a program for each row.

Besides the kernel, a step needs one matrix product, which the caller computes: it maps the state to hidden gates and
query. The values (b, k, 3d) are already multiplied by the weights of the gates. Arithmetic is in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.triton.gru_step import gru_backward, gru_forward

_TILE = 32 << 10  # bytes of keys or values loaded at a time; a program holds the scores of all keys


@triton.jit
def _inverse(x):
    """Return r = 1 / (1 + e^{2x}), so that tanh x = 1 − 2 r and its derivative 4 r (1 − r)."""
    return 1.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _read(place, columns, inside):
    return tl.load(place + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _tile(place, rows, columns, real, inside, stride):
    cells = place + rows[:, None] * stride + columns[None, :]
    return tl.load(cells, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _write(place, columns, number, inside):
    tl.store(place + columns, number.to(place.dtype.element_ty), mask=inside)


@triton.jit
def _forward_step(
    product, keys, score, values, inputs, before, mask, weights, gates, after,
    K, F, D, MASKED: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    product += row * (3 * D + F)
    keys += row * K * F
    values += row * K * 3 * D
    inputs += row * 3 * D
    gates += row * 3 * D
    j = tl.arange(0, BK)
    real = j < K
    energy = tl.zeros([BK], tl.float32)
    for start in range(0, F, BF):
        f = start + tl.arange(0, BF)
        inside = f < F
        query = _read(product + 3 * D, f, inside)
        weight = _read(score, f, inside)
        hidden = 1.0 - 2.0 * _inverse(query[None, :] + _tile(keys, j, f, real, inside, F))
        energy += tl.sum(weight[None, :] * hidden, 1)
    seen = real
    if MASKED:
        seen = real & (tl.load(mask + row * K + j, mask=real, other=0) != 0)
    energy = tl.where(seen, energy, float("-inf"))
    most = tl.max(energy, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    share = tl.where(seen, tl.exp(energy - most), 0.0)
    total = tl.sum(share, 0)
    share = share / tl.where(total == 0.0, 1.0, total)
    _write(weights + row * K, j, share, real)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        inside = d < D
        reset = _read(inputs, d, inside) + _read(product, d, inside)
        reset += tl.sum(share[:, None] * _tile(values, j, d, real, inside, 3 * D), 0)
        update = _read(inputs + D, d, inside) + _read(product + D, d, inside)
        update += tl.sum(share[:, None] * _tile(values + D, j, d, real, inside, 3 * D), 0)
        new = _read(inputs + 2 * D, d, inside)
        new += tl.sum(share[:, None] * _tile(values + 2 * D, j, d, real, inside, 3 * D), 0)
        last, hidden_new = _read(before + row * D, d, inside), _read(product + 2 * D, d, inside)
        reset, update, new, state = gru_forward(reset, update, new, hidden_new, last)
        _write(gates, d, reset, inside)
        _write(gates + D, d, update, inside)
        _write(gates + 2 * D, d, new, inside)
        _write(after + row * D, d, state, inside)


@triton.jit
def _backward_step(
    product, keys, score, values, before, weights, gates, upstream, upweights, carried, through,
    dgates, dproduct, dscores, share,
    K, F, D, step, PARTS: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    product += row * (3 * D + F)
    dproduct += row * (3 * D + F)
    keys += row * K * F
    values += row * K * 3 * D
    gates += row * 3 * D
    dgates += row * 3 * D
    j = tl.arange(0, BK)
    real = j < K
    dweights = _read(upweights + row * K, j, real)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        inside = d < D
        dstate = _read(carried + row * D, d, inside) + _read(upstream + row * D, d, inside)
        for part in tl.static_range(PARTS):
            dstate += _read(through + part * step + row * D, d, inside)
        reset, update, new = _read(gates, d, inside), _read(gates + D, d, inside), _read(gates + 2 * D, d, inside)
        last, hidden_new = _read(before + row * D, d, inside), _read(product + 2 * D, d, inside)
        direct, dreset, dupdate, dnew = gru_backward(dstate, reset, update, new, hidden_new, last)
        _write(share + row * D, d, direct, inside)
        _write(dgates, d, dreset, inside)
        _write(dgates + D, d, dupdate, inside)
        _write(dgates + 2 * D, d, dnew, inside)
        _write(dproduct, d, dreset, inside)
        _write(dproduct + D, d, dupdate, inside)
        _write(dproduct + 2 * D, d, dnew * reset, inside)
        dweights += tl.sum(dreset[None, :] * _tile(values, j, d, real, inside, 3 * D), 1)
        dweights += tl.sum(dupdate[None, :] * _tile(values + D, j, d, real, inside, 3 * D), 1)
        dweights += tl.sum(dnew[None, :] * _tile(values + 2 * D, j, d, real, inside, 3 * D), 1)
    weight = _read(weights + row * K, j, real)
    dscore = weight * (dweights - tl.sum(weight * dweights, 0))
    _write(dscores + row * K, j, dscore, real)
    for start in range(0, F, BF):
        f = start + tl.arange(0, BF)
        inside = f < F
        inverse = _inverse(_read(product + 3 * D, f, inside)[None, :] + _tile(keys, j, f, real, inside, F))
        slope = tl.sum(dscore[:, None] * inverse * (1.0 - inverse), 0)
        _write(dproduct + 3 * D, f, 4.0 * _read(score, f, inside) * slope, inside)


@triton.jit
def _sums(products, keys, score, dscores, dkeys, along, B, T, K, F, D, BK: tl.constexpr, BF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = f < F
    j = tl.arange(0, BK)
    real = j < K
    key = _tile(keys + row * K * F, j, f, real, inside, F)
    slopes = tl.zeros([BK, BF], tl.float32)
    total = tl.zeros([BF], tl.float32)
    for t in range(0, T):
        step = t * B + row
        dscore = _read(dscores + step * K, j, real)
        inverse = _inverse(_read(products + step * (3 * D + F) + 3 * D, f, inside)[None, :] + key)
        slopes += dscore[:, None] * inverse * (1.0 - inverse)
        total += tl.sum(dscore[:, None] * (1.0 - 2.0 * inverse), 0)
    slopes *= 4.0 * _read(score, f, inside)[None, :]
    cells = dkeys + row * K * F + j[:, None] * F + f[None, :]
    tl.store(cells, slopes.to(dkeys.dtype.element_ty), mask=real[:, None] & inside[None, :])
    _write(along + row * F, f, total, inside)


def _blocks(keys: Tensor) -> dict[str, int]:
    """Return tile sizes and number of warps; there are few warps, so that each thread sums whole columns of values."""
    rows = max(16, triton.next_power_of_2(keys.shape[1]))
    columns = max(16, _TILE // keys.element_size() // rows)
    return {"BK": rows, "BF": columns, "BD": columns, "num_warps": 4}


def _blocks_back(keys: Tensor) -> dict[str, int]:
    """Return tile sizes and number of warps of the backward step.

    In float32, half as many columns of values and twice as many warps as in the forward step were faster.
    """
    found = _blocks(keys)
    return found if keys.element_size() < 4 else {**found, "BD": max(16, found["BD"] // 2), "num_warps": 8}


def forward_step(
    product: Tensor, keys: Tensor, score: Tensor, values: Tensor, inputs: Tensor, before: Tensor, mask: Tensor | None,
    weights: Tensor, gates: Tensor, after: Tensor,
) -> None:  # fmt: skip
    """Compute attention weights, gates and the next state, and write them into `weights`, `gates` and `after`.

    `product` (b, 3d + f) holds the hidden gates and the query, both computed from the previous state `before`.
    Reference implementation: one step of `regard.kernels.recurrent.bahdanau._forward`.
    """
    batch, count, features = keys.shape
    _forward_step[(batch,)](
        product, keys, score, values, inputs, before, None if mask is None else mask.view(torch.uint8), weights, gates,
        after, count, features, before.shape[-1], MASKED=mask is not None, **_blocks(keys),
    )  # fmt: skip


def backward_step(
    product: Tensor, keys: Tensor, score: Tensor, values: Tensor, before: Tensor, weights: Tensor, gates: Tensor,
    upstream: Tensor, upweights: Tensor, carried: Tensor, through: Tensor,
    dgates: Tensor, dproduct: Tensor, dscores: Tensor, share: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of gates, product and scores into `dgates`, `dproduct` and `dscores`.

    `share` receives the gradient of the previous state, without its part through the product. The gradient of the next
    state is the sum of `upstream`, `carried` and the p parts of `through` (p, b, d). Reference implementation: one step
    of `regard.kernels.recurrent.bahdanau._backward`.
    """
    batch, count, features = keys.shape
    _backward_step[(batch,)](
        product, keys, score, values, before, weights, gates, upstream, upweights, carried, through, dgates, dproduct,
        dscores, share, count, features, before.shape[-1], before.numel(), PARTS=len(through), **_blocks_back(keys),
    )  # fmt: skip


def sums(products: Tensor, keys: Tensor, score: Tensor, dscores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of the keys (b, k, f) and of the score's weight (f,), summed over all steps.

    Reference implementation: `regard.kernels.additive.query_scores.sums`.
    """
    batch, count, features = keys.shape
    dkeys, along = torch.empty_like(keys), keys.new_empty(batch, features, dtype=torch.float32)
    rows = max(16, triton.next_power_of_2(count))
    columns = max(16, 2048 // rows)
    _sums[(batch, triton.cdiv(features, columns))](
        products, keys, score, dscores, dkeys, along, batch, len(dscores), count, features, size,
        BK=rows, BF=columns, num_warps=8,
    )  # fmt: skip
    return dkeys, along.sum(0)
