"""Feature maps φ for linear attention, in which φ(q)·φ(k) replaces exp(q·k/√d) for a query q and a key k of size d.

A feature map is any function from vectors (…, d) to features (…, m) ≥ 0. If the features are exponentials, the map also
has a method `log_features` for their logarithms, so that nothing overflows.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.tensor_arguments import integer


@runtime_checkable
class LogFeatures(Protocol):
    """The protocol of a feature map that returns logarithms of features, which never overflow."""

    def log_features(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... m"]: ...


Features = LogFeatures | Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PerformerFeatures:
    """φ(x) = exp(w·x' − |x'|²/2) / √m for the m rows w of `projection`, with x' = x / d^¼ for vectors x of size d.

    For random w the mean of φ(q)·φ(k) is exp(q·k/√d) (Choromanski et al. 2021, §2.3).

    >>> features = PerformerFeatures.draw(64, 256, generator=torch.Generator().manual_seed(0))
    >>> features(torch.zeros(64)).sum()  # 256 features of 1/√256
    tensor(16.)
    """

    projection: Float[Tensor, "m d"]
    orthogonal: bool = True

    @classmethod
    def draw(
        cls,
        size: int,
        count: int | None = None,
        *,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "PerformerFeatures":
        """Sample `count` random directions for vectors of `size`; by default size · ln(size), and at least size.

        Each direction is Gaussian. With `orthogonal`, the directions of each block of `size` are at right angles to
        each other, which lowers the variance (Choromanski et al. 2021, §2.4).
        """
        size = _at_least_one(size, "size of PerformerFeatures")
        count = max(size, round(size * math.log(size))) if count is None else count
        count = _at_least_one(count, "count of PerformerFeatures")
        source = torch.device("cpu") if generator is None else generator.device
        blocks = math.ceil(count / size)
        gaussian = torch.randn(2, blocks, size, size, generator=generator, device=source, dtype=torch.float64)
        projection = gaussian[0].flatten(0, 1)[:count]
        if orthogonal:
            # The directions are uniformly distributed orthonormal vectors times the lengths of Gaussian vectors. Q of
            # the QR decomposition of a Gaussian matrix is uniform if its columns are multiplied by the signs of R's
            # diagonal (Mezzadri 2007).
            q, r = torch.linalg.qr(gaussian[1].mT)
            directions = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.flatten(0, 1)[:count]
            projection = projection.norm(dim=-1, keepdim=True) * directions
        return cls(projection.to(device=device, dtype=dtype or torch.get_default_dtype()), orthogonal)

    def redraw(self, generator: torch.Generator | None = None) -> "PerformerFeatures":
        """Return features with newly sampled directions of the same kind and number, to resample during training.

        Without resampling, the model could adapt to one sample of directions.
        """
        count, size = self.projection.shape
        dtype, device = self.projection.dtype, self.projection.device
        return self.draw(size, count, orthogonal=self.orthogonal, generator=generator, dtype=dtype, device=device)

    def check(self, x: Float[Tensor, "... d"]) -> None:
        """Raise if the vectors x do not have the size and the device of the random directions."""
        size = self.projection.shape[1]
        if x.shape[-1] != size:
            raise ValueError(f"features are drawn for vectors of size {size}, got size {x.shape[-1]}")
        if x.device != self.projection.device:
            raise ValueError(f"features are on {self.projection.device}, the vectors on {x.device}: draw(…, device=)")

    def log_features(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... m"]:
        """Return the logarithms of the features, w·x' − |x'|²/2 − ½ ln m in the notation of the class."""
        self.check(x)
        count, size = self.projection.shape
        rows = x.reshape(math.prod(x.shape[:-1]), size) / size**0.25  # leading axes flattened, for one matrix product
        logs = rows @ self.projection.to(x.dtype).mT
        # A squared length that overflows (|x| ≈ 1e19 in float32) would give −inf here, and an output of 0 / 0.
        most = torch.finfo(x.dtype).max / 8
        lengths = rows.square().sum(-1, keepdim=True).add(math.log(count)).div(2)
        return logs.sub_(torch.where(lengths == torch.inf, most, lengths)).view(*x.shape[:-1], count)

    def __call__(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... m"]:
        return self.log_features(x).exp()


@dataclass(frozen=True)
class EluFeatures:
    """φ(x) = elu(x) + 1, one feature for each entry of the vector (Katharopoulos et al. 2020, eq. 7).

    >>> EluFeatures()(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.3679, 1.0000, 3.0000])
    """

    def __call__(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        return x.clamp_max(0).exp() + x.relu()  # the sum elu(x) + 1 would be rounded to 0 below x = −17


def _at_least_one(value: int, name: str) -> int:
    if integer(value, name) < 1:
        raise ValueError(f"{name} must be 1 or more, got {value}")
    return value


def default_features(size: int, dtype: torch.dtype, device: torch.device) -> PerformerFeatures:
    """Return the default Performer features, sampled from a fixed seed, so that they are the same in every process."""
    if torch.compiler.is_compiling():  # torch.compile can trace neither the cache of features nor the generator
        from regard.core import graph_breaks  # imported here: the module imports torch's compiler, which takes a second

        return graph_breaks.sampled(size, dtype, device)
    return sampled(size, dtype, device)


def sampled(size: int, dtype: torch.dtype, device: torch.device) -> PerformerFeatures:
    """Return the default Performer features, sampled once and cached; in fake tensor mode, fake features that are not
    cached."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    fake = mode is not None and not mode.allow_non_fake_inputs
    return _draw(size, dtype, device) if fake else _cached(int(size), dtype, device)


@lru_cache(maxsize=64)
def _cached(size: int, dtype: torch.dtype, device: torch.device) -> PerformerFeatures:
    # Tensors created under vmap or inference mode are unusable outside of it. These modes only affect the current
    # thread, so the cached tensors are created in another thread, and are valid in every later call.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_draw, size, dtype, device).result()


def _draw(size: int, dtype: torch.dtype, device: torch.device) -> PerformerFeatures:
    if size == 0:  # exp(w·x) of an empty vector is 1 for every w
        return PerformerFeatures(torch.zeros(1, 0, dtype=dtype, device=device))
    return PerformerFeatures.draw(size, generator=torch.Generator().manual_seed(0), dtype=dtype, device=device)
