"""The loop of a GRU decoder with additive attention in Luong's order with input feeding, and its own backward pass.

This loop is built like that of `bahdanau`, and carries one more tensor from step to step: o, the input of the output
layer. For each step i:

    s_i = gru(x_i + W_f o_{i-1}, h_{i-1}, s_{i-1})
    [h_i; q; p] = [W_hh; W_q; W_r] s_i + b        one matrix product
    a = softmax(v · tanh(q + k_j))
    o_i = tanh(p + Σ_j a_j W_c u_j)               the products W_c u_j are computed before the loop

with the input gates x_i of the token, the keys k_j, the values u_j and the vector v of the score.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.kernels import cuda_graphs
from regard.kernels.additive.query_scores import prepare, scores, slope, sums
from regard.kernels.derivatives import once_only
from regard.kernels.products import matrix
from regard.kernels.recurrent import gru
from regard.kernels.recurrent.bahdanau import weighed


class Unrolled(NamedTuple):
    """The input of the output layer after each step (t, b, d), and the attention weights of each step (t, b, k)."""

    outputs: Tensor
    weights: Tensor


class Given(NamedTuple):
    """The inputs of the loop: t steps, b rows of the batch, k keys of f features, states of size d."""

    inputs: Tensor  # (t, b, 3d): input gates from the tokens, bias included
    keys: Tensor  # (b, k, f): the keys of the score
    score: Tensor  # (f,): the vector v of the score
    values: Tensor  # (b, k, d): the values multiplied by the matrix W_c of the context
    feeding: Tensor  # (3d, d): the matrix W_f, applied to the output of the previous step
    state: Tensor  # (b, d): the state before the first step
    recurrent: Tensor  # (3d + f + d, d): W_hh above W_q above W_r
    bias: Tensor  # (3d + f + d,): the bias of the product with `recurrent`
    mask: Tensor | None  # (b, k): True where a key may be attended to


class Stored(NamedTuple):
    """The tensors that the forward pass stores for the backward pass."""

    states: Tensor  # (t + 1, b, d): the state before the first step, and that after each step
    outputs: Tensor  # (t + 1, b, d): zeros, then the input of the output layer after each step
    gates: Tensor  # (t, b, 3d): r, z, n after their nonlinearities
    products: Tensor  # (t + 1, b, 3d + f + d): the product of each state with `recurrent`, plus bias
    weights: Tensor  # (t, b, k): attention weights


def unrolled(given: Given) -> Unrolled:
    """Return the outputs and the attention weights of all steps, which can be differentiated once.

    Reference implementation: the loop of `RecurrentDecoder` over single steps.
    """
    return Unrolled(*_Loop.apply(*(None if tensor is None else tensor.contiguous() for tensor in given)))


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        stored: Any = Stored(*cast(Any, cuda_graphs.run(_forward, given)))
        ctx.save_for_backward(*given, *stored)
        return stored.outputs[1:], stored.weights

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        once_only("a recurrent decoder with additive attention")
        return (*cuda_graphs.run(_backward, (*ctx.saved_tensors, *upstream)), None)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    given = Given(*arguments)
    steps, batch, gate_size = given.inputs.shape
    size, features = given.state.shape[-1], given.keys.shape[-1]
    keys = prepare(given.keys, given.score, steps)
    states, outputs = (given.inputs.new_empty(steps + 1, batch, size) for _ in range(2))
    states[0], outputs[0] = given.state, 0.0
    gates = torch.empty_like(given.inputs)
    products = given.inputs.new_empty(steps + 1, batch, len(given.recurrent))
    weights = given.inputs.new_empty(steps, batch, given.keys.shape[1])
    recurrent, feeding = (matrix(weight, batch, uses=steps) for weight in (given.recurrent, given.feeding))
    masked = None if given.mask is None else ~given.mask
    recurrent.into(products[0], states[0], given.bias)
    for i in range(steps):
        feeding.into(gates[i], outputs[i], given.inputs[i])
        gru.in_place(gates[i], products[i, :, :gate_size], states[i], None, states[i + 1])
        recurrent.into(products[i + 1], states[i + 1], given.bias)
        _, query, rest = products[i + 1].split([gate_size, features, size], -1)
        weighed(scores(query, keys), masked, weights[i])
        mixed = torch.baddbmm(rest.unsqueeze(1), weights[i].unsqueeze(1), given.values)
        torch.tanh(mixed.squeeze(1), out=outputs[i + 1])
    return Stored(states, outputs, gates, products, weights)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    given, stored = Given(*arguments[: len(Given._fields)]), Stored(*arguments[len(Given._fields) : -2])
    upstream, upweights = arguments[-2:]
    steps, batch, gate_size = given.inputs.shape
    size, features = given.state.shape[-1], given.keys.shape[-1]
    keys = prepare(given.keys, given.score, steps, back=True)
    recurrent, feeding = (matrix(weight.t(), batch, uses=steps) for weight in (given.recurrent, given.feeding))
    dgates, dproducts = torch.empty_like(stored.gates), torch.zeros_like(stored.products)
    dscores, dmixed = torch.empty_like(stored.weights), torch.empty_like(stored.outputs[1:])
    share = doutput = torch.zeros_like(given.state)
    for i in reversed(range(steps)):
        output = stored.outputs[i + 1]
        torch.mul(upstream[i] + doutput, 1 - output * output, out=dmixed[i])
        # The product is written as row times matrix: on the CPU, matrix times column would be four times slower.
        dweights = torch.baddbmm(upweights[i].unsqueeze(1), dmixed[i].unsqueeze(1), given.values.mT).squeeze(1)
        part = stored.weights[i] * dweights
        torch.addcmul(part, stored.weights[i], part.sum(-1, keepdim=True), value=-1, out=dscores[i])
        _, query, _ = stored.products[i + 1].split([gate_size, features, size], -1)
        dproducts[i + 1, :, gate_size : gate_size + features] = slope(query, keys, dscores[i])
        dproducts[i + 1, :, gate_size + features :] = dmixed[i]
        dstate = recurrent.times(dproducts[i + 1], share)
        hidden, dhidden = stored.products[i, :, :gate_size], dproducts[i, :, :gate_size]
        share = gru.in_place_back(stored.gates[i], hidden, stored.states[i], None, dstate, dgates[i], dhidden)
        doutput = feeding.times(dgates[i])
    dstate = recurrent.times(dproducts[0], share)
    queries = stored.products[1:, :, gate_size : gate_size + features]
    dkeys, dscore = sums(queries, keys, dscores)
    dvalues = torch.bmm(stored.weights.permute(1, 2, 0), dmixed.transpose(0, 1))
    dfeeding = dgates.flatten(0, 1).t() @ stored.outputs[:-1].flatten(0, 1)
    drecurrent = dproducts.flatten(0, 1).t() @ stored.states.flatten(0, 1)
    return dgates, dkeys, dscore, dvalues, dfeeding, dstate, drecurrent, dproducts.sum((0, 1))
