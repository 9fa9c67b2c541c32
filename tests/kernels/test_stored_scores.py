"""The kernels that store the scores of small calls, against the explicit form in float64."""

from typing import Any

import pytest
import torch

from additive_cases import BRAIN, CASES, FULL, HALF, compare, explicit
from interpreting import DEVICES

TANH = [name for name, (_, settings) in CASES.items() if settings.get("activation", "tanh") in ("tanh", "sigmoid")]
INTERPRETED = ("float16, heavy weights", "every head its keys", "lengths", "everything float32", "a 60, b -59")


def _stored(name: str) -> tuple[torch.dtype, dict[str, Any]]:
    dtype, settings = CASES[name]
    return dtype, {**settings, "form": "stored"}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str) -> None:
    dtype, settings = _stored(name)
    compare(dtype, "cpu", **settings)


@pytest.mark.cuda
@pytest.mark.parametrize("name", TANH)
def test_compiled(name: str) -> None:
    dtype, settings = _stored(name)
    compare(dtype, "cuda", **settings)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", HALF, marks=pytest.mark.interpreted, id="interpreted"),
        pytest.param("cuda", FULL, marks=pytest.mark.cuda, id="cuda-float32"),
        pytest.param("cuda", BRAIN, marks=pytest.mark.cuda, id="cuda-bfloat16"),
        pytest.param("cuda", HALF, marks=pytest.mark.cuda, id="cuda-float16"),
    ],
)
def test_one_query_and_wide_values(device: str, dtype: torch.dtype) -> None:
    """A single query, more keys than a tile, more columns than a program takes, a weight of another type, gaps."""
    from regard.kernels.additive.fused import additive_attention

    torch.manual_seed(5)
    rows = torch.randn(1, 2, 1, 40), torch.randn(1, 2, 67, 40), torch.randn(1, 2, 67, 139)
    query, key, value = (x.to(device, dtype)[..., ::2].requires_grad_() for x in rows)
    weight = (torch.randn(20, device=device) / 4).requires_grad_()
    leaves = [query, key, value, weight]
    true_leaves = [x.detach().double().requires_grad_() for x in leaves]
    allowed = torch.ones(1, 2, 1, 67, dtype=torch.bool, device=device)
    true, _ = explicit(*true_leaves[:3], true_leaves[3].expand(2, -1), "tanh", allowed, 0.0)
    found, _ = additive_attention(*leaves, form="stored")
    grads = [torch.autograd.grad(out.double().square().sum(), x) for out, x in ((found, leaves), (true, true_leaves))]
    most = {FULL: 3e-6, HALF: 5e-3, BRAIN: 4e-2}[dtype]
    for name, a, t in zip(("out", *"qkvw"), (found, *grads[0]), (true, *grads[1]), strict=True):
        assert (a.double() - t).norm() <= most * t.norm(), name


@pytest.mark.parametrize("device", DEVICES)
def test_without_stored_scores(device: str) -> None:
    """torch.compile's operator does not hand the scores on: its backward pass computes them again."""
    from regard.kernels.triton.additive.operator import additive, additive_forward

    torch.manual_seed(6)
    leaves = [torch.randn(1, 1, n, d, device=device).requires_grad_() for n, d in ((3, 4), (5, 4), (5, 2))]
    leaves.append(torch.randn(4, device=device).requires_grad_())
    rest = (None, None, None, None, None, None, None, 1, "tanh", 0.0, 0, "auto")
    found = []
    for out, lse in (additive(*leaves, *rest), additive_forward(*leaves, *rest, True)):
        found.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.interpreted
@pytest.mark.parametrize("activation", ["gelu", "leaky_relu"])
def test_other_activations_are_refused(activation: str) -> None:
    from regard.kernels.additive.fused import additive_attention

    rows = torch.ones(1, 1, 2, 3)
    with pytest.raises(ValueError, match="stored scores serve tanh and sigmoid"):
        additive_attention(rows, rows, rows, torch.ones(3), activation=activation, form="stored")
