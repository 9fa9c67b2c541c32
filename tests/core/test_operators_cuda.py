"""Calls with no mask or a causal one on CUDA: the kernel that runs, its output and gradients against float64."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard

pytestmark = pytest.mark.cuda

HALF, SINGLE = torch.bfloat16, torch.float32
# Each call: batch, query heads, key heads, queries, keys, size, size of values, dtype, causal or not; then the kernel
# that a call with gradients uses.
CALLS: dict[str, tuple[tuple[Any, ...], str]] = {
    "short": ((2, 3, 3, 31, 31, 64, 64, HALF, True), "efficient"),
    "long": ((2, 3, 3, 300, 300, 64, 64, HALF, True), "flash"),
    "grouped": ((2, 4, 2, 31, 31, 96, 96, HALF, False), "flash"),
    "one key head": ((2, 4, 1, 33, 50, 64, 64, SINGLE, False), "efficient"),
    "grouped in float32": ((2, 4, 2, 33, 33, 64, 64, SINGLE, True), "efficient"),
    "another size of values": ((2, 3, 3, 31, 31, 96, 40, HALF, True), "efficient"),
    "another size in float32": ((2, 3, 3, 31, 29, 40, 96, SINGLE, False), "efficient"),
    "few queries": ((2, 3, 3, 3, 1100, 64, 64, SINGLE, False), "products"),
    "long memory of one head": ((3, 16, 1, 17, 16384, 64, 64, HALF, False), "cudnn"),
    "few keys": ((67, 2, 2, 1024, 5, 128, 128, SINGLE, False), "products"),
    "an odd size": ((2, 3, 3, 11, 31, 33, 50, SINGLE, False), "products"),
    "few queries of an odd size": ((2, 3, 3, 3, 31, 33, 50, SINGLE, False), "products"),
    "few queries in groups": ((2, 6, 2, 2, 1100, 64, 32, SINGLE, False), "products"),
}


def tensors(call: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    batch, heads, groups, queries, keys, size, value_size, dtype, causal = CALLS[call][0]
    shapes = ((heads, queries, size), (groups, keys, size), (groups, keys, value_size))
    made = [torch.randn(batch, *shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    return made, {"mask": regard.causal()} if causal else {}


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose memory does not begin at a multiple of 16 bytes."""
    copy = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)[1:].view(tensor.shape)
    return copy.copy_(tensor.detach()).requires_grad_()


def near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    limit = 2e-2 if dtype == HALF else 1e-5
    assert (found.double() - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("call", CALLS)
def test_output_and_gradients_are_those_of_float64(call: str, aligned: bool) -> None:
    leaves, options = tensors(call)
    if not aligned:
        leaves = [misaligned(leaf) for leaf in leaves]
    elif CALLS[call][1] != "products":  # CALLS has the name of the kernel that a call with gradients uses
        assert regard.explain(*leaves, **options).kernel == CALLS[call][1]
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = regard.attention(*double, **options, backend="reference").output
    upstream = torch.randn_like(exact).to(leaves[0].dtype)
    expected = torch.autograd.grad(exact, double, upstream.double())
    for _ in range(3):  # the first call chooses a kernel, which later calls reuse
        output = regard.attention(*leaves, **options).output
        near(output, exact, leaves[0].dtype)
        for found, known in zip(torch.autograd.grad(output, leaves, upstream), expected, strict=True):
            near(found, known, leaves[0].dtype)
    with torch.no_grad():
        near(regard.attention(*leaves, **options).output, exact, leaves[0].dtype)


@pytest.mark.parametrize("call", CALLS)
def test_a_kernel_that_is_disabled_does_not_run(call: str) -> None:
    leaves, options = tensors(call)
    expected = regard.attention(*leaves, **options).output
    with sdpa_kernel(SDPBackend.MATH):
        output = regard.attention(*leaves, **options).output
        assert regard.explain(*leaves, **options).kernel in ("math", "products")
    near(output, expected.double(), leaves[0].dtype)


def test_grouped_heads_in_float32_form_no_matrix() -> None:
    query, key = (torch.randn(1, heads, 2048, 64, device="cuda", requires_grad=True) for heads in (8, 2))
    regard.attention(query, key, key).output.sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    regard.attention(query, key, key).output.sum().backward()
    matrix = 8 * 2048 * 2048 * 4
    assert torch.cuda.max_memory_allocated() - before < matrix / 2


@pytest.mark.parametrize("sharp", [1.0, 12.0], ids=["flat", "sharp"])
@pytest.mark.parametrize("length", [512, 640, 1001])
@pytest.mark.parametrize("size", [80, 96])
def test_gradients_of_long_sequences_by_cudnn(size: int, length: int, sharp: float) -> None:
    """With fewer than 512 keys, cuDNN's gradients were NaN for one of these head sizes if attention weights are near 0
    and 1."""
    torch.manual_seed(length)
    leaves = [torch.randn(40, 9, length, size, device="cuda", dtype=HALF) for _ in range(3)]
    leaves = [t.mul_(sharp if n == 0 else 1.0).requires_grad_() for n, t in enumerate(leaves)]
    assert regard.explain(*leaves, mask=regard.causal()).kernel == "cudnn"
    output = regard.attention(*leaves, mask=regard.causal()).output
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, leaves, upstream)
    assert all(grad.isfinite().all() for grad in grads)
    double = [leaf[:2].detach().double().requires_grad_() for leaf in leaves]
    exact = regard.attention(*double, mask=regard.causal(), backend="reference").output
    near(output[:2], exact, HALF)
    for found, right in zip(grads, torch.autograd.grad(exact, double, upstream[:2].double()), strict=True):
        near(found[:2], right, HALF)
