"""Attention over parts of the keys by torch's flash kernel: output, log-sum-exp and gradients against float64."""

import pytest
import torch

import regard
from regard.core import key_parts
from regard.core.backends import flash_cuda
from regard.core.key_parts import Part
from regard.core.problem import Problem, build

pytestmark = pytest.mark.cuda
GENERATOR = torch.Generator().manual_seed(5)


def problem(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> Problem:
    mask = regard.causal() if causal else None
    score, normalize = regard.ScaledDot(), regard.Softmax()
    return build(query, key, value, score, normalize, mask, None, 0.0, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "queries", "size"), [(4, 2, 130, 64), (2, 2, 33, 8), (1, 1, 64, 256)])
def test_two_parts_give_the_gradients_of_all_keys(heads: int, key_heads: int, queries: int, size: int,
                                                  dtype: torch.dtype) -> None:  # fmt: skip
    """The first half of the keys has no mask; the second half is causal, with as many keys as queries."""
    shapes = ((heads, queries), (key_heads, 2 * queries), (key_heads, 2 * queries))
    query, key, value = (torch.randn(2, h, n, size, generator=GENERATOR).to("cuda", dtype) for h, n in shapes)
    upstream = torch.randn(2, heads, queries, size, generator=GENERATOR).to("cuda", dtype)

    true = [t.double().requires_grad_() for t in (query, key, value)]
    scores = true[0] @ true[1].repeat_interleave(heads // key_heads, 1).mT / size**0.5
    seen = torch.ones(queries, 2 * queries, dtype=torch.bool, device="cuda").tril(queries)
    scores = scores.masked_fill(~seen, -torch.inf)
    right = scores.softmax(-1) @ true[2].repeat_interleave(heads // key_heads, 1)
    expected = torch.autograd.grad(right, true, upstream.double())

    early = problem(query, key[:, :, :queries], value[:, :, :queries], causal=False)
    late = problem(query, key[:, :, queries:], value[:, :, queries:], causal=True)
    assert flash_cuda.serves(early)
    assert flash_cuda.serves(late)
    parts = [key_parts.forward(one) for one in (early, late)]
    total = torch.logaddexp(parts[0].logsumexp, parts[1].logsumexp)
    output = sum(part.output * (part.logsumexp - total).exp().unsqueeze(-1) for part in parts)
    near = {"rtol": 0, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(output.double(), right, **near)
    torch.testing.assert_close(total.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)

    first, second = (key_parts.backward(one, Part(output, total), upstream, None) for one in (early, late))
    found = (first[0] + second[0], torch.cat([first[1], second[1]], 2), torch.cat([first[2], second[2]], 2))
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= 8 * torch.finfo(dtype).eps * b.norm()


def test_masks_and_other_sizes_are_left_to_blocks() -> None:
    query, key, value = (torch.randn(1, 1, 8, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert not flash_cuda.serves(problem(query, key, value[..., :8], causal=False))
    assert not flash_cuda.serves(problem(query.float(), key.float(), value.float(), causal=False))
    assert not flash_cuda.serves(problem(query[..., :4, :], key, value, causal=True))
