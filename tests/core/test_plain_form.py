"""The reference's formula in fewer torch operations (`plain_form`), run as on a GPU, where no value is inspected."""

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.core.backends import plain_form

NORMALIZERS = [
    regard.Softmax(), regard.Sigmoid(-0.5), regard.Sparsemax(), regard.Entmax(1.5), regard.Hard(sample=False),
]  # fmt: skip
SCORES = {
    "dot": regard.Dot(),
    "softcap": regard.ScaledDot(softcap=3.0),
    "cosine": regard.Cosine(4.0),
    "bilinear": regard.Bilinear(torch.linspace(-1, 1, 49).view(7, 7)),
    "additive": regard.Additive(torch.linspace(-1, 1, 7)),
}
EMPTY = torch.arange(5)[:, None] != 2  # this mask leaves no key for the third query
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"mask": regard.causal()},
    "late": {"mask": regard.causal(-2)},
    "window": {"mask": regard.window(1, 1) & regard.padding([11, 4])},
    "dense": {"mask": EMPTY & (torch.arange(11) != 6)},
    "bias": {"bias": torch.zeros(5, 11).masked_fill(~EMPTY | (torch.arange(11) > 7), -math.inf)},
    "both": {"mask": regard.window(3, 2), "bias": regard.relative(torch.linspace(-1, 1, 7))},
    "alibi": {"mask": regard.causal(3), "bias": regard.alibi([0.5, 0.25])},
}
REQUESTS = {
    "full": regard.full(), "rows": regard.rows([0, -1]), "top": regard.top(3), "received": regard.received(),
    "entropy": regard.entropy(),
}  # fmt: skip


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_form, "inspects", lambda problem: False)


def drawn(seed: int, *, groups: int = 2) -> list[Tensor]:
    """Return query, key and value in float64, which the compiled loops of the CPU do not compute."""
    source, wide = torch.Generator().manual_seed(seed), torch.float64
    return [
        torch.randn(2, heads, n, 7, generator=source, dtype=wide) for heads, n in ((2, 5), (groups, 11), (groups, 11))
    ]


def computed(tensors: list[Tensor], backend: str, learning: bool, **settings: Any) -> list[Tensor]:
    """Return the output, the requested weights and the gradients of a call as a list of tensors."""
    leaves = [tensor.clone().requires_grad_(learning) for tensor in tensors]
    found = regard.attention(*leaves, backend=backend, **settings)
    results = [found.output, *([] if found.weights is None else [found.weights])]
    results = [part for result in results for part in (result if isinstance(result, tuple) else (result,))]
    if learning:
        change = torch.linspace(-1, 2, found.output.numel(), device=found.output.device).view_as(found.output)
        results += torch.autograd.grad(found.output, leaves, change.to(found.output.dtype), materialize_grads=True)
    return [result.detach() for result in results]


def agree(tensors: list[Tensor], learning: bool, **settings: Any) -> None:
    # With this request `auto` computes the formula by few torch operations.
    settings.setdefault("weights", regard.full())
    assert regard.explain(*tensors, **settings).backend == "reference"
    found = computed(tensors, "auto", learning, **settings)
    if isinstance(settings.get("bias"), Tensor):
        settings["bias"] = settings["bias"].double()
    if isinstance(score := settings.get("score"), regard.Score):
        settings["score"] = score.holding(lambda tensor: tensor.double())
    true = computed([tensor.double() for tensor in tensors], "reference", learning, **settings)
    for one, other in zip(found, true, strict=True):
        assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("normalize", NORMALIZERS, ids=lambda record: record.name)
@pytest.mark.parametrize("learning", [False, True], ids=["", "gradients"])
def test_every_mask_and_normalizer(mask: str, normalize: regard.Normalizer, learning: bool) -> None:
    agree(drawn(1), learning, normalize=normalize, **MASKS[mask])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("score", [*SCORES])
@pytest.mark.parametrize("learning", [False, True], ids=["", "gradients"])
def test_every_score_with_shared_key_heads(score: str, learning: bool) -> None:
    agree(drawn(2, groups=1), learning, score=SCORES[score], mask=regard.padding([9, 11]) & regard.causal(2))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("request_", [*REQUESTS])
@pytest.mark.parametrize("normalize", NORMALIZERS, ids=lambda record: record.name)
def test_every_request(request_: str, normalize: regard.Normalizer) -> None:
    agree(drawn(3), False, normalize=normalize, mask=MASKS["dense"]["mask"], weights=REQUESTS[request_])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", [*SCORES])
@pytest.mark.parametrize("normalize", NORMALIZERS[:4], ids=lambda record: record.name)
def test_masked_keys_and_values_have_no_effect(poison: float, score: str, normalize: regard.Normalizer) -> None:
    """Key 6 is masked for all queries. A non-finite value that only the last query attends affects that query alone."""
    tensors = drawn(4)
    mask = (torch.arange(11) != 6) & ((torch.arange(11) != 8) | (torch.arange(5)[:, None] == 4))
    settings: dict[str, Any] = {"score": SCORES[score], "normalize": normalize, "mask": mask, "weights": regard.full()}
    clean = computed(tensors, "auto", True, **settings)
    tensors[1][:, :, 6] = tensors[2][:, :, 6] = poison
    for one, other in zip(computed(tensors, "auto", True, **settings), clean, strict=True):
        assert_close(one, other)
    tensors[2][0, :, 8, 3] = poison
    output = computed(tensors, "auto", False, **settings)[0]
    affected = torch.zeros(output.shape, dtype=torch.bool)
    affected[0, :, 4, 3] = True
    assert torch.equal(output.isfinite(), ~affected)
    tensors[1][0, :, 8] = math.nan
    output, _, query, _, _ = computed(tensors, "auto", True, **settings)
    assert_close(query[:, :, :4], clean[2][:, :, :4])
    assert output[0, :, 4].isnan().all()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("request_", [*REQUESTS])
@pytest.mark.parametrize("normalize", NORMALIZERS[:4], ids=lambda record: record.name)
def test_attended_nan_is_not_lost(mask: str, request_: str, normalize: regard.Normalizer) -> None:
    """Requested weights are NaN where those of the reference are; some rows are empty, and some attend to no NaN."""
    tensors = drawn(6)
    tensors[0][0, 0, 4, 1], tensors[1][1, 1, 2, 3] = math.nan, math.nan
    # A query of NaN has no effect if the mask leaves it no key, as some masks do for query 2.
    tensors[0][:, :, 2, 1] = math.nan
    settings = MASKS[mask] | {"normalize": normalize, "weights": REQUESTS[request_]}
    found = computed(tensors, "auto", False, **settings)[1]
    true = computed([tensor.double() for tensor in tensors], "reference", False, **settings)[1]
    assert_close(found.double(), true.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_query_of_nan_in_an_empty_row_has_no_effect() -> None:
    tensors = drawn(5)
    clean = computed(tensors, "auto", True, weights=regard.full(), **MASKS["dense"])
    tensors[0][:, :, 2] = math.nan
    for one, other in zip(computed(tensors, "auto", True, weights=regard.full(), **MASKS["dense"]), clean, strict=True):
        assert_close(one, other)


READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("normalize", NORMALIZERS, ids=lambda record: record.name)
@pytest.mark.parametrize("learning", [False, True], ids=["", "gradients"])
def test_no_value_is_read_on_the_host(normalize: regard.Normalizer, learning: bool) -> None:
    """Reading a value would wait for the GPU. These masks have no tensors, which on the CPU would be inspected."""
    for mask, request in itertools.product((regard.causal(-2), regard.window(1, 1)), REQUESTS.values()):
        settings = {"normalize": normalize, "mask": mask, "weights": request}
        computed(drawn(6), "auto", learning, **settings)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as events:
            computed(drawn(6), "auto", learning, **settings)
        names = {event.name for event in events.events()} - {"aten::item"}
        assert not names & READS, (mask, request, names & READS)


@pytest.mark.cuda
@pytest.mark.parametrize("mask", ["band", "lengths", "dense", "bias"])
@pytest.mark.parametrize("normalize", NORMALIZERS, ids=lambda record: record.name)
@pytest.mark.parametrize("learning", [False, True], ids=["", "gradients"])
def test_the_host_does_not_wait_for_a_gpu(mask: str, normalize: regard.Normalizer, learning: bool) -> None:
    tensors = [tensor.cuda() for tensor in drawn(8)]
    settings: dict[str, Any] = {
        "band": {"mask": regard.causal(-2)},
        "lengths": {"mask": regard.padding(torch.tensor([11, 4], device="cuda")) & regard.window(3, 3)},
        "dense": {"mask": MASKS["dense"]["mask"].cuda()},
        "bias": {"bias": regard.relative(torch.linspace(-1, 1, 7).cuda()), "mask": regard.causal()},
    }[mask]
    for request in REQUESTS.values():
        computed(tensors, "auto", learning, normalize=normalize, weights=request, **settings)
        before = torch.cuda.get_sync_debug_mode()
        try:
            # Torch warns that the mode in which synchronisation with the GPU raises an error is a prototype.
            with warnings.catch_warnings(action="ignore"):
                torch.cuda.set_sync_debug_mode("error")
            computed(tensors, "auto", learning, normalize=normalize, weights=request, **settings)
        finally:
            torch.cuda.set_sync_debug_mode(before)


LENGTHS = torch.tensor([261, 0, 40])


@pytest.mark.cuda
@pytest.mark.parametrize("mask", [None, regard.causal(), regard.causal(-2), "lengths", "tensor"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "groups", "keys", "size"), [(4, 4, 261, 40), (4, 2, 256, 64), (48, 48, 261, 128)])
def test_all_weights_with_gradients_on_a_gpu(
    heads: int, groups: int, keys: int, size: int, dtype: torch.dtype, mask: Any
) -> None:
    """The kernels return the gradients of output and weights; the last shape has so many pairs that rows are padded."""
    torch.manual_seed(8)
    shapes = (3, 261, heads, size), (3, keys, groups, size), (3, keys, groups, size)
    leaves = [torch.randn(shape, device="cuda").to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]
    allowed = torch.ones(3, 1, 261, keys, dtype=torch.bool, device="cuda")
    if mask == "lengths":
        mask = regard.padding(LENGTHS.clamp_max(keys).cuda())
        allowed = allowed & (torch.arange(keys) < LENGTHS[:, None])[:, None, None].cuda()
    elif mask == "tensor":
        mask = allowed = torch.rand(allowed.shape, device="cuda") > 0.3
    elif mask is not None:
        allowed = allowed.tril(mask.high)
    assert regard.explain(*leaves, mask=mask, weights=regard.full()).kernel == "triton weights"
    query, key, value = true = [leaf.detach().double().requires_grad_() for leaf in leaves]
    key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
    weights = (query @ key.mT / size**0.5).masked_fill(~allowed, -math.inf).softmax(-1)
    weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    right = (weights @ value, weights)
    change = [torch.randn(t.shape, device="cuda").to(dtype) for t in right]
    for used in ([0], [0, 1]):
        exact = torch.autograd.grad(
            [right[n] for n in used], true, [change[n].double() for n in used], retain_graph=True
        )
        for _ in range(2):  # the second call is found in the cache of recent calls
            attended = regard.attention(*leaves, mask=mask, weights=regard.full())
            results = (attended.output, attended.weights)
            grads = torch.autograd.grad([results[n] for n in used], leaves, [change[n] for n in used])
            for found, wanted in zip((*results, *grads), (*right, *exact), strict=True):
                assert found.dtype == dtype
                error = float((found.double() - wanted).norm().detach() / wanted.norm().detach())
                assert error <= 6 * torch.finfo(dtype).eps


@pytest.mark.cuda
def test_second_derivatives_of_all_weights_on_a_gpu() -> None:
    leaves = [tensor[..., :4].cuda().half().requires_grad_() for tensor in drawn(7)]
    true = [leaf.detach().double().requires_grad_() for leaf in leaves]
    seconds = []
    for tensors, settings in ((leaves, {}), (true, {"backend": "reference"})):
        attended = regard.attention(*tensors, mask=regard.causal(), weights=regard.full(), **settings)
        total = attended.output.square().sum() + attended.weights.square().sum()
        grads = torch.autograd.grad(total, tensors, create_graph=True)
        seconds.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), tensors))
    for found, wanted in zip(*seconds, strict=True):
        assert float((found.double() - wanted).norm()) <= 2e-2 * float(wanted.norm())


@pytest.mark.cuda
def test_differentiated_calls_whose_weights_are_not_rounded() -> None:
    """In float32, with a bias, or for a summary, torch operations compute the gradients."""
    half = [tensor[..., :4].cuda().half().requires_grad_() for tensor in drawn(9)]
    single = [tensor.detach().float().requires_grad_() for tensor in half]
    bias = regard.relative(torch.linspace(-1, 1, 7).cuda())
    assert regard.explain(*half, weights=regard.full()).kernel == "triton weights"
    for tensors, settings in (
        (single, {"weights": regard.full()}),
        (half, {"weights": regard.full(), "bias": bias}),
        (half, {"weights": regard.entropy()}),
    ):
        assert regard.explain(*tensors, **settings).kernel != "triton weights"


def test_the_second_derivative_is_that_of_the_reference() -> None:
    leaves = [tensor[:1, :1, :3, :2].double().requires_grad_() for tensor in drawn(7)]

    def learned(*tensors: Tensor) -> Tensor:
        return regard.attention(*tensors, mask=regard.causal(), weights=regard.full()).output

    assert torch.autograd.gradgradcheck(learned, leaves, gen_non_contig_grad_outputs=True)
