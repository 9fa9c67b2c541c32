"""A GRU over whole sequences on the CPU, one direction at a time, with its own backward pass.

    [h_r; h_z; h_n] = W_hh s + b            one matrix product per step
    s' = gru(x_j, h, s)

torch's own GRU adds to the gradient of W_hh at every step. This loop computes that gradient by one product over all
steps, and packs W_hh once. Rows are sorted by length, longest first, so at each position the rows with a token are the
first ones, and padding is not computed. Under autocast the operands and results of products are bfloat16, and the
recurrent state is float32. Reference implementation: `_plainly`.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.products import matrix
from regard.kernels.recurrent import gru


def states(inputs: Tensor, recurrent: Tensor, bias: Tensor, counts: list[int], back: bool) -> Tensor:
    """Return states (t, b, d) from input gates (t, b, 3d), W_hh (3d, d) and its bias, starting from zeros; t is the
    number of steps.

    `counts` holds the number of rows with a token at each position; the states of the other rows are zeros. With `back`
    the sequence is processed from its end.
    """
    return cast(Tensor, _Sequence.apply(inputs, recurrent, bias, counts, back))


class _Sequence(torch.autograd.Function):
    """The autograd function: states (t, b, d) from input gates (t, b, 3d); rows without a token are zeros."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, recurrent: Tensor, bias: Tensor, counts: list[int], back: bool) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            states, gates, hidden = _forward(inputs, recurrent, bias, counts, back)
        ctx.save_for_backward(inputs, recurrent, bias, states, gates, hidden)
        ctx.counts, ctx.back = counts, back
        return states[:-1] if back else states[1:]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        inputs, recurrent, bias, states, gates, hidden = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives, autograd differentiates the reference implementation
            given = (inputs, recurrent, bias)
            wanted = [tensor for tensor in given if tensor.requires_grad]
            plain = _plainly(inputs, recurrent, bias, ctx.counts, ctx.back)
            grads = iter(torch.autograd.grad(plain, wanted, upstream[0], create_graph=True))
            return (*(next(grads) if tensor.requires_grad else None for tensor in given), None, None)
        with torch.autocast("cpu", enabled=False):
            dgates, dproducts = _backward(inputs, recurrent, states, gates, hidden, upstream[0], ctx.counts, ctx.back)
            # The state before the first step is zeros, so the first step adds nothing to the gradient of W_hh.
            later = dproducts[:-1] if ctx.back else dproducts[1:]
            drecurrent = later.flatten(0, 1).t() @ states[1:-1].flatten(0, 1)
        return dgates, drecurrent, dproducts.sum((0, 1)), None, None


def _forward(
    inputs: Tensor, recurrent: Tensor, bias: Tensor, counts: list[int], back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return states with the initial zeros (t + 1, b, d), gates (t, b, 3d), and the part of W_hh s + b that the
    reset gate multiplies (t, b, d)."""
    steps, batch, gate_size = inputs.shape
    size, wide = recurrent.shape[-1], torch.promote_types(inputs.dtype, torch.float32)
    states = torch.empty(steps + 1, batch, size, dtype=inputs.dtype)
    gates, hidden = torch.empty(steps, batch, gate_size, dtype=wide), torch.empty(steps, batch, size, dtype=wide)
    state = torch.zeros(batch, size, dtype=wide)
    states[-1 if back else 0] = 0.0
    weight, form = matrix(recurrent, batch, uses=steps), gru.forms(inputs)
    for i in _order(steps, back):
        rows, first = counts[i], i == (steps - 1 if back else 0)
        before = states[i + 1 if back else i, :rows]
        product = bias.repeat(rows, 1) if first else weight.times(before, bias)
        forth = form.forth if rows > 1 else gru.forth
        if rows > len(state):
            state = F.pad(state, (0, 0, 0, rows - len(state)))
        state = forth(inputs[i, :rows], None, product, state[:rows], gates[i, :rows], hidden[i, :rows])
        after = states[i if back else i + 1]
        after[:rows], after[rows:] = state, 0.0
    return states, gates, hidden


def _backward(
    inputs: Tensor,
    recurrent: Tensor,
    states: Tensor,
    gates: Tensor,
    hidden: Tensor,
    upstream: Tensor,
    counts: list[int],
    back: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients, (t, b, 3d) each, of the input gates and of the products of W_hh with the states, bias
    included."""
    steps, batch, _ = inputs.shape
    dgates, dproducts = (torch.empty(*inputs.shape, dtype=inputs.dtype) for _ in range(2))
    dstate = states.new_zeros(states.shape[1:], dtype=torch.promote_types(inputs.dtype, torch.float32))
    weight, form = matrix(recurrent.t(), batch, uses=steps), gru.forms(inputs)
    for i in _order(steps, not back):
        rows, first = counts[i], i == (steps - 1 if back else 0)
        step_back = form.back if rows > 1 else gru.back
        before = states[i + 1 if back else i, :rows]
        dgate, dproduct = dgates[i], dproducts[i]
        dgate[rows:], dproduct[rows:] = 0.0, 0.0
        share = step_back(
            gates[i, :rows], hidden[i, :rows], before, dstate[:rows], upstream[i, :rows], dgate[:rows], dproduct[:rows]
        )
        if not first:
            dstate[:rows] = weight.times(dproduct[:rows], share)
    return dgates, dproducts


def _order(steps: int, back: bool) -> Iterable[int]:
    return reversed(range(steps)) if back else range(steps)


def _plainly(inputs: Tensor, recurrent: Tensor, bias: Tensor, counts: list[int], back: bool) -> Tensor:
    """Return what `states` returns, by operations that autograd can differentiate any number of times."""
    steps, batch, _ = inputs.shape
    state = inputs.new_zeros(batch, recurrent.shape[-1])
    states: list[Tensor] = []
    for i in reversed(range(steps)) if back else range(steps):
        after = gru.step(inputs[i], F.linear(state, recurrent, bias), state)
        state = torch.where(torch.arange(batch).unsqueeze(-1) < counts[i], after, 0.0)
        states.append(state)
    return torch.stack(states[::-1] if back else states)
