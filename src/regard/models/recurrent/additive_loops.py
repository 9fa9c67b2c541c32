"""Runs a decoder with additive attention by the hand-written loops of `kernels.recurrent`, where they apply."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import attention as calls
from regard.core.normalizers import Softmax
from regard.core.scores import Additive
from regard.kernels.recurrent import bahdanau as bahdanau_loop
from regard.kernels.recurrent import bahdanau_cpu, luong
from regard.nn.attention import Attention
from regard.nn.protocol import Projected


class LoopResult(NamedTuple):
    """The result of a hand-written loop: decoder states (b, t, d), attention weights (b, t, k), contexts (b, t, e).

    With input feeding, `states` are the inputs of the output layer, and there are no contexts. If `turned` is true,
    states and contexts have time first, (t, b, …), as the CPU loop computes them.
    """

    states: Tensor
    weights: Tensor
    contexts: Tensor | None = None
    turned: bool = False


def serves(network: nn.GRU | nn.LSTM, attention: object, *, feeding: bool = False) -> bool:
    """Return whether the hand-written loops can run this decoder.

    The decoder must be a GRU of one layer with additive softmax attention without dropout, outside of torch.compile and
    without observers of attention calls. Under autocast on the CPU, the dtype must be bfloat16, and there must be no
    input feeding.
    """
    if calls.observers:
        return False
    if not isinstance(network, nn.GRU) or network.num_layers > 1:
        return False
    if not isinstance(attention, Attention) or type(attention.normalize) is not Softmax:
        return False
    score: Any = attention.score()
    additive = isinstance(score, Additive) and score.activation == "tanh" and score.weight.ndim == 1
    device = network.get_parameter("weight_hh_l0").device.type
    plain = attention.dropout == 0.0 or not attention.training
    cast = torch.is_autocast_enabled(device) and device != "cuda"
    known = not cast or (device == "cpu" and torch.get_autocast_dtype("cpu") == torch.bfloat16 and not feeding)
    return additive and plain and attention.query is not None and known and not torch.compiler.is_compiling()


def bahdanau(
    network: nn.GRU | nn.LSTM, attention: Any, gates: Tensor, mapping: Tensor, state: Tensor, projected: Projected
) -> LoopResult:
    """Run all steps in Bahdanau's order, from the tokens' input gates (t, b, 3d) and the first state (b, d).

    `mapping` is the matrix that maps a context to the input gates.
    """
    query = attention.query.weight
    recurrent = torch.cat((network.get_parameter("weight_hh_l0"), query))
    hidden = network.get_parameter("bias_hh_l0")
    bias = torch.cat((hidden, hidden.new_zeros(len(query))))
    values, score = projected.value, attention.score().weight
    if state.device.type == "cpu":
        keys, score, state = _wide(gates, projected.key, score, state)
        _, values, mapping, recurrent, bias = _narrow(gates, values, mapping, recurrent, bias)
        inputs = bahdanau_cpu.Given(gates, keys, score, values, mapping, state, recurrent, bias, projected.mask)
        states, contexts, weights = bahdanau_cpu.unrolled(inputs)
        return LoopResult(states, weights.transpose(0, 1), contexts, turned=True)
    # The values are mapped to the input gates once, which saves a matrix product with the context at each step.
    narrow = _narrow(gates, projected.key, score, F.linear(values, mapping), state, recurrent, bias)
    result = _batch_first(bahdanau_loop.unrolled(bahdanau_loop.Given._make([*narrow, projected.mask])))
    return result._replace(contexts=result.weights @ values)


def feeding(
    network: nn.GRU | nn.LSTM,
    attention: Any,
    readout: nn.Linear,
    gates: Tensor,
    mapping: Tensor,
    state: Tensor,
    projected: Projected,
) -> LoopResult:
    """Run all steps in Luong's order with input feeding; `mapping` maps the last output to the input gates."""
    values, query = projected.value, attention.query.weight
    context, hidden = readout.weight.split([values.shape[-1], readout.in_features - values.shape[-1]], 1)
    recurrent = torch.cat((network.get_parameter("weight_hh_l0"), query, hidden))
    hidden_bias = network.get_parameter("bias_hh_l0")
    bias = torch.cat((hidden_bias, hidden_bias.new_zeros(len(query)), readout.bias))
    values, score = F.linear(values, context), attention.score().weight
    narrow = _narrow(gates, projected.key, score, values, mapping, state, recurrent, bias)
    return _batch_first(luong.unrolled(luong.Given._make([*narrow, projected.mask])))


def _narrow(gates: Tensor, *others: Tensor | None) -> list[Any]:
    """Return all arguments in the dtype of `gates`, which under autocast is the autocast dtype."""
    return [gates, *(None if other is None else other.to(gates.dtype) for other in others)]


def _wide(gates: Tensor, *others: Tensor) -> list[Any]:
    """Return the arguments after `gates` in float32, or in the dtype of `gates` if that dtype is wider."""
    dtype = torch.promote_types(gates.dtype, torch.float32)
    return [other.to(dtype) for other in others]


def _batch_first(result: tuple[Tensor, Tensor]) -> LoopResult:
    states, weights = result
    return LoopResult(states.transpose(0, 1), weights.transpose(0, 1))
