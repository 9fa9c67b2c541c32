"""Tensors that torch negates lazily, such as the imaginary part of a conjugate: their memory holds the numbers before
the negation, which kernels must not use."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.core.local import local_attention

SHAPE = (2, 3, 19, 8)


def negated(*shape: int) -> Tensor:
    found = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert found.is_neg()
    return found


@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Sparsemax()], ids=str)
def test_query_key_and_value(place: int, normalize: regard.Normalizer) -> None:
    tensors = [torch.randn(SHAPE) for _ in range(3)]
    for _ in range(2):  # stores the choice of a kernel for calls with these shapes and strides
        regard.attention(*tensors, normalize=normalize)
    tensors[place] = torch._neg_view(tensors[place])
    exact = [tensor.resolve_neg().double() for tensor in tensors]
    expected = regard.attention(*exact, normalize=normalize, backend="reference").output
    for _ in range(2):
        assert_close(regard.attention(*tensors, normalize=normalize).output.double(), expected, rtol=0, atol=1e-5)


def test_a_bias() -> None:
    tensors, bias = [torch.randn(SHAPE) for _ in range(3)], negated(19, 19)
    regard.attention(*tensors, bias=torch.randn(19, 19, 2)[..., 0])
    expected = regard.attention(*tensors, bias=bias.resolve_neg()).output
    for _ in range(2):
        assert_close(regard.attention(*tensors, bias=bias).output, expected)


def test_the_centres_of_local_attention() -> None:
    tensors, centre = [torch.randn(SHAPE) for _ in range(3)], negated(*SHAPE[:3]) * -9
    centre = torch._neg_view(centre)
    assert_close(
        local_attention(*tensors, centre, reach=4).output,
        local_attention(*tensors, centre.resolve_neg(), reach=4).output,
    )
