"""Triton kernels of linear attention, interpreted on the CPU and compiled on a GPU, against all pairs in float64."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from interpreting import DEVICES
from regard.core import linear, linear_kernel

# The sizes of a call: (batch, heads, key heads, queries, keys, size, value size, causal, whether keys are masked).
CASES = {
    "full": (2, 2, 2, 71, 37, 16, 16, False, False),
    "causal": (1, 2, 1, 331, 331, 16, 24, True, False),
    "more queries": (1, 2, 2, 203, 139, 24, 16, True, False),
    "hidden": (2, 1, 1, 67, 139, 16, 16, False, True),
    "hidden and causal": (2, 2, 1, 139, 139, 16, 16, True, True),
    "short": (1, 1, 1, 67, 67, 16, 16, True, False),
    "even": (1, 2, 1, 150, 150, 64, 48, True, False),
    "wide": (1, 1, 1, 40, 40, 128, 100, False, False),
    "grouped": (2, 4, 2, 139, 203, 33, 50, False, True),
    "wide and causal": (1, 2, 1, 40, 40, 128, 100, True, False),
}
DTYPES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted, id="interpreted"),
    pytest.param("cuda", torch.float32, marks=pytest.mark.cuda, id="cuda-float32"),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.cuda, id="cuda-bfloat16"),
    pytest.param("cuda", torch.float16, marks=pytest.mark.cuda, id="cuda-float16"),
]


# The number of Performer features (None: elu features), and the factor of the inputs. With a large factor, the features
# of the keys in a chunk have very different magnitudes.
MAPS = {"elu": (None, 2.0), "performer": (37, 1.0), "large elu": (None, 60.0), "large performer": (24, 20.0)}
PAIRS = [
    (case, features)
    for case in CASES
    for features in MAPS
    if ("large" not in features or case == "short") and (CASES[case][-2] or "performer" in features)
]


def explicit(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor, projection: Tensor | None, causal: bool
) -> Tensor:
    """Return the output from all weights Σ_m exp(l(q)_m + l(k)_m), for logarithms l of features; 0 without keys."""
    group = query.shape[1] // key.shape[1]
    key, value, keep = (t.repeat_interleave(group, 1) for t in (key, value, keep))
    if projection is None:
        logs = [torch.where(x > 0, (x.clamp_min(0) + 1).log(), x) for x in (query, key)]
    else:
        scaled = [x / x.shape[-1] ** 0.25 for x in (query, key)]
        logs = [x @ projection.double().mT - x.square().sum(-1, keepdim=True) / 2 for x in scaled]
    pairs = logs[0].unsqueeze(-2) + logs[1].unsqueeze(-3)
    seen = keep.unsqueeze(-2).expand(pairs.shape[:-1])
    seen = seen.tril() if causal else seen
    pairs = torch.where(seen.unsqueeze(-1), pairs, -torch.inf)
    largest = pairs.detach().amax((-1, -2), keepdim=True)
    weights = (pairs - torch.where(largest == -torch.inf, 0, largest)).exp().sum(-1)
    total = weights.sum(-1, keepdim=True)
    return weights @ torch.where(keep.unsqueeze(-1), value, 0) / torch.where(total == 0, 1, total)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize(("case", "features"), PAIRS)
def test_outputs_and_gradients(case: str, features: str, device: str, dtype: torch.dtype) -> None:
    from regard.kernels.triton.linear.operator import linear_attention

    compare(linear_attention, case, features, device, dtype)


@pytest.mark.parametrize(("device", "dtype"), [kind for kind in DTYPES if kind.id != "cuda-float16"])
@pytest.mark.parametrize("case", CASES)
def test_products(case: str, device: str, dtype: torch.dtype) -> None:
    compare(products(CASES[case][-2]), case, "elu", device, dtype)


FULL = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreted, id="interpreted-float32"),
    pytest.param("cpu", torch.float16, marks=pytest.mark.interpreted, id="interpreted-float16"),
    *DTYPES[2:],
]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Divides every sequence into chunks of one tile, whose sums a kernel adds up."""
    tuning = {size: tuning._replace(least=1, sums=1024, few=1) for size, tuning in full().TUNING.items()}
    monkeypatch.setattr(full(), "TUNING", tuning)
    full()._plan.cache_clear()
    yield
    full()._plan.cache_clear()


def full() -> Any:
    from regard.kernels.triton.linear import full

    return full


def fully(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, *_: object) -> Tensor:
    """Compute linear attention with elu features without a causal mask, by a function with the kernels' arguments."""
    return full().linear_attention(query, key, value, keep)


@pytest.mark.parametrize(("device", "dtype"), FULL)
@pytest.mark.parametrize("case", [case for case in CASES if not CASES[case][-2]])
def test_full_attention(case: str, device: str, dtype: torch.dtype) -> None:
    compare(fully, case, "elu", device, dtype)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("device", "dtype"), FULL)
@pytest.mark.parametrize("case", ["full", "grouped", "wide"])
def test_full_attention_in_many_chunks(case: str, device: str, dtype: torch.dtype) -> None:
    compare(fully, case, "elu", device, dtype)


# The means of queries, keys and values, and factors by which they are multiplied first. Features of keys near −14 are
# 10⁻⁶. If the values are far from 0, the gradient of a query is a small difference of large numbers.
NUMBERS = {
    "small keys": (0.0, -14.0, 0.0, 1.0, 1.0, 1.0),
    "small queries": (-14.0, 0.0, 0.0, 1.0, 1.0, 1.0),
    "large keys": (0.0, 0.0, 0.0, 1.0, 1e4, 1.0),
    "large queries": (0.0, 0.0, 0.0, 1e4, 1.0, 1.0),
    "values far from 0": (0.0, 0.0, 10.0, 1.0, 1.0, 1.0),
    "small values": (0.0, 0.0, 0.0, 1.0, 1.0, 1e-3),
    "large values": (0.0, 0.0, 0.0, 1.0, 1.0, 1e4),
}


@pytest.mark.parametrize(("device", "dtype"), FULL)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_numbers_of_any_size_in_full_attention(numbers: str, device: str, dtype: torch.dtype) -> None:
    sizes, (*means, a, b, c) = ((90, 64), (150, 64), (150, 48)), NUMBERS[numbers]
    leaves = [torch.randn(1, 2, *size) * by + mean for size, mean, by in zip(sizes, means, (a, b, c), strict=True)]
    most = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    check(*(x.to(device, dtype) for x in leaves), most)


def check(query: Tensor, key: Tensor, value: Tensor, most: float, change: Tensor | None = None) -> None:
    """Compare output and gradients of full attention with attention by explicit weights in float64."""
    leaves = [x.requires_grad_() for x in (query, key, value)]
    true = [x.detach().double().requires_grad_() for x in leaves]
    output, real = fully(*leaves, None), explicit(*true, torch.ones_like(key[..., 0], dtype=torch.bool), None, False)
    change = torch.randn_like(output) if change is None else change
    results = (output, *torch.autograd.grad(output, leaves, change))
    for a, t in zip(results, (real, *torch.autograd.grad(real, true, change.double())), strict=True):
        rounding = (t.to(a.dtype).double() - t).norm()  # large if float16 cannot represent small gradients
        assert (a.double() - t).norm() <= most * t.norm() + 2 * rounding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "value_size"), [(100, 200), (200, 40)])
def test_full_attention_of_wide_vectors(size: int, value_size: int, device: str) -> None:
    leaves = [torch.randn(1, 2, *shape).half().to(device) for shape in ((70, size), (90, size), (90, value_size))]
    check(*leaves, 4e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_full_attention_of_tensors_with_any_strides(device: str) -> None:
    leaves = [torch.randn(n, 2, 24, 3, device=device).half().permute(3, 1, 0, 2) for n in (70, 130, 130)]
    upstream = torch.ones((), dtype=torch.float16, device=device).expand(3, 2, 70, 24)  # the gradient of a sum
    check(*leaves, 4e-3, upstream)


@pytest.mark.parametrize("device", DEVICES)
def test_results_have_the_layout_of_the_inputs(device: str) -> None:
    """Tensors (b, n, h, d) in memory give an output and gradients in the same order, so that no copies follow."""
    leaves = [torch.randn(2, 70, 3, 24, device=device).half().transpose(1, 2).requires_grad_() for _ in range(3)]
    output = fully(*leaves, None)
    for result in (output, *torch.autograd.grad(output.sum(), leaves)):
        assert result.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_are_not_finite_in_full_attention(device: str) -> None:
    """Inf or NaN in a value changes one column of the output, in a query one row; a masked key or value, and a query
    without keys, change nothing."""
    query, key, value = (torch.randn(2, 1, 70, 32, device=device).half() for _ in range(3))
    keep = torch.ones(2, 1, 70, dtype=torch.bool, device=device)
    keep[0, 0, 5], keep[1] = False, False
    usual = fully(query, key, value, keep)
    query[0, 0, 7], query[1], key[0, 0, 5], value[1] = math.nan, math.nan, math.inf, math.inf
    value[0, 0, 5], value[0, 0, 9, 3], value[0, 0, 9, 4] = math.nan, math.inf, math.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = fully(*leaves, keep)
    assert output[0, 0, 7].isnan().all()
    rest = torch.arange(70, device=device) != 7
    assert (output[0, 0, rest, 3] == math.inf).all()
    assert output[0, 0, rest, 4].isnan().all()
    columns = torch.arange(32, device=device)
    columns = columns[(columns != 3) & (columns != 4)]
    assert_close(output[0, 0, rest][:, columns], usual[0, 0, rest][:, columns])
    assert torch.count_nonzero(output[1]) == 0
    for gradient in torch.autograd.grad(output, leaves, torch.full_like(output, math.nan)):
        assert torch.count_nonzero(gradient[1]) == 0
    infinite = key.detach().clone()
    infinite[0] = -math.inf  # the features of these keys are 0
    assert torch.count_nonzero(fully(torch.zeros_like(query), infinite, torch.ones_like(value), None)[0]) == 0


@pytest.mark.interpreted
@pytest.mark.parametrize("group", [1, 2])
def test_calls_that_are_repeated(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call with a signature skips the checks of the first one; calls with a mask are checked again."""
    monkeypatch.setattr(linear_kernel, "DEVICE", "cpu")
    monkeypatch.setattr(linear_kernel, "ways", {})
    features = regard.EluFeatures()
    for learned, known in ((False, 0), (False, 1), (True, 1), (True, 2)):
        query, key, value = (torch.randn(2, h, 37, 24).half() for h in (2 * group, 2, 2))
        leaves = [x.requires_grad_(learned) for x in (query, key, value)]
        assert len(linear_kernel.ways) == known
        output = regard.linear_attention(*leaves, features=features)
        true = [x.detach().double().requires_grad_() for x in leaves]
        keep = torch.ones(2, 2, 37, dtype=torch.bool)
        real = explicit(*true, keep, None, False)
        assert_close(output.double(), real, rtol=4e-3, atol=4e-3)
        if learned:
            change = torch.randn_like(output)
            slopes = torch.autograd.grad(real, true, change.double())
            for a, t in zip(torch.autograd.grad(output, leaves, change), slopes, strict=True):
                assert_close(a.double(), t, rtol=4e-3, atol=4e-3)
        masked = regard.linear_attention(*leaves, features=features, mask=regard.padding([0, 13]))
        keep = torch.arange(37) < torch.tensor([0, 13])[:, None, None]
        assert_close(masked.double(), explicit(*true, keep.expand(2, 2, 37), None, False), rtol=4e-3, atol=4e-3)
    with pytest.raises(ValueError, match="query has size 24, key has size 23"):
        regard.linear_attention(query, key[..., 1:], value, features=features)


def products(causal: bool) -> Callable[..., Tensor]:
    """Return linear attention by matrix products, full or causal, as a function with the Triton kernels' arguments."""
    from regard.kernels.triton.linear import causal_products
    from regard.kernels.triton.linear import products as full_products

    def attend(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, *_: object) -> Tensor:
        if not causal:
            return full_products.linear_attention(query, key, value if keep is None else value.nan_to_num(), keep)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        keep = None if keep is None else keep.repeat_interleave(group, 1)
        return causal_products.linear_attention(query, key, value, keep)

    return attend


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), pytest.param("cuda", torch.float32, marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("case", ["full", "hidden", "wide"])
def test_performer_products(case: str, device: str, dtype: torch.dtype) -> None:
    from regard.kernels.performer_products import linear_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, projection: Tensor, _: bool) -> Tensor:
        flat = [x.flatten(0, 1) for x in (query, key, value.nan_to_num())]
        logarithms = regard.PerformerFeatures(projection).log_features
        output = linear_attention(logarithms, projection, *flat, None if keep is None else keep.flatten(0, 1))
        return output.unflatten(0, query.shape[:2])

    compare(attend, case, "performer", device, dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize("masked", [False, True], ids=["every key", "masked"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("size", "dtype"), [(66, torch.float32), (260, torch.float16)], ids=["float32", "wide half"])
def test_grouped_heads_and_masks_by_products(
    size: int, dtype: torch.dtype, causal: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences without keys give 0, and NaN in masked keys and values has no effect."""
    monkeypatch.setattr(linear_kernel, "TRIAL", True)
    query, key, value = (torch.randn(2, h, 37, s).to(dtype) for h, s in ((4, size), (2, size), (2, 7)))
    mask = regard.padding(torch.tensor([0, 13])) if masked else None
    if masked:
        key[:, :, 13:], value[:, :, 13:], value[0] = math.nan, math.nan, math.inf
    leaves = [x.requires_grad_() for x in (query, key, value)]
    true = [x.detach().double().requires_grad_() for x in leaves]
    problem, _ = linear._checked(*leaves, mask)
    output = linear_kernel.attend(problem, tuple(leaves), regard.EluFeatures(), causal)
    real = regard.linear_attention(*true, features=regard.EluFeatures(), causal=causal, mask=mask)
    change, tolerance = torch.randn_like(output), 1e-5 if dtype == torch.float32 else 2e-3
    results = (output, *torch.autograd.grad(output, leaves, change))
    for a, t in zip(results, (real, *torch.autograd.grad(real, true, change.double())), strict=True):
        assert_close(a, t.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_products_of_large_and_small_features(device: str) -> None:
    """For two equal keys, query features of 1e25 and of e⁻⁵⁰ both give the mean of the two values."""
    from regard.kernels.triton.linear.products import linear_attention

    value = torch.tensor([[2.0, 0.0], [5.0, 4.0]], device=device)
    key = torch.tensor([[1e20, 1e20], [1e20, 1e20]], device=device)
    query = torch.tensor([[1e25, 1e25], [-50.0, -50.0], [math.nan, 0.0]], device=device)
    output = linear_attention(*(x[None, None] for x in (query, key, value)), None)[0, 0]
    assert_close(output[:2], torch.tensor([[3.5, 2.0], [3.5, 2.0]], device=device))
    assert output[2].isnan().all()


def compare(attend: Callable[..., Tensor], case: str, features: str, device: str, dtype: torch.dtype) -> None:
    """Compare output and gradients of `attend` with attention by explicit weights in float64."""
    b, h, g, q, k, d, e, causal, hides = CASES[case]
    count, factor = MAPS[features]
    if factor > 2 and dtype != torch.float32:
        pytest.skip("exponents in the hundreds, from inputs of 8 or 11 bits")
    torch.manual_seed(7)
    sizes = ((h, q, d, factor), (g, k, d, factor), (g, k, e, 1.0))
    leaves = [torch.randn(b, x, n, s).mul(by).to(device, dtype) for x, n, s, by in sizes]
    projection = None if count is None else torch.randn(count, d).to(device)
    keep = torch.ones(b, g, k, dtype=torch.bool, device=device)
    if hides:
        keep = torch.rand(b, g, k).to(device) > 0.4
        keep[0] = False  # the first sequence has no keys that are not masked
        leaves[2] = torch.where(keep.unsqueeze(-1), leaves[2], torch.nan)
    mine = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
    true = [x.double().nan_to_num(0.0).requires_grad_() for x in leaves]
    out = attend(*mine, keep if hides else None, projection, causal)
    real = explicit(*true, keep, projection, causal)
    change = torch.randn_like(real)
    # Large inputs give exponents in the thousands, which multiply relative rounding errors by as much.
    most = {torch.float32: 1e-5 if factor <= 2 else 1e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    results = (out, *torch.autograd.grad(out, mine, change.to(dtype)))
    for a, t in zip(results, (real, *torch.autograd.grad(real, true, change)), strict=True):
        assert (a.double() - t).norm().item() <= most * max(t.norm().item(), 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [None, 0, 19], ids=["elu", "elu by products", "performer"])
@pytest.mark.parametrize("change", [1e3, math.nan, math.inf], ids=str)
def test_later_positions_do_not_change_earlier_ones(change: float, count: int | None, device: str) -> None:
    from regard.kernels.triton.linear import operator

    linear_attention = products(True) if count == 0 else operator.linear_attention
    leaves = [torch.randn(1, 1, 100, 16).to(device) for _ in range(3)]
    projection = torch.randn(count, 16).to(device) if count else None
    changed = [x.clone().requires_grad_() for x in leaves]
    with torch.no_grad():
        for x in changed:
            x[..., 71:, :] *= change
    output = linear_attention(*leaves, None, projection, True)
    other = linear_attention(*changed, None, projection, True)
    assert_close(other[..., :71, :], output[..., :71, :])
    assert math.isfinite(change) or not other[..., 71:, :].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_inputs_of_any_size_stay_finite(causal: bool, device: str) -> None:
    from regard.kernels.triton.linear.operator import linear_attention

    leaves = [torch.randn(1, 1, 70, 16).mul(3e4).to(device).requires_grad_() for _ in range(3)]
    output = linear_attention(*leaves, None, torch.randn(24, 16).to(device), causal)
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert all(t.isfinite().all() for t in (output, *gradients))


@pytest.mark.parametrize("device", DEVICES)
def test_a_few_sequences_at_a_time_give_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels.triton.linear import operator

    leaves = [torch.randn(3, 2, 40, 16).to(device) for _ in range(3)]
    keep, projection = (torch.rand(3, 2, 40) > 0.3).to(device), torch.randn(24, 16).to(device)
    whole = operator.linear_attention(*leaves, keep, projection, True)
    monkeypatch.setattr(operator, "SUMS", 1)
    assert torch.equal(operator.linear_attention(*leaves, keep, projection, True), whole)
