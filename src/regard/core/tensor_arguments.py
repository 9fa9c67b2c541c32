"""Checks of arguments that masks, biases and requests share: integers, positions, lengths, shapes that broadcast.

The errors name the argument, what was expected and what was given.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

_FAR = 2**62  # positions and distances are int64: sums of larger numbers would overflow


def broadcastable(tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Return the tensor with leading axes of size 1 added, or raise an error that names what does not broadcast."""
    fits = tensor.ndim <= len(shape) and all(
        a in (1, b) for a, b in zip(reversed(tensor.shape), reversed(shape), strict=False)
    )
    if not fits:
        given, hint = tuple(tensor.shape), ""
        if len(shape) in (3, 4) and given == (shape[0], shape[-1]):
            axes = ", None" * (len(shape) - 2)
            hint = f"; for keys of each sequence write {name}[:{axes}, :]"
        elif len(shape) == 4 and given in ((shape[0], *shape[-2:]), (shape[0], 1, shape[-1])):
            hint = f"; for pairs of each sequence, the same for all heads, write {name}[:, None]"
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it does not broadcast to the scores {shape}{hint}")
    return tensor.reshape((1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape))


def integer(value: int, name: str) -> int:
    """Return the value as an int, or raise."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    return operator.index(value)  # `index` converts NumPy integers too


def position(value: int, name: str) -> int:
    """Return the value as an int that is a valid position in a sequence, or raise."""
    value = integer(value, name)
    if isinstance(value, int) and not -_FAR <= value <= _FAR:
        raise ValueError(f"{name} must be from −2⁶² to 2⁶², got {value}: positions are counted in int64")
    return value


def extent(numbers: Tensor) -> tuple[int, int] | None:
    """Return the smallest and the largest number if the values can be read without a device synchronisation, else
    None."""
    if numbers.device.type != "cpu" or torch.compiler.is_compiling() or numbers.numel() == 0:
        return None
    try:
        low, high = numbers.aminmax()
        return int(low), int(high)
    except RuntimeError:  # the values of tensors under vmap and of fake tensors cannot be read
        return None


def check_lengths(bounds: tuple[int, int] | None, keys: int | None, name: str) -> None:
    """Raise if a length is negative or exceeds `keys`, the number of keys (None: not checked)."""
    if bounds is None:
        return
    low, high = bounds
    if low < 0:
        raise ValueError(f"{name} must not be negative, got {low}")
    if keys is not None and high > keys:
        raise ValueError(f"{name} must be at most {keys}, the number of keys, got {high}")


def integers(values: Tensor | Sequence[int] | int, name: str) -> Tensor:
    """Return the values as a tensor of signed integers, or raise."""
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be integers, got {values!r}") from None
    if tensor.numel() == 0 and not isinstance(values, Tensor):
        tensor = tensor.long()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        hint = ": a mask goes to mask= itself" if tensor.dtype == torch.bool else ""
        raise TypeError(f"{name} must be integers, got {tensor.dtype}{hint}")
    return tensor if tensor.dtype.is_signed else tensor.long()  # torch cannot compare uint16 with int64


def second_offset(name: str, own: int, offset: int | Tensor, plain: str) -> str:
    """Return the error message for a mask or bias with an offset in a layer that adds its cache's length by itself."""
    held = f"holds {offset} positions" if isinstance(offset, int) else "holds positions already"
    return (
        f"{name} has an offset of {own} and the cache {held}: the layer adds the cache's length by itself, so write "
        f"{plain} without an offset"
    )
