"""Dispatch: later calls use a stored route (the function chosen for a signature); `explain` names the kernel."""

import gc
import random
import re
import sys
import weakref
from typing import Any

import pytest
import torch

import forked
import regard
from regard.core import dispatch
from regard.core.dispatch import BACKENDS
from regard.core.signatures import signature

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def random_call(seed: int, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return tensors and options of a random call; simple options are the most frequent."""
    draw = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    lengths = (1, 5, 17, 40) if device == "cpu" else (5, 17, 64, 150, 1100)
    batch, heads = (2, 3) if draw.random() < 0.8 or device == "cpu" else (64, 16)
    queries = draw.choice(lengths)
    keys = queries if draw.random() < 0.6 else draw.choice(lengths)
    size = draw.choice((7, 16, 32, 64))
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    shapes = [(batch, heads, n, size) for n in (queries, keys, keys)]
    if draw.random() < 0.2:
        shapes[draw.randrange(3)] = (batch, 1, shapes[1][2], size)
    if draw.random() < 0.2:
        shapes[2] = (*shapes[2][:3], size + draw.choice((-5, 3)))
    tensors = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
    if draw.random() < 0.5:
        tensors = [tensor.requires_grad_() for tensor in tensors]
    weight = torch.randn(size, size, generator=generator, device=device, dtype=dtype)
    scores = [regard.ScaledDot(), regard.ScaledDot(), regard.ScaledDot(0.3), regard.ScaledDot(softcap=5.0)]
    scores += [regard.Dot(), regard.Additive(weight[0]), regard.Cosine(2.0), regard.Bilinear(weight)]
    padding = regard.padding(torch.randint(keys + 1, (batch,), generator=generator, device=device))
    pairs = torch.rand(queries, keys, generator=generator, device=device) < 0.7
    segments = regard.segments(*(torch.arange(n, device=device) // 9 for n in (queries, keys)))
    masks = [None, None, regard.causal(), regard.causal(), regard.window(3, 0), regard.causal(offset=2), padding]
    masks += [padding & regard.causal(), pairs, ~padding, segments]
    slopes = torch.rand(heads, generator=generator, device=device)
    biases = [None] * 6 + [regard.alibi(slopes), torch.randn(queries, keys, generator=generator, device=device)]
    requests = [None] * 6 + [regard.full(), regard.entropy(), regard.logsumexp(), regard.top(2)]
    options = {
        "score": draw.choice(scores),
        "normalize": draw.choice([regard.Softmax()] * 5 + [regard.Sparsemax()]),
        "mask": draw.choice(masks),
        "bias": draw.choice(biases),
        "weights": draw.choice(requests),
    }
    return tensors, options


def spoiled(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return tensors of the same shapes with other numbers, for every third seed with a NaN or Inf in one tensor."""
    others = [tensor.detach() * -1.5 for tensor in tensors]
    if seed % 3 == 0:
        others[seed // 3 % 3].view(-1)[0] = (torch.nan, torch.inf)[seed % 2]
    return [other.requires_grad_(tensor.requires_grad) for other, tensor in zip(others, tensors, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(120))
def test_a_signature_that_was_served_before_changes_nothing(seed: int, device: str) -> None:
    """A second call with the same signature gives the result that it gives if the first call stored nothing."""
    tensors, options = random_call(seed, device)
    try:
        regard.attention(*tensors, **options)
    except ValueError as error:  # a repeated invalid call raises the same error
        with pytest.raises(ValueError, match=re.escape(str(error))):
            regard.attention(*tensors, **options)
        return
    others = spoiled(tensors, seed)
    served = regard.attention(*others, **options)
    # Calls with a generator do not use the choice of a kernel stored by earlier calls: dispatch tries all backends.
    fresh = regard.attention(*others, **options, generator=torch.Generator(device))
    results = [[made.output, *as_tensors(made.weights)] for made in (served, fresh)]
    # Gradients are not compared on CUDA, because some kernels sum in no fixed order.
    if tensors[0].requires_grad and device == "cpu":
        results = [[*made, *torch.autograd.grad(made[0].sum(), others)] for made in results]
    near = 0.0 if device == "cpu" else 1e-2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize("seed", range(120))
def test_the_loops_of_a_plan_are_those_that_run(seed: int) -> None:
    """If `explain` names the compiled loops, they give the bits that `auto` gives, also if they are chosen by name."""
    tensors, options = random_call(seed, "cpu")
    try:
        plan = regard.explain(*tensors, **options)
    except ValueError:
        pytest.skip("an invalid call")
    if plan.backend != "loops":
        assert "loops" in plan.refused
        return
    made, named = regard.attention(*tensors, **options), regard.attention(*tensors, **options, backend="loops")
    for one, other in zip(
        [made.output, *as_tensors(made.weights)], [named.output, *as_tensors(named.weights)], strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30], ids=str)
@pytest.mark.parametrize("heads", [(2, 3), (3,), ()], ids=["batch", "heads", "one head"])
def test_numbers_that_the_loops_refuse(number: float, heads: tuple[int, ...]) -> None:
    """NaN, Inf and a product that overflows: `auto` takes the next backend, and the backend chosen by name raises."""
    query, key, value = (torch.randn(*heads, 37, 16) for _ in range(3))
    query[..., 5, :] = key[..., 7, :] = number
    assert regard.explain(query, key, value).backend == "loops"
    right = regard.attention(query, key, value, backend="reference").output
    for _ in range(3):
        torch.testing.assert_close(regard.attention(query, key, value).output, right, equal_nan=True)
    with pytest.raises(ValueError, match="backend 'loops' cannot serve this call: NaN or Inf"):
        regard.attention(query, key, value, backend="loops")


def as_tensors(weights: Any) -> list[torch.Tensor]:
    return [] if weights is None else list(weights) if isinstance(weights, tuple) else [weights]


def route(*tensors: torch.Tensor, score: Any = regard.ScaledDot(), mask: Any = None) -> dispatch.Route:
    """Run a call once; return the choice of a kernel (`Route`) that is stored for later calls of its signature."""
    regard.attention(*tensors, score=score, mask=mask)
    kept = dispatch.stored(signature(*tensors, score, regard.Softmax(), mask, None, 0.0, None))
    assert kept is not None
    return kept


@pytest.mark.parametrize("mask", [None, regard.causal()], ids=["all", "causal"])
@pytest.mark.parametrize("score", [regard.ScaledDot(), regard.Cosine(), regard.Bilinear(torch.eye(16))], ids=str)
def test_the_commonest_calls_need_no_problem(score: Any, mask: Any) -> None:
    query, key = torch.randn(2, 6, 37, 16), torch.randn(2, 3, 37, 16)
    kept = route(query, key, key, score=score, mask=mask)
    assert kept.direct is not None
    assert kept.backends[0].name == "loops"


def test_data_that_a_kernel_does_not_take_go_to_the_next_backend() -> None:
    query, key, value = (torch.randn(2, 3, 37, 16) for _ in range(3))
    kept = route(query, key, value, mask=regard.causal())
    value[0, 0, -1, 0] = torch.nan  # under the causal mask only the last query attends this value
    assert kept.direct is not None
    assert kept.direct(query, key, value, regard.ScaledDot(), regard.causal(), None) is None
    output = regard.attention(query, key, value, mask=regard.causal()).output
    assert output[0, 0, -1, 0].isnan()
    assert output.isnan().sum() == 1


def test_lengths_are_checked_at_each_call() -> None:
    query = torch.randn(2, 3, 5, 8)
    regard.attention(query, query, query, mask=regard.padding(torch.tensor([5, 2])))
    with pytest.raises(ValueError, match="at most 5, the number of keys, got 6"):
        regard.attention(query, query, query, mask=regard.padding(torch.tensor([6, 2])))


def test_slopes_that_change_in_place_are_read_again() -> None:
    x, slopes = torch.randn(1, 3, 6, 8), torch.tensor([0.5, 0.2, 0.1])
    bias = regard.alibi(slopes)
    outputs = [regard.attention(x, x, x, bias=bias, mask=regard.causal()).output for _ in range(2)]
    slopes.mul_(4)
    changed = regard.attention(x, x, x, bias=bias, mask=regard.causal()).output
    fresh = regard.attention(x, x, x, bias=regard.alibi([2.0, 0.8, 0.4]), mask=regard.causal()).output
    torch.testing.assert_close(changed, fresh)
    assert torch.equal(*outputs)
    assert not torch.allclose(changed, outputs[0])


def test_what_is_kept_holds_no_tensor() -> None:
    weight = torch.randn(16, 16)
    query = torch.randn(2, 3, 37, 16)
    route(query, query, query, score=regard.Bilinear(weight))
    freed = [weakref.ref(query), weakref.ref(weight)]
    del query, weight
    gc.collect()
    assert [each() for each in freed] == [None, None]


def test_gradients_are_wanted_or_not() -> None:
    """A call's signature contains the grad mode, and which tensors require gradients."""
    query, key, value = (torch.randn(2, 3, 37, 16) for _ in range(3))
    parameter = torch.nn.Parameter(torch.eye(16))
    for score, learned in ((regard.Bilinear(torch.eye(16)), False), (regard.Bilinear(parameter), True)):
        for learning in (True, False):
            with torch.set_grad_enabled(learning):
                output = regard.attention(query, key, value, score=score).output
            assert output.requires_grad is (learned and learning)


LONG = [torch.randn(1, 4, 1024, 32) for _ in range(3)]
VERY_LONG = [torch.randn(1, 4, 20000, 32) for _ in range(3)]
SOME, FEW = ([t[..., :length, :] for t in LONG] for length in (64, 8))
WEIGHT = torch.randn(32)
# Tensors and options of a call on the CPU, its backend, and the kernel that `explain` names.
KERNELS = {
    "plain": (VERY_LONG, {}, "sdpa", "flash"),
    "short": (SOME, {}, "loops", "compiled loops"),
    "short, by name": (SOME, {"backend": "sdpa"}, "sdpa", "flash"),
    "causal": (LONG, {"mask": regard.causal()}, "loops", "compiled loops"),
    "long, by name": (VERY_LONG, {"backend": "loops"}, "loops", "compiled loops"),
    "padding": (VERY_LONG, {"mask": regard.padding(torch.tensor([700]))}, "sdpa", "flash"),
    "short padding": (SOME, {"mask": regard.padding(torch.tensor([50]))}, "loops", "compiled loops"),
    "dropout": (SOME, {"dropout": 0.1}, "loops", "compiled loops"),
    "dropout, by name": (SOME, {"dropout": 0.1, "backend": "sdpa"}, "sdpa", "math"),
    "log-sum-exp": (LONG, {"weights": regard.logsumexp()}, "loops", "compiled loops"),
    "long log-sum-exp": (VERY_LONG, {"weights": regard.logsumexp()}, "sdpa", "flash"),
    "some additive": (SOME, {"score": regard.Additive(WEIGHT)}, "additive", "exponential (compiled)"),
    "few additive": (FEW, {"score": regard.Additive(WEIGHT)}, "additive", "tanh (compiled)"),
    "some sigmoid": (SOME, {"score": regard.Additive(WEIGHT), "normalize": regard.Sigmoid()}, "additive", "logistic"),
    "few sigmoid": (FEW, {"score": regard.Additive(WEIGHT), "normalize": regard.Sigmoid()}, "reference", "reference"),
    "sparsemax": (VERY_LONG, {"normalize": regard.Sparsemax()}, "blocked", "blocks"),
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
    """Runs in a separate process, because torch.compile cannot trace the run-time shape checks of the tests."""
    done = forked.run([sys.executable, "-c", COMPILED])
    assert "backend 'blocked' cannot serve this call: the score draws random numbers" in done.stdout, done.stderr


def test_autocast_is_part_of_a_call_and_stays_on() -> None:
    x = torch.randn(1, 2, 20, 16)
    assert regard.attention(x, x, x).output.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert regard.attention(x, x, x).output.dtype == torch.bfloat16
        assert regard.attention(x.bfloat16(), x.bfloat16(), x.bfloat16()).output.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="does not broadcast"):
            regard.attention(x.bfloat16(), x.bfloat16(), x.bfloat16(), mask=torch.ones(3, 3).bool())
        assert torch.is_autocast_enabled("cpu")
    assert regard.attention(x, x, x).output.dtype == torch.float32
