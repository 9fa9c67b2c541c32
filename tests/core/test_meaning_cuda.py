"""The semantics of calls on GPU kernels: every rule is tested on every backend that supports it on a GPU.

Each rule (such as "empty rows give zeros") is also tested on the CPU if a CPU backend supports it, so that machines
without a GPU test it too.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard

SIZE = 32  # FlexAttention's kernel requires a power of two


@dataclass(frozen=True)
class Way:
    """A backend, a score that it supports, and a dtype."""

    backend: str
    score: str = "scaled"
    dtype: torch.dtype = torch.bfloat16

    @property
    def near(self) -> float:
        return {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}[self.dtype]

    def __str__(self) -> str:
        return f"{self.backend}-{self.score}-{str(self.dtype).removeprefix('torch.')}"


FULL, HALF = torch.float32, torch.float16
WAYS = [
    Way("reference", dtype=FULL), Way("blocked", dtype=FULL), Way("blocked", "additive", FULL), Way("sdpa"),
    Way("sdpa", "cosine"), Way("short", "cosine"), Way("flex", "cosine"), Way("auto", "cosine"), Way("flex"),
    Way("short"), Way("short", dtype=HALF), Way("additive", "additive"),
    Way("additive", "additive", HALF), Way("additive", "additive", FULL), Way("auto"), Way("auto", "additive"),
]  # fmt: skip
CPU = [Way("reference", dtype=FULL), Way("blocked", "additive", FULL), Way("sdpa", dtype=FULL)]
on_a_gpu = pytest.mark.parametrize(
    ("way", "device"),
    [pytest.param(way, "cuda", marks=pytest.mark.cuda, id=f"cuda-{way}") for way in WAYS]
    + [pytest.param(way, "cpu", id=f"cpu-{way}") for way in CPU],
)


def drawn(way: Way, device: str, *, batch: int = 2, queries: int = 19, keys: int = 19, seed: int = 0) -> list[Tensor]:
    """Return query, key, value and the weight of an additive score."""
    source = torch.Generator().manual_seed(seed)
    shapes = [(batch, 2, queries, SIZE), (batch, 2, keys, SIZE), (batch, 2, keys, SIZE), (SIZE,)]
    found = [torch.randn(shape, generator=source) / (1 if len(shape) > 1 else 4) for shape in shapes]
    return [x.to(device, way.dtype).requires_grad_() for x in found]


REFUSED = {  # the tests whose calls a backend may refuse to compute; any other refusal is an error
    "short": ("empty", "packed", "intersect", "bias", "long", "or"),
    "flex": ("or",),
    "additive": ("or",),
}


def attend(way: Way, tensors: list[Tensor], rule: str = "", **settings: Any) -> Any:
    query, key, value, weight = tensors
    score = {"scaled": regard.ScaledDot(), "cosine": regard.Cosine(), "additive": regard.Additive(weight)}[way.score]
    try:
        return regard.attention(query, key, value, score=score, backend=way.backend, **settings)
    except ValueError as error:
        if "cannot serve" not in str(error) or rule not in REFUSED.get(way.backend, ()):
            raise
        pytest.skip(str(error))


def exactly(way: Way, tensors: list[Tensor], allowed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the output in float64, from the formulas alone; it is differentiable."""
    query, key, value, weight = (x.double() for x in tensors)
    if way.score == "additive":
        scores = (torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) * weight).sum(-1)
    else:
        if way.score == "cosine":
            query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
        scores = query @ key.mT / (1.0 if way.score == "cosine" else math.sqrt(SIZE))
    scores = scores if bias is None else scores + bias.double()
    filled = allowed.any(-1, keepdim=True)
    scores = torch.where(allowed, scores, torch.where(filled, -math.inf, 0.0).double())
    return torch.where(filled, torch.softmax(scores, -1), 0.0) @ value


def learned(tensors: list[Tensor], output: Tensor) -> list[Tensor]:
    """Return gradients of query, key and value for a loss in which every row of the output counts."""
    source = torch.Generator().manual_seed(9)
    direction = torch.randn(output.shape, generator=source).to(output.device, output.dtype)
    return list(torch.autograd.grad(output, tensors[:3], direction, retain_graph=True))


def near(way: Way, found: Tensor, true: Tensor) -> None:
    error = (found.detach().double() - true.detach().double()).norm() / true.detach().double().norm()
    assert error <= way.near, f"{way}: off by {float(error):.1e}"


@pytest.mark.slow
@on_a_gpu
@pytest.mark.parametrize("length", [19, 64, 192])
@pytest.mark.parametrize("how", ["band", "window", "dense", "bias"])
def test_a_row_with_nothing_to_attend_is_zero_in_output_weights_and_gradient(
    way: Way, device: str, how: str, length: int
) -> None:
    tensors = drawn(way, device, queries=length, keys=length)
    keep = torch.ones(length, length, dtype=torch.bool, device=device).tril(-2)
    keep = keep.triu(-6) if how == "window" else keep
    settings: dict[str, Any] = {"mask": regard.dense(keep)}
    if how == "band":
        settings = {"mask": regard.causal(offset=-2)}
    if how == "window":
        settings = {"mask": regard.window(4, 0, offset=-2)}
    if how == "bias":
        settings = {"bias": torch.zeros(length, length, device=device, dtype=way.dtype).masked_fill(~keep, -math.inf)}
    attended = attend(way, tensors, "empty", weights=regard.full(), **settings)
    plain = attend(way, tensors, "empty", **settings).output
    true = exactly(way, tensors, keep.expand(2, 2, length, length))
    near(way, plain, true)
    gradients = learned(tensors, plain)
    for gradient, wanted in zip(gradients, learned(tensors, true), strict=True):
        # Empty rows contribute nothing to the gradients of keys and values.
        near(way, gradient, wanted)
    for result in (attended.output, attended.weights, plain, gradients[0]):
        assert torch.count_nonzero(result[:, :, :2]) == 0
    assert torch.count_nonzero(gradients[0][:, :, 5]) > 0


@on_a_gpu
def test_a_row_of_a_sequence_of_nothing_is_zero(way: Way, device: str) -> None:
    tensors = drawn(way, device)
    plain = attend(way, tensors, mask=regard.padding(torch.tensor([0, 19], device=device))).output
    for result in (plain, *learned(tensors, plain)):
        assert torch.count_nonzero(result[0]) == 0
        assert torch.count_nonzero(result[1]) > 0


@on_a_gpu
@pytest.mark.parametrize("how", ["padding", "dense", "segments", "together", "or", "bias"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_closed_key_holds_has_no_effect(way: Way, device: str, poison: float, how: str) -> None:
    tensors = drawn(way, device)
    closed = torch.zeros(2, 19, dtype=torch.bool, device=device)
    closed[0, 11:] = True
    if how not in ("padding", "segments"):
        closed[1, 3] = True
    keep = ~closed[:, None, None].expand(2, 1, 19, 19)
    i, j = torch.arange(19, device=device)[:, None], torch.arange(19, device=device)
    settings: dict[str, Any] = {
        "padding": lambda: {"mask": regard.padding(torch.tensor([11, 19], device=device))},
        "dense": lambda: {"mask": regard.dense(keep)},
        "segments": lambda: {"mask": regard.segments(torch.zeros_like(closed, dtype=torch.long), closed.long())},
        # A dense mask and a causal mask: together they mask keys for all queries, but neither of them does alone.
        "together": lambda: {"mask": regard.dense(keep | (j > i)) & regard.causal()},
        "or": lambda: {"mask": regard.dense(keep & (j > i)) | regard.dense(keep & (j <= i))},
        "bias": lambda: {"bias": torch.zeros(keep.shape, device=device, dtype=way.dtype).masked_fill(~keep, -math.inf)},
    }[how]()
    rule = {"padding": "", "or": "or", "bias": "bias"}.get(how, "packed")
    clean = attend(way, tensors, rule, **settings).output
    if way.backend == "sdpa" and device == "cpu":
        pytest.skip("there it refuses what it would let through")
    spoilt = [x.detach().clone() for x in tensors]
    for x in spoilt[1:3]:
        x.masked_fill_(closed[:, None, :, None], poison)
    spoilt = [x.requires_grad_() for x in spoilt]
    found = attend(way, spoilt, rule, **settings).output
    near(way, found, clean)
    for gradient, wanted in zip(learned(spoilt, found), learned(tensors, clean), strict=True):
        near(way, gradient, wanted)
    for gradient in learned(spoilt, found)[1:]:
        assert torch.count_nonzero(gradient.masked_select(closed[:, None, :, None])) == 0


@on_a_gpu
def test_padded_is_packed_is_one_by_one(way: Way, device: str) -> None:
    lengths = [7, 19]
    tensors = drawn(way, device)
    padded = attend(way, tensors, mask=regard.padding(torch.tensor(lengths, device=device))).output
    alone = [
        attend(way, [*(x[b : b + 1, :, :n] for x in tensors[:3]), tensors[3]]).output for b, n in enumerate(lengths)
    ]
    for b, n in enumerate(lengths):
        near(way, padded[b : b + 1, :, :n], alone[b])
    packed = [torch.cat([x[b : b + 1, :, :n] for b, n in enumerate(lengths)], 2) for x in tensors[:3]]
    ids = torch.repeat_interleave(torch.arange(2, device=device), torch.tensor(lengths, device=device)).unsqueeze(0)
    together = attend(way, [*packed, tensors[3]], "packed", mask=regard.segments(ids, ids)).output
    near(way, together, torch.cat(alone, 2))


@on_a_gpu
def test_masks_intersect(way: Way, device: str) -> None:
    tensors = drawn(way, device)
    source = torch.Generator().manual_seed(5)
    keep = (torch.rand(2, 1, 19, 19, generator=source) > 0.3).to(device)
    i, j = torch.arange(19, device=device)[:, None], torch.arange(19, device=device)
    allowed = keep & (j <= i) & (j >= i - 6)
    found = attend(way, tensors, "intersect", mask=regard.dense(keep) & regard.causal() & regard.window(6, 3)).output
    near(way, found, exactly(way, tensors, allowed.expand(2, 2, 19, 19)))


@on_a_gpu
def test_a_bias_of_minus_infinity_masks(way: Way, device: str) -> None:
    tensors = drawn(way, device)
    source = torch.Generator().manual_seed(6)
    bias = torch.randn(2, 2, 19, 19, generator=source).to(device, way.dtype)
    closed = (torch.rand(2, 2, 19, 19, generator=source) > 0.6).to(device)
    closed[:, :, 4] = True
    found = attend(way, tensors, "bias", bias=bias.masked_fill(closed, -math.inf)).output
    near(way, found, exactly(way, tensors, ~closed, bias))
    assert torch.count_nonzero(found[:, :, 4]) == 0


@on_a_gpu
def test_a_zero_vector_has_a_finite_cosine_and_gradient(way: Way, device: str) -> None:
    if way.score != "scaled":
        pytest.skip("one score for each backend is enough")
    tensors = [x.detach() for x in drawn(way, device)]
    tensors[0][:, :, 3], tensors[1][:, :, 5] = 0.0, 0.0
    query, key, value = (x.requires_grad_() for x in tensors[:3])
    found = attend(replace(way, score="cosine"), [query, key, value, tensors[3]]).output
    true = value.detach().double().mean(2)
    near(way, found[:, :, 3], true)  # all scores of query 3 are 0, so its output is the mean of the values
    for gradient in torch.autograd.grad(found.float().square().sum(), (query, key, value)):
        assert gradient.isfinite().all()


@on_a_gpu
@pytest.mark.parametrize("length", [19, 64, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_1e5_stay_finite(way: Way, device: str, causal: bool, length: int) -> None:
    if way.dtype == HALF or way.score == "cosine":
        pytest.skip("such scores do not exist there")
    query, key, value, weight = (x.detach() for x in drawn(way, device, queries=length, keys=length))
    if way.score == "additive":
        weight = torch.full_like(weight, 1e5 / SIZE)
    else:
        query, key = (torch.full_like(x, (1e5 / math.sqrt(SIZE)) ** 0.5) * x.sign() for x in (query, key))
        # The entries of key 0 have the signs of the query's entries, so that its score is 1e5.
        key[:, :, 0] = query[:, :, 0].sign() * key[:, :, 0].abs()
        assert float((query.double() @ key.double().mT).max() / math.sqrt(SIZE)) > 0.98e5
    tensors = [x.requires_grad_() for x in (query, key, value, weight)]
    found = attend(way, tensors, "long", mask=regard.causal() if causal else None).output
    gradients = torch.autograd.grad(found.float().square().sum(), tensors[:3])
    assert found.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert found.abs().max() <= value.abs().max() * 1.01


@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_first_of_equal_keys_wins(backend: str, device: str) -> None:
    # Dot products of integers are exact in any order of summation, so equal keys have equal scores.
    query, key = (torch.randint(-2, 3, (1, 2, n, SIZE), device=device).float() for n in (5, 1))
    key, value = key.expand(1, 2, 9, SIZE), torch.randn(1, 2, 9, SIZE, device=device)
    normalize = regard.Hard(sample=False)
    found = regard.attention(query, key, value, score=regard.Dot(), normalize=normalize, backend=backend).output
    torch.testing.assert_close(found, value[:, :, :1].expand(1, 2, 5, SIZE))


@on_a_gpu
@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("length", [19, 200])
def test_a_scale_may_be_negative_or_nothing(way: Way, device: str, mask: str, scale: float, length: int) -> None:
    if way.score != "scaled":
        pytest.skip("has no scale, or has it as a product")
    if way.backend == "short" and (mask == "window" or length > 64):
        pytest.skip("not for short sequences")
    query, key, value, _ = drawn(way, device, queries=length, keys=length)
    i, j = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    allowed = {"none": j >= 0, "causal": j <= i, "window": (j <= i) & (j >= i - 6)}[mask]
    record = {"none": None, "causal": regard.causal(), "window": regard.window(6, 0)}[mask]
    found = regard.attention(query, key, value, score=regard.ScaledDot(scale), mask=record, backend=way.backend).output
    q, k, v = (t.double() for t in (query, key, value))
    true = torch.where(allowed, q @ k.mT * scale, -math.inf).softmax(-1) @ v
    near(way, found, true)
    tensors = [query, key, value]
    for gradient, wanted in zip(learned(tensors, found), learned(tensors, true), strict=True):
        error = (gradient.double() - wanted.double()).norm()
        assert error <= way.near * wanted.double().norm() + 1e-5, f"{way}: off by {float(error):.1e}"


@on_a_gpu
@pytest.mark.parametrize("far", [0.0, 50.0])
def test_a_query_of_nan_spoils_its_own_row_alone(way: Way, device: str, far: float) -> None:
    if far and way.score != "additive":
        pytest.skip("scores of such keys are all alike to a product")
    query, key, value, weight = (x.detach() for x in drawn(way, device, queries=70, keys=70))
    query, key = query - far, key + far
    clean = attend(way, [query, key, value, weight], "long").output
    query = query.clone()
    query[:, :, 3] = math.nan
    found = attend(way, [query, key, value, weight], "long").output
    assert found[:, :, 3].isnan().all()
    others = torch.arange(70, device=device) != 3
    near(way, found[:, :, others], clean[:, :, others])
