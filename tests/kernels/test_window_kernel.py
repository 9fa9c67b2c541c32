"""The Triton kernels of window masks, against float64 softmax over a dense mask."""

import pytest
import torch
from torch import Tensor

import regard

# batch, heads, key heads, queries, keys, size, value size, and the window: low <= key - query <= high
SHAPES = (
    (1, 1, 1, 151, 151, 16, 16, -20, 0),
    (2, 2, 1, 71, 97, 16, 32, -7, 9),
    (1, 1, 1, 71, 41, 16, 16, -5, -30),  # with this window, most queries attend to no key
    (1, 2, 1, 71, 211, 32, 16, 60, 90),
    (1, 1, 1, 67, 67, 128, 64, -9, 0),  # for head sizes above 64, the kernel uses other tile sizes
)


def explicit(query: Tensor, key: Tensor, value: Tensor, low: int, high: int, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None, :]
    allowed = ((j - i >= low) & (j - i <= high)).to(query.device)
    filled = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, query @ key.mT * scale, torch.where(filled, -torch.inf, 0.0).double())
    return torch.where(filled, torch.softmax(scores, -1), 0.0) @ value


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted, id="interpreted-float32"),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda, id="cuda-bfloat16"),
        pytest.param("cuda", torch.float16, marks=pytest.mark.cuda, id="cuda-float16"),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    from regard.kernels.triton.window_attention import window_attention

    most = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.manual_seed(3)
    b, h, g, q, k, d, e, low, high = shape
    leaves = [torch.randn(b, x, n, s) for x, n, s in ((h, q, d), (g, k, d), (g, k, e))]
    leaves = [x.to(device, dtype) for x in leaves]
    # The tensors are stored as (b, n, h, d), the layout of a layer's projections.
    mine = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    true = [x.double().requires_grad_() for x in leaves]
    out, real = window_attention(*mine, low, high, 0.3), explicit(*true, low, high, 0.3)
    change = torch.randn_like(real)
    found = (out, *torch.autograd.grad(out, mine, change.to(dtype)))
    for a, t in zip(found, (real, *torch.autograd.grad(real, true, change)), strict=True):
        assert (a.double() - t).norm().item() <= most * max(t.norm().item(), 1e-6)


@pytest.mark.cuda
def test_a_scale_is_the_callers_own() -> None:
    """A call with the integer 1 as scale does not make Triton compile the kernel for this constant alone."""
    query, key, value = (torch.randn(1, 2, 1500, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for scale in (1, 0.125, 2):
        settings = {"score": regard.ScaledDot(scale), "mask": regard.window(40, 0)}
        found = regard.attention(query, key, value, backend="flex", **settings).output
        # Without `backend=`, a call may reuse the choice of a kernel that an earlier call stored.
        short = regard.attention(query, key, value, **settings).output
        assert torch.equal(short, found)
        true = regard.attention(*(t.double() for t in (query, key, value)), backend="reference", **settings).output
        assert (found.double() - true).norm() <= 1e-2 * true.norm()
