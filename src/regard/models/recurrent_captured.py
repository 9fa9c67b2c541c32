"""A GRU over whole sequences on CUDA, both directions in step, forward and backward by hand.

torch's own spends more time launching a short sequence than computing it. Here the loop is replayed as one graph, and a
row that has ended keeps its state, so padding needs no packing and no word from the device.
"""

import os
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.machine import TRITON
from regard.core.problem import HALF
from regard.models import recurrent_graphs
from regard.models.recurrent.gru_sequence import Read


def serves(network: nn.GRU | nn.LSTM) -> bool:
    """A GRU of one layer on CUDA; compilers take torch's own."""
    plain = isinstance(network, nn.GRU) and network.num_layers == 1 and not torch.compiler.is_compiling()
    return plain and network.get_parameter("weight_hh_l0").is_cuda


def read(network: nn.GRU | nn.LSTM, embedded: Tensor, mask: Tensor | None) -> Read:
    """Run a sequence (b, k, e) through every direction; `mask` (b, k) ends in False where a row has ended."""
    ways = ["_l0", "_l0_reverse"][: 2 if network.bidirectional else 1]

    def each(name: str) -> list[Tensor]:
        return [network.get_parameter(name + way) for way in ways]

    if mask is not None:  # zero times whatever stands at a padded position must be zero
        embedded = embedded.masked_fill(~mask.unsqueeze(-1), 0.0)
    # One product for both directions, with time first; the way back is turned round in time.
    gates = F.linear(embedded.transpose(0, 1), torch.cat(each("weight_ih")), torch.cat(each("bias_ih"))).chunk(
        len(ways), -1
    )
    inputs = torch.stack([_turned(part, way) for way, part in enumerate(gates)], 1)
    kept = None
    if mask is not None:
        kept = torch.stack([_turned(mask.t(), way) for way in range(len(ways))], 1)
    recurrent = torch.stack(each("weight_hh")).to(inputs.dtype)  # under autocast the gates are narrow
    bias = torch.stack(each("bias_hh")).unsqueeze(1).to(inputs.dtype)
    states = _Sequence.apply(inputs, recurrent, bias, kept)
    found = torch.cat([_turned(states[:, way], way) for way in range(len(ways))], -1).transpose(0, 1)
    if mask is not None:
        found = found.masked_fill(~mask.unsqueeze(-1), 0.0)
    return Read(found, torch.cat(states[-1].unbind(0), -1))


def _turned(sequence: Tensor, way: int) -> Tensor:
    return sequence.flip(0) if way else sequence


def _rows(tensor: Tensor) -> Tensor:
    """Directions and batch as one axis: to all but the matrix product they are the same."""
    return tensor.flatten(0, 1)


class _Sequence(torch.autograd.Function):
    """States (t, w, b, d) from input gates (t, w, b, 3d), w directions; all start from zeros."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, recurrent: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        states, gates, products = cast(Any, recurrent_graphs.run(_forward, (inputs, recurrent, bias, mask)))
        ctx.save_for_backward(states, gates, products, recurrent, mask)
        return states[1:]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the graph of a second derivative would end here without a word
            raise RuntimeError("a recurrent encoder of one GRU layer is differentiable once")
        return (*recurrent_graphs.run(_backward, (*ctx.saved_tensors, upstream[0].contiguous())), None)


def _kernels(inputs: Tensor) -> bool:
    device = inputs.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return device and inputs.dtype in (*HALF, torch.float32) and inputs.numel() > 0 and TRITON


def _forward(inputs: Tensor, recurrent: Tensor, bias: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    steps, ways, batch, _ = inputs.shape
    states = inputs.new_empty(steps + 1, ways, batch, recurrent.shape[-1])
    states[0] = 0.0
    gates, products = inputs.clone(), torch.empty_like(inputs)
    transposed, step, multiply = recurrent.mT, _gru, _multiply
    if _kernels(inputs):
        from regard.models import triton_gru, triton_products  # import Triton: only where it is used

        step = triton_gru.forward
        if triton_products.serves(states[0]):
            multiply = triton_products.multiply
    for i in range(steps):
        multiply(states[i], transposed, products[i], added=bias)
        real = None if mask is None else mask[i].reshape(-1, 1)
        step(_rows(gates[i]), _rows(products[i]), _rows(states[i]), real, _rows(states[i + 1]))
    return states, gates, products


def _multiply(left: Tensor, right: Tensor, out: Tensor, *, added: Tensor) -> Tensor:
    return torch.baddbmm(added, left, right, out=out)


def _gru(gates: Tensor, hidden: Tensor, before: Tensor, mask: Tensor | None, after: Tensor) -> None:
    """Turn input gates into r, z, n in place, and write the next state; a row that is masked keeps its own."""
    size = before.shape[-1]
    gates[:, : 2 * size].add_(hidden[:, : 2 * size]).sigmoid_()
    gates[:, 2 * size :].addcmul_(gates[:, :size], hidden[:, 2 * size :]).tanh_()
    torch.lerp(gates[:, 2 * size :], before, gates[:, size : 2 * size], out=after)
    if mask is not None:
        torch.where(mask, after, before, out=after)


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
    """As `triton_gru.backward`; nothing comes `through` here in parts."""
    assert through is None
    dstate = upstream + carried
    size = before.shape[-1]
    reset, update, new = gates.split(size, -1)
    here = dstate if mask is None else dstate * mask
    share = here * update
    dnew = (here - share) * (1 - new * new)
    dgates[:, 2 * size :] = dnew
    torch.mul(dnew, reset, out=dhidden[:, 2 * size :])
    slopes = gates[:, : 2 * size] * (1 - gates[:, : 2 * size])
    torch.mul(dnew * hidden[:, 2 * size :], slopes[:, :size], out=dgates[:, :size])
    torch.mul(here * (before - new), slopes[:, size:], out=dgates[:, size : 2 * size])
    dhidden[:, : 2 * size] = dgates[:, : 2 * size]
    return share if mask is None else share + dstate * ~mask


def _backward(
    states: Tensor, gates: Tensor, products: Tensor, recurrent: Tensor, mask: Tensor | None, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dgates, dproducts = torch.empty_like(gates), torch.empty_like(products)
    carried, through, step, multiply = torch.zeros_like(states[0]), None, _gru_back, None
    if _kernels(gates):
        from regard.models import triton_gru, triton_products  # import Triton: only where they are used

        step = triton_gru.backward
        if triton_products.serves(states[0]):  # in parts, which the next step's kernel adds up
            multiply = triton_products.multiply
            through = states.new_zeros(triton_products.parts(gates.shape[-1]), *states.shape[1:])
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
    # (w, 3d, t · b) @ (w, t · b, d): one product for each direction's matrix.
    flat = dproducts.transpose(0, 1).flatten(1, 2)
    drecurrent = flat.mT @ states[:-1].transpose(0, 1).flatten(1, 2)
    return dgates, drecurrent, flat.sum(1, keepdim=True)
