"""A GRU over whole sequences on the CPU, one direction at a time, forward and backward by hand.

    [h_r; h_z; h_n] = W_hh s + b            one matrix product a step
    s' = gru(x_j, h, s)

torch's own adds to the matrix's gradient at every step and keeps each step's parts by themselves. Here that gradient is
one product over all steps, and what is kept lies in two tensors. Rows come longest first, so at each position those
that have a token are the first ones: padding is neither computed nor read.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.recurrent_cells import gru_step
from regard.models.recurrent_loop import gru, gru_back
from regard.models.recurrent_tokens import Tokens


class Read(NamedTuple):
    """States of a source (b, k, directions · d), zeros where it is padded, and the last states side by side."""

    states: Tensor
    last: Tensor


def serves(network: nn.GRU | nn.LSTM) -> bool:
    """A GRU of one layer on the CPU; under autocast and for compilers torch's own."""
    plain = isinstance(network, nn.GRU) and network.num_layers == 1 and not torch.compiler.is_compiling()
    return plain and network.get_parameter("weight_hh_l0").device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def read(network: nn.GRU | nn.LSTM, words: Tokens, lengths: Tensor | None) -> Read:
    """Run the sources through every direction. `words` has time first, (k, b); `lengths` are in descending order."""
    states: list[Tensor] = []
    last: list[Tensor] = []
    for way in ("_l0", "_l0_reverse")[: 2 if network.bidirectional else 1]:
        names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
        weight, bias, recurrent, hidden = (network.get_parameter(name + way) for name in names)
        gates = words.mapped(weight, bias)
        back = way.endswith("reverse")
        found = cast(Tensor, _Sequence.apply(gates, recurrent, hidden, _counts(gates, lengths), back))
        states.append(found)
        last.append(_last(found, lengths, back))
    return Read(torch.cat([found.transpose(0, 1) for found in states], -1), torch.cat(last, -1))


def _counts(gates: Tensor, lengths: Tensor | None) -> list[int]:
    """How many rows have a token at each position."""
    steps, batch, _ = gates.shape
    if lengths is None:
        return [batch] * steps
    return (lengths > torch.arange(steps).unsqueeze(-1)).sum(-1).tolist()


def _last(states: Tensor, lengths: Tensor | None, back: bool) -> Tensor:
    """The states (b, d) after the last token of each row in the direction of reading; zeros for a row of nothing."""
    if back:
        return states[0]
    if lengths is None:
        return states[-1]
    rows = torch.arange(states.shape[1])
    return states[(lengths - 1).clamp(min=0), rows]


class _Sequence(torch.autograd.Function):
    """States (k, b, d) from input gates (k, b, 3d), from zeros; rows beyond the count of a position are zeros."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, recurrent: Tensor, bias: Tensor, counts: list[int], back: bool) -> Tensor:
        steps, batch, _ = inputs.shape
        padded = counts[-1] < batch if steps else False
        new = torch.zeros if padded else torch.empty
        size = recurrent.shape[-1]
        # One position more than there are tokens: the zeros from which reading starts.
        states = new(steps + 1, batch, size, dtype=inputs.dtype)
        states[-1 if back else 0] = 0.0
        gates, products = new(inputs.shape, dtype=inputs.dtype), new(inputs.shape, dtype=inputs.dtype)
        for i in reversed(range(steps)) if back else range(steps):
            rows = counts[i]
            before, after = (
                (states[i + 1, :rows], states[i, :rows]) if back else (states[i, :rows], states[i + 1, :rows])
            )
            torch.addmm(bias, before, recurrent.t(), out=products[i, :rows])
            gates[i, :rows] = inputs[i, :rows]
            gru(gates[i, :rows], products[i, :rows], before, after)
        ctx.save_for_backward(states, gates, products, inputs, recurrent, bias)
        ctx.counts, ctx.back = counts, back
        return states[:-1] if back else states[1:]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        states, gates, products, inputs, recurrent, bias = ctx.saved_tensors
        counts, back, given = ctx.counts, ctx.back, (inputs, recurrent, bias)
        if torch.is_grad_enabled():  # a second derivative is asked for: autograd makes it from the plain form
            wanted = [tensor for tensor in given if tensor.requires_grad]
            plain = _plainly(inputs, recurrent, bias, counts, back)
            found = iter(torch.autograd.grad(plain, wanted, upstream[0], create_graph=True))
            return (*(next(found) if tensor.requires_grad else None for tensor in given), None, None)
        steps, batch, _ = gates.shape
        new = torch.zeros_like if steps and counts[-1] < batch else torch.empty_like
        dgates, dproducts = new(gates), new(products)
        dstate = torch.zeros_like(states[0])
        for i in range(steps) if back else reversed(range(steps)):
            rows = counts[i]
            before = states[i + 1 if back else i, :rows]
            dnow = dstate[:rows] + upstream[0][i, :rows]
            share = gru_back(gates[i, :rows], products[i, :rows], before, dnow, dgates[i, :rows], dproducts[i, :rows])
            torch.addmm(share, dproducts[i, :rows], recurrent, out=dstate[:rows])
        flat, read = dproducts.flatten(0, 1), (states[1:] if back else states[:-1]).flatten(0, 1)
        return dgates, flat.t() @ read, flat.sum(0), None, None


def _plainly(inputs: Tensor, recurrent: Tensor, bias: Tensor, counts: list[int], back: bool) -> Tensor:
    """The same states by operations that autograd follows."""
    steps, batch, _ = inputs.shape
    state = inputs.new_zeros(batch, recurrent.shape[-1])
    states: list[Tensor] = []
    for i in reversed(range(steps)) if back else range(steps):
        after = gru_step(inputs[i], F.linear(state, recurrent, bias), state)
        state = torch.where(torch.arange(batch).unsqueeze(-1) < counts[i], after, 0.0)
        states.append(state)
    return torch.stack(states[::-1] if back else states)
