"""Rows divided by their norm in C, against float64."""

import math

import pytest
import torch

from regard.kernels.native_library import compiler
from regard.kernels.unit_rows import serves, unit_rows

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

SHAPES = [(5, 7), (3, 11, 1), (2, 3, 17, 33), (2, 1, 5, 1024), (1, 2, 800, 64)]
WITHIN = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def exact(x: torch.Tensor, change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x / |x| and the gradient of x by its formula, in float64."""
    x, change = x.detach().double(), change.double()
    norm = (x * x).sum(-1, keepdim=True).sqrt()
    unit = x / norm
    return unit, (change - unit * (unit * change).sum(-1, keepdim=True)) / norm


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "tokens first"])
def test_rows_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    x, change = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    if layout == "tokens first" and len(shape) > 2:
        x, change = (t.transpose(-2, -3).contiguous().transpose(-2, -3) for t in (x, change))
    x.requires_grad_()
    assert serves(x)
    unit = unit_rows(x)
    (gradient,) = torch.autograd.grad(unit, x, change)
    # The gradient is a difference of two numbers of about this size, and its error is a share of them.
    large = float((change.double().norm(dim=-1) / x.detach().double().norm(dim=-1)).max())
    for one, other, size in zip((unit, gradient), exact(x, change), (1.0, large), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=WITHIN[dtype], atol=WITHIN[dtype] * size)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("size", [1e-30, 1e-19, 1e17, 1e30])
def test_squares_that_overflow_or_vanish(size: float, twice: bool) -> None:
    x, change = (torch.randn(3, 19).double() * size).float().requires_grad_(), torch.randn(3, 19)
    unit = unit_rows(x)
    (gradient,) = torch.autograd.grad(unit, x, change, create_graph=twice)
    right, slope = exact(x, change)
    torch.testing.assert_close(unit.double(), right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.detach().double() * size, slope * size, rtol=1e-4, atol=1e-5)


def test_gradient_of_subnormal_rows_is_finite_where_it_is_zero() -> None:
    x = torch.full((1, 16), 1e-40).requires_grad_()
    (gradient,) = torch.autograd.grad(unit_rows(x), x, torch.ones(1, 16))
    assert gradient.isfinite().all()


def test_gradients_with_the_negative_bit() -> None:
    x, change = torch.randn(4, 9).requires_grad_(), torch.randn(4, 9)
    (right,) = torch.autograd.grad(unit_rows(x), x, -change)
    (gradient,) = torch.autograd.grad(unit_rows(x), x, torch._neg_view(change))
    torch.testing.assert_close(gradient, right)


def test_zero_rows_stay_zero_and_have_no_gradient() -> None:
    x = torch.randn(4, 5)
    x[2] = 0.0
    x.requires_grad_()
    unit = unit_rows(x)
    (gradient,) = torch.autograd.grad(unit, x, torch.ones(4, 5))
    assert unit[2].tolist() == gradient[2].tolist() == [0.0] * 5
    assert unit.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_become_nan(number: float) -> None:
    x = torch.randn(3, 21)
    x[1, 20] = number
    unit = unit_rows(x)
    assert unit[1].isnan().all()
    assert unit[[0, 2]].isfinite().all()


def test_second_derivatives() -> None:
    """The gradient's derivative along a direction equals a difference quotient of the gradient in float64."""
    x, change, direction = (torch.randn(2, 3, 7) for _ in range(3))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(unit_rows(x), x, change, create_graph=True)
    (second,) = torch.autograd.grad(gradient, x, direction)
    step = 1e-6
    ahead, behind = (exact(x.detach().double() + sign * step * direction, change)[1] for sign in (1, -1))
    along = ((ahead - behind) / (2 * step) * direction).sum()
    torch.testing.assert_close((second * direction).sum().double(), along, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("why", ["float64", "too wide", "strided", "five axes"])
def test_tensors_that_the_loops_do_not_support(why: str) -> None:
    shapes = {"too wide": (2, 1025), "five axes": (1, 1, 1, 2, 3)}
    x = torch.randn(shapes.get(why, (4, 6)), dtype=torch.float64 if why == "float64" else torch.float32)
    assert not serves(x.mT if why == "strided" else x)
