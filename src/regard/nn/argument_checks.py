"""What layers expect of their sizes and inputs, and the errors that say what came instead."""

from torch import Tensor

from regard.core.masks import integer
from regard.core.scores import float_tensor


def check_sizes(**sizes: int | None) -> None:
    """Raise unless every size is a whole number of at least 1, or None."""
    for name, size in sizes.items():
        if size is not None and integer(size, name) < 1:
            raise ValueError(f"{name} must be 1 or more, got {size}")


def check_input(x: Tensor, name: str, size: int) -> None:
    """Raise unless it is a float tensor (batch, length, size)."""
    float_tensor(x, name)
    if x.ndim != 3:
        raise ValueError(f"{name} must be (batch, length, size), got shape {tuple(x.shape)}")
    if x.shape[-1] != size:
        raise ValueError(f"{name} has size {x.shape[-1]}, the layer expects {size}")
