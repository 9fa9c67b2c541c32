"""The loop of a GRU decoder with additive attention in Bahdanau's order on the CPU, with its own backward pass.

It differs from `bahdanau` in two ways. Matrices are packed once for all steps. W_c is applied to the context at each
step, not to every value before the loop, which would save no work on the CPU and need more memory traffic.

    [h; q] = [W_hh; W_q] s_{i-1} + b
    a = softmax(v · tanh(q + k_j)),  c_i = Σ_j a_j u_j
    s_i = gru(x_i + W_c c_i, h, s_{i-1})

with the input gates x_i of the token, the keys k_j, the values u_j and the vector v of the score.

Under autocast the matrices, values and input gates, and the operands and results of matrix products, are bfloat16.
States, scores and the gradients carried from step to step are float32.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.kernels import compilation
from regard.kernels.additive.query_scores import blocked, prepare, scores, slope, sums
from regard.kernels.compilation import compiled
from regard.kernels.derivatives import once_only
from regard.kernels.products import matrix
from regard.kernels.recurrent.bahdanau import weighed
from regard.kernels.recurrent.gru import forms

# From this number of elements of the values, times the number of steps, compiling the sums over values saves time.
_WORTH = 2**24


class Unrolled(NamedTuple):
    """The states after each step (t, b, d), contexts (t, b, e) and attention weights (t, b, k)."""

    states: Tensor
    contexts: Tensor
    weights: Tensor


class Given(NamedTuple):
    """The inputs of the loop: t steps, b rows of the batch, k keys of f features, states of size d, values of size e.

    All tensors except keys, score, state and mask have the dtype of the matrices.
    """

    inputs: Tensor  # (t, b, 3d): input gates from the tokens, bias included
    keys: Tensor  # (b, k, f): the keys of the score
    score: Tensor  # (f,): the vector v of the score
    values: Tensor  # (b, k, e): their weighted sum is the context
    mapping: Tensor  # (3d, e): the matrix W_c, applied to the context
    state: Tensor  # (b, d): the state before the first step
    recurrent: Tensor  # (3d + f, d): W_hh above W_q
    bias: Tensor  # (3d + f,): the bias of the product with `recurrent`
    mask: Tensor | None  # (b, k): True where a key may be attended to


class _Stored(NamedTuple):
    """The tensors that the forward pass stores for the backward pass."""

    states: Tensor  # (t + 1, b, d): the state before the first step, and that after each step
    contexts: Tensor  # (t, b, e): weighted sums of the values
    weights: Tensor  # (t, b, k): attention weights
    gates: Tensor  # (t, b, 3d): r, z, n after their nonlinearities
    hidden: Tensor  # (t, b, d): the part of W_hh s_{i-1} + b that the reset gate r multiplies
    queries: Tensor  # (t, b, f): the query of each step


def unrolled(given: Given) -> Unrolled:
    """Return the states, the contexts and the attention weights of all steps, which can be differentiated once.

    Reference implementation: the loop of `RecurrentDecoder` over single steps.
    """
    return Unrolled(*_Loop.apply(*(None if tensor is None else tensor.contiguous() for tensor in given)))


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            stored = _forward(Given(*_bare(given)))
        ctx.save_for_backward(*given, *stored)
        return stored.states[1:], stored.contexts, stored.weights

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        once_only("a recurrent decoder with additive attention")
        fields = len(Given._fields)
        saved = _bare(ctx.saved_tensors)
        given, stored = Given(*saved[:fields]), _Stored(*saved[fields:])
        with torch.autocast("cpu", enabled=False):
            return (*_backward(given, stored, Unrolled(*upstream)), None)


def _bare(tensors: Iterable[Any]) -> list[Any]:
    """Return the tensors detached, because torch.compile would compile a function again for tensors that require a
    gradient.
    """
    return [None if tensor is None else tensor.detach() for tensor in tensors]


def _forward(given: Given) -> _Stored:
    steps, batch, gate_size = given.inputs.shape
    keys = prepare(given.keys, given.score, steps)
    recurrent, mapping = (matrix(weight, batch, uses=steps) for weight in (given.recurrent, given.mapping))
    gru, read = forms(given.inputs).forth, _Values.of(given.values, steps)
    masked = None if given.mask is None else ~given.mask
    state, narrow = given.state, given.inputs.dtype
    size, wide = state.shape[-1], state.dtype
    stored = _Stored(
        states=torch.empty(steps + 1, batch, size, dtype=narrow),
        contexts=torch.empty(steps, batch, given.values.shape[-1], dtype=narrow),
        weights=torch.empty(steps, *given.keys.shape[:2], dtype=wide),
        gates=torch.empty(steps, batch, gate_size, dtype=wide),
        hidden=torch.empty(steps, batch, size, dtype=wide),
        queries=torch.empty(steps, batch, len(given.score), dtype=wide),
    )
    stored.states[0] = state
    for i in range(steps):
        product = recurrent.times(stored.states[i], given.bias)
        stored.queries[i] = product[:, gate_size:]
        weighed(scores(stored.queries[i], keys), masked, stored.weights[i])
        read.into(stored.contexts[i], stored.weights[i])
        mapped = mapping.times(stored.contexts[i])
        state = gru(given.inputs[i], mapped, product, state, stored.gates[i], stored.hidden[i])
        stored.states[i + 1] = state
    return stored


def _backward(given: Given, stored: _Stored, upstream: Unrolled) -> tuple[Tensor | None, ...]:
    steps, batch, gate_size = given.inputs.shape
    keys = prepare(given.keys, given.score, steps, back=True)
    recurrent, mapping = (matrix(weight.t(), batch, uses=steps) for weight in (given.recurrent, given.mapping))
    gru, spread = forms(given.inputs).back, _spread(given.values, steps)
    narrow = given.inputs.dtype
    dgates = torch.empty(steps, batch, gate_size, dtype=narrow)
    dproducts = torch.empty(steps, batch, len(given.recurrent), dtype=narrow)
    dcontexts, dscores = torch.empty(*stored.contexts.shape, dtype=narrow), torch.empty_like(stored.weights)
    dstate = torch.zeros_like(given.state)
    for i in reversed(range(steps)):
        dhidden, dquery = dproducts[i, :, :gate_size], dproducts[i, :, gate_size:]
        share = gru(stored.gates[i], stored.hidden[i], stored.states[i], dstate, upstream.states[i], dgates[i], dhidden)
        mapping.into(dcontexts[i], dgates[i], upstream.contexts[i])
        dscores[i] = spread(dcontexts[i], given.values, stored.weights[i], upstream.weights[i])
        dquery.copy_(slope(stored.queries[i], keys, dscores[i]))
        dstate = recurrent.times(dproducts[i], share)
    dkeys, dscore = sums(stored.queries, keys, dscores)
    dvalues = torch.bmm(stored.weights.permute(1, 2, 0).to(dcontexts.dtype), dcontexts.transpose(0, 1))
    dmapping = dgates.flatten(0, 1).t() @ stored.contexts.flatten(0, 1)
    flat = dproducts.flatten(0, 1)
    drecurrent = flat.t() @ stored.states[:-1].flatten(0, 1)
    dbias = (flat.new_ones(1, len(flat)) @ flat).squeeze(0)  # twice as fast as a sum over rows
    return dgates, dkeys, dscore, dvalues, dmapping, dstate, drecurrent, dbias


class _Values(NamedTuple):
    """The values as `rows` (b, k, e), and for the compiled loop also as `blocks` (b, e / 16, k, 16)."""

    rows: Tensor
    blocks: Tensor | None

    @staticmethod
    def of(values: Tensor, steps: int) -> "_Values":
        return _Values(values, blocked(values) if _worth(values, steps) else None)

    def into(self, out: Tensor, weights: Tensor) -> None:
        """Write the weighted sum of the values, for each row of the batch, into `out`."""
        if self.blocks is not None:
            out.copy_(compiled(_read)(weights, self.blocks))
        else:
            torch.bmm(weights.to(out.dtype).unsqueeze(1), self.rows, out=out.unsqueeze(1))


def _worth(values: Tensor, steps: int) -> bool:
    large = values.numel() * steps >= _WORTH and min(values.shape) > 1
    return large and values.dtype != torch.float64 and compilation.compiler()


def _read(weights: Tensor, values: Tensor) -> Tensor:
    return (weights[:, None, :, None] * values).sum(2).flatten(1)


def _spread(values: Tensor, steps: int) -> Any:
    return compiled(_spread_back) if _worth(values, steps) else _spread_plainly


def _spread_back(dcontext: Tensor, values: Tensor, weights: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of the scores from `dcontext`, that of the context, and `upstream`, that of the weights."""
    dweights = upstream + (dcontext.to(weights.dtype).unsqueeze(1) * values).sum(-1)
    share = weights * dweights
    return share - weights * share.sum(-1, keepdim=True)


def _spread_plainly(dcontext: Tensor, values: Tensor, weights: Tensor, upstream: Tensor) -> Tensor:
    """Return what `_spread_back` returns, by a matrix product, which does not store dcontext times each value."""
    # The product is written as row times matrix: on the CPU, matrix times column would be four times slower.
    dweights = upstream + torch.bmm(dcontext.unsqueeze(1), values.mT).squeeze(1)
    share = weights * dweights
    return share - weights * share.sum(-1, keepdim=True)
