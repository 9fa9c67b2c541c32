"""torch.compile of a call gives the same result and gradients as the call, without warnings."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import regard

# On CUDA these calls are compiled to kernels (backend "inductor"), which takes long. For all others, torch.compile only
# traces the forward and backward graphs (backend "aot_eager").
TO_KERNELS = ("plain", "window", "additive", "additive, causal")


@dataclass(frozen=True)
class Place:
    """A device on which a test runs, with the dtype and the sequence length of the test's calls."""

    device: str

    @property
    def length(self) -> int:
        return 150 if self.device == "cpu" else 1100  # on CUDA, `auto` chooses the backend `flex` from 1,024 keys on

    def draw(self, *shape: int) -> Tensor:
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        return torch.randn(shape, device=self.device, dtype=dtype)

    def tensor(self, numbers: list[float] | list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def table(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).requires_grad_()

    def padding(self) -> regard.Mask:
        return regard.padding(self.tensor([self.length, 97]))

    def segments(self) -> regard.Mask:
        ids = torch.arange(self.length, device=self.device).div(70, rounding_mode="floor").expand(2, -1)
        return regard.segments(ids, ids)

    def additive(self) -> regard.Additive:
        return regard.Additive((self.draw(32) / 4).requires_grad_())


class Learned(nn.Module):
    def __init__(self, at: Place) -> None:
        super().__init__()
        self.weight = nn.Parameter(at.draw(32, 32) / 8)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return (query @ self.weight) @ key.mT


CALLS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "plain": lambda at: {},
    "causal": lambda at: {"mask": regard.causal()},
    "padding": lambda at: {"mask": at.padding()},
    "window": lambda at: {"mask": regard.window(40, 0)},
    "segments": lambda at: {"mask": at.segments()},
    "causal and padding": lambda at: {"mask": regard.causal() & at.padding()},
    "alibi": lambda at: {"bias": regard.alibi(at.tensor([0.5, 0.25, 0.1])), "mask": regard.causal()},
    "relative": lambda at: {"bias": regard.relative(torch.linspace(-1, 1, 9, device=at.device))},
    "learned table": lambda at: {"bias": regard.relative(at.table(3, 9))},
    "softcap": lambda at: {"score": regard.ScaledDot(softcap=5.0)},
    "cosine": lambda at: {"score": regard.Cosine(scale=4.0)},
    "bilinear": lambda at: {"score": regard.Bilinear((at.draw(32, 32) / 8).requires_grad_())},
    "additive": lambda at: {"score": at.additive()},
    "additive, causal": lambda at: {"score": at.additive(), "mask": regard.causal()},
    "additive, padding": lambda at: {"score": at.additive(), "mask": at.padding()},
    "sparsemax": lambda at: {"normalize": regard.Sparsemax()},
    "entmax": lambda at: {"normalize": regard.Entmax(1.5)},
    "blocked": lambda at: {"score": at.additive(), "backend": "blocked"},
    "learned score": lambda at: {"score": Learned(at), "backend": "blocked"},
    "top": lambda at: {"weights": regard.top(3)},
    "top of few": lambda at: {"mask": regard.causal(), "weights": regard.top(3)},
}

PLACES = [
    pytest.param(Place("cpu"), id="cpu"),
    pytest.param(Place("cuda"), marks=pytest.mark.cuda, id="cuda"),
]
pytestmark = [
    pytest.mark.installed,
    # This DeprecationWarning comes from torch's own compiler.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
every_place = pytest.mark.parametrize("at", PLACES)


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Discard compiled code before each test, and make too many recompilations an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert wanted.norm() > 0
    near = 1e-5 if wanted.device.type == "cpu" else 2e-2
    assert (found.double() - wanted.double()).norm() <= near * wanted.double().norm()


@every_place
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call(name: str, at: Place) -> None:
    """Query, key and value are transposed tensors: the compiler fixes the strides of their gradients as it traces."""
    options = CALLS[name](at)
    leaves = [at.draw(2, at.length, 3, 32).requires_grad_() for _ in range(3)]
    parameters = [*leaves]
    if isinstance(getattr(options.get("score"), "weight", None), Tensor):
        parameters.append(options["score"].weight)
    if name == "learned table":
        parameters.append(options["bias"].table)

    def attend(*rows: Tensor) -> Tensor:
        return regard.attention(*(x.transpose(1, 2) for x in rows), **options).output

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        output = call(*leaves)
        return [output, *torch.autograd.grad(output.float().square().sum(), parameters)]

    to_kernels = at.device == "cuda" and name in TO_KERNELS
    compiled = torch.compile(attend, backend="inductor" if to_kernels else "aot_eager")
    for found, wanted in zip(run(compiled), run(attend), strict=True):
        same(found, wanted)
    if at.device == "cuda" and "mask" not in options:
        with torch.no_grad():  # calls with a single query use other kernels than calls with many queries
            same(compiled(leaves[0][:, :1], *leaves[1:]), attend(leaves[0][:, :1], *leaves[1:]))


@every_place
def test_linear_attention(at: Place) -> None:
    x = at.draw(1, 2, 20, 16)
    compiled = torch.compile(lambda x: regard.linear_attention(x, x, x, causal=True), backend="aot_eager")
    same(compiled(x), regard.linear_attention(x, x, x, causal=True))
    with torch.profiler.profile(acc_events=True) as seen:
        compiled(x)
    assert not [event for event in seen.events() if "linalg" in event.name], "features are sampled once"


@every_place
def test_the_gradient_of_a_repeated_query_of_linear_attention(at: Place) -> None:
    x, memory = at.draw(1, 2, 20, 16), at.draw(3, 2, 20, 16)
    features = regard.PerformerFeatures.draw(16, device=x.device)
    slope = torch.func.grad(lambda x: regard.linear_attention(x, memory, memory, features=features).square().sum())
    same(torch.compile(slope, backend="aot_eager")(x.expand(3, 2, 20, 16)), slope(x.repeat(3, 1, 1, 1)))


@every_place
@pytest.mark.parametrize("normalize", [regard.Sparsemax(), regard.Entmax(1.5)], ids=lambda one: one.name)
def test_sparse_normalizers_are_one_graph(normalize: Any, at: Place) -> None:
    x = at.draw(1, 2, 20, 16).requires_grad_()

    def attend(x: Tensor) -> Tensor:
        return regard.attention(x, x, x, normalize=normalize, backend="reference").output

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    same(*(torch.autograd.grad(call(x).float().square().sum(), x)[0] for call in (compiled, attend)))


@every_place
# Torch warns that it has only slow kernels for some operations under vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("outside", ["vmap", "grad"])
@pytest.mark.parametrize("mask", [None, regard.causal(), "padding"], ids=["open", "causal", "padding"])
def test_transforms_inside_of_compiled_code(mask: Any, outside: str, at: Place) -> None:
    many = at.draw(3, 2, 2, 40, 16)
    mask = regard.padding(at.tensor([7, 40])) if mask == "padding" else mask

    def total(x: Tensor) -> Tensor:
        return regard.attention(x, x, x, mask=mask).output.float().square().sum()

    mapped = torch.vmap(torch.func.grad(total))
    transform = mapped if outside == "vmap" else torch.func.grad(lambda x: torch.vmap(total)(x).sum())
    same(torch.compile(transform, backend="aot_eager")(many), transform(many))


@every_place
@pytest.mark.parametrize("rule", ["alibi", "relative"])
def test_biases_of_any_length_take_few_graphs(rule: str, at: Place) -> None:
    alibi = rule == "alibi"
    bias = regard.alibi([0.5, 0.1]) if alibi else regard.relative(at.table(2, 5))
    counter = torch._dynamo.testing.CompileCounter()

    def attend(x: Tensor, y: Tensor) -> Tensor:
        return regard.attention(x, y, y, bias=bias).output

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for queries, keys in ((20, 20), (21, 23), (25, 30), (30, 26), (40, 41)):
        x, y = at.draw(1, 2, queries, 16), at.draw(1, 2, keys, 16)
        same(compiled(x, y), attend(x, y))
    assert counter.frame_count <= 3


@every_place
def test_a_compiled_backward_pass(at: Place) -> None:
    # The input is scaled in place before it requires gradients, as an optimiser changes parameters in place.
    x = at.draw(1, 1, 20, 8).mul_(2).requires_grad_()

    def total() -> Tensor:
        return regard.attention(x, x, x, backend="blocked").output.float().square().sum()

    (wanted,) = torch.autograd.grad(total(), x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: total().backward(), backend="eager")()
    assert x.grad is not None
    same(x.grad, wanted)


def test_importing_regard_does_not_import_the_compiler() -> None:
    """Importing the compiler would take longer than importing all of regard."""
    ask = "import sys, regard; regard.attention, regard.nn.MultiHeadAttention; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout == "False\n"
