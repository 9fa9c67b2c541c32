"""Additive scores on the CPU with tanh computed from exponentials or logistic functions: as accurate as tanh."""

import functools
import math
import operator

import pytest
import torch
from torch import Tensor

import regard
from regard.core.backends.additive import Logistic
from regard.kernels.additive import pair_loops

# Sizes (batch, heads, queries, keys, size) of calls that `backend="additive"` computes in the exponential form (`FEW`)
# and in the logistic form (`SOME`).
FEW = (2, 2, 7, 31, 16)
SOME = (2, 2, 16, 64, 64)


def drawn(shape: tuple[int, ...], scale: float = 1.0, heavy: float = 1.0, seed: int = 0) -> list[Tensor]:
    """Return query, key, value, and the weight of an additive score, with a norm of about `heavy`."""
    source = torch.Generator().manual_seed(seed)
    batch, heads, queries, keys, size = shape
    query, key, value = (torch.randn(batch, heads, n, size, generator=source) for n in (queries, keys, keys))
    return [query * scale, key * scale, value, torch.randn(size, generator=source) * heavy / math.sqrt(size)]


def learned(tensors: list[Tensor], backend: str, **settings: object) -> list[Tensor]:
    """Return the output of additive attention, and the gradients of query, key, value and weight."""
    query, key, value, weight = (x.detach().requires_grad_() for x in tensors)
    output = regard.attention(query, key, value, score=regard.Additive(weight), backend=backend, **settings).output
    direction = torch.arange(output.numel(), dtype=output.dtype).cos().reshape(output.shape)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value, weight), direction)]


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [1.0, 25.0])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("shape", [FEW, SOME], ids=["exponential", "logistic"])
def test_every_form_is_as_exact_as_tanh(shape: tuple[int, ...], scale: float, heavy: float) -> None:
    """The error against float64 is at most twice that of the reference for the output, and three times in gradients."""
    errors: dict[str, list[list[float]]] = {"additive": [], "reference": []}
    for seed in range(4):
        tensors = drawn(shape, scale, heavy, seed)
        true = learned([x.double() for x in tensors], "reference")
        for backend, found in errors.items():
            each = zip(learned(tensors, backend), true, strict=True)
            found.append([float((a.double() - b).norm() / b.norm()) for a, b in each])
    ours, plain = (torch.tensor(found).mean(0) for found in errors.values())
    # The limit of the error is at least the rounding error of a sum that is computed in blocks.
    plain = plain.clamp_min(torch.finfo(torch.float32).eps)
    assert ours[0] <= 2 * plain[0]
    assert (ours[1:] <= 3 * plain[1:]).all(), (ours, plain)


def test_which_form_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    # The patched function simulates a machine without a C compiler.
    monkeypatch.setattr(pair_loops, "available", lambda: False)
    few, some = (regard.explain(*drawn(s)[:3], score=regard.Additive(torch.ones(s[-1]))) for s in (FEW, SOME))
    assert (few.backend, some.backend) == ("reference", "additive")
    assert "small" in few.refused["additive"]
    double = [x.double() for x in drawn(SOME)]
    assert regard.explain(*double[:3], score=regard.Additive(double[3])).backend == "reference"

    called = []
    plainly = Logistic.__call__
    monkeypatch.setattr(Logistic, "__call__", lambda self, query, key: called.append(1) or plainly(self, query, key))

    def used(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, **settings: object) -> bool:
        called.clear()
        regard.attention(query, key, value, score=regard.Additive(weight), **settings)
        return bool(called)

    assert used(*drawn(SOME))
    assert not used(*drawn(SOME, scale=0.05))  # the logistic form loses digits of small inputs
    assert used(*drawn(SOME, scale=0.3))
    assert not used(*drawn(SOME, scale=0.3, heavy=25.0))
    query, key, value, weight = drawn(SOME, scale=1e-3)
    key[:, :, 60:] = 10.0  # the size of inputs at masked keys does not affect the choice of the logistic form
    assert not used(query, key, value, weight, mask=regard.padding([60, 60]))
    key[:, :, 0, 0] = 1e4  # one large number among small inputs does not lead to the logistic form
    assert not used(query, key, value, weight)


@pytest.mark.parametrize("shape", [FEW, SOME], ids=["exponential", "logistic"])
@pytest.mark.parametrize("rows", [1, 4])
def test_weights_of_heads_and_heads_that_share_keys(shape: tuple[int, ...], rows: int) -> None:
    batch, _, queries, keys, size = shape
    query, key, value, _ = drawn((batch, 4, queries, keys, size))
    weight = torch.randn(rows, size, generator=torch.Generator().manual_seed(1)) / math.sqrt(size)
    tensors = [query, key[:, :2], value[:, :2], weight]
    for found, wanted in zip(learned(tensors, "additive"), learned(tensors, "reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_logistic_form_under_masks_biases_and_requests() -> None:
    tensors = drawn(SOME)
    settings = {
        "mask": regard.causal(offset=40) & regard.padding([50, 64]),
        "bias": torch.randn(16, 64),
        "weights": regard.full(),
    }
    clean = learned(tensors, "reference", **settings)
    query, key, value, weight = tensors
    key, value = key.clone(), value.clone()
    key[0, :, 50:], value[0, :, 50:] = math.nan, math.inf
    for found, wanted in zip(learned([query, key, value, weight], "additive", **settings), clean, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    each = [
        regard.attention(*tensors[:3], score=regard.Additive(weight), backend=b, **settings).weights
        for b in ("reference", "additive")
    ]
    torch.testing.assert_close(each[0], each[1])


def test_small_calls_have_second_derivatives_and_can_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, weight = drawn(SOME)

    def curved(backend: str) -> Tensor:
        leaf = query.clone().requires_grad_()
        output = regard.attention(leaf, key, value, score=regard.Additive(weight), backend=backend).output
        (first,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    torch.testing.assert_close(curved("additive"), curved("reference"), rtol=1e-3, atol=1e-4)
    # The patched function simulates a machine without a C compiler.
    monkeypatch.setattr(pair_loops, "available", lambda: False)
    torch.testing.assert_close(curved("additive"), curved("reference"), rtol=1e-3, atol=1e-4)
    score = regard.Additive(weight)
    queries, keys, values = (torch.stack((x, x.flip(2))) for x in (query, key, value))
    mapped = torch.func.vmap(lambda *x: regard.attention(*x, score=score).output)(queries, keys, values)
    for found, *inputs in zip(mapped, queries, keys, values, strict=True):
        torch.testing.assert_close(found, regard.attention(*inputs, score=score, backend="reference").output)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_second_derivatives_of_compiled_loops(causal: bool, padded: bool) -> None:
    masks = [regard.causal(40)] * causal + [regard.padding([50, 64])] * padded
    mask = functools.reduce(operator.and_, masks) if masks else None
    tensors = [drawn(SOME)[0], *drawn(SOME)[1:3], torch.randn(2, 64, generator=torch.Generator().manual_seed(3)) / 8]

    def curved(backend: str, key: Tensor) -> list[Tensor]:
        query, value, weight = (tensors[i].clone().requires_grad_() for i in (0, 2, 3))
        key = key.clone().requires_grad_()
        output = regard.attention(query, key, value, score=regard.Additive(weight), mask=mask, backend=backend).output
        first = torch.autograd.grad(output.square().sum(), (query, key, weight), create_graph=True)
        return list(torch.autograd.grad(sum(x.square().sum() for x in first), (query, key, value, weight)))

    broken = tensors[1].clone()
    if padded:
        broken[0, :, 60:] = math.nan  # the mask allows only the first 50 keys of sequence 0
    for found, wanted in zip(curved("additive", broken), curved("reference", tensors[1]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("scale", [3.0, 0.1], ids=["far", "near"])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 8, 9, 32), (1, 8, 33, 17, 16), (5, 1, 16, 12, 24), (3, 2, 17, 23, 5)], ids=str
)
def test_compiled_loops_serve_any_shape_and_layout(shape: tuple[int, ...], turned: bool, scale: float) -> None:
    tensors = drawn(shape, scale)
    if turned:
        tensors = [x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.ndim > 1 else x for x in tensors]
    for mine, plain in zip(learned(tensors, "additive"), learned(tensors, "reference"), strict=True):
        assert (mine - plain).norm() <= 1e-4 * plain.norm()
