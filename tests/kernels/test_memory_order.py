"""Strides of new tensors in the memory order of others, beside torch's own `empty_like`."""

import itertools

import pytest
import torch

from regard.kernels.memory_order import dense_strides


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 5), (2, 3, 4, 1)], ids=str)
@pytest.mark.parametrize("order", [(*first, 3) for first in itertools.permutations(range(3))], ids=str)
def test_the_order_of_a_permuted_tensor_is_kept(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    places = [order.index(axis) for axis in range(4)]
    given = torch.empty([shape[axis] for axis in order]).permute(places)
    assert given.shape == shape
    found = torch.empty_strided(shape, dense_strides(given.shape, given.stride()))
    like = torch.empty_like(given)
    # The strides of axes of size 1 are arbitrary.
    assert [step for step, size in zip(found.stride(), shape, strict=True) if size > 1] == [
        step for step, size in zip(like.stride(), shape, strict=True) if size > 1
    ]
    assert found.stride(-1) == 1


def test_gaps_are_closed() -> None:
    given = torch.empty(2, 9, 3, 16)[:, ::2, :, :5].transpose(1, 2)
    assert dense_strides(given.shape, given.stride()) == torch.empty(2, 5, 3, 5).transpose(1, 2).stride()


@pytest.mark.parametrize(
    "given", [torch.empty(2, 1, 4, 5).expand(2, 3, 4, 5), torch.empty(2, 3, 5, 4).mT], ids=["broadcast", "transposed"]
)
def test_other_tensors_give_a_contiguous_one(given: torch.Tensor) -> None:
    assert dense_strides(given.shape, given.stride()) == torch.empty(2, 3, 4, 5).stride()
