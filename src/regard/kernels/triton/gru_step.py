"""The elementwise part of a GRU step: a forward and a backward kernel, and their formulas as device functions."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


@triton.jit
def gru_forward(reset, update, new, hidden_new, before):
    """Return r, z, n and the next state of a GRU.

    `reset` and `update` are r and z before the sigmoid; n = tanh(new + r · hidden_new); `before` is the previous state.
    """
    reset = tl.sigmoid(reset)
    update = tl.sigmoid(update)
    new = new + reset * hidden_new
    new = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * new))
    return reset, update, new, new + update * (before - new)


@triton.jit
def gru_backward(dstate, reset, update, new, hidden_new, before):
    """Return the gradients of the previous state (without the part through the gates) and of the three gates' inputs.

    `reset`, `update` and `new` are the values of the gates r, z and n, which `gru_forward` returns.
    """
    direct = dstate * update
    dnew = (dstate - direct) * (1.0 - new * new)
    dreset = dnew * hidden_new * reset * (1.0 - reset)
    dupdate = dstate * (before - new) * update * (1.0 - update)
    return direct, dreset, dupdate, dnew


@triton.jit
def _forward(gates, hidden, before, mask, after, D, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    gates += row * 3 * D + d
    hidden += row * 3 * D + d
    reset = tl.load(gates, inside).to(tl.float32) + tl.load(hidden, inside).to(tl.float32)
    update = tl.load(gates + D, inside).to(tl.float32) + tl.load(hidden + D, inside).to(tl.float32)
    new = tl.load(gates + 2 * D, inside).to(tl.float32)
    last = tl.load(before + row * D + d, inside).to(tl.float32)
    hidden_new = tl.load(hidden + 2 * D, inside).to(tl.float32)
    reset, update, new, state = gru_forward(reset, update, new, hidden_new, last)
    if MASKED:
        state = tl.where(tl.load(mask + row) != 0, state, last)
    kind = gates.dtype.element_ty
    tl.store(gates, reset.to(kind), inside)
    tl.store(gates + D, update.to(kind), inside)
    tl.store(gates + 2 * D, new.to(kind), inside)
    tl.store(after + row * D + d, state.to(kind), inside)


@triton.jit
def _backward(
    gates, hidden, before, mask, upstream, carried, through, dgates, dhidden, share, D, step,
    MASKED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    at = row * 3 * D + d
    reset = tl.load(gates + at, inside).to(tl.float32)
    update = tl.load(gates + at + D, inside).to(tl.float32)
    new = tl.load(gates + at + 2 * D, inside).to(tl.float32)
    dstate = tl.load(upstream + row * D + d, inside).to(tl.float32)
    dstate += tl.load(carried + row * D + d, inside).to(tl.float32)
    for part in tl.static_range(PARTS):
        dstate += tl.load(through + part * step + row * D + d, inside).to(tl.float32)
    here = dstate
    if MASKED:
        here = tl.where(tl.load(mask + row) != 0, dstate, 0.0)
    last = tl.load(before + row * D + d, inside).to(tl.float32)
    hidden_new = tl.load(hidden + at + 2 * D, inside).to(tl.float32)
    direct, dreset, dupdate, dnew = gru_backward(here, reset, update, new, hidden_new, last)
    kind = gates.dtype.element_ty
    tl.store(dgates + at, dreset.to(kind), inside)
    tl.store(dgates + at + D, dupdate.to(kind), inside)
    tl.store(dgates + at + 2 * D, dnew.to(kind), inside)
    tl.store(dhidden + at, dreset.to(kind), inside)
    tl.store(dhidden + at + D, dupdate.to(kind), inside)
    tl.store(dhidden + at + 2 * D, (dnew * reset).to(kind), inside)
    tl.store(share + row * D + d, (direct + dstate - here).to(share.dtype.element_ty), inside)


def _grid(before: Tensor) -> tuple[tuple[int, int], int]:
    block = min(_BLOCK, triton.next_power_of_2(before.shape[-1]))
    return (len(before), triton.cdiv(before.shape[-1], block)), block


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def forward(gates: Tensor, hidden: Tensor, before: Tensor, mask: Tensor | None, after: Tensor) -> None:
    """Replace the input gates by the gates r, z and n (see `gru_forward`), and write the next state into `after`.

    Reference implementation: `regard.kernels.recurrent.gru.in_place`.
    """
    grid, block = _grid(before)
    size = before.shape[-1]
    _forward[grid](gates, hidden, before, _bytes(mask), after, size, MASKED=mask is not None, BLOCK=block)


def backward(
    gates: Tensor,
    hidden: Tensor,
    before: Tensor,
    mask: Tensor | None,
    upstream: Tensor,
    carried: Tensor,
    through: Tensor | None,
    dgates: Tensor,
    dhidden: Tensor,
) -> Tensor:
    """Write the gradients of input gates and hidden gates, and return the gradient of the previous state.

    The returned gradient excludes the part through the hidden gates, which the caller computes. The gradient of
    the next state is the sum of `upstream` (b, d), `carried` (b, d) and the parts of `through` (p, …, b, d). Reference
    implementation: `regard.kernels.recurrent.gru.in_place_back`.
    """
    grid, block = _grid(before)
    share = torch.empty_like(carried)
    parts = 0 if through is None else len(through)
    _backward[grid](
        gates, hidden, before, _bytes(mask), upstream, carried, through, dgates, dhidden, share, before.shape[-1],
        before.numel(), MASKED=mask is not None, PARTS=parts, BLOCK=block,
    )  # fmt: skip
    return share
