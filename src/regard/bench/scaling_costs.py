"""The cost model of `regard bench scaling`: time, memory and bytes sent of a training step on N devices.

Symbols: P parameters, of which P_l are in the layers; N devices; b tokens in a batch, in sequences of n tokens; d
features; L layers. A parameter, its gradient and the two moments of AdamW have 4 bytes each: 16 bytes of state.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

FLOAT = 4.0  # bytes of a parameter, of its gradient, and of each of its two moments
WAYS = ("plain", "ddp", "fsdp2", "context")


@dataclass(frozen=True)
class Model:
    """A causal language model: Transformer layers between an embedding and an output of `vocabulary` words.

    >>> Model(size=8, layers=2, vocabulary=10).parameters  # 2 (12·8² + 13·8) + 2·10·8 + 2·8
    1920
    """

    size: int
    layers: int
    vocabulary: int
    name: str = ""

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of all layers; one layer of size d has 12 d² + 13 d parameters.

        Attention has 4 d² + 4 d, the feed-forward part 8 d² + 5 d, and the two normalisations 4 d.
        """
        return self.layers * (12 * self.size**2 + 13 * self.size)

    @property
    def parameters(self) -> int:
        """Return the number of parameters: layers, embedding, output weights, and the last normalisation."""
        return self.layer_parameters + 2 * self.vocabulary * self.size + 2 * self.size

    def flops(self, length: int) -> float:
        """Return the floating-point operations per token, forward and backward: 6 per weight of the layers and the
        output, and 6 · layers · length · size for causal attention."""
        weights = 12 * self.layers * self.size**2 + self.vocabulary * self.size
        return 6.0 * weights + 6.0 * self.layers * length * self.size


@dataclass(frozen=True)
class Work:
    """One training step: `tokens` tokens on all devices together, in sequences of `length` tokens."""

    model: Model
    tokens: int
    length: int


@dataclass(frozen=True)
class Link:
    """A link between processes: bytes per second that a process sends, and latency of a message in seconds."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """The cost of a training step on one device, and the links between devices.

    A step of b tokens takes `per_layer` · L + `per_parameter` · P + b · f / `flops` + b · v · `per_logit` seconds for L
    layers, P parameters, f operations per token (`Model.flops`) and a vocabulary of v words. The time of the logits is
    bound by memory rather than by arithmetic. `added` is the additional time of each layer in a process group of one,
    by kind of parallelism. `cores` is the number of processes that can compute at once, if the devices are CPU
    processes of one machine. If `overlaps` is true, communication runs during the backward pass (DDP) or during the
    forward and backward pass (FSDP2).
    """

    name: str
    flops: float
    per_layer: float
    per_parameter: float
    per_logit: float
    near: Link  # the link between devices of a node
    far: Link  # the link between nodes, for each device
    node: int = 8  # number of devices in a node
    memory: float = math.inf  # memory of a device in bytes
    activation: float = 40.0  # bytes per token, layer and feature that are stored for the backward pass
    output: float = 12.0  # bytes per token and word of the vocabulary that the logits take
    width: int = 4  # bytes of an entry of keys or values that is sent
    cores: float = math.inf
    overlaps: bool = True
    added: Mapping[str, float] = field(default_factory=dict)
    scatters: bool = True  # False: a reduce-scatter is an all-reduce of which a part is used, as in gloo
    copies: int = 2  # number of copies of a parameter group while it is gathered or reduced


@dataclass(frozen=True)
class Cost:
    """The cost of a step for one device, and the tokens per second of all devices."""

    seconds: float
    tokens_per_second: float
    sent: float  # bytes that a device sends in a step, averaged over the devices
    states: float  # bytes of parameters, gradients and moments
    memory: float  # bytes of `states`, of the activations and of gathered parameters


def reduced(size: float, devices: int) -> float:
    """Return bytes that each of N devices sends in an all-reduce of `size` bytes: 2 (N − 1) / N times `size`.

    >>> reduced(100.0, 4)
    150.0
    """
    return 2 * (devices - 1) / devices * size


def exchanged(machine: Machine, size: float, devices: int, *, passes: int = 2) -> float:
    """Return seconds of an all-reduce (2 passes), or of an all-gather or reduce-scatter (1), of `size` bytes.

    Within a node of m devices each device sends (m − 1) / m of the bytes; between M nodes each device sends (M − 1) / M
    of its m-th part. A pass among N devices has log₂ N steps of latency, as in a tree.
    """
    inner = min(devices, machine.node)
    outer = math.ceil(devices / machine.node)
    near = (inner - 1) / inner * size / machine.near.bandwidth + math.log2(inner) * machine.near.latency
    far = (outer - 1) / outer * size / inner / machine.far.bandwidth + math.log2(outer) * machine.far.latency
    return passes * (near + far)


def ring(work: Work, machine: Machine, devices: int) -> float:
    """Return bytes that a device sends for causal attention in a balanced ring, on average, forward and backward.

    Each of N devices has m positions, with u bytes of keys and values each. In each layer it sends 3/4 (N − 1) m u
    bytes in the forward pass and 3/2 (N − 1) m u bytes in the backward pass (docs/parallel.md).
    """
    positions = work.tokens / devices
    unit = 2 * work.model.size * machine.width
    return work.model.layers * 2.25 * (devices - 1) * positions * unit


def cost(way: str, work: Work, machine: Machine, devices: int) -> Cost:
    """Return the cost of a step on N devices."""
    model = work.model
    mine = work.tokens / devices
    whole, layers = FLOAT * model.parameters, FLOAT * model.layer_parameters
    share = devices if way == "fsdp2" else 1
    slower = max(1.0, devices / machine.cores)  # processes of one machine share its cores
    passes = mine * (model.flops(work.length) / machine.flops + model.vocabulary * machine.per_logit)
    # The ring computes 2 N + 1 blocks in each layer; `added` was measured with one process, which computes three.
    added = machine.added.get(way, 0.0) * ((2 * devices + 1) / 3 if way == "context" else 1.0)
    per_layer = machine.per_layer + added
    compute = slower * (per_layer * model.layers + machine.per_parameter * model.parameters / share + passes)
    sent, seconds, hidden = 0.0, 0.0, 0.0
    if way == "ddp":
        sent, seconds = reduced(whole, devices), exchanged(machine, whole, devices)
        hidden = 2 / 3 * passes  # communication overlaps with the backward pass
    elif way == "fsdp2":
        # Layers are gathered for each pass, other parameters once; gradients are reduced once.
        gathered = (devices - 1) / devices * (whole + layers)
        scattered = reduced(whole, devices) / (2 if machine.scatters else 1)
        sent = gathered + scattered
        seconds = exchanged(machine, whole + layers, devices, passes=1)
        seconds += exchanged(machine, whole, devices, passes=1 if machine.scatters else 2)
        hidden = passes
    elif way == "context":
        keys = ring(work, machine, devices)
        sent = keys + reduced(whole, devices)
        link = machine.near if devices <= machine.node else machine.far
        # A layer sends 3 (N − 1) messages, and its call begins with a comparison among all processes.
        moved = keys / link.bandwidth + model.layers * (3 * (devices - 1) + 2) * link.latency
        seconds = max(0.0, moved - (passes if machine.overlaps else 0.0)) + exchanged(machine, whole, devices)
    if devices == 1:
        sent = seconds = 0.0
    exposed = max(0.0, seconds - hidden) if machine.overlaps else seconds
    time = compute + exposed
    states = 4 * whole / share
    memory = states + mine * (machine.activation * model.layers * model.size + machine.output * model.vocabulary)
    if way == "fsdp2" and devices > 1:
        # Parameters outside of layers and their gradients stay gathered for the whole step; layers are gathered two at
        # a time.
        rest, layer = whole - layers, layers / model.layers
        memory += 2 * rest + 2 * layer + machine.copies * max(rest, layer)
    if way == "context" and devices > 1:  # a process also holds keys and values of two other processes
        memory += 2 * mine * 2 * model.size * machine.width
    return Cost(time, work.tokens / time, sent, states, memory)
