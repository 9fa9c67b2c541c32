"""Single steps of GRU and LSTM with the parameters of `nn.GRU` and `nn.LSTM`, which only run whole sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.kernels.recurrent import gru

CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}

# The hidden state: (h,) of a GRU or (h, c) of an LSTM, each of shape (layers, b, d) as in torch.
Hidden = tuple[Tensor, ...]


@dataclass(frozen=True)
class Recurrence:
    """The settings of a recurrent decoder, besides its sizes.

    In training, `dropout` is applied to the embeddings, between layers and before the output layer.

    >>> Recurrence(cell="lstm", layers=2).cell
    'lstm'
    """

    cell: Literal["gru", "lstm"] = "gru"
    layers: int = 1
    embedding_size: int | None = None  # with None, embeddings have the size of the decoder's hidden state
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.cell not in CELLS:
            raise ValueError(f"cell must be one of {', '.join(CELLS)}, got {self.cell!r}")
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {self.dropout}")

    @property
    def parts(self) -> int:
        """Return the number of vectors in a layer's hidden state: 1 for a GRU (h), 2 for an LSTM (h and c)."""
        return 2 if self.cell == "lstm" else 1

    def network(self, input_size: int, size: int, *, bidirectional: bool = False) -> nn.GRU | nn.LSTM:
        """Return an `nn.GRU` or `nn.LSTM` with these settings, batch first."""
        between = self.dropout if self.layers > 1 else 0.0
        return CELLS[self.cell](
            input_size, size, self.layers, batch_first=True, dropout=between, bidirectional=bidirectional
        )


def run(network: nn.GRU | nn.LSTM, inputs: Float[Tensor, "b t i"], hidden: Hidden) -> tuple[Tensor, Hidden]:
    """Run all steps in one call of `nn.GRU` or `nn.LSTM`; return outputs (b, t, d) and the last hidden state."""
    if isinstance(network, nn.LSTM):
        outputs, (last, cell) = network(inputs, (hidden[0], hidden[1]))
        return outputs, (last, cell)
    outputs, last = network(inputs, hidden[0])
    return outputs, (last,)


def advance(network: nn.GRU | nn.LSTM, gates: Float[Tensor, "b g"], hidden: Hidden) -> tuple[Tensor, Hidden]:
    """Run one step, given the first layer's input gates W x + b; return the output (b, d) and new hidden state."""
    states: list[Sequence[Tensor]] = []
    output = gates
    for layer in range(network.num_layers):
        if layer > 0:
            below = F.dropout(output, network.dropout, network.training)
            gates = F.linear(
                below, network.get_parameter(f"weight_ih_l{layer}"), network.get_parameter(f"bias_ih_l{layer}")
            )
        weight, bias = network.get_parameter(f"weight_hh_l{layer}"), network.get_parameter(f"bias_hh_l{layer}")
        before = [part[layer] for part in hidden]
        recurrent = F.linear(before[0], weight, bias)
        after = (
            _lstm(gates, recurrent, before[1])
            if isinstance(network, nn.LSTM)
            else (gru.step(gates, recurrent, before[0]),)
        )
        output = after[0]
        states.append(after)
    return output, tuple(torch.stack(parts) for parts in zip(*states, strict=True))


def _lstm(gates: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return h' = o tanh c' and c' = f c + i g of an LSTM, whose gates have torch's order i, f, g, o."""
    write, keep, new, show = (gates + recurrent).chunk(4, -1)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(cell), cell
