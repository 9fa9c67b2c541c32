"""Calls on CUDA with any normaliser by a kernel over rows of scores, against the specification in float64."""

from typing import Any

import pytest
import torch

import regard

pytestmark = pytest.mark.cuda

SCORES: dict[str, Any] = {
    "dot": regard.Dot(),
    "softcap": regard.ScaledDot(softcap=2.0),
    "cosine": regard.Cosine(scale=3.0),
    "bilinear": regard.Bilinear(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)) / 8),
}
# Normalisers by name, each with a request that the kernel computes weights for, or None.
NORMALIZERS: dict[str, tuple[Any, Any]] = {
    "softmax": (regard.Softmax(), regard.received()),
    "sigmoid": (regard.Sigmoid(bias=-1.0), regard.full()),
    "sparsemax": (regard.Sparsemax(), None),
    "entmax": (regard.Entmax(1.3), regard.top(3)),
    "hard": (regard.Hard(), None),
    "hard, cold": (regard.Hard(temperature=0.5), None),
}
B, H, G, Q, K, D, E = 3, 4, 2, 19, 37, 16, 24


def drawn() -> dict[str, tuple[Any, Any]]:
    """Return masks and biases by name."""
    make = torch.Generator().manual_seed(4)
    lengths, slopes = torch.tensor([37, 5, 0]), torch.rand(H, generator=make)
    segments = [torch.randint(0, 3, (B, n), generator=make).sort().values for n in (Q, K)]
    bias = torch.randn(H, Q, K, generator=make).masked_fill(torch.rand(H, Q, K, generator=make) < 0.1, -torch.inf)
    return {
        "none": (None, None),
        "causal lengths, distances": (regard.causal() & regard.padding(lengths.cuda()), regard.alibi(slopes.cuda())),
        "segments": (regard.segments(*(ids.cuda() for ids in segments)), None),
        "window, table": (regard.window(3, 9), regard.relative(torch.randn(H, 7, generator=make).cuda())),
        "bias": (None, bias.cuda()),
        "tensor": ((torch.rand(B, 1, Q, K, generator=make) > 0.4).cuda(), None),
    }


def on_cpu(thing: Any) -> Any:
    """Return a tensor, or an object of regard that holds tensors, in float64 on the CPU."""
    if isinstance(thing, torch.Tensor):
        return thing.double().cpu() if thing.is_floating_point() else thing.cpu()
    if isinstance(thing, regard.Bilinear):
        return regard.Bilinear(thing.weight.double().cpu())
    if isinstance(thing, regard.Mask):
        shape, device = (B, H, Q, K), torch.device("cuda")
        return thing.aligned(shape).allowed(range(Q), range(K), device).cpu()
    if isinstance(thing, regard.Bias):
        return thing.aligned((B, H, Q, K)).values(range(Q), range(K), torch.float64).cpu()
    return thing


@pytest.mark.parametrize("masked", ["none", "causal lengths, distances", "segments", "window, table", "bias", "tensor"])
@pytest.mark.parametrize("normalize", NORMALIZERS)
@pytest.mark.parametrize("score", SCORES)
def test_calls(score: str, normalize: str, masked: str) -> None:
    mask, bias = drawn()[masked]
    normalizer, request = NORMALIZERS[normalize]
    score_ = SCORES[score]
    score_ = regard.Bilinear(score_.weight.cuda()) if isinstance(score_, regard.Bilinear) else score_
    torch.manual_seed(9)
    query, key, value = (torch.randn(B, h, n, d).cuda() for h, n, d in ((H, Q, D), (G, K, D), (G, K, E)))
    settings = {"score": score_, "normalize": normalizer, "mask": mask, "bias": bias, "weights": request}
    exact = {name: on_cpu(thing) for name, thing in settings.items()}
    right = regard.attention(*map(on_cpu, (query, key, value)), **exact, backend="reference")
    for _ in range(2):  # the second call is found in the cache of recent calls
        attended = regard.attention(query, key, value, **settings)
        torch.testing.assert_close(attended.output.double().cpu(), right.output, rtol=2e-5, atol=2e-5)
        if right.log_prob is not None:
            assert attended.log_prob is not None
            torch.testing.assert_close(attended.log_prob.double().cpu(), right.log_prob, rtol=2e-5, atol=2e-5)
        if isinstance(right.weights, regard.Top):
            assert isinstance(attended.weights, regard.Top)
            torch.testing.assert_close(
                attended.weights.values.double().cpu(), right.weights.values, rtol=2e-5, atol=2e-5
            )
        elif right.weights is not None:
            assert isinstance(attended.weights, torch.Tensor)
            torch.testing.assert_close(attended.weights.double().cpu(), right.weights, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Scores and weights are computed in float32, and the output is rounded once."""
    torch.manual_seed(10)
    query, key, value = (torch.randn(B, H, n, D, dtype=dtype).cuda() for n in (Q, K, K))
    lengths = torch.tensor([37, 5, 0]).cuda()
    settings: dict[str, Any] = {"score": regard.Cosine(4.0), "normalize": regard.Sparsemax()}
    attended = regard.attention(query, key, value, mask=regard.padding(lengths), **settings)
    inputs = [t.double().cpu() for t in (query, key, value)]
    right = regard.attention(*inputs, mask=regard.padding(lengths.cpu()), **settings, backend="reference")
    assert attended.output.dtype == dtype
    torch.testing.assert_close(attended.output.double().cpu(), right.output, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("normalize", [regard.Hard(), regard.Sparsemax(), regard.Sigmoid()], ids=lambda n: n.name)
def test_nan_in_masked_keys_and_values_has_no_effect(normalize: regard.Normalizer) -> None:
    torch.manual_seed(11)
    query, key, value = (torch.randn(2, H, n, D).cuda() for n in (Q, K, K))
    mask = regard.padding(torch.tensor([37, 20]).cuda())
    settings: dict[str, Any] = {"mask": mask, "normalize": normalize, "score": regard.ScaledDot(softcap=4.0)}
    clean = regard.attention(query, key, value, **settings).output
    key[1, :, 20:], value[1, :, 20:] = torch.nan, torch.inf
    assert torch.equal(regard.attention(query, key, value, **settings).output, clean)


def test_explain_names_the_kernel() -> None:
    query, key, value = (torch.randn(2, H, 16, D, device="cuda") for _ in range(3))
    plan = regard.explain(query, key, value, normalize=regard.Hard(), bias=regard.alibi(torch.rand(H).cuda()))
    assert (plan.backend, plan.kernel) == ("reference", "triton rows")
