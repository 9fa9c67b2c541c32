"""Bilinear scores in float16, where query · weight may overflow although the scores are in float16's range."""

import math

import pytest
import torch
from torch import Tensor

import regard


def scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    product = regard.Bilinear(weight).as_product(query, key)
    assert product.query.isfinite().all()
    assert product.key.isfinite().all()
    return product.scale * product.query.double() @ product.key.double().mT


@pytest.mark.parametrize(("queries", "keys"), [(2, 3), (3, 2)], ids=["the queries are transformed", "the keys are"])
def test_a_product_beyond_float16_is_computed(queries: int, keys: int) -> None:
    query = torch.full((1, 1, queries, 4), 300.0, dtype=torch.float16)
    key = torch.full((1, 1, keys, 4), 2.0**-10, dtype=torch.float16)
    weight = 400.0 * torch.eye(4)  # 300 · 400 is 120,000; the largest float16 is 65,504
    if queries > keys:
        query, key = query * 2.0**-18, key * 2.0**18
    found = scores(query, key, weight)
    torch.testing.assert_close(found, torch.full_like(found, 4 * 300 * 400 / 1024), rtol=2e-3, atol=0.0)


def test_ordinary_numbers_are_not_rescaled() -> None:
    torch.manual_seed(0)
    query, key, weight = torch.randn(2, 3, 5, 7).half(), torch.randn(2, 3, 5, 7).half(), torch.randn(7, 7).half()
    product = regard.Bilinear(weight).as_product(query, key)
    assert torch.equal(product.query, query @ weight)
    assert torch.equal(product.key, key)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_one_bad_query_changes_no_other_row(number: float) -> None:
    torch.manual_seed(1)
    query, key, weight = torch.randn(1, 1, 5, 7).half(), torch.randn(1, 1, 5, 7).half(), torch.randn(7, 7).half()
    good = regard.Bilinear(weight).as_product(query, key).query
    query[..., 2, :] = number
    product = regard.Bilinear(weight).as_product(query, key)
    assert torch.equal(product.query[..., [0, 1, 3, 4], :], good[..., [0, 1, 3, 4], :])
    assert torch.equal(product.key, key)


@pytest.mark.cuda
@pytest.mark.parametrize("large", [False, True], ids=["ordinary", "beyond float16"])
@pytest.mark.parametrize(
    "mask", [None, regard.causal(), regard.causal() & regard.padding([70, 41])], ids=["", "causal", "padding"]
)
def test_float16_on_a_gpu_is_fused_and_right(mask: regard.Mask | None, large: bool) -> None:
    torch.manual_seed(2)
    query, key, value = (torch.randn(2, 3, 70, 16, device="cuda").half() for _ in range(3))
    weight = torch.randn(16, 16, device="cuda") / 4
    if large:
        query, key, weight = query * 512, key * 2.0**-14, weight * 64
    leaves = [t.requires_grad_() for t in (query, key, value, weight)]
    plan = regard.explain(query, key, value, score=regard.Bilinear(weight), mask=mask)
    assert plan.backend in ("sdpa", "flex", "short")
    output = regard.attention(query, key, value, score=regard.Bilinear(weight), mask=mask).output
    double = [t.detach().double().requires_grad_() for t in leaves]
    exact = regard.attention(*double[:3], score=regard.Bilinear(double[3]), mask=mask, backend="reference").output
    # The upstream gradient is small, so that no gradient overflows in float16.
    upstream = torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output) / 128
    grads = torch.autograd.grad(output, leaves, upstream.half())
    expected = torch.autograd.grad(exact, double, upstream.double())
    for found, right in zip((output, *grads), (exact, *expected), strict=True):
        assert ((found.double() - right).norm() / right.norm()).item() < 1e-2
