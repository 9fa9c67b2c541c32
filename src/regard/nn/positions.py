"""Positional encodings: added to vectors, applied as rotations, or added to the scores."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import sharding
from regard.core.biases import Bias, alibi
from regard.core.scores import float_tensor
from regard.nn.relative import RelativePositions as RelativePositions

Offset = int | Tensor  # the position of the first vector: a number, or a tensor on the device


def _steps(count: int, offset: Offset, device: torch.device) -> Tensor:
    """Return offset, offset + 1, … in float64, as float32 angles of large positions lose digits; on MPS in float32."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.arange(count, device=device, dtype=dtype) + offset


def _angles(count: int, offset: Offset, size: int, base: float, device: torch.device) -> Tensor:
    """Return t · base^(−2i / size) for each position t and pair i: (count, size / 2)."""
    steps = _steps(count, offset, device)
    pair = torch.arange(0, size, 2, device=device, dtype=steps.dtype)
    return steps.unsqueeze(-1) * torch.exp(pair * (-math.log(base) / size))


def _even(size: int, name: str) -> int:
    if size < 2 or size % 2:
        raise ValueError(f"{name} must be an even number of at least 2 (sines and cosines come in pairs), got {size}")
    return size


class SinusoidalPositions(nn.Module):
    """x + p with p(t, 2i) = sin(t / 10000^(2i/d)), p(t, 2i+1) = cos of the same (Vaswani et al. 2017, section 3.5).

    p(t + k) is a linear map of p(t) that depends only on k: a rotation of each pair of sine and cosine.

    >>> SinusoidalPositions(4).table(2)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """

    def __init__(self, size: int, base: float = 10000.0) -> None:
        super().__init__()
        self.size = _even(size, "size")
        self.base = base

    def table(
        self,
        count: int,
        *,
        offset: Offset = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Float[Tensor, "n d"]:
        """Return the encodings of positions offset … offset + count − 1."""
        angles = _angles(count, offset, self.size, self.base, device or torch.device("cpu"))
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).to(dtype)

    def forward(self, x: Float[Tensor, "b n d"], *, offset: Offset = 0) -> Float[Tensor, "b n d"]:
        """Return x plus the encodings of its positions; `offset` is the position of the first vector."""
        _sized(x, self.size)
        offset = sharding.shifted(offset, x.shape[-2], x.device)
        return x + self.table(x.shape[-2], offset=offset, dtype=x.dtype, device=x.device)


class LearnedPositions(nn.Module):
    """x + p with a learned vector p(t) for each of `capacity` positions (Gehring et al. 2017, section 3.1).

    >>> LearnedPositions(8, capacity=5)(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, size: int, capacity: int) -> None:
        super().__init__()
        if size < 1 or capacity < 1:
            raise ValueError(f"size and capacity must be at least 1, got {size} and {capacity}")
        self.size = size
        self.capacity = capacity
        self.weight = nn.Parameter(torch.empty(capacity, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise near zero, so that positions are small beside word embeddings."""
        nn.init.normal_(self.weight, std=0.02)

    def table(self, count: int, *, offset: Offset = 0) -> Float[Tensor, "n d"]:
        """Return the encodings of positions offset … offset + count − 1."""
        if isinstance(offset, Tensor):  # an index outside of the table raises a device error on CUDA
            return self.weight.index_select(0, torch.arange(count, device=self.weight.device) + offset)
        if offset < 0 or offset + count > self.capacity:
            raise ValueError(f"positions {offset} to {offset + count - 1} asked, the table holds {self.capacity}")
        return self.weight.narrow(0, offset, count)

    def forward(self, x: Float[Tensor, "b n d"], *, offset: Offset = 0) -> Float[Tensor, "b n d"]:
        """Return x plus the encodings of its positions; `offset` is the position of the first vector."""
        _sized(x, self.size)
        offset = sharding.shifted(offset, x.shape[-2], x.device)
        return x + self.table(x.shape[-2], offset=offset).to(x.dtype)


class Rotary(nn.Module):
    """Each pair of features is rotated by t · base^(−2i/d), so that ⟨R(s) q, R(t) k⟩ depends on t − s (Su et al. 2021).

    Feature i is paired with feature i + d/2 (section 3.4.2 of the paper pairs neighbouring features, which differs only
    in the order of features).

    >>> turned = Rotary(4)(torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 3, 4))
    >>> turned[0, 0, :, 0], turned[0, 0, :, 2]  # cos t, sin t
    (tensor([ 1.0000,  0.5403, -0.4161]), tensor([0.0000, 0.8415, 0.9093]))
    """

    def __init__(self, head_size: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_size = _even(head_size, "head_size")
        self.base = base

    def forward(self, x: Float[Tensor, "b h n d"], *, offset: Offset = 0) -> Float[Tensor, "b h n d"]:
        """Return queries or keys (b, h, n, d) rotated by their positions; `offset` is the position of the first."""
        _sized(x, self.head_size)
        offset = sharding.shifted(offset, x.shape[-2], x.device)
        angles = _angles(x.shape[-2], offset, self.head_size, self.base, x.device)
        dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        cos, sin = (part.to(dtype).unsqueeze(-2) for part in (angles.cos(), angles.sin()))
        # The rotation uses the layout (b, n, h, d) of projections, which fused kernels accept without a copy.
        first, second = x.transpose(1, 2).to(dtype).chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return turned.to(x.dtype).transpose(1, 2)


class Alibi(nn.Module):
    """−m · |i − j| added to the scores, m = 2^(−8/h), 2^(−16/h), … for the h heads (Press et al. 2022, section 3).

    If the number of heads h is not a power of two, the slopes of the next smaller power of two come first, then every
    other slope of the next larger power of two.

    >>> Alibi(4).slopes
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads must be at least 1, got {heads}")
        self.heads = heads
        power = 2 ** int(math.log2(heads))
        whole = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
        between = [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        self.register_buffer("slopes", torch.tensor(whole + between), persistent=False)

    def bias(self, offset: int = 0) -> Bias:
        """Return the ALiBi bias for queries of which the first is at key position `offset`."""
        return alibi(self.slopes, offset)


def _sized(x: Tensor, size: int) -> None:
    float_tensor(x, "x")
    if x.shape[-1] != size:
        raise ValueError(f"x has size {x.shape[-1]}, the positions are for size {size}")
