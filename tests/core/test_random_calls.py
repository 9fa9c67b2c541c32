"""Random calls, each made three times with other values: what the first call stores must be right for the next ones.

Outputs, requested weights and gradients are compared with the reference in float64. Between the calls the tensors of a
mask may change in place, and masked keys may hold NaN.
"""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from random_calls import CUDA, Draw

TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9}


@pytest.mark.parametrize("seed", range(200))
def test_calls_after_the_first_agree_with_the_reference(seed: int) -> None:
    drawn = Draw(seed)
    for turn in range(3):
        tensors = drawn.tensors()
        if turn == 2:
            drawn.change()
        found = drawn.call(tensors, "auto")
        true = drawn.call([tensor.double() for tensor in tensors], "reference")
        tolerance = TOLERANCE[drawn.dtype]
        for one, other in zip(found, true, strict=True):
            assert_close(one.double(), other, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(160))
def test_calls_on_a_gpu_agree_with_the_reference(seed: int) -> None:
    """The error is at most four times the reference's error in the same dtype, plus the rounding of a few
    operations."""
    drawn = Draw(seed, CUDA)
    for turn in range(3):
        tensors = drawn.tensors()
        if turn == 2:
            drawn.change()
        found = drawn.call(tensors, "auto")
        plain = drawn.call(tensors, "reference")
        true = drawn.call([tensor.double() for tensor in tensors], "reference")
        if any(exact.isnan().any() for exact in true):
            # A NaN may reach queries that do not attend to it (docs/attention.md), but those that do must return NaN.
            for one, exact in zip(found, true, strict=True):
                assert one.isnan()[exact.isnan()].all(), drawn
            continue
        for one, other, exact in zip(found, plain, true, strict=True):
            # The scale is at least 0.05, because small gradients are differences of large numbers with rounding errors.
            scale = max(exact.nan_to_num().abs().max().item(), 0.05)
            rounding = (other.double() - exact).nan_to_num().abs().max().item()
            bound = 4 * rounding + 8 * torch.finfo(drawn.dtype).eps * scale + 3e-5
            assert_close(one.double(), exact, rtol=0, atol=bound, equal_nan=True, msg=lambda text: f"{drawn}: {text}")


@pytest.mark.parametrize("mask", [regard.padding([0]), regard.padding([0]) & regard.causal()], ids=str)
def test_a_batch_without_a_key_has_a_gradient_of_zeros(mask: regard.Mask) -> None:
    leaves = [torch.randn(1, 2, 33, 4, requires_grad=True) for _ in range(3)]
    for _ in range(2):
        output = regard.attention(*leaves, mask=mask).output
        assert not output.any()
        assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum(), leaves))


def test_an_intersection_of_which_one_part_masks_nothing() -> None:
    """For one query after eleven keys the causal mask allows everything, so only the dense mask remains."""
    query, key, value = (torch.randn(2, 1, n, 4) for n in (1, 12, 12))
    mask = regard.dense(torch.arange(12) % 2 == 0) & regard.causal(offset=11)
    for _ in range(2):
        found = regard.attention(query, key, value, mask=mask).output
        assert_close(found, regard.attention(query, key[:, :, ::2], value[:, :, ::2]).output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [regard.window(9, 3), regard.window(60, 60), regard.causal()], ids=["narrow", "wide", ""]
)
def test_the_first_call_gives_the_bits_of_the_next_ones(mask: regard.Mask) -> None:
    """First and later calls give equal bits, because a resumed run starts with nothing stored; dropout would show a
    difference in the number of kernel calls."""
    query, key, value = (torch.randn(25, 8, 181, 4).bfloat16() for _ in range(3))
    outputs = []
    for _ in range(3):
        torch.manual_seed(1)
        outputs.append(regard.attention(query, key, value, mask=mask, dropout=0.5).output)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])


class Near(regard.Mask):
    """A user-defined mask that depends on a number beside its tensors."""

    def __init__(self, reach: int) -> None:
        self.reach, self.kept = reach, torch.ones(20, dtype=torch.bool)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.kept,)

    def allowed(self, rows, columns, device):
        rows, columns = torch.arange(rows.start, rows.stop)[:, None], torch.arange(columns.start, columns.stop)
        return (columns - rows <= self.reach) & self.kept[columns]


def test_a_mask_of_the_callers_own_is_not_stored() -> None:
    x, mask = torch.randn(1, 2, 20, 8), Near(0)
    for reach in (0, 5):
        mask.reach = reach
        assert_close(
            regard.attention(x, x, x, mask=mask).output, regard.attention(x, x, x, mask=regard.causal(reach)).output
        )


def test_an_output_without_keys_can_be_changed_in_place() -> None:
    x = torch.randn(1, 2, 100, 8)
    output = regard.attention(x, x, x, mask=regard.padding([0])).output
    output += 1
    assert torch.equal(output, torch.ones_like(x))
