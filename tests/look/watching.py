"""A function as a model, and the trace of its call."""

from torch import nn

from regard.look.trace import Trace
from regard.look.watch import watch


class Bare(nn.Module):
    """Any function as a model."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def seen(function, *tensors, **options) -> Trace:
    """Return the trace of one call."""
    model = Bare(function)
    with watch(model, **options) as trace:
        model(*tensors)
    return trace
