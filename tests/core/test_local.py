"""Local attention against its definition, pair by pair."""

import math

import pytest
import torch

import regard
from regard.core import local
from regard.core.local import local_attention
from regard.core.scores import Additive, ScaledDot

LEAD, HEADS, QUERIES, KEYS, SIZE, VALUE = 2, 3, 5, 11, 7, 4


def by_hand(query, key, value, centre, reach, length, gaussian):
    """Return the output of one query in Python numbers: the softmax over its window, times the Gaussian."""
    near = [s for s in range(KEYS) if abs(s - centre) <= reach and s < length]
    if not near:
        return torch.zeros(VALUE, dtype=torch.float64)
    scores = [sum(a * b for a, b in zip(query, key[s], strict=True)) / math.sqrt(SIZE) for s in near]
    total = sum(math.exp(score) for score in scores)
    out = torch.zeros(VALUE, dtype=torch.float64)
    for s, score in zip(near, scores, strict=True):
        bell = math.exp(-((s - centre) ** 2) / (2 * (reach / 2) ** 2)) if gaussian else 1.0
        out = out + math.exp(score) / total * bell * value[s]
    return out


def inputs():
    shapes = ((LEAD, HEADS, QUERIES, SIZE), (LEAD, HEADS, KEYS, SIZE), (LEAD, HEADS, KEYS, VALUE))
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return query, key, value, torch.rand(LEAD, HEADS, QUERIES, dtype=torch.float64) * 13 - 1


@pytest.mark.parametrize("gaussian", [True, False], ids=["local-p", "local-m"])
@pytest.mark.parametrize("reach", [1, 3])
def test_it_is_the_paper_s_window(reach: int, gaussian: bool) -> None:
    query, key, value, centre = inputs()
    lengths = torch.tensor([KEYS, 4])
    found = local_attention(query, key, value, centre, reach=reach, lengths=lengths, gaussian=gaussian).output
    for b in range(LEAD):
        for h in range(HEADS):
            for i in range(QUERIES):
                at = (query[b, h, i].tolist(), key[b, h].tolist(), value[b, h], float(centre[b, h, i]))
                torch.testing.assert_close(found[b, h, i], by_hand(*at, reach, int(lengths[b]), gaussian))


@pytest.mark.slow
def test_the_centre_learns() -> None:
    query, key, value, centre = inputs()
    leaves = [t.requires_grad_() for t in (query, key, value, centre)]
    assert torch.autograd.gradcheck(lambda *t: local_attention(*t, reach=2).output, leaves, fast_mode=True)


def test_what_is_outside_the_window_has_no_effect() -> None:
    query, key, value, centre = inputs()
    centre = torch.full_like(centre, 2.0).requires_grad_()
    clean = local_attention(query, key, value, centre, reach=2).output
    key[..., 5:, :], value[..., 5:, :] = torch.nan, torch.inf
    found = local_attention(query, key, value, centre, reach=2).output
    torch.testing.assert_close(found, clean)
    (grad,) = torch.autograd.grad(found.sum(), centre)
    assert grad.isfinite().all()


@pytest.mark.usefixtures("as_installed")
def test_bad_arguments_are_named() -> None:
    query, key, value, centre = inputs()
    with pytest.raises(ValueError, match="reach must be at least 1, got 0"):
        local_attention(query, key, value, centre, reach=0)
    with pytest.raises(ValueError, match="equal leading axes"):
        local_attention(query, key[:, :2], value[:, :2], centre, reach=1)


@pytest.mark.parametrize("score", [ScaledDot(), Additive(torch.linspace(-1, 1, SIZE, dtype=torch.float64))], ids=str)
@pytest.mark.parametrize("gaussian", [True, False], ids=["local-p", "local-m"])
def test_all_pairs_give_what_gathered_windows_give(score, gaussian: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs()]
    lengths = torch.tensor([KEYS, 4])

    def results(dense: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(local, "_dense_is_faster", lambda *_: dense)
        found = local_attention(*leaves, reach=2, score=score, lengths=lengths, gaussian=gaussian)
        slope = torch.linspace(-1, 2, found.weights.numel()).reshape(found.weights.shape)
        learned = leaves if gaussian else leaves[:3]
        total = found.output.sum() + (found.weights * slope).sum()
        return [found.output, found.weights, *torch.autograd.grad(total, learned)]

    for dense, gathered in zip(results(True), results(False), strict=True):
        torch.testing.assert_close(dense, gathered)


def test_a_value_outside_of_the_window_that_is_not_finite_is_not_multiplied() -> None:
    query, key, value, centre = inputs()
    centre = torch.full_like(centre, 2.0)
    # With few keys, the scores of all pairs are computed, also outside of the window: NaN there must have no effect.
    clean = local_attention(query, key, value, centre, reach=4).output
    value[..., 9:, :] = torch.nan
    torch.testing.assert_close(local_attention(query, key, value, centre, reach=4).output, clean)


def test_a_large_value_outside_of_every_window_leaves_gradients_finite() -> None:
    leaves = [torch.randn(1, 1, n, 8) for n in (4, 9, 9)]
    leaves[2][..., 8, :] = 1e38
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output = local_attention(*leaves, torch.zeros(1, 1, 4), reach=2).output
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), leaves))


@pytest.mark.parametrize("score", [regard.Bilinear(torch.ones(2, 8, 8)), regard.Additive(torch.ones(2, 8))])
def test_a_weight_for_each_head_is_refused(score: regard.Score) -> None:
    query, key, value = (torch.randn(1, 2, n, 8) for n in (2, 9, 9))
    with pytest.raises(ValueError, match="one weight for all heads"):
        local_attention(query, key, value, torch.zeros(1, 2, 2), reach=2, score=score)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [23, 300])
def test_on_a_gpu_it_is_the_same_and_a_value_outside_of_a_window_has_no_effect(dtype: torch.dtype, keys: int) -> None:
    source = torch.Generator().manual_seed(3)
    tensors = [torch.randn(2, 3, n, 16, generator=source).to(dtype) for n in (11, keys, keys)]
    centre, lengths = torch.rand(2, 3, 11, generator=source) * 15, torch.tensor([keys, 9])
    results = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.to(device).requires_grad_() for tensor in (*tensors, centre)]
        if device == "cuda":
            with torch.no_grad():
                leaves[1][1, :, 9:], leaves[2][:, :, 22:] = math.nan, math.inf
        found = local_attention(*leaves, reach=3, lengths=lengths.to(device))
        gradients = torch.autograd.grad(found.output.float().square().sum(), leaves)
        results.append([t.detach().cpu() for t in (found.output, found.weights, *gradients)])
    near = 1e-5 if dtype == torch.float32 else 5e-2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


def rounded(dtype: torch.dtype, keys: int = KEYS) -> list[torch.Tensor]:
    """Return inputs in a lower precision; keys and values are not contiguous."""
    query = torch.randn(LEAD, HEADS, QUERIES, SIZE).to(dtype)
    key, value = (torch.randn(LEAD, keys, HEADS, size).to(dtype).transpose(1, 2) for size in (SIZE, VALUE))
    return [query, key, value, torch.rand(LEAD, HEADS, QUERIES) * 13 - 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gaussian", [True, False], ids=["local-p", "local-m"])
def test_lower_precision_is_near_float64(dtype: torch.dtype, gaussian: bool) -> None:
    tensors, lengths = rounded(dtype), torch.tensor([KEYS, 4])
    slope = torch.linspace(-1, 2, LEAD * HEADS * QUERIES * VALUE).reshape(LEAD, HEADS, QUERIES, VALUE).to(dtype)

    def results(given: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        found = local_attention(*leaves, reach=3, lengths=lengths, gaussian=gaussian)
        learned = leaves if gaussian else leaves[:3]
        change = slope.to(found.output.dtype)
        return [found.output, found.weights, *torch.autograd.grad(found.output, learned, change)]

    near = 1e-5 if dtype == torch.float32 else 3e-2
    for low, exact in zip(results(tensors), results([tensor.double() for tensor in tensors]), strict=True):
        torch.testing.assert_close(low.double(), exact, rtol=near, atol=near)


def test_gradients_of_requested_weights_and_second_derivatives_in_float32() -> None:
    def results(given: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        found = local_attention(*leaves, reach=3)
        slope = torch.linspace(-1, 2, found.weights.numel(), dtype=found.weights.dtype).reshape(found.weights.shape)
        first = torch.autograd.grad(found.output.square().sum() + (found.weights * slope).sum(), leaves)
        found = local_attention(*leaves, reach=3)
        again = torch.autograd.grad(found.output.square().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(grad.square().sum() for grad in again), leaves)]

    tensors = rounded(torch.float32)
    for low, exact in zip(results(tensors), results([tensor.double() for tensor in tensors]), strict=True):
        torch.testing.assert_close(low.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True], ids=["output", "weights"])
def test_one_tensor_may_be_query_key_and_value(weighted: bool) -> None:
    x, centre = torch.randn(1, 2, 9, 8), torch.rand(1, 1, 9) * 9

    def gradient(same: torch.Tensor) -> torch.Tensor:
        same = same.detach().requires_grad_()
        found = local_attention(same, same, same, centre, reach=2)
        total = found.output.square().sum() + (found.weights.square().sum() if weighted else 0.0)
        return torch.autograd.grad(total, same)[0]

    torch.testing.assert_close(gradient(x), gradient(x.double()).float(), rtol=1e-4, atol=1e-4)


def test_a_broadcast_centre_and_other_leading_axes_in_float32() -> None:
    query, key, value, _ = rounded(torch.float32)
    centre = (torch.rand(1, 1, QUERIES) * 10).requires_grad_()
    found = local_attention(query, key, value, centre, reach=2)
    (slope,) = torch.autograd.grad(found.output.sum(), centre)
    other = local_attention(*(t[:, None].double() for t in (query, key, value)), centre[None].double(), reach=2)
    torch.testing.assert_close(found.output, other.output[:, 0].float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slope, torch.autograd.grad(other.output.sum(), centre)[0], rtol=1e-4, atol=1e-5)


def test_a_number_in_a_window_that_is_not_finite_reaches_the_queries_that_attend_it_alone() -> None:
    query, key, value, centre = rounded(torch.float32)
    clean = local_attention(query, key, value, centre, reach=2).output
    key[0, 1, 5], value[1, 2, 6] = torch.nan, torch.inf
    found = local_attention(query, key, value, centre, reach=2).output
    spoilt = torch.zeros(LEAD, HEADS, QUERIES, dtype=torch.bool)
    spoilt[0, 1], spoilt[1, 2] = (centre[0, 1] - 5).abs() <= 2, (centre[1, 2] - 6).abs() <= 2
    assert not found[spoilt].isfinite().any()
    torch.testing.assert_close(found[~spoilt], clean[~spoilt])


@pytest.mark.usefixtures("as_installed")
def test_other_modes_in_float32_give_the_same() -> None:
    tensors = rounded(torch.float32)
    plain = local_attention(*tensors, reach=2).output
    mapped = torch.func.vmap(lambda *t: local_attention(*t, reach=2).output)(*tensors)
    torch.testing.assert_close(mapped, plain)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            local_attention(*tensors, reach=2).output, plain, rtol=5e-2, atol=5e-2, check_dtype=False
        )
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="reach must be at least 1"):
            local_attention(*tensors, reach=wrong)
    with pytest.raises(ValueError, match="lengths of local_attention"):
        local_attention(*tensors, reach=2, lengths=torch.tensor([KEYS + 1, 2]))
    tensors[3][0, 0, 0] = torch.nan
    spoilt = local_attention(*tensors, reach=2).output
    assert spoilt[0, 0, 0].isnan().all()
    torch.testing.assert_close(spoilt[1], plain[1])
