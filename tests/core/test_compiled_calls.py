"""torch.compile of a call gives the same result and gradients as the call, without warnings.

Runs in a separate process, because the shape checks of these tests cannot be compiled.
"""

import subprocess
import sys

import pytest

import forked

CALLS = """
import functools
import sys
import warnings

import torch
import torch._dynamo.testing

import regard

device, wholly = sys.argv[1], sys.argv[2:]  # what is compiled down to kernels: it takes long
dtype, length = (torch.float32, 150) if device == "cpu" else (torch.bfloat16, 1100)  # flex serves from 1,024 on
near = 1e-5 if device == "cpu" else 2e-2
warnings.filterwarnings("error", message=".*Dynamo.*")


def drawn(*shape):
    return torch.randn(shape, device=device, dtype=dtype)


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(drawn(32, 32) / 8)

    def forward(self, query, key):
        return (query @ self.weight) @ key.mT


weight = (drawn(32) / 4).requires_grad_()
matrix = (drawn(32, 32) / 8).requires_grad_()
table = torch.randn(3, 9, device=device).requires_grad_()
slopes = torch.tensor([0.5, 0.25, 0.1], device=device)
lengths = torch.tensor([length, 97], device=device)
ids = torch.arange(length, device=device).div(70, rounding_mode="floor").expand(2, -1)
additive = dict(score=regard.Additive(weight))
calls = {
    "plain": {},
    "causal": dict(mask=regard.causal()),
    "padding": dict(mask=regard.padding(lengths)),
    "window": dict(mask=regard.window(40, 0)),
    "segments": dict(mask=regard.segments(ids, ids)),
    "causal and padding": dict(mask=regard.causal() & regard.padding(lengths)),
    "alibi": dict(bias=regard.alibi(slopes), mask=regard.causal()),
    "relative": dict(bias=regard.relative(torch.linspace(-1, 1, 9, device=device))),
    "a table that learns": dict(bias=regard.relative(table)),
    "softcap": dict(score=regard.ScaledDot(softcap=5.0)),
    "cosine": dict(score=regard.Cosine(scale=4.0)),
    "bilinear": dict(score=regard.Bilinear(matrix)),
    "additive": additive,
    "additive, causal": additive | dict(mask=regard.causal()),
    "additive, padding": additive | dict(mask=regard.padding(lengths)),
    "sparsemax": dict(normalize=regard.Sparsemax()),
    "entmax": dict(normalize=regard.Entmax(1.5)),
    "blocked": additive | dict(backend="blocked"),
    "a score that learns": dict(score=Learned(), backend="blocked"),
    "top": dict(weights=regard.top(3)),
    "top of few": dict(mask=regard.causal(), weights=regard.top(3)),
}


def same(what, found, wanted):
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, what
    assert wanted.norm() > 0, f"{what}: nothing to compare"
    off = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert off <= near, f"{what}: {off:.1e} off"


def check(name, arguments):
    torch.manual_seed(0)
    # heads split from rows: transposed operands, whose gradients' strides the compiler is told beforehand
    leaves = [drawn(2, length, 3, 32).requires_grad_() for _ in range(3)]
    score = arguments.get("score")
    learned = [*leaves, score.weight] if hasattr(score, "weight") else leaves
    learned = [*leaves, table] if "learns" in name and "bias" in arguments else learned

    def attend(*rows):
        return regard.attention(*(x.transpose(1, 2) for x in rows), **arguments).output

    def run(call):
        output = call(*leaves)
        return output, *torch.autograd.grad(output.float().square().sum(), learned)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="inductor" if name in wholly else "aot_eager")
    ways = run(attend), run(compiled)
    for part, plain, other in zip(("output", "query", "key", "value", "learned"), *ways):
        same(part, other, plain)
    if device == "cuda" and "mask" not in arguments:
        with torch.no_grad():  # a step of decoding, which has kernels of its own
            steps = [call(leaves[0][:, :1], *leaves[1:]) for call in (attend, compiled)]
        same("a step", *steps)


def linear():
    x = drawn(1, 2, 20, 16)
    compiled = torch.compile(lambda x: regard.linear_attention(x, x, x, causal=True), backend="aot_eager")
    same("linear", compiled(x), regard.linear_attention(x, x, x, causal=True))
    with torch.profiler.profile() as seen:
        compiled(x)
    assert not [event for event in seen.events() if "linalg" in event.name], "features are drawn once"
    features, memory = regard.PerformerFeatures.draw(16, device=x.device), drawn(3, 2, 20, 16)
    slope = torch.func.grad(lambda x: regard.linear_attention(x, memory, memory, features=features).square().sum())
    same("repeats", torch.compile(slope, backend="aot_eager")(x.expand(3, 2, 20, 16)), slope(x.repeat(3, 1, 1, 1)))


def sparse():
    for normalize in (regard.Sparsemax(), regard.Entmax(1.5)):
        x = drawn(1, 2, 20, 16).requires_grad_()
        attend = lambda x: regard.attention(x, x, x, normalize=normalize, backend="reference").output
        runs = attend, torch.compile(attend, backend="aot_eager", fullgraph=True)
        same("sparse", *(torch.autograd.grad(run(x).float().square().sum(), x)[0] for run in runs))


def mapped():
    many = drawn(3, 2, 2, 40, 16)
    for arguments in ({}, dict(mask=regard.causal()), dict(mask=regard.padding(torch.tensor([7, 40], device=device)))):
        total = lambda x: regard.attention(x, x, x, **arguments).output.float().square().sum()
        for transform in (torch.vmap(torch.func.grad(total)), torch.func.grad(lambda x: torch.vmap(total)(x).sum())):
            torch._dynamo.reset()
            same("mapped", torch.compile(transform, backend="aot_eager")(many), transform(many))


def lengths_of_rules():
    rules = regard.alibi([0.5, 0.1]), regard.relative(torch.randn(2, 5, device=device).requires_grad_())
    for rule in rules:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        attend = lambda x, y: regard.attention(x, y, y, bias=rule).output
        compiled = torch.compile(attend, backend=counter, fullgraph=True)
        for queries, keys in ((20, 20), (21, 23), (25, 30), (30, 26), (40, 41)):
            x, y = drawn(1, 2, queries, 16), drawn(1, 2, keys, 16)
            same("lengths", compiled(x, y), attend(x, y))
        assert counter.frame_count <= 3, f"{counter.frame_count} graphs"


def backward():
    x = drawn(1, 1, 20, 8).mul_(2).requires_grad_()  # changed before, as every parameter is after a step
    total = lambda: regard.attention(x, x, x, backend="blocked").output.float().square().sum()
    (wanted,) = torch.autograd.grad(total(), x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: total().backward(), backend="eager")()
    same("backward", x.grad, wanted)


checks = {name: functools.partial(check, name, arguments) for name, arguments in calls.items()}
checks |= {"linear": linear, "one graph": sparse, "mapped": mapped}
checks |= {"lengths": lengths_of_rules, "the way back": backward}
for name, ask in checks.items():
    try:
        ask()
    except Exception as problem:
        print(f"{name}: {type(problem).__name__}: {str(problem)[-1500:]}")
    else:
        print(name, "as without a compiler")
"""


def run(device: str, *wholly: str) -> None:
    command = [sys.executable, "-c", CALLS, device, *wholly]
    # CUDA cannot be used in a forked process.
    done = forked.run(command) if device == "cpu" else subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("as without a compiler") == 26, done.stdout
    assert "recompile_limit" not in done.stderr, "torch gave up: " + done.stderr


@pytest.mark.process
def test_on_the_cpu() -> None:
    run("cpu")


@pytest.mark.process
@pytest.mark.cuda
def test_on_a_gpu() -> None:
    run("cuda", "plain", "window", "additive", "additive, causal")


@pytest.mark.process
def test_importing_regard_does_not_import_the_compiler() -> None:
    """Importing the compiler would take longer than importing all of regard."""
    ask = "import sys, regard; regard.attention, regard.nn.MultiHeadAttention; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout == "False\n"
