"""The Triton kernels that divide the rows of two tensors by their norm, against float64: interpreted and on CUDA."""

import pytest
import torch
from torch import Tensor

from interpreting import DEVICES
from regard.core.scores import unit

SHAPES = [(2, 3, 5, 7), (1, 2, 130, 64), (3, 1, 1, 1), (1, 1, 2, 300)]
# Factors of the rows: squares of numbers near 1e-30 and 1e30 underflow and overflow in float32.
SCALES = {"small": 1e-30, "usual": 1.0, "large": 1e30}


def unit_rows(x: Tensor) -> Tensor:
    """Return the unit rows of x, computed together with another tensor."""
    from regard.kernels.triton.row_norms import unit_rows

    return unit_rows(x, x.detach()[:, :1, :1])[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_gradients_agree_with_float64(shape: tuple[int, ...], scale: str, device: str) -> None:
    generator = torch.Generator(device).manual_seed(3)
    packed = torch.randn(shape[0], shape[2], shape[1], shape[3], generator=generator, device=device) * SCALES[scale]
    # The input is a strided view, like the heads of a layer.
    x = packed.transpose(1, 2).requires_grad_()
    upstream = torch.randn(shape, generator=generator, device=device)
    output = unit_rows(x)
    (grad,) = torch.autograd.grad(output, x, upstream)
    exact, g = x.detach().double(), upstream.double()
    length = exact.square().sum(-1, keepdim=True).sqrt()
    right = exact / length
    torch.testing.assert_close(output.double(), right, rtol=1e-5, atol=1e-6)
    expected = (g - right * (right * g).sum(-1, keepdim=True)) / length
    torch.testing.assert_close(grad.double() * length, expected * length, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("rows", [(3, 70), (70, 3)], ids=str)
def test_two_tensors_with_other_heads_and_rows(rows: tuple[int, int], heads: tuple[int, int], device: str) -> None:
    from regard.kernels.triton.row_norms import unit_rows

    generator = torch.Generator(device).manual_seed(4)
    pair = [
        torch.randn(2, h, n, 64, generator=generator, device=device).requires_grad_()
        for h, n in zip(heads, rows, strict=True)
    ]
    upstream = [torch.randn(x.shape, generator=generator, device=device) for x in pair]
    outputs = unit_rows(*pair)
    grads = torch.autograd.grad(outputs, pair, upstream)
    for x, output, grad, g in zip(pair, outputs, grads, upstream, strict=True):
        wide = x.detach().double().requires_grad_()
        right = wide / wide.square().sum(-1, keepdim=True).sqrt()
        torch.testing.assert_close(output.double(), right, rtol=1e-5, atol=1e-6)
        (expected,) = torch.autograd.grad(right, wide, g.double())
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)
    (alone,) = torch.autograd.grad(unit_rows(*pair)[1], pair[1], upstream[1])
    torch.testing.assert_close(alone, grads[1])


@pytest.mark.parametrize("device", DEVICES)
def test_overlapping_rows(device: str) -> None:
    numbers = torch.randn(200, generator=torch.Generator().manual_seed(5)).to(device)
    x = numbers.as_strided((2, 3, 8, 4), (1, 2, 8, 1))
    torch.testing.assert_close(unit_rows(x), x / x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_of_zeros_stays_so_without_a_gradient(device: str) -> None:
    x = torch.tensor([[[[0.0, 0.0], [3.0, 4.0]]]], device=device, requires_grad=True)
    for function in (unit_rows, unit):
        output = function(x)
        (grad,) = torch.autograd.grad(output, x, torch.ones_like(output))
        torch.testing.assert_close(output.tolist(), [[[[0.0, 0.0], [0.6, 0.8]]]], rtol=0, atol=1e-6)
        # The gradient of row x = (3, 4) is (1 − 0.6 · 1.4) / 5 = 0.032 and (1 − 0.8 · 1.4) / 5 = −0.024.
        torch.testing.assert_close(grad.tolist(), [[[[0.0, 0.0], [0.032, -0.024]]]], rtol=0, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 70, 64, device="cuda").to(dtype).requires_grad_()
    upstream = torch.randn(2, 3, 70, 64, device="cuda").to(dtype)
    right = unit(x.double())
    # The absolute tolerance is the smallest subnormal number of the dtype.
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(unit_rows(x).double(), right, rtol=torch.finfo(dtype).eps, atol=least)
    (grad,) = torch.autograd.grad(unit_rows(x), x, upstream)
    (expected,) = torch.autograd.grad(right, x, upstream.double())
    assert (grad.double() - expected).norm() < 2 * torch.finfo(dtype).eps * expected.norm()
