"""The compiled C loops write to buffers of a fixed dtype: torch's default dtype and device must not change a result."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.core.local import local_attention

Call = Callable[..., Tensor]


def attended(**options: Any) -> Call:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = regard.attention(query, key, value, **options)
        return found.output.sum() if found.weights is None else found.output.sum() + found.weights.square().sum()  # pyrefly: ignore

    return call


def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    centre = query[..., 0].float() * 9
    return local_attention(query, key, value, centre, reach=4).output.square().sum()


def linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return regard.linear_attention(query, key, value, features=regard.EluFeatures(), causal=True).square().sum()


CALLS: dict[str, Call] = {
    "weights": attended(weights=regard.full()),
    "sparsemax": attended(normalize=regard.Sparsemax(), weights=regard.full()),
    "entmax": attended(normalize=regard.Entmax(), weights=regard.full()),
    "entropy": attended(weights=regard.entropy(), mask=regard.causal()),
    "additive": attended(score=regard.Additive(torch.linspace(-1, 1, 8)), weights=regard.full()),
    "alibi": attended(bias=regard.alibi([0.1, 0.2, 0.3])),
    "local": local,
    "linear": linear,
}


@pytest.fixture(params=[("float64", None), ("bfloat16", None), ("float32", "meta")], ids=str)
def change(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Yield a function that changes torch's default dtype and device until the end of the test."""
    dtype, device = request.param

    def changed() -> None:
        torch.set_default_dtype(getattr(torch, dtype))
        torch.set_default_device(device)

    yield changed
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, 33, 8, generator=source).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CALLS)
def test_results_do_not_depend_on_the_defaults(change: Callable[[], None], kind: str, dtype: torch.dtype) -> None:
    leaves, call = tensors(dtype), CALLS[kind]
    expected = [call(*leaves), *torch.autograd.grad(call(*leaves), leaves)]
    change()
    found = [call(*leaves), *torch.autograd.grad(call(*leaves), leaves)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["weights", "sparsemax", "entmax", "entropy"])
def test_second_derivatives_do_not_depend_on_the_default_dtype(kind: str) -> None:
    leaves, call = tensors(torch.float32), CALLS[kind]

    def second() -> Tensor:
        gradients = torch.autograd.grad(call(*leaves), leaves, create_graph=True)
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        return torch.autograd.grad(total, leaves[0])[0]

    expected = second()
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(second(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_bias_with_a_gradient(change: Callable[[], None]) -> None:
    bias = torch.linspace(-1, 1, 33 * 33).view(33, 33).requires_grad_()
    leaves = tensors(torch.float32)
    (expected,) = torch.autograd.grad(regard.attention(*leaves, bias=bias).output.square().sum(), bias)
    change()
    (found,) = torch.autograd.grad(regard.attention(*leaves, bias=bias).output.square().sum(), bias)
    assert torch.equal(found, expected)


def test_the_best_key(change: Callable[[], None]) -> None:
    query, key, value = (tensor.detach() for tensor in tensors(torch.float32))
    options: dict[str, Any] = {"normalize": regard.Hard(), "weights": regard.full()}
    expected = regard.attention(query, key, value, **options)
    change()
    found = regard.attention(query, key, value, **options)
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.log_prob, expected.log_prob)
    assert torch.equal(found.weights, expected.weights)
