"""Between forward and backward, hooks may return saved tensors with other strides, and masks may change in place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

import regard
from regard.core.local import local_attention

Call = Callable[[Tensor, Tensor, Tensor], Tensor]

CALLS: dict[str, Call] = {
    "softmax": lambda q, k, v: regard.attention(q, k, v, mask=regard.window(2, 1)).output,
    "sparsemax": lambda q, k, v: regard.attention(q, k, v, normalize=regard.Sparsemax()).output,
    "bilinear": lambda q, k, v: regard.attention(q, k, v, score=regard.Bilinear(torch.eye(8))).output,
    "additive": lambda q, k, v: regard.attention(q, k, v, score=regard.Additive(torch.ones(8))).output,
    "linear": lambda q, k, v: regard.linear_attention(q, k, v, features=regard.EluFeatures(), causal=True),
    "local": lambda q, k, v: local_attention(q, k, v, q[..., 0] * 9, reach=4).output,
}


def leaves(heads: int = 3) -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    return [torch.randn(2, 29, heads, 8, generator=source).transpose(1, 2).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("kind", CALLS)
def test_hooks_may_change_the_strides_of_saved_tensors(kind: str) -> None:
    """The hook returns contiguous copies of saved tensors, as `save_on_cpu` with pinned memory does."""
    inputs = leaves()
    expected = torch.autograd.grad(CALLS[kind](*inputs).square().sum(), inputs)
    with saved_tensors_hooks(lambda t: t.detach().contiguous(), lambda t: t):
        total = CALLS[kind](*inputs).square().sum()
    assert_close(torch.autograd.grad(total, inputs), expected)


def test_lengths_changed_between_the_passes_of_additive_attention() -> None:
    """With one head, the compiled backward loops could read the caller's tensor of lengths, which changes between the
    passes."""
    inputs, lengths = leaves(1), torch.tensor([29, 5])
    options = {"score": regard.Additive(torch.linspace(-1, 1, 8)), "mask": regard.padding(lengths)}
    expected = torch.autograd.grad(regard.attention(*inputs, **options).output.square().sum(), inputs)
    total = regard.attention(*inputs, **options).output.square().sum()
    lengths.copy_(torch.tensor([3, 17]))
    assert_close(torch.autograd.grad(total, inputs), expected)
