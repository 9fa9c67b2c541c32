"""Matrix products by oneDNN against float64: layouts of the matrix, kinds of addends, and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import products
from regard.kernels.products import linear, matrix

ROWS, OUT, INTO = 67, 263, 257
WIDE = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Enable oneDNN for float32 and bfloat16 on any processor, or disable it; return whether it is enabled."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN: its products go unchecked")
    monkeypatch.setattr(products, "_dtypes", lambda: WIDE if request.param else ())
    monkeypatch.setattr(products, "LEAST", 1)
    return bool(request.param)


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=error * float(expected.abs().max()))


def layouts(dtype: torch.dtype) -> list[Tensor]:
    """Return a matrix (n, k) stored by rows, by columns, and with gaps between rows."""
    return [
        torch.randn(OUT, INTO).to(dtype),
        torch.randn(INTO, OUT).to(dtype).t(),
        torch.randn(OUT, INTO + 5).to(dtype)[:, 3 : 3 + INTO],
    ]


@pytest.mark.parametrize("uses", [1, 30])
@pytest.mark.parametrize("dtype", [*WIDE, torch.float64])
def test_a_matrix_times_rows(dtype: torch.dtype, uses: int, library: bool) -> None:
    bias, other = torch.randn(OUT).to(dtype), torch.randn(OUT, ROWS).to(dtype).t()
    for weight in layouts(dtype):
        ready = matrix(weight, ROWS, uses=uses)
        assert (ready.ready is not None) == (library and dtype in WIDE)
        for rows in (torch.randn(ROWS, INTO), torch.randn(INTO, 5).t(), torch.randn(1, INTO), torch.randn(0, INTO)):
            rows = rows.to(dtype)
            expected = rows.double() @ weight.double().t()
            if not expected.numel():
                assert ready.times(rows).shape == expected.shape
                continue
            near(ready.times(rows), expected, dtype)
            near(ready.times(rows, bias), expected + bias, dtype)
            some = other[: len(rows)]
            near(ready.times(rows, some), expected + some, dtype)
            out = torch.empty(len(rows), OUT, dtype=dtype)
            for add in (None, bias, some):
                ready.into(out, rows, add)
                near(out, expected if add is None else expected + add, dtype)


def test_what_is_added_keeps_its_dtype(library: bool) -> None:
    ready = matrix(torch.randn(OUT, INTO).bfloat16(), ROWS, uses=30)
    rows, other = torch.randn(ROWS, INTO).bfloat16(), torch.randn(ROWS, OUT)
    found = ready.times(rows, other)
    assert found.dtype == torch.float32
    assert torch.equal(found, other + ready.times(rows))


@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_map_has_the_gradients_of_torchs(biased: bool, library: bool) -> None:
    rows, weight = torch.randn(3, 23, INTO, requires_grad=True), torch.randn(OUT, INTO, requires_grad=True)
    given = (rows, weight, torch.randn(OUT, requires_grad=True)) if biased else (rows, weight)
    upstream = torch.randn(3, 23, OUT)
    exact = [x.detach().double().requires_grad_() for x in given]
    found, expected = linear(*given), F.linear(*exact)
    near(found.detach(), expected.detach(), torch.float32)
    ours, theirs = torch.autograd.grad(found, given, upstream), torch.autograd.grad(expected, exact, upstream.double())
    for one, other in zip(ours, theirs, strict=True):
        near(one, other, torch.float32)
    # The upstream gradient of a sum is an expanded scalar, with strides of 0.
    [of_weight] = torch.autograd.grad(linear(*given).sum(), [weight])
    near(of_weight, rows.detach().double().sum((0, 1)).expand(OUT, -1), torch.float32)


def test_a_second_derivative_of_a_linear_map(library: bool) -> None:
    rows, weight = torch.randn(7, INTO, requires_grad=True), torch.randn(OUT, INTO, requires_grad=True)
    seconds = []
    for function in (linear, F.linear):
        [first] = torch.autograd.grad(function(rows, weight).square().sum(), rows, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), weight)[0])
    near(seconds[0], seconds[1].double(), torch.float32)


def test_autocast_reaches_a_linear_map(library: bool) -> None:
    rows, weight = torch.randn(7, INTO), torch.randn(OUT, INTO)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(rows, weight).dtype == torch.bfloat16


def test_functions_of_functions(library):
    """torch.func and forward-mode derivatives work through `linear` as through torch's own product."""
    torch.manual_seed(2)
    rows, weight = torch.randn(5, 300), torch.randn(290, 300)
    found = torch.func.grad(lambda w: linear(rows, w).square().sum())(weight)
    torch.testing.assert_close(found, 2 * (rows @ weight.T).T @ rows, rtol=1e-4, atol=1e-2)
    _, moved = torch.func.jvp(lambda w: linear(rows, w), (weight,), (torch.ones_like(weight),))
    torch.testing.assert_close(moved, rows.sum(-1, keepdim=True).expand(5, 290), rtol=1e-4, atol=1e-4)


def test_little_work_stays_with_torch(library, monkeypatch):
    monkeypatch.setattr(products, "LEAST", ROWS * OUT * INTO * 3)
    weight = torch.randn(OUT, INTO)
    assert matrix(weight, ROWS, uses=2).ready is None
    assert (matrix(weight, ROWS, uses=3).ready is not None) == library
