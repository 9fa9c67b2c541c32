"""A model that calls a given function, and a function that returns the trace of one call."""

from torch import nn

from regard.look.trace import Trace
from regard.look.watch import watch


class Bare(nn.Module):
    """A model whose forward pass calls a given function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def seen(function, *tensors, **options) -> Trace:
    """Call a function under `regard.watch` and return the trace."""
    model = Bare(function)
    with watch(model, **options) as trace:
        model(*tensors)
    return trace
