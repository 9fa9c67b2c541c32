"""Dispatch: the shortcut for simple calls runs the same kernel as the table, and plans name the kernels."""

import random
import sys

import pytest
import torch

import forked
import regard
from regard.core.dispatch import BACKENDS, choose, plain
from regard.core.problem import build

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def random_call(seed: int, device: str) -> tuple[list[torch.Tensor], object, object, object]:
    """Return tensors, score, normaliser and mask of a random call, often a simple one."""
    draw = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    lengths = (1, 5, 17, 64, 150) if device == "cpu" else (5, 17, 64, 150, 1100)
    batch, heads = (2, 3) if draw.random() < 0.8 else (64, 16)
    queries = draw.choice(lengths)
    keys = queries if draw.random() < 0.6 else draw.choice(lengths)
    size = draw.choice((7, 16, 32, 64))
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    shapes = [(batch, heads, n, size) for n in (queries, keys, keys)]
    if draw.random() < 0.2:
        shapes[draw.randrange(3)] = (batch, 1, shapes[1][2], size)
    tensors = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
    if draw.random() < 0.3:  # NaN or Inf in one of the tensors
        tensors[draw.randrange(3)].view(-1)[0] = draw.choice((torch.nan, torch.inf))
    if draw.random() < 0.5:
        tensors = [tensor.requires_grad_() for tensor in tensors]
    scores = [regard.ScaledDot(), regard.ScaledDot(), regard.ScaledDot(0.3), regard.ScaledDot(softcap=5.0)]
    weight = torch.randn(size, generator=generator, device=device, dtype=dtype)
    score = draw.choice([*scores, regard.Dot(), regard.Additive(weight)])
    normalize = draw.choice([regard.Softmax()] * 5 + [regard.Sparsemax()])
    mask = draw.choice([None, None, regard.causal(), regard.causal(), regard.window(3, 0), regard.causal(offset=2)])
    return tensors, score, normalize, mask


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(60))
def test_a_plain_call_takes_what_the_table_chooses(seed: int, device: str) -> None:
    tensors, score, normalize, mask = random_call(seed, device)
    try:
        problem = build(*tensors, score, normalize, mask, None, 0.0, None, None)
    except ValueError:  # incompatible shapes are refused by the general path
        assert plain(*tensors, score, normalize, mask) is None
        return
    output = plain(*tensors, score, normalize, mask)
    if output is not None:
        chosen = choose(problem, "auto", {})
        assert chosen.name in ("sdpa", "flex", "additive")
        assert torch.equal(output.nan_to_num(99.0), chosen.attend(problem).output.nan_to_num(99.0))


@pytest.mark.parametrize("mask", [None, regard.causal()], ids=["all", "causal"])
def test_the_commonest_calls_are_plain(mask: object) -> None:
    tensors = [torch.randn(2, 3, 37, 16) for _ in range(3)]
    assert plain(*tensors, regard.ScaledDot(), regard.Softmax(), mask) is not None


LONG = [torch.randn(1, 4, 1024, 32) for _ in range(3)]
WEIGHT = torch.randn(32)
# A call on the CPU, its backend and the code that runs.
KERNELS = {
    "plain": (LONG, {}, "sdpa", "flash"),
    "padding": (LONG, {"mask": regard.padding(torch.tensor([700]))}, "sdpa", "flash"),
    "dropout": ([t[..., :64, :] for t in LONG], {"dropout": 0.1}, "sdpa", "math"),
    "log-sum-exp": (LONG, {"weights": regard.logsumexp()}, "sdpa", "flash"),
    "some additive": ([t[..., :64, :] for t in LONG], {"score": regard.Additive(WEIGHT)}, "additive", "logistic"),
    "few additive": ([t[..., :8, :] for t in LONG], {"score": regard.Additive(WEIGHT)}, "reference", "reference"),
    "sparsemax": (LONG, {"normalize": regard.Sparsemax()}, "blocked", "blocks"),
    "nothing": ([t[..., :0, :] for t in LONG], {"backend": "sdpa"}, "sdpa", "reference"),
}


@pytest.mark.parametrize("call", KERNELS)
def test_a_plan_names_the_kernel(call: str) -> None:
    tensors, arguments, backend, kernel = KERNELS[call]
    plan = regard.explain(*tensors, **arguments)
    assert (plan.backend, plan.kernel) == (backend, kernel)


@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "no compiler"])
def test_a_plan_knows_whether_additive_scores_are_compiled(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels.additive import pair_loops

    monkeypatch.setattr(pair_loops, "available", lambda: compiler)
    plan = regard.explain(*LONG, score=regard.Additive(WEIGHT))
    assert plan.kernel == ("exponential (compiled)" if compiler else "exponential")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_says_what_it_serves(name: str) -> None:
    assert BACKENDS[name].name == name
    assert BACKENDS[name].serves


COMPILED = """
import torch, regard
x = torch.randn(1, 2, 30, 8)
def call(x, backend):
    score = lambda query, key: torch.randn_like(query) @ key.mT
    return regard.attention(x, x, x, score=score, backend=backend).output
try:
    torch.compile(call, backend="eager")(x, "blocked")
except ValueError as error:
    print(error)
"""


@pytest.mark.process
def test_a_named_backend_that_cannot_serve_raises_when_compiled() -> None:
    """Runs in a separate process, because the shape checks of these tests cannot be compiled."""
    done = forked.run([sys.executable, "-c", COMPILED])
    assert "backend 'blocked' cannot serve this call: the score draws random numbers" in done.stdout, done.stderr
