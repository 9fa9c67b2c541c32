"""The loop of a GRU decoder with additive attention in Bahdanau's order, with its own backward pass.

Everything that does not depend on the previous state is computed for all steps before the loop. Then, for each step i:

    [h; q] = [W_hh; W_q] s_{i-1} + b        one matrix product
    a = softmax(v · tanh(q + k_j))
    s_i = gru(x_i + Σ_j a_j W_c u_j, h, s_{i-1})      the products W_c u_j are computed before the loop

with the input gates x_i of the token, the keys k_j, the values u_j and the vector v of the score.

Autograd would store the hidden layer of every step, and add to the gradient of every matrix at every step. This loop
stores only states, gates, products and weights. Its backward pass has one matrix product per step, and computes the
gradients of matrices, keys and values from all steps at once, after the loop. `bahdanau_cpu` is the loop for the CPU.
"""

import os
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.kernels import cuda_graphs
from regard.kernels.additive.query_scores import prepare, scores, slope, sums
from regard.kernels.availability import TRITON
from regard.kernels.derivatives import once_only
from regard.kernels.dtypes import HALF
from regard.kernels.recurrent import gru

_MOST_KEYS = 128  # the largest number of keys that one program of the kernels can hold


class Unrolled(NamedTuple):
    """The states after each step (t, b, d) and the attention weights of each step (t, b, k)."""

    states: Tensor
    weights: Tensor


class Given(NamedTuple):
    """The inputs of the loop: t steps, b rows of the batch, k keys of f features, states of size d."""

    inputs: Tensor  # (t, b, 3d): input gates from the tokens, bias included
    keys: Tensor  # (b, k, f): the keys of the score
    score: Tensor  # (f,): the vector v of the score
    values: Tensor  # (b, k, 3d): the values multiplied by the matrix W_c of the context
    state: Tensor  # (b, d): the state before the first step
    recurrent: Tensor  # (3d + f, d): W_hh above W_q
    bias: Tensor  # (3d + f,): the bias of the product with `recurrent`
    mask: Tensor | None  # (b, k): True where a key may be attended to


class Stored(NamedTuple):
    """The tensors that the forward pass stores for the backward pass."""

    states: Tensor  # (t + 1, b, d): the state before the first step, and that after each step
    gates: Tensor  # (t, b, 3d): r, z, n after their nonlinearities
    products: Tensor  # (t, b, 3d + f): the product of the state before each step with `recurrent`, plus bias
    weights: Tensor  # (t, b, k): attention weights


def unrolled(given: Given) -> Unrolled:
    """Return the states and the attention weights of all steps, which can be differentiated once.

    Reference implementation: the loop of `RecurrentDecoder` over single steps.
    """
    return Unrolled(*_Loop.apply(*(None if tensor is None else tensor.contiguous() for tensor in given)))


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        stored: Any = Stored(*cast(Any, cuda_graphs.run(_forward, given)))
        ctx.save_for_backward(*given, *stored)
        return stored.states[1:], stored.weights

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        once_only("a recurrent decoder with additive attention")
        return (*cuda_graphs.run(_backward, (*ctx.saved_tensors, *upstream)), None)


def _kernels(given: Given) -> bool:
    """Return whether the Triton kernels can run; one program of theirs holds all keys of a row of the batch."""
    device = given.inputs.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    known = given.inputs.dtype in (*HALF, torch.float32) and 0 < given.keys.shape[1] <= _MOST_KEYS
    return device and known and given.inputs.numel() > 0 and TRITON


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    given = Given(*arguments)
    if _kernels(given):
        return _forward_by_kernels(given)
    steps, batch, gate_size = given.inputs.shape
    size = given.state.shape[-1]
    keys = prepare(given.keys, given.score, steps)
    states = given.inputs.new_empty(steps + 1, batch, size)
    states[0] = given.state
    gates = torch.empty_like(given.inputs)
    products = given.inputs.new_empty(steps, batch, len(given.recurrent))
    weights = given.inputs.new_empty(steps, batch, given.keys.shape[1])
    recurrent = given.recurrent.t()
    masked = None if given.mask is None else ~given.mask
    for i in range(steps):
        torch.addmm(given.bias, states[i], recurrent, out=products[i])
        weighed(scores(products[i, :, gate_size:], keys), masked, weights[i])
        read = weights[i].unsqueeze(1)
        torch.baddbmm(given.inputs[i].unsqueeze(1), read, given.values, out=gates[i].unsqueeze(1))
        gru.in_place(gates[i], products[i, :, :gate_size], states[i], None, states[i + 1])
    return Stored(states, gates, products, weights)


def weighed(energy: Tensor, masked: Tensor | None, out: Tensor) -> None:
    """Write to `out` the softmax over the keys that are not masked; a row whose keys are all masked is zeros."""
    if masked is None:
        torch.softmax(energy, -1, out=out)
        return
    # The lowest finite number replaces −inf, so that a fully masked row is not NaN before it is set to 0.
    torch.softmax(energy.masked_fill(masked, torch.finfo(energy.dtype).min), -1, out=out)
    out.masked_fill_(masked, 0.0)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    given, stored = Given(*arguments[: len(Given._fields)]), Stored(*arguments[len(Given._fields) : -2])
    upstream, upweights = arguments[-2:]
    if _kernels(given):
        return _backward_by_kernels(given, stored, upstream, upweights)
    steps, _, gate_size = given.inputs.shape
    keys = prepare(given.keys, given.score, steps, back=True)
    dgates, dproducts = torch.empty_like(stored.gates), torch.empty_like(stored.products)
    dscores = torch.empty_like(stored.weights)
    dstate = torch.zeros_like(given.state)
    for i in reversed(range(steps)):
        dstate = dstate + upstream[i]
        hidden, query = stored.products[i, :, :gate_size], stored.products[i, :, gate_size:]
        dhidden = dproducts[i, :, :gate_size]
        dstate = gru.in_place_back(stored.gates[i], hidden, stored.states[i], None, dstate, dgates[i], dhidden)
        # The product is written as row times matrix: on the CPU, matrix times column would be four times slower.
        dweights = torch.baddbmm(upweights[i].unsqueeze(1), dgates[i].unsqueeze(1), given.values.mT).squeeze(1)
        share = stored.weights[i] * dweights
        torch.addcmul(share, stored.weights[i], share.sum(-1, keepdim=True), value=-1, out=dscores[i])
        dproducts[i, :, gate_size:] = slope(query, keys, dscores[i])
        dstate = torch.addmm(dstate, dproducts[i], given.recurrent)
    queries = stored.products[:, :, gate_size:]
    dkeys, dscore = sums(queries, keys, dscores)
    dvalues = torch.bmm(stored.weights.permute(1, 2, 0), dgates.transpose(0, 1))
    drecurrent = dproducts.flatten(0, 1).t() @ stored.states[:-1].flatten(0, 1)
    return dgates, dkeys, dscore, dvalues, dstate, drecurrent, dproducts.sum((0, 1))


def _forward_by_kernels(given: Given) -> tuple[Tensor, ...]:
    """Return what `_forward` returns, by two launches per step: a matrix product, and one kernel for all else."""
    from regard.kernels.triton import few_row_products  # a lazy import, because the module imports Triton
    from regard.kernels.triton.gru_attention_step import forward_step

    steps, batch, _ = given.inputs.shape
    states = given.inputs.new_empty(steps + 1, batch, given.state.shape[-1])
    states[0] = given.state
    gates = torch.empty_like(given.inputs)
    products = given.inputs.new_empty(steps, batch, len(given.recurrent))
    weights = given.inputs.new_empty(steps, batch, given.keys.shape[1], dtype=torch.float32)
    recurrent, bias = given.recurrent.t(), given.bias.expand(1, 1, -1)
    ours = few_row_products.serves(given.state)
    for i in range(steps):
        if ours:
            few_row_products.multiply(states[i : i + 1], recurrent.unsqueeze(0), products[i : i + 1], added=bias)
        else:
            torch.addmm(given.bias, states[i], recurrent, out=products[i])
        forward_step(
            products[i], given.keys, given.score, given.values, given.inputs[i], states[i], given.mask,
            weights[i], gates[i], states[i + 1],
        )  # fmt: skip
    return Stored(states, gates, products, weights)


def _backward_by_kernels(
    given: Given, stored: Stored, upstream: Tensor, upweights: Tensor
) -> tuple[Tensor | None, ...]:
    # These modules import Triton, so they are imported only here.
    from regard.kernels.triton import few_row_products, gru_attention_step

    dgates, dproducts = torch.empty_like(stored.gates), torch.empty_like(stored.products)
    dscores = torch.empty_like(stored.weights)
    upstream, upweights = upstream.contiguous(), upweights.contiguous()
    # The gradient of the state is the sum of two terms: `shares`, directly from the next state, in float32, and
    # `through`, from the matrix product, in the dtype of the state. If `few_row_products` computes the product,
    # `through` holds partial sums.
    shares = given.state.new_zeros(2, *given.state.shape, dtype=torch.float32)
    ours = few_row_products.serves(given.state)
    through = given.state.new_zeros(few_row_products.parts(len(given.recurrent)) if ours else 1, *given.state.shape)
    for i in reversed(range(len(dgates))):
        gru_attention_step.backward_step(
            stored.products[i], given.keys, given.score, given.values, stored.states[i], stored.weights[i],
            stored.gates[i], upstream[i], upweights[i], shares[(i + 1) % 2], through, dgates[i], dproducts[i],
            dscores[i], shares[i % 2],
        )  # fmt: skip
        if ours:
            few_row_products.multiply(dproducts[i : i + 1], given.recurrent.unsqueeze(0), through.unsqueeze(1))
        else:
            torch.mm(dproducts[i], given.recurrent, out=through[0])
    dstate = shares[0] + through.sum(0)
    dkeys, dscore = gru_attention_step.sums(stored.products, given.keys, given.score, dscores, given.state.shape[-1])
    dvalues = torch.bmm(stored.weights.permute(1, 2, 0).to(dgates.dtype), dgates.transpose(0, 1))
    drecurrent = dproducts.flatten(0, 1).t() @ stored.states[:-1].flatten(0, 1)
    return dgates, dkeys, dscore, dvalues, dstate, drecurrent, dproducts.sum((0, 1))
