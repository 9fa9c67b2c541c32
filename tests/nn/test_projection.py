"""Layers call linear maps and norms without `Module.__call__` only if the result is the same, as without hooks."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import regard.nn
from regard.nn.projection import applied


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_map(bias: bool) -> None:
    layer, x = nn.Linear(3, 5, bias=bias), torch.randn(7, 3)
    assert torch.equal(applied(layer, x), x @ layer.weight.mT + (layer.bias if bias else 0))


def test_a_normalisation() -> None:
    layer, x = nn.LayerNorm(3, eps=0.5), torch.tensor([[1.0, 2.0, 3.0]])
    nn.init.constant_(layer.weight, 2.0)
    expected = torch.tensor([[-1.0, 0.0, 1.0]]) * 2 / (2 / 3 + 0.5) ** 0.5
    torch.testing.assert_close(applied(layer, x), expected)
    assert torch.equal(applied(nn.LayerNorm(3, elementwise_affine=False), x), nn.LayerNorm(3)(x))


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], torch.utils.hooks.RemovableHandle]] = {
    "forward": lambda layer, seen: layer.register_forward_hook(seen),
    "forward pre": lambda layer, seen: layer.register_forward_pre_hook(seen),
    "backward": lambda layer, seen: layer.register_full_backward_hook(seen),
    "all modules": lambda layer, seen: nn.modules.module.register_module_forward_hook(seen),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_called(kind: str) -> None:
    layer, seen = nn.Linear(3, 5), list[object]()
    handle = HOOKS[kind](layer, lambda *given: seen.append(given))
    try:
        applied(layer, torch.randn(7, 3, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert len(seen) == 1


def test_a_forward_of_the_caller_is_called() -> None:
    layer = nn.Linear(3, 5)
    layer.forward = lambda x: x * 0
    assert applied(layer, torch.ones(2, 3)).shape == (2, 3)


def test_a_parametrised_weight_is_used() -> None:
    layer, x = nn.Linear(3, 5, bias=False), torch.randn(7, 3)
    plain = applied(layer, x)
    parametrize.register_parametrization(layer, "weight", Doubled())
    torch.testing.assert_close(applied(layer, x), 2 * plain)


def test_a_parametrised_projection_is_used() -> None:
    layer, x = regard.nn.MultiHeadAttention(8, 2, bias=False), torch.randn(2, 3, 8)
    layer.output.weight.data.copy_(torch.eye(8))
    # Queries and keys are 0, so that all attention weights are equal.
    layer.projection.weight.data[:16] = 0
    plain = layer(x).output
    parametrize.register_parametrization(layer.projection, "weight", Doubled())
    torch.testing.assert_close(layer(x).output, 2 * plain)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_queries_keys_and_values_are_rows_of_one_product(kv_heads: int, grad: bool) -> None:
    layer = regard.nn.MultiHeadAttention(8, 4, kv_heads=kv_heads).projection
    x = torch.randn(3, 5, 8)
    with torch.set_grad_enabled(grad):
        parts = layer.apart(x)
    rows = (x @ layer.weight.mT + layer.bias).split(layer.rows, -1)
    for part, row in zip(parts, rows, strict=True):
        torch.testing.assert_close(part, row.unflatten(-1, (-1, 2)).transpose(1, 2))
