"""A mask class of the caller's own needs `allowed` and `coarse`; the other methods of `Mask` have safe defaults."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.core.clauses import Clauses
from regard.core.masks import Blocks, Coarse
from regard.nn import KeyValueCache, MultiHeadAttention

ODD = torch.arange(11)[:, None] % 2 == torch.arange(13) % 2


def wanted(allowed: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention in float64, from the textbook formula."""
    scores = query.double() @ key.double().mT / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value.double()).float()


@dataclass(frozen=True, eq=False)
class SameParity(regard.Mask):
    """Query i may attend to key j if i − j is even."""

    def allowed(self, rows, columns, device):
        return torch.arange(rows.start, rows.stop)[:, None] % 2 == torch.arange(columns.start, columns.stop) % 2

    def coarse(self, blocks: Blocks) -> Coarse:
        some = torch.ones(len(blocks.rows) - 1, len(blocks.columns) - 1, dtype=torch.bool)
        return Coarse(some, torch.zeros_like(some))


@dataclass(frozen=True, eq=False)
class FirstKeys(SameParity):
    """Every query may attend to the first `count` keys. The method `clauses` describes this to kernels."""

    count: int

    def allowed(self, rows, columns, device):
        return (torch.arange(columns.start, columns.stop) < self.count).expand(rows.stop - rows.start, -1)

    def clauses(self) -> Clauses:
        return Clauses(lengths=torch.tensor([[self.count]]))

    def by_key(self) -> bool:
        return True

    def later(self, offset, queries, keys, device):
        return self


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "blocked"])
@pytest.mark.parametrize("mask", [SameParity(), SameParity() & regard.causal()], ids=["alone", "causal"])
def test_a_mask_with_pairs_and_blocks_runs(backend, mask):
    query, key, value = torch.randn(2, 3, 11, 8), torch.randn(2, 3, 13, 8), torch.randn(2, 3, 13, 8)
    allowed = ODD if isinstance(mask, SameParity) else ODD & torch.ones(11, 13, dtype=torch.bool).tril()
    output = regard.attention(query, key, value, mask=mask, backend=backend).output
    assert_close(output, wanted(allowed, query, key, value))


@pytest.mark.parametrize("backend", ["auto", "additive", "blocked"])
def test_the_clauses_of_a_mask_reach_the_kernels(backend):
    weight = torch.randn(8)
    query, key, value = torch.randn(2, 3, 11, 8), torch.randn(2, 3, 13, 8), torch.randn(2, 3, 13, 8)
    output = regard.attention(
        query, key, value, score=regard.Additive(weight), mask=FirstKeys(5), backend=backend
    ).output
    scores = (query.double().unsqueeze(-2) + key.double().unsqueeze(-3)).tanh() @ weight.double()
    assert_close(output, (scores[..., :5].softmax(-1) @ value[..., :5, :].double()).float())


def test_a_mask_by_key_goes_to_linear_attention():
    query, key, value = torch.randn(2, 3, 11, 8), torch.randn(2, 3, 13, 8), torch.randn(2, 3, 13, 8)
    output = regard.linear_attention(query, key, value, mask=FirstKeys(5))
    assert_close(output, regard.linear_attention(query, key[..., :5, :], value[..., :5, :]))
    with pytest.raises(ValueError, match="must hide the same keys from every query"):
        regard.linear_attention(query, key, value, mask=SameParity())


def test_a_mask_beside_a_cache_must_define_its_shift():
    layer, x = MultiHeadAttention(8, 2).eval(), torch.randn(1, 4, 8)
    cached = layer(x, mask=FirstKeys(2), cache=KeyValueCache()).output
    assert_close(cached, layer(x, mask=FirstKeys(2)).output)
    with pytest.raises(TypeError, match="a mask of type SameParity beside a cache"):
        layer(x, mask=SameParity(), cache=KeyValueCache())


LENGTHS = torch.tensor([20, 7]), torch.tensor([11, 30])
IDS = torch.arange(30).view(1, 30) // 9
INTERSECTIONS = {
    "two lengths": regard.padding(LENGTHS[0]) & regard.padding(LENGTHS[1]),
    "two bands": regard.window(8, 2) & regard.causal(offset=-1),
    "two tensors": regard.dense(torch.arange(900).view(30, 30) % 7 > 0) & regard.dense(torch.arange(30) % 5 > 0),
    "a band and a union": regard.causal() & (regard.padding(LENGTHS[0]) | regard.segments(IDS, IDS)),
    "a complement": ~regard.window(3, 3) & regard.padding(LENGTHS[1]),
    "a complement of lengths": ~(regard.padding(LENGTHS[1]) & regard.causal()),
}


@pytest.mark.parametrize("name", INTERSECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_intersections(name: str, dtype: torch.dtype) -> None:
    """Intersections with two masks of one kind, a union or a complement; each call runs twice, because the second run
    uses what the first one cached."""
    mask = INTERSECTIONS[name]
    torch.manual_seed(3)
    tensors = [torch.randn(2, 3, 30, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    i, j = torch.arange(30).view(30, 1), torch.arange(30)
    first, second = (j < lengths.view(2, 1, 1, 1) for lengths in LENGTHS)
    same = IDS.view(30, 1) == IDS
    allowed = {
        "two lengths": first & second,
        "two bands": (j - i >= -8) & (j - i <= 2) & (j - i <= -1),
        "two tensors": (torch.arange(900).view(30, 30) % 7 > 0) & (j % 5 > 0),
        "a band and a union": (j <= i) & (first | same),
        "a complement": ((j - i).abs() > 3) & second,
        "a complement of lengths": ~(second & (j <= i)),
    }[name].expand(2, 3, 30, 30)
    scores = doubles[0] @ doubles[1].mT / 4
    weights = torch.where(allowed, scores, -1e300).softmax(-1) * allowed
    right = (weights @ doubles[2], *torch.autograd.grad((weights @ doubles[2]).sin().sum(), doubles))
    for _ in range(2):
        output = regard.attention(*tensors, mask=mask).output
        grads = torch.autograd.grad(output.sin().sum(), tensors)
        for found, true in zip((output, *grads), right, strict=True):
            near = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(found.double(), true, rtol=near, atol=near)


@pytest.mark.parametrize("lead", [(3,), (2, 3), (1, 3)], ids=str)
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.padding([21]), ~regard.window(4, 4)], ids=str)
def test_calls_with_and_without_an_axis_of_the_batch(lead: tuple[int, ...], mask: regard.Mask | None) -> None:
    torch.manual_seed(4)
    tensors = [torch.randn(*lead, 30, 16).requires_grad_() for _ in range(3)]
    for request in (None, regard.full(), regard.received(), regard.entropy(), regard.rows([4, 0, 4]), regard.top(2)):
        found = regard.attention(*tensors, mask=mask, weights=request)
        right = regard.attention(*tensors, mask=mask, weights=request, backend="reference")
        assert_close(found.output, right.output)
        assert_close(found.weights, right.weights)
        directions = [torch.autograd.grad(one.output.sin().sum(), tensors) for one in (found, right)]
        assert_close(*directions)
