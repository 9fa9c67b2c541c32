"""A GRU over whole sequences on CUDA, both directions at once, with its own backward pass.

For a short sequence torch's own GRU spends more time on launching kernels than on running them. This loop is replayed
as one CUDA graph. After its last token a row keeps its state, so padded sequences need neither packing nor a transfer
of their lengths from the device. Reference implementation: `gru.step`, applied position by position.
"""

import os
from typing import Any, cast

import torch
from torch import Tensor

from regard.kernels import cuda_graphs
from regard.kernels.availability import TRITON
from regard.kernels.derivatives import once_only
from regard.kernels.dtypes import HALF
from regard.kernels.recurrent import gru


def states(inputs: Tensor, recurrent: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return states (t, w, b, d) of w directions from input gates (t, w, b, 3d), starting from zeros.

    `recurrent` (w, 3d, d) and `bias` (w, 1, 3d) hold W_hh and its bias for each direction. Where `mask` (t, w, b) is
    False, a row keeps its state.
    """
    return cast(Tensor, _Sequence.apply(inputs, recurrent, bias, mask))


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor with directions and batch as one axis: only the matrix product depends on the direction."""
    return tensor.flatten(0, 1)


class _Sequence(torch.autograd.Function):
    """The autograd function: states (t, w, b, d) from input gates (t, w, b, 3d), w directions, starting from zeros."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, recurrent: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        states, gates, products = cast(Any, cuda_graphs.run(_forward, (inputs, recurrent, bias, mask)))
        ctx.save_for_backward(states, gates, products, recurrent, mask)
        return states[1:]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        once_only("a recurrent encoder of one GRU layer")
        return (*cuda_graphs.run(_backward, (*ctx.saved_tensors, upstream[0].contiguous())), None)


def _kernels(inputs: Tensor) -> bool:
    device = inputs.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return device and inputs.dtype in (*HALF, torch.float32) and inputs.numel() > 0 and TRITON


def _forward(inputs: Tensor, recurrent: Tensor, bias: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    steps, ways, batch, _ = inputs.shape
    states = inputs.new_empty(steps + 1, ways, batch, recurrent.shape[-1])
    states[0] = 0.0
    gates, products = inputs.clone(), torch.empty_like(inputs)
    transposed, step, multiply = recurrent.mT, gru.in_place, _multiply
    if _kernels(inputs):
        from regard.kernels.triton import (
            few_row_products,  # a lazy import, because the module imports Triton
            gru_step,
        )

        step = gru_step.forward
        if few_row_products.serves(states[0]):
            multiply = few_row_products.multiply
    for i in range(steps):
        multiply(states[i], transposed, products[i], added=bias)
        real = None if mask is None else mask[i].reshape(-1, 1)
        step(_rows(gates[i]), _rows(products[i]), _rows(states[i]), real, _rows(states[i + 1]))
    return states, gates, products


def _multiply(left: Tensor, right: Tensor, out: Tensor, *, added: Tensor) -> Tensor:
    return torch.baddbmm(added, left, right, out=out)


def _gru_back(
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
    """Return what `triton.gru_step.backward` returns, by torch operations; `through` must be None."""
    assert through is None
    return gru.in_place_back(gates, hidden, before, mask, upstream + carried, dgates, dhidden)


def _backward(
    states: Tensor, gates: Tensor, products: Tensor, recurrent: Tensor, mask: Tensor | None, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dgates, dproducts = torch.empty_like(gates), torch.empty_like(products)
    carried, through, step, multiply = torch.zeros_like(states[0]), None, _gru_back, None
    if _kernels(gates):
        from regard.kernels.triton import (
            few_row_products,  # a lazy import, because the module imports Triton
            gru_step,
        )

        step = gru_step.backward
        if few_row_products.serves(states[0]):  # the product writes partial sums, which the next step's kernel adds
            multiply = few_row_products.multiply
            through = states.new_zeros(few_row_products.parts(gates.shape[-1]), *states.shape[1:])
    for i in reversed(range(len(gates))):
        real = None if mask is None else mask[i].reshape(-1, 1)
        share = step(
            _rows(gates[i]), _rows(products[i]), _rows(states[i]), real, _rows(upstream[i]), _rows(carried), through,
            _rows(dgates[i]), _rows(dproducts[i]),
        )  # fmt: skip
        carried = share.view_as(carried)
        if multiply is not None and through is not None:
            multiply(dproducts[i], recurrent, through)
        else:
            carried = torch.baddbmm(carried, dproducts[i], recurrent)
    # The gradient of each direction's matrix is one product over all steps: (w, 3d, t · b) @ (w, t · b, d).
    flat = dproducts.transpose(0, 1).flatten(1, 2)
    drecurrent = flat.mT @ states[:-1].transpose(0, 1).flatten(1, 2)
    return dgates, drecurrent, flat.sum(1, keepdim=True)
