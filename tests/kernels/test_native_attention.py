"""Additive attention by compiled C on the CPU, against float64 softmax over a dense mask."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard.kernels.additive import pair_loops
from regard.kernels.additive.native_attention import Visible, attention, with_weights

pytestmark = pytest.mark.skipif(not pair_loops.available(), reason="there is no C compiler")

BATCH, HEADS, QUERIES, KEYS = 3, 2, 7, 23
LENGTHS = torch.tensor([23, 5, 0])
VISIBLE = {
    "all keys": (Visible(None, None), lambda b, i, j: j < KEYS),
    "lengths": (Visible(LENGTHS.repeat_interleave(HEADS), None), lambda b, i, j: j < LENGTHS[b]),
    "causal": (Visible(None, 0), lambda b, i, j: j <= i),
    "shifted": (Visible(None, -2), lambda b, i, j: j <= i - 2),
    "both": (Visible(LENGTHS.repeat_interleave(HEADS), 1), lambda b, i, j: (j <= i + 1) & (j < LENGTHS[b])),
}


def drawn(size: int, value_size: int, scale: float, by_head: bool) -> list[Tensor]:
    source = torch.Generator().manual_seed(size)
    shapes = ((BATCH, HEADS, QUERIES, size), (BATCH, HEADS, KEYS, size), (BATCH, HEADS, KEYS, value_size))
    query, key, value = (torch.randn(shape, generator=source) for shape in shapes)
    weight = torch.randn(*((HEADS, size) if by_head else (size,)), generator=source)
    return [query * scale, key * scale, value, weight]


def exact(tensors: list[Tensor], allowed: Tensor, direction: Tensor) -> list[Tensor]:
    query, key, value, weight = (t.double().requires_grad_() for t in tensors)
    hidden = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3))
    scores = (hidden * (weight if weight.ndim == 1 else weight[:, None, None])).sum(-1)
    filled = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, scores, torch.where(filled, -torch.inf, 0.0).double())
    output = torch.where(filled, scores.softmax(-1), 0.0) @ value
    return [output.detach(), *torch.autograd.grad(output, (query, key, value, weight), direction.double())]


@pytest.mark.parametrize("name", VISIBLE)
@pytest.mark.parametrize(
    ("size", "value_size", "scale", "by_head"),
    [(5, 3, 1.0, False), (16, 64, 0.1, True), (67, 149, 5.0, False)],
    ids=["small", "near", "wide"],
)
def test_output_and_gradients(name: str, size: int, value_size: int, scale: float, by_head: bool) -> None:
    """Values of NaN at keys that no query attends have no effect on output or gradients."""
    visible, rule = VISIBLE[name]
    tensors = drawn(size, value_size, scale, by_head)
    b, i, j = torch.arange(BATCH)[:, None, None], torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None, :]
    allowed = rule(b, i, j).expand(BATCH, QUERIES, KEYS)[:, None]
    direction = torch.arange(BATCH * HEADS * QUERIES * value_size).cos().reshape(BATCH, HEADS, QUERIES, value_size)
    true = exact(tensors, allowed, direction)
    masked = ~allowed.any(-2).unsqueeze(-1)
    tensors[2] = tensors[2].masked_fill(masked, torch.nan)
    leaves = [t.clone().requires_grad_() for t in tensors]
    output = attention(leaves[0], leaves[1], leaves[2], leaves[3], visible)
    alone = attention(tensors[0], tensors[1], tensors[2], tensors[3], visible)
    assert output is not None
    assert alone is not None
    assert torch.equal(output, alone)
    found = [output.detach(), *torch.autograd.grad(output, leaves, direction)]
    for one, right in zip(found, true, strict=True):
        torch.testing.assert_close(one, right.float(), rtol=1e-4, atol=2e-5 * max(1.0, float(right.abs().max())))


@pytest.mark.parametrize(("place", "number"), [(0, 44.0), (1, torch.nan), (2, torch.inf), (3, torch.inf)])
@pytest.mark.parametrize("learning", [False, True], ids=["forward", "gradients"])
def test_numbers_beyond_its_range_are_refused(place: int, number: float, learning: bool) -> None:
    tensors = drawn(5, 3, 1.0, False)
    tensors[place].view(-1)[-1] = number
    query, key, value, weight = (t.requires_grad_(learning) for t in tensors)
    assert attention(query, key, value, weight, Visible(None, None)) is None


@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_a_call_by_the_public_function(tokens_first: bool, masked: bool) -> None:
    """The call is large enough for the compiled loops; NaN and Inf after the end of a short sequence have no effect."""
    torch.manual_seed(3)
    shape = (2, 61, 3, 67) if tokens_first else (2, 3, 61, 67)
    query, key, value = (torch.randn(shape) for _ in range(3))
    if tokens_first:
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    weight, lengths = torch.randn(67), torch.tensor([61, 13])
    mask = regard.causal() & regard.padding(lengths) if masked else None
    i, j = torch.arange(61)[:, None], torch.arange(61)[None, :]
    allowed = (j <= i) & (j < lengths[:, None, None, None]) if masked else torch.ones(2, 1, 61, 61, dtype=torch.bool)
    right = exact([query, key, value, weight], allowed, torch.ones(2, 3, 61, 67))[0]
    if masked:
        key[1, :, 13:], value[1, :, 13:] = torch.nan, torch.inf
    for _ in range(2):
        output = regard.attention(query, key, value, score=regard.Additive(weight), mask=mask).output
        torch.testing.assert_close(output, right.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VISIBLE)
def test_gradients_of_weights_and_output(name: str) -> None:
    visible, rule = VISIBLE[name]
    tensors = drawn(19, 21, 1.0, True)
    b, i, j = torch.arange(BATCH)[:, None, None], torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None, :]
    allowed = rule(b, i, j).expand(BATCH, QUERIES, KEYS)[:, None]
    # Values that are the identity matrix make the output equal to the weights.
    tensors[2] = torch.eye(KEYS, KEYS).expand(BATCH, HEADS, KEYS, KEYS).contiguous()
    direction = torch.arange(BATCH * HEADS * QUERIES * KEYS).cos().reshape(BATCH, HEADS, QUERIES, KEYS)
    true = exact(tensors, allowed, 3 * direction)
    leaves = [t.clone().requires_grad_() for t in tensors]
    found = with_weights(leaves[0], leaves[1], leaves[2], leaves[3], visible)
    assert found is not None
    output, weights = found
    torch.testing.assert_close(weights.detach(), true[0].float(), rtol=1e-4, atol=1e-6)
    made = torch.autograd.grad(output, leaves, direction, retain_graph=True)
    more = torch.autograd.grad(weights, leaves, 2 * direction, allow_unused=True)
    assert more[2] is None or torch.count_nonzero(more[2]) == 0
    for place, right in ((0, true[1]), (1, true[2]), (3, true[4])):
        torch.testing.assert_close(made[place] + more[place], right.float(), rtol=1e-4, atol=2e-5)


def test_scores_of_a_single_key_have_no_gradient() -> None:
    """The first query of a causal call attends to a single key, whose weight is 1 whatever the score is."""
    query, key, value, weight = drawn(128, 130, 1.0, False)
    leaves = [query[:, :, :1].clone().requires_grad_(), weight.requires_grad_()]
    score = regard.Additive(leaves[1])
    output = regard.attention(leaves[0], key, value, score=score, mask=regard.causal()).output
    for grad in torch.autograd.grad(output.cos().sum(), leaves):
        assert torch.count_nonzero(grad) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Half precision is only the dtype of inputs and results; the loops compute in float32."""
    tensors = [t.to(dtype) for t in drawn(33, 17, 1.0, False)]
    direction = torch.arange(BATCH * HEADS * QUERIES * 17).cos().reshape(BATCH, HEADS, QUERIES, 17).to(dtype)
    leaves = [t.clone().requires_grad_() for t in tensors]
    attended = regard.attention(
        leaves[0], leaves[1], leaves[2], score=regard.Additive(leaves[3]), weights=regard.full()
    )
    true = exact(tensors, torch.ones(BATCH, 1, QUERIES, KEYS, dtype=torch.bool), direction)
    found = [attended.output.detach(), *torch.autograd.grad(attended.output, leaves, direction)]
    assert attended.weights.dtype == dtype
    for one, right in zip(found, true, strict=True):
        torch.testing.assert_close(one, right.to(dtype), rtol=1e-2, atol=1e-2 * max(1.0, float(right.abs().max())))


@pytest.mark.parametrize("request_", [None, regard.full()], ids=["output", "weights"])
def test_tensors_without_memory_use_other_code(request_: object) -> None:
    query, key, value, weight = drawn(16, 8, 1.0, False)

    def call(query: Tensor, key: Tensor) -> Tensor:
        return regard.attention(query, key, value, score=regard.Additive(weight), weights=request_).output

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert call(torch.empty(query.shape), torch.empty(key.shape)).shape == (*query.shape[:3], 8)


@pytest.mark.parametrize("value_size", [1, 7, 16, 17, 80, 200])
@pytest.mark.parametrize("rows", [1, 5])
def test_values_in_bfloat16_are_those_in_float32(rows: int, value_size: int) -> None:
    """The code reads values in bfloat16 without a copy; the sums are those of the same numbers in float32."""
    torch.manual_seed(8)
    query, key = torch.randn(3, 2, rows, 20), torch.randn(3, 2, 23, 20)
    value, weight = torch.randn(3, 2, 23, value_size).bfloat16(), torch.randn(20) / 4
    visible = Visible(torch.tensor([23, 23, 5, 5, 0, 0]), None)
    of_half = with_weights(query, key, value, weight, visible)
    of_single = with_weights(query, key, value.float(), weight, visible)
    assert of_half is not None
    assert of_single is not None
    assert torch.equal(of_half[0], of_single[0])
    assert torch.equal(of_half[1], of_single[1])
    value[1, 0, 4, -1] = torch.nan
    assert with_weights(query, key, value, weight, visible) is None
