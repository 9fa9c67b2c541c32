"""Bottom-up attention, without a query: max pooling and gating."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.attended import Attended
from regard.core.requests import Request
from regard.core.scores import float_tensor
from regard.nn.argument_checks import check_sizes


class MaxSaliency(nn.Module):
    """The maximum max_j x_jc of each feature c over all positions j; the weights mark its position, the first on a tie.

    Max pooling is attention with weights that are 1 at the maximum and 0 elsewhere. Each feature has its own weights,
    so the weights are (b, d, k): `received()` counts the features whose maximum is at each position, a saliency map.

    >>> x = torch.tensor([[[1.0, 9.0], [4.0, 2.0], [3.0, 0.0]]])
    >>> from regard.core.requests import received
    >>> seen = MaxSaliency()(x, weights=received())
    >>> seen.output, seen.weights
    (tensor([[4., 9.]]), tensor([[1., 1., 0.]]))
    """

    def forward(
        self,
        x: Float[Tensor, "b k d"],
        *,
        mask: Bool[Tensor, "b k"] | None = None,
        weights: Request | None = None,
    ) -> Attended:
        """Return the maximum of each feature (b, d) over the real positions; zeros if there are none."""
        float_tensor(x, "x")
        if x.ndim != 3:
            raise ValueError(f"x must be (b, positions, size), got {tuple(x.shape)}")
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        if real.dtype != torch.bool or real.shape != x.shape[:2]:
            raise ValueError(
                f"mask must be a bool tensor {tuple(x.shape[:2])}, True for real positions, "
                f"got {real.dtype} {tuple(real.shape)}"
            )
        if x.shape[1] == 0:  # torch.max raises on an empty axis
            return Attended(x.sum(1), None if weights is None else weights.of(x.mT))
        seen = x if mask is None else torch.where(real.unsqueeze(-1), x, -torch.inf)
        best, index = seen.max(1)
        filled = real.any(1, keepdim=True)
        output = best if mask is None else torch.where(filled, best, 0)
        if weights is None:
            return Attended(output)
        winners = F.one_hot(index, x.shape[1]).to(x.dtype) * filled.unsqueeze(-1)
        return Attended(output, weights.of(winners))


class Gate(nn.Module):
    """x ⊙ σ(W x + b): every entry is multiplied by a gate computed from its vector.

    The gates are the weights, in the shape of the input (…, d).

    >>> from regard.core.requests import full
    >>> seen = Gate(8)(torch.randn(2, 5, 8), weights=full())
    >>> seen.output.shape, seen.weights.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 8]))
    """

    def __init__(self, size: int, *, bias: bool = True) -> None:
        super().__init__()
        check_sizes(size=size)
        self.size = size
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, x: Float[Tensor, "*lead n d"], *, weights: Request | None = None) -> Attended:
        """Return the gated input, a tensor in the shape of the input."""
        float_tensor(x, "x")
        if x.ndim < 2 or x.shape[-1] != self.size:
            raise ValueError(f"x must be (…, n, {self.size}), got {tuple(x.shape)}")
        gates = torch.sigmoid(self.linear(x)).to(x.dtype)
        return Attended(x * gates, None if weights is None else weights.of(gates))
