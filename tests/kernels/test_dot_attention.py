"""Compare the compiled C attention on the CPU with float64 attention over a dense mask, for short sequences."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels import dot_attention, dot_form, dot_formula
from regard.kernels.dot_form import Limits

pytestmark = pytest.mark.skipif(not dot_attention.available(), reason="there is no C compiler")

BATCH, GROUP, QUERIES, KEYS = 3, 2, 37, 41
NONE: dict[str, Any] = {}
# The tested calls by name: arguments of `dot_form.form`, and the tensors that mask or change the scores.
CALLS: dict[str, tuple[dict[str, Any], Limits]] = {
    "all keys": (NONE, Limits()),
    "causal": ({"band": (None, 0)}, Limits()),
    "window": ({"band": (-5, 3)}, Limits()),
    "later keys": ({"band": (19, None)}, Limits()),
    "nothing": ({"band": (50, None)}, Limits()),
    "lengths": (NONE, Limits(lengths=torch.tensor([41, 5, 0]))),
    "both": ({"band": (None, 2)}, Limits(lengths=torch.tensor([7, 41, 23]))),
    "ids": (NONE, Limits(query_ids=torch.arange(37)[None] // 11, key_ids=torch.arange(123).view(3, 41) // 7 % 5)),
    "documents": (
        {"band": (None, 0)},
        Limits(query_ids=torch.arange(37)[None] // 11, key_ids=torch.arange(41)[None] // 11),
    ),
    "pairs": (NONE, Limits(allowed=torch.arange(37 * 41).view(1, 1, 37, 41) % 7 < 3)),
    "bias": (NONE, Limits(bias=torch.arange(37 * 41).view(1, 1, 37, 41).cos().log())),
    "slopes": ({"offset": 4}, Limits(slopes=torch.tensor([0.1, 1.0, 0.0, 0.5]))),
    "softcap": ({"softcap": 3.0, "band": (None, 0)}, Limits()),
    "sigmoid": ({"normalizer": "sigmoid", "shift": -2.0, "band": (None, 0)}, Limits()),
    "sparsemax": ({"normalizer": "sparsemax", "band": (None, 0)}, Limits(lengths=torch.tensor([41, 5, 0]))),
    "entmax": ({"normalizer": "entmax", "band": (-9, 4)}, Limits(slopes=torch.tensor([0.1, 1.0, 0.0, 0.5]))),
    "power": ({"normalizer": "power", "alpha": 1.3, "softcap": 3.0}, Limits(lengths=torch.tensor([41, 5, 0]))),
    "power near softmax": ({"normalizer": "power", "alpha": 1.05, "band": (None, 0)}, Limits()),
    "negative scale": ({"scale": -0.3}, Limits()),
}

REPEATED = [1, 0, 1]  # the queries whose weights are requested: not sorted, and one of them twice
# The expected result of each kind of request, computed from the attention weights and the log-sum-exp of the scores.
REQUESTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights": lambda weights, _: weights,
    "received": lambda weights, _: weights.sum(-2),
    "entropy": lambda weights, _: -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1),
    "rows": lambda weights, _: weights[:, :, REPEATED],
    "logsumexp": lambda _, totals: totals,
}
# Only softmax has the request "logsumexp".
REQUESTED = [(c, r) for c in CALLS for r in REQUESTS if r != "logsumexp" or "normalizer" not in CALLS[c][0]]


def rows(request: str, queries: int) -> Any:
    return dot_form.rows(torch.tensor(REPEATED), queries) if request == "rows" else None


def drawn(size: int, value_size: int, queries: int, dtype: torch.dtype, tokens_first: bool) -> list[Tensor]:
    source = torch.Generator().manual_seed(size)
    made = []
    for heads, length, width in ((2 * GROUP, queries, size), (2, KEYS, size), (2, KEYS, value_size)):
        tensor = torch.randn(BATCH, length, heads, width, generator=source).to(dtype).transpose(1, 2)
        made.append(tensor if tokens_first else tensor.contiguous())
    return made


def finite(tensor: Tensor) -> Tensor:
    """Return the tensor with 0 in place of −inf, which is the log-sum-exp of a query that attends to no key."""
    return torch.where(tensor > -math.inf, tensor, 0.0)


def exact(tensors: list[Tensor], options: dict[str, Any], limits: Limits) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the attention weights and the log-sum-exp of the scores, computed in float64 by torch."""
    query, key, value = tensors
    key, value = (t.repeat_interleave(GROUP, 1) for t in (key, value))
    scores = query @ key.mT * options.get("scale", 0.3)
    if softcap := options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(scores.shape[-2])[:, None], torch.arange(KEYS)[None]
    low, high = options.get("band", (None, None))
    allowed = (j - i >= (-99 if low is None else low)) & (j - i <= (99 if high is None else high))
    if limits.bias is not None:
        scores = scores + limits.bias.double()[:, :, : scores.shape[-2]]
    if limits.slopes is not None:
        scores = scores - limits.slopes.double()[:, None, None] * (i + options.get("offset", 0) - j).abs()
    if limits.lengths is not None:
        allowed = allowed & (j < limits.lengths[:, None, None, None])
    if limits.query_ids is not None and limits.key_ids is not None:
        allowed = allowed & (limits.query_ids[:, None, : len(i), None] == limits.key_ids[:, None, None])
    if limits.allowed is not None:
        allowed = allowed & limits.allowed[:, :, : len(i)]
    allowed = allowed & (scores > -math.inf)
    weights = normalised(
        options.get("normalizer", "softmax"), scores + options.get("shift", 0.0), allowed, options.get("alpha", 2.0)
    )
    some = allowed.any(-1)
    totals = torch.where(allowed, scores, torch.where(some[..., None], -math.inf, 0.0).double()).logsumexp(-1)
    return weights @ value, weights, torch.where(some, totals, -math.inf)


def normalised(name: str, scores: Tensor, allowed: Tensor, alpha: float = 2.0) -> Tensor:
    if name == "sigmoid":
        return torch.where(allowed, torch.sigmoid(scores), 0.0)
    filled = allowed.any(-1, keepdim=True)
    if name == "softmax":
        lowest = torch.where(filled, -math.inf, 0.0).double()
        return torch.where(filled, torch.where(allowed, scores, lowest).softmax(-1), 0.0)
    if name == "power":
        return torch.where(filled, entmax(torch.where(allowed, scores, -1e9), alpha), 0.0)
    # Compute the threshold by sorting (Martins and Astudillo 2016; Peters, Niculae and Martins 2019).
    scores = torch.where(allowed, scores, -1e9) / (2.0 if name == "entmax" else 1.0)
    ordered = scores.sort(-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1)
    mean = ordered.cumsum(-1) / count
    if name == "sparsemax":
        threshold = mean - 1 / count
    else:
        spread = (1 - (ordered.square().cumsum(-1) - count * mean.square())) / count
        threshold = mean - spread.clamp(min=1e-12).sqrt()
    support = (threshold < ordered).sum(-1, keepdim=True)
    weights = (scores - threshold.gather(-1, support - 1)).clamp(min=0)
    return torch.where(allowed & filled, weights.square() if name == "entmax" else weights, 0.0)


def entmax(scores: Tensor, alpha: float) -> Tensor:
    """Return entmax of scores, with its threshold computed by bisection.

    Two steps of Newton's method then give the threshold its first and second derivatives.
    """
    scores = scores * (alpha - 1)
    low, high = scores.detach().amax(-1, keepdim=True) - 1, scores.detach().amax(-1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        above = ((scores.detach() - middle).clamp(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    threshold = low
    for _ in range(2):
        rest = (scores - threshold).clamp(min=1e-40)
        slope = (rest ** (1 / (alpha - 1) - 1)).sum(-1, keepdim=True) / (alpha - 1)
        threshold = threshold + ((rest ** (1 / (alpha - 1))).sum(-1, keepdim=True) - 1) / slope
    return (scores - threshold).clamp(min=1e-40) ** (1 / (alpha - 1))


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.9])
def test_the_oracle_of_entmax(alpha: float) -> None:
    scores = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = entmax(scores, alpha)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: entmax(x, alpha), scores)
    assert torch.autograd.gradgradcheck(lambda x: entmax(x, alpha), scores, atol=1e-4)


@pytest.mark.parametrize(("call", "request_name"), REQUESTED)
@pytest.mark.parametrize(
    ("size", "value_size", "queries", "dtype", "tokens_first"),
    [
        (5, 3, 2, torch.float32, False),
        (33, 20, QUERIES, torch.float32, True),
        (64, 64, QUERIES, torch.float32, False),
        (17, 32, QUERIES, torch.bfloat16, True),
        (40, 33, 3, torch.bfloat16, False),
        (64, 72, QUERIES, torch.bfloat16, False),
    ],
    ids=["few queries", "odd sizes", "whole vectors", "bfloat16", "few in bfloat16", "wide in bfloat16"],
)
def test_output_and_gradients(
    call: str, request_name: str, size: int, value_size: int, queries: int, dtype: torch.dtype, tokens_first: bool
) -> None:
    options, limits = CALLS[call]
    if limits.bias is not None:
        limits = limits._replace(bias=limits.bias.nan_to_num(-math.inf, neginf=-math.inf))
    if limits.query_ids is not None:
        limits = limits._replace(query_ids=limits.query_ids[:, :queries].contiguous())
    tensors = drawn(size, value_size, queries, dtype, tokens_first)
    options_of_call = {"scale": 0.3, **options}
    form = dot_form.form(tensors[0], tensors[1], tensors[2], **options_of_call)
    alone = dot_attention.attention(tensors[0], tensors[1], tensors[2], form, limits, learning=False)
    leaves = [t.detach().requires_grad_() for t in tensors]
    form = dot_form.form(tensors[0], tensors[1], tensors[2], request=request_name, **options_of_call)
    chosen = rows(request_name, queries)
    result = dot_attention.with_request(leaves[0], leaves[1], leaves[2], form, limits, learning=True, rows=chosen)
    inferred = dot_attention.with_request(tensors[0], tensors[1], tensors[2], form, limits, False, chosen)
    assert result is not None
    assert inferred is not None
    assert result.requested is not None
    assert inferred.requested is not None
    assert alone is not None
    made = (result.output, result.requested)
    assert torch.equal(inferred.output, alone)
    assert torch.equal(inferred.requested, made[1])
    assert torch.equal(made[0], alone)
    directions = [torch.arange(t.numel()).cos().reshape(t.shape).to(t.dtype) for t in made]
    doubles = [t.double().requires_grad_() for t in tensors]
    output, weights, totals = exact(doubles, options, limits)
    right = (output, REQUESTS[request_name](weights, totals))
    found, true = list(made), list(right)
    # First the gradients of the output alone are compared, then those of the output and the requested result together.
    for number in (1, 2):
        found += torch.autograd.grad(made[:number], leaves, directions[:number], retain_graph=True)
        wide = [t.double() for t in directions[:number]]
        true += torch.autograd.grad(right[:number], doubles, wide, retain_graph=True)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, true, strict=True):
        scale = max(1.0, float(finite(other.detach()).abs().max()))
        torch.testing.assert_close(one.detach().double(), other.detach(), rtol=near, atol=near * scale)


@pytest.mark.parametrize("shape", [(1, 4, QUERIES, KEYS), (3, 1, 1, KEYS)], ids=str)
def test_the_gradient_of_a_bias(shape: tuple[int, ...]) -> None:
    """Most scores reach the softcap of 0.1; the bias is added after the softcap."""
    query, key, value = drawn(16, 16, QUERIES, torch.float32, False)
    bias = torch.arange(math.prod(shape)).sin().reshape(shape)
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaf = bias.to(dtype).requires_grad_()
        limits, given = Limits(bias=leaf), [t.to(dtype) for t in (query, key, value)]
        form = dot_form.form(query, key, value, scale=0.3, softcap=0.1, band=(None, 0))
        options = {"softcap": 0.1, "band": (None, 0)}
        wide = dtype == torch.float64
        output = (
            exact(given, options, limits)[0] if wide else dot_attention.attention(*given, form, limits, learning=True)
        )
        assert output is not None
        grads.append(torch.autograd.grad(output.cos().sum(), leaf)[0])
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("learning", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [3, QUERIES])
def test_numbers_that_are_not_finite_are_refused(
    place: int, number: float, learning: bool, dtype: torch.dtype, queries: int
) -> None:
    tensors = drawn(5, 3, queries, dtype, False)
    tensors[place].view(-1)[-1] = number
    query, key, value = (t.requires_grad_(learning) for t in tensors)
    form = dot_form.form(query, key, value, scale=0.3)
    assert dot_attention.attention(query, key, value, form, Limits(), learning) is None


@pytest.mark.parametrize("lengths", [[-1, 1, 1], [1, 42, 1]], ids=["negative", "too long"])
def test_lengths_out_of_range_are_refused(lengths: list[int]) -> None:
    query, key, value = drawn(5, 3, QUERIES, torch.float32, False)
    form = dot_form.form(query, key, value, scale=0.3)
    assert dot_attention.attention(query, key, value, form, Limits(torch.tensor(lengths)), learning=False) is None


def test_keys_that_no_query_attends_are_not_read() -> None:
    query, key, value = drawn(16, 16, QUERIES, torch.float32, False)
    form, limits = dot_form.form(query, key, value, scale=0.3), Limits(torch.tensor([5, 9, 1]))
    right = dot_attention.attention(query, key, value, form, limits, learning=False)
    for sequence, length in enumerate((5, 9, 1)):
        key[sequence, :, length:], value[sequence, :, length:] = math.nan, math.inf
    leaves = [t.requires_grad_() for t in (query, key, value)]
    output = dot_attention.attention(query, key, value, form, limits, learning=True)
    assert output is not None
    assert right is not None
    assert torch.equal(output, right)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_between_those_of_two_queries(dtype: torch.dtype) -> None:
    """No query attends to the keys of the second document, so NaN in these keys does not reach the gradients."""
    torch.manual_seed(3)
    query, key, value = (torch.randn(1, 2, length, 16).to(dtype) for length in (6, 11, 11))
    key[:, :, 4:7] = math.nan
    mask = regard.segments(torch.tensor([[0] * 3 + [2] * 3]), torch.tensor([[0] * 4 + [1] * 3 + [2] * 4]))
    leaves = [t.requires_grad_() for t in (query, key, value)]
    output = regard.attention(*leaves, mask=mask).output
    assert output.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), leaves))


# Masks of 100 queries and keys that leave some queries without keys, or some keys without queries.
IDS = torch.arange(100)
GAPS: dict[str, Callable[[], regard.Mask]] = {
    "window of a short sequence": lambda: regard.window(5, 0) & regard.padding([60]),
    "late": lambda: regard.causal(-32),
    "late and short": lambda: regard.causal(-7) & regard.padding([81]),
    "a document without queries": lambda: regard.segments((IDS >= 50).long()[None], (IDS >= 33).long()[None] * 2),
    "gaps": lambda: regard.segments((IDS // 60)[None], torch.where(IDS < 10, 0, torch.where(IDS < 86, 7, 1))[None]),
    "a document without keys": lambda: regard.segments((IDS // 9)[None], (IDS // 18)[None]) & regard.causal(),
}


@pytest.mark.parametrize("score", [regard.ScaledDot(), regard.Dot(), regard.Cosine(), regard.Bilinear(torch.eye(16))])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gaps", GAPS)
def test_nan_that_no_pair_uses_reaches_no_gradient(
    gaps: str, dtype: torch.dtype, heads: int, score: regard.Score
) -> None:
    """NaN in queries that attend to no key, and in keys and values to which no query attends."""
    torch.manual_seed(5)
    mask = GAPS[gaps]()
    clean = [torch.randn(1, heads, 100, 16).to(dtype) for _ in range(3)]
    uniform = regard.attention(*[t[:, :1].float() for t in clean], mask=mask, weights=regard.full()).weights
    allowed = uniform[0, 0] > 0  # pyrefly: ignore
    unused = [~allowed.any(1), ~allowed.any(0), ~allowed.any(0)]
    assert any(rows.any() for rows in unused)
    poisoned = [t.clone() for t in clean]
    for tensor, rows in zip(poisoned, unused, strict=True):
        tensor[:, :, rows] = math.nan

    def gradients(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        output = regard.attention(*leaves, score=score, mask=mask).output
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    wide = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(gradients(poisoned), gradients(clean), strict=True):
        torch.testing.assert_close(one, other, rtol=wide, atol=wide * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("band", [(None, None), (None, 0), (-70, 0)], ids=str)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_more_rows_and_keys_than_a_block(
    dtype: torch.dtype, band: tuple[int | None, int | None], request_name: str
) -> None:
    torch.manual_seed(4)
    tensors = [torch.randn(1, 2, 301, size).to(dtype).requires_grad_() for size in (48, 48, 40)]
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    query, key, value = tensors
    form = dot_form.form(query, key, value, scale=0.1, band=band, request=request_name)
    result = dot_attention.with_request(query, key, value, form, Limits(), True, rows(request_name, 301))
    assert result is not None
    assert result.requested is not None
    made = (result.output, result.requested)
    distance = torch.arange(301) - torch.arange(301)[:, None]
    masked = (distance < (-301 if band[0] is None else band[0])) | (distance > (301 if band[1] is None else band[1]))
    scores = (doubles[0] @ doubles[1].mT * 0.1).masked_fill(masked, -math.inf)
    weights = scores.softmax(-1)
    right = (weights @ doubles[2], REQUESTS[request_name](weights, scores.logsumexp(-1)))
    directions = [torch.arange(t.numel()).cos().reshape(t.shape).to(t.dtype) for t in made]
    found = (*made, *torch.autograd.grad(made, tensors, directions))
    true = (*right, *torch.autograd.grad(right, doubles, [t.double() for t in directions]))
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=near, atol=near * float(other.detach().abs().max()))


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype, request_name: str) -> None:
    torch.manual_seed(2)
    query, key, value = (torch.randn(1, heads, 201, 32).to(dtype).requires_grad_() for heads in (4, 2, 2))
    form = dot_form.form(query, key, value, scale=0.3, band=(-50, 0), request=request_name)
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            result = dot_attention.with_request(query, key, value, form, Limits(), True, rows(request_name, 201))
            assert result is not None
            assert result.requested is not None
            total = result.output.sum() + result.requested.square().sum()
            found.append((*result[:2], *torch.autograd.grad(total, (query, key, value))))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys"),
    [(1, 3, 1, 161, 161), (1, 8, 1, 1, 300), (2, 4, 2, 2, 300), (8, 2, 1, 301, 301), (9, 1, 1, 550, 70)],
    ids=["parts of a head", "parts of few rows", "few rows", "several blocks together", "more rows than keys"],
)
@pytest.mark.parametrize("band", [(None, None), (None, 0), (-40, 20)], ids=str)
def test_gradients_of_keys_that_several_heads_share(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    band: tuple[int | None, int | None],
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(5)
    shapes = ((heads, queries, 20), (kv_heads, keys, 20), (kv_heads, keys, 28))
    tensors = [torch.randn(batch, *shape).to(dtype).requires_grad_() for shape in shapes]
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    query, key, value = tensors
    form = dot_form.form(query, key, value, scale=0.1, band=band)
    output = dot_attention.attention(query, key, value, form, Limits(), True)
    assert output is not None
    distance = torch.arange(keys) - torch.arange(queries)[:, None]
    low, high = -999 if band[0] is None else band[0], 999 if band[1] is None else band[1]
    masked = (distance < low) | (distance > high)
    wide_key, wide_value = (t.repeat_interleave(heads // kv_heads, 1) for t in doubles[1:])
    scores = (doubles[0] @ wide_key.mT * 0.1).masked_fill(masked, -math.inf)
    scores = torch.where(masked.all(-1, keepdim=True), 0.0, scores)
    weights = scores.softmax(-1).masked_fill(masked, 0.0)
    right = weights @ wide_value
    direction = torch.arange(right.numel()).cos().reshape(right.shape).to(dtype)
    found = (output, *torch.autograd.grad(output, tensors, direction))
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, (right, *torch.autograd.grad(right, doubles, direction.double())), strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=near, atol=near * max(1.0, float(other.detach().abs().max()))
        )


@pytest.mark.parametrize(("call", "request_name"), REQUESTED)
def test_second_derivatives(call: str, request_name: str) -> None:
    options, limits = CALLS[call]
    if limits.bias is not None:
        limits = limits._replace(bias=limits.bias.nan_to_num(-math.inf, neginf=-math.inf))
    tensors = drawn(5, 3, QUERIES, torch.float32, False)
    options = {"scale": 0.3, "request": request_name, **options}
    form = dot_form.form(tensors[0], tensors[1], tensors[2], **options)
    leaves, doubles = [t.requires_grad_() for t in tensors], [t.detach().double().requires_grad_() for t in tensors]
    chosen = rows(request_name, QUERIES)
    result = dot_attention.with_request(leaves[0], leaves[1], leaves[2], form, limits, learning=True, rows=chosen)
    assert result is not None
    assert result.requested is not None
    output, weights, totals = exact(doubles, options, limits)
    sums = (
        (result.output.sum() + finite(result.requested).square().sum(), leaves),
        (output.sum() + finite(REQUESTS[request_name](weights, totals)).square().sum(), doubles),
    )
    found, true = (
        torch.autograd.grad(sum(g.square().sum() for g in torch.autograd.grad(y, x, create_graph=True)), x)
        for y, x in sums
    )
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("size", [16, 20])
def test_values_that_are_nan_behind_a_causal_mask(size: int) -> None:
    """Only the last query attends to the NaN value. The compiled loops refuse the call; another backend computes it."""
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 3, 23, size) for _ in range(3))
    value[:, :, -1] = math.nan
    output = regard.attention(query, key, value, mask=regard.causal()).output
    assert output[:, :, :-1].isfinite().all()
    assert output[:, :, -1].isnan().all()


SEED = 2**63 + 12345  # seeds are unsigned 64-bit integers: this seed is larger than any signed one


def dropped(dtype: torch.dtype, queries: int, seed: int, probability: float = 0.3) -> Tensor:
    """Return the dropout factor of each weight, computed from the output for one-hot values and equal scores."""
    query, key = torch.zeros(BATCH, 2 * GROUP, queries, 8, dtype=dtype), torch.zeros(BATCH, 2, KEYS, 8, dtype=dtype)
    value = torch.eye(KEYS, dtype=dtype).expand(BATCH, 2, KEYS, KEYS).contiguous()
    form = dot_form.form(query, key, value, scale=1.0, dropout=probability)
    output = dot_attention.attention(query, key, value, form, Limits(), learning=False, seed=seed)
    assert output is not None
    return torch.where(output.double() > 0, 1 / (1 - probability), 0.0)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_weights(probability: float) -> None:
    """Each weight is dropped independently: the mean over any axes is near its expected value, and neighbouring weights
    along each axis are uncorrelated."""
    kept = dropped(torch.float32, QUERIES, SEED, probability) > 0
    deviation = (probability * (1 - probability)) ** 0.5
    for axes in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3)):
        mean = kept.double().mean(axes)
        count = kept.numel() / mean.numel()
        assert ((mean - (1 - probability)).abs() < 5 * deviation / count**0.5).all()
    centred = kept.double() - (1 - probability)
    for axis in range(4):
        pairs = centred.narrow(axis, 1, kept.shape[axis] - 1) * centred.narrow(axis, 0, kept.shape[axis] - 1)
        assert pairs.mean().abs() < 5 * deviation**2 / pairs.numel() ** 0.5


def test_what_is_dropped_depends_on_the_seed_alone() -> None:
    factors = dropped(torch.float32, QUERIES, SEED)
    assert torch.equal(factors, dropped(torch.bfloat16, QUERIES, SEED))
    assert torch.equal(factors, dot_formula.dropout_factors((BATCH, 2 * GROUP, QUERIES, KEYS), 0.3, SEED).double())
    assert not torch.equal(factors, dropped(torch.float32, QUERIES, SEED + 1))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("queries", [2, QUERIES], ids=["few queries", "more queries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout(call: str, queries: int, dtype: torch.dtype) -> None:
    """Dropout applies to the weights that sum the values, not to the returned weights, in both passes."""
    options, limits = CALLS[call]
    if limits.bias is not None:
        limits = limits._replace(bias=limits.bias.nan_to_num(-math.inf, neginf=-math.inf))
    if limits.query_ids is not None:
        limits = limits._replace(query_ids=limits.query_ids[:, :queries].contiguous())
    tensors = [t.requires_grad_() for t in drawn(20, 24, queries, dtype, False)]
    options = {"scale": 0.3, "request": "weights", "dropout": 0.3, **options}
    form = dot_form.form(tensors[0], tensors[1], tensors[2], **options)
    result = dot_attention.with_request(tensors[0], tensors[1], tensors[2], form, limits, learning=True, seed=SEED)
    assert result is not None
    assert result.requested is not None
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    weights = exact(doubles, options, limits)[1]
    value = doubles[2].repeat_interleave(GROUP, 1)
    right = ((weights * dropped(torch.float32, queries, SEED)) @ value, weights)
    made = result[:2]
    directions = [torch.arange(t.numel()).cos().reshape(t.shape).to(t.dtype) for t in made]
    found = (*made, *torch.autograd.grad(made, tensors, directions))
    true = (*right, *torch.autograd.grad(right, doubles, [t.double() for t in directions]))
    near = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(
            one.detach().double(), other.detach(), rtol=near, atol=near * max(1.0, float(other.detach().abs().max()))
        )


def test_second_derivatives_of_dropout() -> None:
    leaves = [t.requires_grad_() for t in drawn(5, 3, QUERIES, torch.float32, False)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    form = dot_form.form(leaves[0], leaves[1], leaves[2], scale=0.3, dropout=0.3)
    output = dot_attention.attention(leaves[0], leaves[1], leaves[2], form, Limits(), learning=True, seed=SEED)
    assert output is not None
    weights = exact(doubles, {}, Limits())[1] * dropped(torch.float32, QUERIES, SEED)
    found, true = (
        torch.autograd.grad(sum(g.square().sum() for g in torch.autograd.grad(y.sum(), x, create_graph=True)), x)
        for y, x in ((output, leaves), (weights @ doubles[2].repeat_interleave(GROUP, 1), doubles))
    )
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4 * max(1.0, float(other.abs().max())))
