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


@pytest.mark.parametrize("lengths", [[3, 17], [10**6, -5]], ids=str)
def test_lengths_changed_through_numpy(lengths: list[int]) -> None:
    """torch does not see this change; the backward pass uses the lengths of the forward pass."""
    inputs, given = leaves(), torch.tensor([29, 5])
    expected = torch.autograd.grad(regard.attention(*inputs, mask=regard.padding([29, 5])).output.sum(), inputs)
    total = regard.attention(*inputs, mask=regard.padding(given)).output.sum()
    given.numpy()[:] = lengths
    assert_close(torch.autograd.grad(total, inputs), expected)


LIMITS: dict[str, Callable[[], dict[str, object]]] = {
    "lengths": lambda: {"mask": regard.padding(torch.tensor([29, 5]))},
    "ids": lambda: {"mask": regard.segments(*[torch.arange(29).div(4, rounding_mode="floor").expand(2, 29)] * 2)},
    "slopes": lambda: {"bias": regard.alibi(torch.tensor([0.1, 0.2, 0.3]))},
}


@pytest.mark.parametrize("kind", LIMITS)
def test_masks_and_biases_created_in_inference_mode(kind: str) -> None:
    inputs = leaves()
    with torch.inference_mode():
        limits = LIMITS[kind]()
    gradients = torch.autograd.grad(regard.attention(*inputs, **limits).output.sum(), inputs)  # pyrefly: ignore
    right = regard.attention(*inputs, **LIMITS[kind](), backend="reference").output.sum()  # pyrefly: ignore
    assert_close(gradients, torch.autograd.grad(right, inputs))


@pytest.mark.parametrize(
    "request_", [regard.full(), regard.entropy(), regard.logsumexp()], ids=lambda r: type(r).__name__
)
def test_weights_do_not_depend_on_values(request_: regard.Request) -> None:
    """If only the value requires a gradient, the requested weights require none, also with `create_graph`."""
    query, key, value = (t.detach() for t in leaves())
    value.requires_grad_()
    assert not regard.attention(query, key, value, weights=request_).weights.requires_grad
    attended = regard.attention(query, key, value, weights=request_, backend="loops")
    total = attended.output.square().sum() + attended.weights.sum()
    (gradient,) = torch.autograd.grad(total, value, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), value)
    assert second.isfinite().all()
