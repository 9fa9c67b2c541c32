"""Runs a GRU of one layer over whole sequences by the loops of `kernels.recurrent`, where they apply."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.recurrent import sequence_cpu, sequence_cuda
from regard.models.recurrent.token_embeddings import Tokens


class Read(NamedTuple):
    """All states of a GRU (b, k, directions · d), zeros at padding, and its last states (b, directions · d)."""

    states: Tensor
    last: Tensor


def serves(network: nn.GRU | nn.LSTM) -> bool:
    """Return whether `read` can run the network: a GRU of one layer on the CPU, outside of torch.compile.

    `read` runs the network only if autocast is off or its dtype is bfloat16.
    """
    plain = isinstance(network, nn.GRU) and network.num_layers == 1 and not torch.compiler.is_compiling()
    known = not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") == torch.bfloat16
    return plain and network.get_parameter("weight_hh_l0").device.type == "cpu" and known


def read(network: nn.GRU | nn.LSTM, words: Tokens, lengths: Tensor | None) -> Read:
    """Run the GRU over the source sequences on the CPU, and return its states in every direction.

    `words` has time first, (k, b), and its rows must be sorted by `lengths` in descending order.
    """
    states: list[Tensor] = []
    last: list[Tensor] = []
    for way in ("_l0", "_l0_reverse")[: 2 if network.bidirectional else 1]:
        names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
        weight, bias, recurrent, hidden = (network.get_parameter(name + way) for name in names)
        gates = words.mapped(weight, bias)
        back = way.endswith("reverse")
        counts = _counts(gates, lengths)
        outputs = sequence_cpu.states(gates, recurrent.to(gates.dtype), hidden.to(gates.dtype), counts, back)
        states.append(outputs)
        last.append(_last(outputs, lengths, back))
    return Read(torch.cat([outputs.transpose(0, 1) for outputs in states], -1), torch.cat(last, -1))


def _counts(gates: Tensor, lengths: Tensor | None) -> list[int]:
    """Return for each position the number of rows that have a token at this position."""
    steps, batch, _ = gates.shape
    if lengths is None:
        return [batch] * steps
    return (lengths > torch.arange(steps).unsqueeze(-1)).sum(-1).tolist()


def _last(states: Tensor, lengths: Tensor | None, back: bool) -> Tensor:
    """Return the states (b, d) after the last token of each row in the given direction; zeros for an empty row."""
    if back:
        return states[0]
    if lengths is None:
        return states[-1]
    rows = torch.arange(states.shape[1])
    return states[(lengths - 1).clamp(min=0), rows]


def serves_cuda(network: nn.GRU | nn.LSTM) -> bool:
    """Return whether `read_cuda` can run the network: a GRU of one layer on CUDA, outside of torch.compile."""
    plain = isinstance(network, nn.GRU) and network.num_layers == 1 and not torch.compiler.is_compiling()
    return plain and network.get_parameter("weight_hh_l0").is_cuda


def read_cuda(network: nn.GRU | nn.LSTM, embedded: Tensor, mask: Tensor | None) -> Read:
    """Run the GRU over embedded source sequences (b, k, e) on CUDA, and return its states in every direction.

    `mask` (b, k) is False at padding.
    """
    ways = ["_l0", "_l0_reverse"][: 2 if network.bidirectional else 1]

    def parameters(name: str) -> list[Tensor]:
        return [network.get_parameter(name + way) for way in ways]

    if mask is not None:  # padding is set to zero, because NaN in padding would stay NaN when multiplied by 0
        embedded = embedded.masked_fill(~mask.unsqueeze(-1), 0.0)
    # One matrix product computes the input gates of both directions, with time first; the gates of the backward
    # direction are then reversed in time.
    gates = F.linear(
        embedded.transpose(0, 1), torch.cat(parameters("weight_ih")), torch.cat(parameters("bias_ih"))
    ).chunk(len(ways), -1)
    inputs = torch.stack([_turned(part, way) for way, part in enumerate(gates)], 1)
    turned_mask = None
    if mask is not None:
        turned_mask = torch.stack([_turned(mask.t(), way) for way in range(len(ways))], 1)
    recurrent = torch.stack(parameters("weight_hh")).to(inputs.dtype)  # under autocast, `inputs` has the autocast dtype
    bias = torch.stack(parameters("bias_hh")).unsqueeze(1).to(inputs.dtype)
    states = sequence_cuda.states(inputs, recurrent, bias, turned_mask)
    outputs = torch.cat([_turned(states[:, way], way) for way in range(len(ways))], -1).transpose(0, 1)
    if mask is not None:
        outputs = outputs.masked_fill(~mask.unsqueeze(-1), 0.0)
    return Read(outputs, torch.cat(states[-1].unbind(0), -1))


def _turned(sequence: Tensor, way: int) -> Tensor:
    return sequence.flip(0) if way else sequence
