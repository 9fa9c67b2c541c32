"""The feed-forward part of a Transformer layer, applied to each position separately."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.scores import float_tensor
from regard.kernels import cuda_graphs
from regard.kernels.availability import TRITON
from regard.nn.argument_checks import check_sizes
from regard.nn.projection import applied, own

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
GATED = "swiglu"
_LARGE = 2**26  # number of entries from which on a kernel runs for longer on the GPU than the host needs to launch it


class FeedForward(nn.Module):
    """Two linear maps with an activation between them, the same at every position.

    relu, gelu: W₂ f(W₁ x + b₁) + b₂ (Vaswani et al. 2017, section 3.3; Hendrycks & Gimpel 2016). swiglu: W₂ (silu(W₁ x)
    ⊙ V x), with W₁ and V in one matrix (Shazeer 2020). `hidden_size` is 4 · size unless given; dropout is applied to
    the input of W₂.

    >>> layer = FeedForward(8, 32, activation="swiglu")
    >>> layer(torch.zeros(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        size: int,
        hidden_size: int | None = None,
        *,
        activation: str = "relu",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if activation != GATED and activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join((*ACTIVATIONS, GATED))}, got {activation!r}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be from 0 to below 1, got {dropout}")
        check_sizes(size=size, hidden_size=hidden_size)
        self.size = size
        self.hidden_size = 4 * size if hidden_size is None else hidden_size
        self.activation = activation
        self.dropout = dropout
        self.inner = nn.Linear(size, self.hidden_size * (2 if activation == GATED else 1), bias=bias)
        self.outer = nn.Linear(self.hidden_size, size, bias=bias)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Apply the two linear maps and the activation to each position (…, d)."""
        float_tensor(x, "x")
        if x.ndim == 0 or x.shape[-1] != self.size:
            raise ValueError(f"x must be (…, {self.size}), got shape {tuple(x.shape)}")
        inner, outer = applied(own(self, "inner"), x), own(self, "outer")
        drops = self.training and self.dropout > 0.0
        if self.activation == GATED:
            gate, linear = inner.chunk(2, -1)
            hidden = F.silu(gate) * linear
        elif drops and self.activation == "relu" and _fuses(inner):
            return applied(outer, _relu_dropout(inner, self.dropout))
        else:
            hidden = ACTIVATIONS[self.activation](inner)
        return applied(outer, F.dropout(hidden, self.dropout) if drops else hidden)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}"

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> "FeedForward":
        """Return the feed-forward part of one of torch's Transformer layers, with a copy of its weights."""
        first, second = layer.linear1, layer.linear2
        converted = cls(
            first.in_features,
            first.out_features,
            activation=_named(layer.activation),
            bias=first.bias is not None,
            dropout=layer.dropout.p,
        )
        converted.to(first.weight)
        converted.inner.load_state_dict(first.state_dict())
        converted.outer.load_state_dict(second.state_dict())
        return converted.train(layer.training)


def _fuses(x: Tensor) -> bool:
    """Return whether the fused kernel of relu and dropout is faster than torch's two kernels.

    In eager calls with few entries the fused kernel is slower: the host takes longer to launch the fused kernel than
    torch's two kernels.
    """
    if not x.is_cuda or not TRITON:
        return False
    return torch.compiler.is_compiling() or cuda_graphs.recording or x.numel() >= _LARGE


def _relu_dropout(x: Tensor, dropout: float) -> Tensor:
    """Compute relu and dropout in one kernel; dropped entries are 0 in the output, so no mask is stored."""
    from regard.kernels.triton.relu_dropout import relu_dropout  # imported here: the module imports Triton

    return relu_dropout(x, torch.randint(2**31 - 1, (1,), device=x.device), dropout)


def _named(activation: object) -> str:
    """Return the name of the activation (such as "relu") that torch's Transformer layer holds as a function or a
    module."""
    if activation is F.relu or activation is torch.relu or isinstance(activation, nn.ReLU):
        return "relu"
    exact = isinstance(activation, nn.GELU) and activation.approximate == "none"
    if activation is F.gelu or exact:
        return "gelu"
    raise ValueError(f"activation of the layer must be ReLU or exact GELU, got {activation!r}")
