"""The layers that `regard bench layers` compares, and a function that counts the steps after which the last position of
a sequence depends on the first."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.masks import window
from regard.nn.linear import LinearAttention
from regard.nn.multihead import MultiHeadAttention
from regard.nn.projection import HeadProjection

HEAD = 64  # size of a head
ROUNDING = 1e-10  # largest difference of outputs in float64 that counts as rounding


@dataclass(frozen=True)
class Setting:
    """Sizes that all layers share."""

    size: int = 256
    kernel: int = 7  # number of positions that a convolution covers: the current position and earlier ones
    reach: int = 128  # number of visible positions on either side of a query in restricted attention

    @property
    def heads(self) -> int:
        """Return the number of heads: of size 64 if the layer's size allows it, else one."""
        return self.size // HEAD if self.size >= HEAD and self.size % HEAD == 0 else 1


@dataclass(frozen=True)
class Kind:
    """One kind of layer: a function that creates it at some depth, and its row of table 1 of Vaswani et al. 2017.

    `work`, `sequential` and `path` are orders of growth as in the table: n positions, d features, a kernel of k, r
    positions of restricted attention, m features of linear attention. `expected` is the exact number of steps until the
    last position depends on the first.
    """

    name: str
    make: Callable[[Setting, int], nn.Module]
    work: str
    sequential: str
    path: str
    expected: Callable[[int, Setting], int]
    forms_matrix: bool = False  # whether the layer materialises a matrix of heads × positions × positions


class Attending(nn.Module):
    """Self-attention that returns only its output, without weights; with `reach`, a query attends that many positions
    on either side."""

    def __init__(self, attention: nn.Module, reach: int | None = None) -> None:
        super().__init__()
        self.attention = attention
        self.mask = None if reach is None else window(reach, reach)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, mask=self.mask).output


class Formed(nn.Module):
    """softmax(Q Kᵀ / √d) V in separate operations: the matrix of all weights is materialised, and stored for the
    backward pass."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projection = HeadProjection(size, size, size, heads, heads, size // heads, True)
        self.output = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).split(self.heads, 1)
        weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
        return self.output((weights @ value).transpose(1, 2).flatten(-2))


class Recurrent(nn.Module):
    """A GRU from the first position to the last."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.cells = nn.GRU(size, size, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Convolution(nn.Module):
    """A causal convolution over each position and `kernel` − 1 earlier ones, which are `dilation` positions apart."""

    def __init__(self, size: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.before = (kernel - 1) * dilation
        self.kernel = nn.Conv1d(size, size, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(F.pad(x.mT, (self.before, 0))).mT


def _attention(setting: Setting, depth: int) -> nn.Module:
    return Attending(MultiHeadAttention(setting.size, setting.heads))


def _restricted(setting: Setting, depth: int) -> nn.Module:
    return Attending(MultiHeadAttention(setting.size, setting.heads), setting.reach)


def _linear(setting: Setting, depth: int) -> nn.Module:
    return Attending(LinearAttention(setting.size, setting.heads))


def _once(length: int, setting: Setting) -> int:
    return 1


def dilated_layers(length: int, kernel: int) -> int:
    """Return the number of convolutions with dilations 1, k, k², …, where k is `kernel`, after which the last of
    `length` positions depends on the first: L layers cover k^L − 1 earlier positions.

    >>> [dilated_layers(length, 3) for length in (2, 3, 4, 9, 10)]
    [1, 1, 2, 2, 3]
    """
    layers = 1
    while kernel**layers < length:
        layers += 1
    return layers


KINDS = (
    Kind("self-attention", _attention, "n² · d", "1", "1", _once),
    Kind(
        "self-attention, matrix formed",
        lambda setting, depth: Formed(setting.size, setting.heads),
        *("n² · d", "1", "1"),
        _once,
        forms_matrix=True,
    ),
    Kind(
        "restricted self-attention",
        _restricted,
        *("r · n · d", "1", "n / r"),
        lambda length, setting: max(1, math.ceil((length - 1) / setting.reach)),
    ),
    Kind("linear attention", _linear, "m · n · d", "1", "1", _once),
    Kind(
        "recurrent (GRU)",
        lambda setting, depth: Recurrent(setting.size),
        *("n · d²", "n", "n"),
        lambda length, setting: length,
    ),
    Kind(
        "convolution",
        lambda setting, depth: Convolution(setting.size, setting.kernel),
        *("k · n · d²", "1", "n / k"),
        lambda length, setting: max(1, math.ceil((length - 1) / (setting.kernel - 1))),
    ),
    Kind(
        "dilated convolution",
        lambda setting, depth: Convolution(setting.size, setting.kernel, setting.kernel**depth),
        *("k · n · d²", "1", "log_k n"),
        lambda length, setting: dilated_layers(length, setting.kernel),
    ),
)
"""All kinds of layers, regard's attention first."""


@dataclass(frozen=True)
class Met:
    """The path between the first and the last position of a sequence: the numbers of stacked layers and of sequential
    steps.
    """

    layers: int
    steps: int


@torch.no_grad()
def meet(kind: Kind, length: int, setting: Setting) -> Met:
    """Return the numbers of layers and of steps after which the last position depends on the first, counted by running
    the layers.

    Two sequences differ at the first position. After each layer, the positions at which its outputs differ are those
    that the change has reached; there the next layer's inputs are set to differ as much as before, because a change
    that decays from layer to layer would be lost in rounding. The receptive field of a layer does not depend on its
    size, so the layers are run with two features.
    """
    narrow = Setting(size=2, kernel=setting.kernel, reach=setting.reach)
    x = torch.randn(1, length, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if kind.sequential == "n":
        return Met(1, _recurrent_steps(x))
    reached = torch.arange(length) == 0
    layers, layer = 0, None
    while layers == 0 or not reached[-1]:
        if layers == length:
            raise ValueError(f"{kind.name}: the ends of {length} positions do not meet in {length} layers")
        if layer is None or "log" in kind.path:  # only in dilated layers does the receptive field depend on the depth
            layer = kind.make(narrow, layers).double()
        reached = _differ(*layer(torch.cat((x, x + reached.unsqueeze(-1).double()))))
        layers += 1
    return Met(layers, layers)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return the positions at which two sequences of vectors differ by more than rounding."""
    return (one - other).abs().amax(-1) > ROUNDING


def _recurrent_steps(x: Tensor) -> int:
    """Return the number of steps of a GRU cell until the state at the last position depends on the first position."""
    cell, state, steps = nn.GRUCell(2, 2).double(), x.new_zeros(2, 2), 0
    # The cell runs on two sequences that differ in the first input; `reached`: whether their current states differ.
    reached = torch.tensor(True)
    for vector in x[0]:
        change = torch.stack((torch.zeros(2), reached.expand(2))).double()
        pair = vector + (change if steps == 0 else 0)
        state = cell(pair.expand(2, 2), state if steps == 0 else state[:1] + change)
        reached = _differ(*state)
        steps += 1
    if not reached:
        raise ValueError("the last state of a recurrent network does not depend on the first position")
    return steps
