"""Stage 1 of attention: the score of each query and key.

A score is a frozen record that is also a function, `score(query, key) -> scores`. Every score is *pairwise*:
scores[i, j] depends only on query i and key j, so any block of the score matrix can be computed independently.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.core.transforms import eager, transformed
from regard.kernels import unit_rows
from regard.kernels.availability import TRITON

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),  # negative slope as in graph attention (Veličković et al. 2018)
}

_ROOM = 2.0**15  # a bound below the largest float16 number (65504), so that rounding does not overflow
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # float8 has no arithmetic in torch

Swap = Callable[[Tensor], Tensor]


class ScaledProduct(NamedTuple):
    """A score rewritten as scale · query @ keyᵀ, the only form that fused kernels compute."""

    query: Tensor
    key: Tensor
    scale: float


class Score:
    """The base class of scores: `score(query, key)` returns the scores, and the other methods describe the score."""

    name = "score"

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        raise NotImplementedError

    def check(self, query: Tensor, key: Tensor) -> None:
        """Raise if query (…, h, q, d) and key (…, g, k, d) cannot be scored."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the score, such as a learned weight, which get gradients with every backend."""
        return ()

    def holding(self, swap: Swap) -> "Score":
        """Return a copy of the score with each of its tensors replaced by `swap(tensor)`."""
        return self

    def as_product(self, query: Tensor, key: Tensor) -> ScaledProduct | None:
        """Return a scaled dot product that gives the scores of this query and key, or None if there is none."""
        return None

    def why_no_product(self) -> str | None:
        """Return the reason why the score cannot be written as a dot product (see `as_product`), or None if it can."""
        return f"{self.name} scores are not a dot product"

    def flops(self, size: int) -> int:
        """Return the number of floating-point operations for one pair of query and key."""
        return 2 * size

    def floats(self, size: int) -> float:
        """Return the number of floats that calling the score holds in memory for one pair of query and key."""
        return 1.0


def finite(value: object, name: str) -> float:
    """Return the value, or raise unless it is a finite number.

    A tensor is refused as value, because some backends could not compute a gradient for it.
    """
    if isinstance(value, Tensor):
        hint = ": multiply the query by a learned scale instead" if name == "scale" else ""
        raise TypeError(f"{name} must be a number, got a tensor{hint}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = type(value).__name__
        hint = f": write float(…) of the {kind}" if hasattr(value, "__float__") and not isinstance(value, bool) else ""
        raise TypeError(f"{name} must be a number, int or float, got {kind}{hint}")
    if not -math.inf < value < math.inf:  # torch.compile can trace this comparison, but not math.isfinite
        raise ValueError(f"{name} must be a finite number, got {value}")
    return value


def float_tensor(value: object, name: str) -> None:
    """Raise unless the argument is a float tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a float tensor, got {type(value).__name__}")
    if value.dtype not in FLOATS:
        hint = f": write {name}.bfloat16()" if value.is_floating_point() else ""
        raise TypeError(f"{name} must be a float tensor of 16, 32 or 64 bits, got {value.dtype}{hint}")


def _same_size(query: Tensor, key: Tensor, name: str) -> None:
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query has size {query.shape[-1]}, key has size {key.shape[-1]}: "
            f"{name} scores need equal sizes (regard.Bilinear takes different ones)"
        )


@dataclass(frozen=True)
class Dot(Score):
    """⟨q, k⟩, unscaled (Luong et al. 2015).

    >>> Dot()(torch.tensor([[10.0, 5, 10]]), torch.tensor([[5.0, 0, 1], [0, 1, 1]]))
    tensor([[60., 15.]])
    """

    name = "dot"

    def __call__(
        self, query: Float[Tensor, "*#lead q d"], key: Float[Tensor, "*#lead k d"]
    ) -> Float[Tensor, "... q k"]:
        return query @ key.mT

    def check(self, query: Tensor, key: Tensor) -> None:
        _same_size(query, key, self.name)

    def as_product(self, query: Tensor, key: Tensor) -> ScaledProduct:
        return ScaledProduct(query, key, 1.0)

    def why_no_product(self) -> str | None:
        return None


@dataclass(frozen=True)
class ScaledDot(Score):
    """scale · ⟨q, k⟩, with scale = 1/√d unless given (Vaswani et al. 2017).

    With a `softcap` c each score s becomes c · tanh(s / c), which is bounded by ±c; mask and bias are applied after it.

    >>> ScaledDot()(torch.tensor([[1.0, 1, 1, 1]]), torch.tensor([[1.0, 2, 3, 4]]))
    tensor([[5.]])
    """

    scale: float | None = None
    softcap: float | None = None
    name = "scaled_dot"

    def __post_init__(self) -> None:
        if self.scale is not None:
            finite(self.scale, "scale")
        if self.softcap is not None and not finite(self.softcap, "softcap") > 0:
            raise ValueError(f"softcap must be a finite number above 0, got {self.softcap}")

    def __call__(
        self, query: Float[Tensor, "*#lead q d"], key: Float[Tensor, "*#lead k d"]
    ) -> Float[Tensor, "... q k"]:
        scores = (query * self.factor(query.shape[-1])) @ key.mT
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def factor(self, size: int) -> float:
        """Return the given scale, or 1/√size if there is none."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(max(size, 1))

    def check(self, query: Tensor, key: Tensor) -> None:
        _same_size(query, key, self.name)

    def as_product(self, query: Tensor, key: Tensor) -> ScaledProduct | None:
        return None if self.softcap is not None else ScaledProduct(query, key, self.factor(query.shape[-1]))

    def why_no_product(self) -> str | None:
        return None if self.softcap is None else "a softcap bends the scores: no dot product"


def unit(x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """Return x / |x|; a zero vector stays zero and has a gradient of zero (x / max(|x|, ε) would have 1/ε)."""
    if x.numel() == 0:
        return x
    if _readable(x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        low, high = norm.detach().aminmax()
        if low.item() > 1e-15 and high.item() < 1e15:
            return x / norm
    # Dividing by the largest entry first prevents overflow and underflow of x·x; this factor cancels, so it is a
    # constant for the gradient.
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / largest.masked_fill_(largest == 0, math.inf)
    # The norm of the scaled vector is 0, or at least 1, so clamping it to 1 only affects zero vectors.
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1)


def _readable(x: Tensor) -> bool:
    """Return whether the values of the tensor can be inspected without waiting for a device, in a dtype for squares.

    Half precision is excluded, because it has too little range for squares.
    """
    plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return plain and not torch.compiler.is_compiling() and not transformed()


@dataclass(frozen=True)
class Cosine(Score):
    """scale · cos(q, k); the score is 0 if query or key is a zero vector.

    >>> Cosine()(torch.tensor([[3.0, 4]]), torch.tensor([[30.0, 40], [0, 0]]))
    tensor([[1., 0.]])
    """

    scale: float = 1.0
    name = "cosine"

    def __post_init__(self) -> None:
        finite(self.scale, "scale")

    def __call__(
        self, query: Float[Tensor, "*#lead q d"], key: Float[Tensor, "*#lead k d"]
    ) -> Float[Tensor, "... q k"]:
        return (unit(query) * self.scale) @ unit(key).mT

    def check(self, query: Tensor, key: Tensor) -> None:
        _same_size(query, key, self.name)

    def as_product(self, query: Tensor, key: Tensor) -> ScaledProduct:
        if _by_kernel(query) and _by_kernel(key) and query.dtype == key.dtype:
            from regard.kernels.triton import row_norms  # imported here: the module imports Triton

            return ScaledProduct(*row_norms.unit_rows(query, key), self.scale)
        return ScaledProduct(_unit_in_float(query), _unit_in_float(key), self.scale)

    def why_no_product(self) -> str | None:
        return None


def _unit_in_float(x: Tensor) -> Tensor:
    """Return unit vectors in the dtype of x, computed in at least float32: squares in half precision lose digits."""
    if x.device.type == "cpu" and eager((x,)) and unit_rows.serves(x):
        return unit_rows.unit_rows(x)
    return unit(x.float()).to(x.dtype) if x.dtype in (torch.float16, torch.bfloat16) else unit(x)


def _by_kernel(x: Tensor) -> bool:
    """Return whether the Triton kernel of `row_norms` can compute the unit vectors of x (b, h, n, d)."""
    if not (TRITON and x.is_cuda) or torch.compiler.is_compiling() or transformed():
        return False
    if x.dtype == torch.float64 or x.ndim != 4:
        return False
    fits = 0 < x.shape[-1] <= 4096 and 0 < x.shape[0] * x.shape[1] < 2**16 and x.shape[2] > 0
    return fits and x.device.index == torch.cuda.current_device()


@dataclass(frozen=True, eq=False)
class Bilinear(Score):
    """q W kᵀ, the general score of Luong et al. (2015): a dot product after a linear map of the keys.

    `weight` is (d_query, d_key), or (h, d_query, d_key) for one matrix per head; query and key may differ in size.
    """

    weight: Float[Tensor, "*h dq dk"]
    name = "bilinear"

    def __post_init__(self) -> None:
        float_tensor(self.weight, "weight of Bilinear")
        if self.weight.ndim not in (2, 3):
            raise ValueError(
                "weight must be (query size, key size) or (heads, query size, key size), "
                f"got shape {tuple(self.weight.shape)}"
            )

    def __call__(
        self, query: Float[Tensor, "*#lead q dq"], key: Float[Tensor, "*#lead k dk"]
    ) -> Float[Tensor, "... q k"]:
        return (query @ self.weight.to(query.dtype)) @ key.mT

    def check(self, query: Tensor, key: Tensor) -> None:
        expected = (query.shape[-1], key.shape[-1])
        if tuple(self.weight.shape[-2:]) != expected:
            raise ValueError(
                f"weight of the bilinear score must end in (query size, key size) = {expected}, "
                f"got shape {tuple(self.weight.shape)}"
            )
        _per_head(self.weight, query, 3, "bilinear")

    def holding(self, swap: Swap) -> Score:
        return replace(self, weight=swap(self.weight))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def as_product(self, query: Tensor, key: Tensor) -> ScaledProduct:
        weight, sizes = self.weight, self.weight.shape[-2:]
        of_each_head = weight.ndim == 3 and query.shape[-3] != key.shape[-3]
        smaller = key.shape[-2] < query.shape[-2] and sizes[0] == sizes[1] and not of_each_head
        if query.dtype == torch.float16:
            factor = _fitting(key, weight, query) if smaller else _fitting(query, weight, key)
            query, key = (query / factor, key) if smaller else (query, key / factor)
            weight = weight * factor
        weight = weight.to(query.dtype)
        return ScaledProduct(query, key @ weight.mT, 1.0) if smaller else ScaledProduct(query @ weight, key, 1.0)

    def why_no_product(self) -> str | None:
        return None


def _fitting(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """Return a factor c ≤ 1 with which neither x @ (c · weight) nor other / c overflows float16, if there is one.

    The factor is computed on the device from the largest entries. It is 1 for numbers that cannot overflow, and if a
    tensor holds NaN or Inf.
    """
    # The norm is computed in the dtype of the tensor: with dtype=float32 torch would first cast the whole tensor.
    of_x, of_weight, of_other = (torch.linalg.vector_norm(t.detach(), math.inf).float() for t in (x, weight, other))
    largest = of_x * of_weight * max(weight.shape[-2:])  # an upper bound of the entries of x @ weight
    factor = (_ROOM / largest).maximum(of_other / _ROOM).clamp_max(1.0)
    return torch.where((largest < math.inf) & (of_other < math.inf), factor, 1.0)


@dataclass(frozen=True, eq=False)
class Additive(Score):
    """w · tanh(q + k) (Bahdanau et al. 2015), for queries and keys that are already projected to the hidden size f.

    `weight` is (f,), or (h, f) for one vector per head. `activation` may be tanh, sigmoid, gelu or leaky_relu.

    >>> Additive(torch.tensor([1.0, 1.0]))(torch.tensor([[0.0, 9.0]]), torch.tensor([[0.0, 9.0]]))
    tensor([[1.]])
    """

    weight: Float[Tensor, "*h f"]
    activation: str = "tanh"
    name = "additive"

    def __post_init__(self) -> None:
        float_tensor(self.weight, "weight of Additive")
        if self.weight.ndim not in (1, 2):
            raise ValueError(f"weight must be (size,) or (heads, size), got shape {tuple(self.weight.shape)}")
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")

    def __call__(
        self, query: Float[Tensor, "*#lead q f"], key: Float[Tensor, "*#lead k f"]
    ) -> Float[Tensor, "... q k"]:
        hidden = query.unsqueeze(-2) + key.unsqueeze(-3)
        hidden = hidden.tanh_() if self.activation == "tanh" else ACTIVATIONS[self.activation](hidden)
        weight = self.weight.to(query.dtype)
        if weight.ndim == 2:
            weight = weight[:, None]  # the shape is (h, 1, f), one weight vector for all queries of a head
        return (hidden @ weight.unsqueeze(-1)).squeeze(-1)

    def check(self, query: Tensor, key: Tensor) -> None:
        _same_size(query, key, self.name)
        if self.weight.shape[-1] != query.shape[-1]:
            raise ValueError(
                f"weight of the additive score has size {self.weight.shape[-1]}, query has size {query.shape[-1]}: "
                "they must be equal"
            )
        _per_head(self.weight, query, 2, "additive")

    def holding(self, swap: Swap) -> Score:
        return replace(self, weight=swap(self.weight))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def flops(self, size: int) -> int:
        return 4 * size  # each hidden feature takes an addition, an activation, a multiplication and an addition

    def floats(self, size: int) -> float:
        return 2.0 * size


def _per_head(weight: Tensor, query: Tensor, ndim: int, name: str) -> None:
    """Raise unless a weight with a head axis matches the heads of the query."""
    if weight.ndim == ndim:
        heads = query.shape[-3] if query.ndim > 2 else 1
        if weight.shape[0] not in (1, heads):
            raise ValueError(
                f"weight of the {name} score has {weight.shape[0]} heads, query has {heads}: they must be equal"
            )
