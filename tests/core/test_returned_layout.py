"""The gradients of the inputs do not depend on the memory layout of the output's gradient.

torch caches cuDNN's backward graphs by the layout of the inputs alone: see `regard.core.backends.returned_layout`.
"""

from collections.abc import Callable

import pytest
import torch

import regard
from regard.core.backends import returned_layout

seen: list[tuple[int, ...]] = []  # the strides of the upstream gradients that the kernel received


@torch.library.custom_op("returned_layout::kernel", mutates_args=())
def kernel(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clone()


@torch.library.custom_op("returned_layout::kernel_backward", mutates_args=())
def kernel_backward(grad: torch.Tensor) -> torch.Tensor:
    seen.append(grad.stride())
    return grad.clone()


kernel.register_fake(torch.empty_like)
kernel_backward.register_fake(torch.empty_like)
kernel.register_autograd(lambda ctx, grad: kernel_backward(grad))

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda grad: grad.contiguous(),
    "by rows": lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2),
    "by columns": lambda grad: grad.mT.contiguous().mT,
    "the same for all queries": lambda grad: grad[:, :, :1].expand(grad.shape),
    "one number": lambda grad: grad[:1, :1, :1, :1].expand(grad.shape),
}


@pytest.mark.slow
# This DeprecationWarning comes from torch's own compiler.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_a_kernel_gets_the_gradient_laid_out_like_its_output(compiler: str | None, as_installed: None) -> None:
    def attend(rows: torch.Tensor) -> torch.Tensor:
        return returned_layout.returning_alike(kernel(rows.transpose(1, 2)))

    rows = torch.randn(2, 5, 3, 8, requires_grad=True)
    output = (torch.compile(attend, backend=compiler, fullgraph=True) if compiler else attend)(rows)
    assert torch.equal(output, rows.transpose(1, 2))
    for lay in LAYOUTS.values():
        grad = lay(torch.randn(2, 3, 5, 8))
        seen.clear()
        (found,) = torch.autograd.grad(output, rows, grad, retain_graph=True)
        assert torch.equal(found, grad.transpose(1, 2))
        # torch itself copies a gradient for cuDNN if its last axis is not contiguous.
        assert seen == [output.stride()] or (len(seen) == 1 and seen[0][-1] != 1)


def test_gradients_in_batches() -> None:
    """Gradients in batches (`is_grads_batched`), as in `torch.autograd.functional.jacobian(vectorize=True)`."""
    x, grads = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(4, 2, 5, 3, 8).transpose(2, 3)
    output = returned_layout.returning_alike(x * 2)
    (found,) = torch.autograd.grad(output, x, grads, is_grads_batched=True)
    assert torch.equal(found, grads * 2)
    alone = torch.func.grad(lambda x: (returned_layout.returning_alike(x * 2).mean(-2) * grads[0, :, :, 0]).sum())(x)
    assert torch.allclose(alone, (grads[0, :, :, :1] * 2 / 5).expand_as(alone))


def test_hooks_of_the_caller_run_before_the_layout_is_changed() -> None:
    x, grad = torch.randn(2, 5, 3, 8, requires_grad=True), torch.randn(2, 3, 5, 8)
    output = returned_layout.returning_alike(kernel(x.transpose(1, 2)))
    handles = [output.register_hook(change) for change in (lambda grad: grad * 5, torch.Tensor.contiguous)]
    seen.clear()
    (found,) = torch.autograd.grad(output, x, grad, retain_graph=True)
    torch.testing.assert_close(found, grad.transpose(1, 2) * 5)
    assert seen == [output.stride()]
    handles[0].remove()
    (found,) = torch.autograd.grad(output, x, grad)
    torch.testing.assert_close(found, grad.transpose(1, 2))


@pytest.mark.cuda
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32 in autocast"])
@pytest.mark.parametrize("call", ["plain", "causal", "padding", "cosine", "window"])
def test_gradients_in_every_layout_on_cuda(call: str, dtype: torch.dtype, by_rows: bool) -> None:
    calls = {
        "plain": {},
        "causal": {"mask": regard.causal()},
        "padding": {"mask": regard.padding(torch.tensor([700, 1100], device="cuda"))},
        "cosine": {"score": regard.Cosine(scale=4.0)},
        "window": {"mask": regard.window(40, 0), "backend": "sdpa"},
    }
    shape = (2, 1100, 3, 64) if by_rows else (2, 3, 1100, 64)
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype).requires_grad_() for _ in range(3)]
    # For every memory layout of the output's gradient, the inputs' gradients are compared with those of these float64
    # copies.
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]

    def attend(tensors: list[torch.Tensor], **more: str) -> torch.Tensor:
        heads = [tensor.transpose(1, 2) if by_rows else tensor for tensor in tensors]
        return regard.attention(*heads, **calls[call] | more).output

    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
        output = attend(leaves)
    assert output.dtype == torch.bfloat16
    wanted = attend(exact, backend="reference")
    for name, lay in LAYOUTS.items():
        grad = lay(torch.randn(2, 3, 1100, 64, device="cuda", dtype=torch.bfloat16))
        ours = torch.autograd.grad(output, leaves, grad, retain_graph=True)
        theirs = torch.autograd.grad(wanted, exact, grad.double(), retain_graph=True)
        for part, found, known in zip(("query", "key", "value"), ours, theirs, strict=True):
            off = ((found.double() - known).norm() / known.norm()).item()
            assert off < 2e-2, f"gradient of {part} with one {name}: {off:.1e} off"


@pytest.mark.cuda
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("shape", [(85, 1, 9, 64), (9, 85, 1, 64), (85, 9, 64, 64), (3, 5, 17, 41)], ids=str)
def test_gradients_in_half_precision_are_those_of_float64(shape: tuple[int, ...], size: int) -> None:
    """cuDNN gave NaN gradients for a head size of 96: see `regard.core.backends.torch_sdpa`."""
    batch, heads, queries, keys = shape
    tensors = [torch.randn(batch, heads, n, size, device="cuda", dtype=torch.bfloat16) for n in (queries, keys, keys)]
    upstream = torch.randn(batch, heads, queries, size, device="cuda", dtype=torch.bfloat16)
    found = []
    for dtype, backend in ((torch.bfloat16, "sdpa"), (torch.float64, "reference")):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        output = regard.attention(*leaves, backend=backend).output
        found.append(torch.autograd.grad(output, leaves, upstream.to(dtype)))
    for actual, expected in zip(*found, strict=True):
        assert (actual.double() - expected).norm() <= 2e-2 * expected.norm()
