"""The Triton kernels of sparsemax and entmax over rows of scores, against an independent bisection in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import interpreting
import regard
from interpreting import DEVICES

ALPHAS = (2.0, 1.5, 1.3)


def explicit(scores: Tensor, alpha: float) -> Tensor:
    """Return weights of entmax by bisection for the threshold, row by row; rows that are all −inf give 0."""
    out = torch.zeros_like(scores, dtype=torch.float64)
    for row, to in zip(scores.double().reshape(-1, scores.shape[-1]), out.view(-1, scores.shape[-1]), strict=True):
        inside = row > -torch.inf
        if not inside.any():
            continue
        x = (alpha - 1) * row[inside]
        low, high = x.max() - 1, x.max()
        for _ in range(200):
            middle = (low + high) / 2
            mass = (x - middle).clamp_min(0).pow(1 / (alpha - 1)).sum()
            low, high = (middle, high) if mass >= 1 else (low, middle)
        to[inside] = (x - low).clamp_min(0).pow(1 / (alpha - 1))
    return out


def rows() -> Tensor:
    """Return rows of scores: random ones, equal scores, one dominant score, some masked keys, and an empty row."""
    torch.manual_seed(5)
    scores = torch.randn(7, 83) * torch.tensor([0.1, 1.0, 5.0, 30.0, 1.0, 1.0, 1.0])[:, None]
    scores[4] = 2.5
    scores[5, 11] = 400.0
    scores[6] = -torch.inf
    scores[1, 40:] = -torch.inf
    return scores


def chunked(scores: Tensor, size: int) -> Tensor:
    """Return scores (slices, rows, keys) as (chunks, slices, rows, size), padded after the last key with 1e30."""
    missing = -scores.shape[-1] % size
    padded = torch.nn.functional.pad(scores, (0, missing), value=1e30)
    return padded.unflatten(-1, (-1, size)).permute(2, 0, 1, 3).contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [83, 32], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_rows(alpha: float, size: int, device: str) -> None:
    """Check thresholds, weights and the gradient of the scores."""
    from regard.kernels.triton import entmax

    scores = rows().to(device)
    true = explicit(scores.cpu(), alpha).to(device)
    torch.manual_seed(8)
    change = torch.randn_like(scores)
    slope = torch.where(true > 0, torch.where(true > 0, true, 1).pow(2 - alpha), 0)
    mean = (slope * change).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True).clamp_min(1e-300)
    tiles, dtiles = chunked(scores[None], size), chunked(change[None], size)
    found = torch.zeros(1, 7, 2, device=device)
    entmax.weigh(tiles.clone(), found, alpha, i0=0, j0=0, n=83, weights=False)
    again = tiles.clone()
    entmax.weigh(again, found, alpha, i0=0, j0=0, n=83)
    entmax.weigh_back(tiles, dtiles, found, alpha, i0=0, j0=0, n=83)
    weights, dscores = (t.permute(1, 2, 0, 3).flatten(-2)[0] for t in (tiles, dtiles))
    torch.testing.assert_close(again, tiles, rtol=0, atol=0)
    torch.testing.assert_close(weights[:, :83].double(), true, rtol=2e-4, atol=2e-6)
    # Near a weight of 0, the gradient of its score depends on the threshold's rounding error, so the tolerance is
    # larger.
    torch.testing.assert_close(dscores[:, :83].double(), slope * (change - mean), rtol=4e-3, atol=8e-3)
    assert not weights[:, 83:].any()
    assert not dscores[:, 83:].any()
    threshold = entmax.entmax_threshold(scores, alpha)
    torch.testing.assert_close(threshold, found[0], rtol=1e-6, atol=1e-7)
    before = scores.clone()
    torch.testing.assert_close(entmax.entmax(scores.view(7, 1, -1), alpha)[:, 0].double(), true, rtol=2e-4, atol=2e-6)
    assert torch.equal(scores, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_score_that_is_not_finite_spoils_its_row_alone(bad: float, device: str) -> None:
    from regard.kernels.triton import entmax

    spoilt = rows().to(device)
    spoilt[2, 3] = bad
    tiles = chunked(spoilt[None], 32)
    entmax.weigh(tiles, torch.zeros(1, 7, 2, device=device), 1.5, i0=0, j0=0, n=83)
    assert tiles[:, 0, 2].isnan().all()
    assert tiles[:, 0, [0, 1, 3, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alpha", ALPHAS[:2])
def test_wide_rows(alpha: float, device: str) -> None:
    """All weights are positive, which gives the sum of a row the largest rounding error."""
    from regard.kernels.triton import entmax

    torch.manual_seed(11)
    wide = 1e-5 * torch.randn(1, 5, 5003, device=device)
    tiles = chunked(wide, 5003)
    entmax.weigh(tiles, torch.zeros(1, 5, 2, device=device), alpha, i0=0, j0=0, n=5003)
    off = (tiles[0].double() - explicit(wide.cpu(), alpha).to(device)).abs().sum(-1)
    assert off.max() < 4e-6


MASKS = {
    "none": lambda device: None,
    "causal": lambda device: regard.causal(),
    "window": lambda device: regard.window(9, 4),
    "ahead": lambda device: regard.window(2, 3, offset=28),  # with this window, the last queries attend to no key
    "lengths": lambda device: regard.padding(torch.tensor([0, 23], device=device)),
    "both": lambda device: regard.causal() & regard.padding(torch.tensor([5, 37], device=device)),
}


# Calls of attention by name: (score, normalizer, mask, dtype, relative tolerance, absolute tolerance).
ATTENTION = {
    **{name: ("scaled", regard.Sparsemax(), name, torch.float32, 2e-4, 2e-5) for name in MASKS},
    "cosine": ("cosine", regard.Entmax(1.5), "both", torch.float32, 2e-4, 2e-5),
    "entmax": ("scaled", regard.Entmax(1.25), "none", torch.float32, 2e-4, 2e-5),
    # The kernels compute scores in float32; only the output and the gradients are rounded to half precision.
    "bfloat16": ("general", regard.Sparsemax(), "causal", torch.bfloat16, 8e-3, 8e-3),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the kernels' chunks of keys, blocks of rows and groups of heads so small that a short sequence has several
    of each."""
    from regard.core.backends import sparse_rows
    from regard.kernels import entmax_rows

    monkeypatch.setattr(entmax_rows, "CHUNK", 16)
    monkeypatch.setattr(sparse_rows, "BYTES", 4 * 48 * 5 * 3)
    monkeypatch.setattr(sparse_rows, "ROWS", 5)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which every call of the Triton kernels is appended."""
    from regard.core.backends import sparse_rows

    if interpreting.INSIDE:  # without a GPU, `serves` would refuse the call because of its device
        monkeypatch.setattr(sparse_rows, "serves", lambda problem: problem.dtype == torch.float32)
    calls: list[Any] = []
    attend = sparse_rows.attend
    monkeypatch.setattr(sparse_rows, "attend", lambda problem: calls.append(problem) or attend(problem))
    return calls


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, *device.values, marks=device.marks, id=f"{name}-{device.id}")
        for device in DEVICES
        for name in ATTENTION
        # The interpreter is slow, so it skips two cases: "both" also tests a causal mask, and "entmax" tests no mask.
        if device.id == "cuda" or name not in ("none", "causal")
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_attention_in_small_blocks(name: str, device: str, taken: list[Any]) -> None:
    check_attention(name, device)
    assert len(taken) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, taken: list[Any]) -> None:
    check_attention(name, "cuda")
    assert len(taken) == 1


def check_attention(name: str, device: str) -> None:
    """Compare output and gradients of attention by the kernels with the reference in float64."""
    torch.manual_seed(6)
    score_name, normalize, mask, dtype, relative, absolute = ATTENTION[name]
    inputs = [torch.randn(2, h, n, d, device=device) for h, n, d in ((2, 13, 11), (1, 37, 11), (1, 37, 7))]
    general = regard.Bilinear(torch.randn(11, 11, device=device) / 3)
    score = {"scaled": regard.ScaledDot(), "cosine": regard.Cosine(5.0), "general": general}[score_name]
    found = []
    rounded = [t.to(dtype) for t in inputs]
    for backend, used in (("blocked", dtype), ("reference", torch.float64)):
        leaves = [t.to(used).requires_grad_() for t in rounded]
        settings = {"score": score, "normalize": normalize, "mask": MASKS[mask](device), "backend": backend}
        output = regard.attention(*leaves, **settings).output
        change = torch.ones_like(output) if dtype != torch.float32 else 2 * output.detach()
        found.append((output, *torch.autograd.grad(output, leaves, change)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=relative, atol=absolute)


@pytest.mark.parametrize("device", DEVICES)
def test_inside_autocast(device: str, taken: list[Any]) -> None:
    """Forward and backward pass may both run under autocast."""
    leaves = [torch.randn(1, 1, 9, 5, device=device, requires_grad=True) for _ in range(3)]
    with torch.autocast(device, dtype=torch.bfloat16):
        output = regard.attention(*leaves, normalize=regard.Sparsemax(), backend="blocked").output
        inside = torch.autograd.grad(output.sum(), leaves)
    output = regard.attention(*leaves, normalize=regard.Sparsemax(), backend="reference").output
    for a, b in zip(inside, torch.autograd.grad(output.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-2)  # autocast rounds the inputs
    assert len(taken) == 1
