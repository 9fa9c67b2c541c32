"""Products of a few rows in three TF32 products, against float64: interpreted here, compiled on CUDA."""

import pytest
import torch

from interpreting import interpreted


def check(device: str) -> None:
    from regard.models.triton_products import multiply

    torch.manual_seed(0)
    for count, rows, summed, columns, pieces in (
        (1, 3, 5, 7, 1),
        (2, 37, 131, 67, 1),
        (2, 33, 203, 70, 2),
        (1, 5, 70, 9, 3),
    ):
        left = torch.randn(count, rows, summed, device=device)
        for right in (
            torch.randn(count, summed, columns, device=device),
            torch.randn(count, columns, summed, device=device).mT,
        ):
            for added in (
                None,
                torch.randn(count, 1, columns, device=device),
                torch.randn(count, rows, columns, device=device),
            ):
                shape = (count, rows, columns) if pieces == 1 else (pieces, count, rows, columns)
                found = multiply(left, right, torch.empty(shape, device=device), added=added if pieces == 1 else None)
                whole = found if pieces == 1 else found.double().sum(0)
                exact = left.double() @ right.double()
                if added is not None and pieces == 1:
                    exact += added
                error = (whole - exact).abs().max() / exact.abs().max()
                assert error < 1e-6, (count, rows, summed, columns, pieces, float(error))
                if pieces == 2:  # a part is a product of its own: none may be left out, or hold everything
                    assert all(float(part.abs().max()) > 0.1 for part in found)


def test_products_in_the_interpreter() -> None:
    assert "exact" in interpreted(__file__, "products of a few rows")


@pytest.mark.cuda
def test_products() -> None:
    check("cuda")


def test_when_they_serve() -> None:
    pytest.importorskip("triton")
    from regard.models.triton_products import parts, serves

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


if __name__ == "__main__":
    check("cpu")
    print("exact")
