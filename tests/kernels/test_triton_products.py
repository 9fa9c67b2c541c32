"""Float32 matrix products of few rows, computed as three TF32 products, against float64."""

import pytest
import torch

from interpreting import DEVICES

# The sizes of a test: (number of products, rows, length of the summed axis, columns, parts into which the summed axis
# is split, rows of an added matrix).
CASES = [(*shape, 1, added) for shape in ((1, 3, 5, 7), (2, 37, 131, 67)) for added in (0, 1, shape[1])]
CASES += [(2, 33, 203, 70, 2, 0), (1, 5, 70, 9, 3, 0)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: tuple[int, ...], transposed: bool, device: str) -> None:
    from regard.kernels.triton.few_row_products import multiply

    count, rows, summed, columns, pieces, more = case
    left = torch.randn(count, rows, summed, device=device)
    right = torch.randn(count, *((columns, summed) if transposed else (summed, columns)), device=device)
    right = right.mT if transposed else right
    added = torch.randn(count, more, columns, device=device) if more else None
    shape = (count, rows, columns) if pieces == 1 else (pieces, count, rows, columns)
    found = multiply(left, right, torch.empty(shape, device=device), added=added)
    whole = found if pieces == 1 else found.double().sum(0)
    exact = left.double() @ right.double()
    if added is not None:
        exact += added
    assert (whole - exact).abs().max() / exact.abs().max() < 1e-6
    if pieces == 2:  # the summed axis is split into two parts, and each partial product is nonzero
        assert all(float(part.abs().max()) > 0.1 for part in found)


# The NaN of a GPU, in which all bits but the sign bit are set.
NAN_OF_A_GPU = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)


# Triton's interpreter does not compute products of bfloat16.
WAYS = [
    *(pytest.param("three", device.values[0], marks=device.marks, id=f"three-{device.id}") for device in DEVICES),
    pytest.param("six", "cuda", marks=pytest.mark.cuda, id="six-cuda"),
]


@pytest.mark.parametrize(("way", "device"), WAYS)
@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e15])
def test_products_of_parts(way: str, device: str, scale: float) -> None:
    """The parts of small and of large numbers are as exact as those of numbers near 1."""
    from one_product import one_product

    left, right = torch.randn(16, 16, device=device) * scale, torch.randn(16, 16, device=device)
    found = torch.empty(16, 16, device=device)
    one_product[1,](left, right, found, way)
    exact = left.double() @ right.double()
    assert (found - exact).norm() < 4e-7 * exact.norm()


@pytest.mark.parametrize(("way", "device"), WAYS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_products_of_parts_keep_nan(side: str, way: str, device: str) -> None:
    check_one_number(side, NAN_OF_A_GPU, way, device)


@pytest.mark.cuda  # Inf − Inf in Triton's interpreter is a NaN with other bits than on a GPU
@pytest.mark.parametrize("way", ["three", "six"])
@pytest.mark.parametrize("number", [torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["left", "right"])
def test_products_of_parts_of_infinity_are_not_finite(side: str, number: float, way: str) -> None:
    """Infinity times the rest of a rounded factor may have the other sign, so that the sum of the products is NaN."""
    check_one_number(side, torch.tensor(number), way, "cuda")


def check_one_number(side: str, number: torch.Tensor, way: str, device: str) -> None:
    from one_product import one_product

    left, right = (torch.rand(16, 16, device=device) + 0.5 for _ in range(2))
    (left if side == "left" else right)[3, 5] = number
    found = torch.empty(16, 16, device=device)
    one_product[1,](left, right, found, way)
    exact = left.double() @ right.double()
    finite = exact.isfinite()
    assert not finite.all()
    assert torch.equal(found.isfinite(), finite)
    torch.testing.assert_close(found[finite].double(), exact[finite], rtol=1e-6, atol=0)


def test_when_they_serve() -> None:
    pytest.importorskip("triton")
    from regard.kernels.triton.few_row_products import parts, serves

    assert serves(torch.empty(2, 128, 512))
    assert not serves(torch.empty(2, 128, 512, dtype=torch.bfloat16))
    assert not serves(torch.empty(2, 2048, 512)), "many rows fill the library's tiles"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert not serves(torch.empty(2, 128, 512)), "who asks for TF32 gets it"
    finally:
        torch.set_float32_matmul_precision(before)
    assert [parts(n) for n in (5, 512, 1536, 2048)] == [1, 1, 3, 4]
