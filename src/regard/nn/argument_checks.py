"""Checks of the sizes and inputs of layers, with errors that name what was given."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

from regard.core.requests import Full, Request
from regard.core.scores import float_tensor
from regard.core.tensor_arguments import integer

P = ParamSpec("P")
R = TypeVar("R")


def check_sizes(**sizes: int | None) -> None:
    """Raise unless every size is a whole number of at least 1, or None."""
    for name, size in sizes.items():
        if size is not None and integer(size, name) < 1:
            raise ValueError(f"{name} must be 1 or more, got {size}")


def check_input(x: Tensor, name: str, size: int, called: str | None = None) -> None:
    """Raise unless x is a float tensor (batch, length, size); `called` is the name of the size in the layer's
    constructor."""
    float_tensor(x, name)
    if x.ndim != 3:
        raise ValueError(f"{name} must be (batch, length, size), got shape {tuple(x.shape)}")
    if x.shape[-1] != size:
        expected = size if called is None else f"{called} = {size}"
        raise ValueError(f"{name} has size {x.shape[-1]}, the layer expects {expected}")


def only_full(weights: Request | None, layer: str) -> None:
    """Raise unless all weights or none are requested: a layer without queries cannot select or sum the weights of some
    queries."""
    if weights is not None and not isinstance(weights, Full):
        raise ValueError(f"weights of {layer} are one map: expected full() or None, got {type(weights).__name__}")


def also_called(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of constructors that makes them accept alternative names of arguments.

    With `also_called(size="dim_in")` the argument `dim_in` may also be given as `size`.
    """

    def wrapped(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for second, first in names.items():
                if second in kwargs:
                    if first in kwargs:
                        raise TypeError(f"{first} was given twice: as {first} and as {second}")
                    kwargs[first] = kwargs.pop(second)
            return function(*args, **kwargs)

        return call

    return wrapped
