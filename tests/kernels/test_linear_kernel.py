"""The kernel of linear attention, interpreted on the CPU and compiled on a GPU, against explicit weights in float64."""

import pytest
import torch
from torch import Tensor

# Batch, heads, key heads, queries, keys, size, value size, causal, masked keys
CASES = {
    "full": (2, 2, 2, 71, 37, 16, 16, False, False),
    "causal": (1, 2, 1, 331, 331, 16, 24, True, False),
    "more queries": (1, 2, 2, 203, 139, 24, 16, True, False),
    "hidden": (2, 1, 1, 67, 139, 16, 16, False, True),
    "hidden and causal": (2, 2, 1, 139, 139, 16, 16, True, True),
}
DTYPES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted, id="interpreted"),
    pytest.param("cuda", torch.float32, marks=pytest.mark.cuda, id="cuda-float32"),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda, id="cuda-bfloat16"),
    pytest.param("cuda", torch.float16, marks=pytest.mark.cuda, id="cuda-float16"),
]


def explicit(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, causal: bool) -> Tensor:
    """Compute every weight φ(q)·φ(k), divided by their sum; 0 if there are no keys."""
    group = query.shape[1] // key.shape[1]
    key, value, keep = (t.repeat_interleave(group, 1) for t in (key, value, keep))
    mapped = [torch.where(x > 0, x + 1, torch.exp(x)) for x in (query, key)]
    weights = mapped[0] @ mapped[1].mT * keep.unsqueeze(-2)
    weights = weights.tril() if causal else weights
    total = weights.sum(-1, keepdim=True)
    return torch.where(
        total == 0, 0, weights @ torch.where(keep.unsqueeze(-1), value, 0) / torch.where(total == 0, 1, total)
    )


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case: str, device: str, dtype: torch.dtype) -> None:
    from regard.kernels.triton.linear_attention import linear_attention

    b, h, g, q, k, d, e, causal, hides = CASES[case]
    torch.manual_seed(7)
    leaves = [torch.randn(b, x, n, s).mul(2).to(device, dtype) for x, n, s in ((h, q, d), (g, k, d), (g, k, e))]
    keep = torch.ones(b, g, k, dtype=torch.bool, device=device)
    if hides:
        keep = torch.rand(b, g, k).to(device) > 0.4
        keep[0] = False  # the first sequence has no keys
        leaves[2] = torch.where(keep.unsqueeze(-1), leaves[2], torch.nan)
    mine = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    true = [x.double().nan_to_num(0.0).requires_grad_() for x in leaves]
    out, real = linear_attention(*mine, keep if hides else None, causal), explicit(*true, keep, causal)
    change = torch.randn_like(real)
    most = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    results = (out, *torch.autograd.grad(out, mine, change.to(dtype)))
    for a, t in zip(results, (real, *torch.autograd.grad(real, true, change)), strict=True):
        assert (a.double() - t).norm().item() <= most * max(t.norm().item(), 1e-6)
