"""The row kernels of sparsemax and entmax, interpreted on the CPU, against a float64 bisection that shares no code."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import regard

ALPHAS = (2.0, 1.5, 1.3)


def explicit(scores: Tensor, alpha: float) -> Tensor:
    """Weights of entmax by bisection for the threshold, row by row; rows that are all −inf give 0."""
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
    """Random rows, equal scores, one that towers, some masked, one with nothing to attend."""
    torch.manual_seed(5)
    scores = torch.randn(7, 83) * torch.tensor([0.1, 1.0, 5.0, 30.0, 1.0, 1.0, 1.0])[:, None]
    scores[4] = 2.5
    scores[5, 11] = 400.0
    scores[6] = -torch.inf
    scores[1, 40:] = -torch.inf
    return scores


def check(device: str) -> None:
    from regard.core.backends import triton_entmax

    for alpha in ALPHAS:
        scores = rows().to(device)
        true = explicit(scores.cpu(), alpha).to(device)
        threshold = triton_entmax.entmax_threshold(scores, alpha)
        weights, slopes, totals = triton_entmax.entmax_weights(scores, threshold, alpha)
        torch.testing.assert_close(weights.double(), true, rtol=2e-4, atol=2e-6)
        real = torch.where(true > 0, true, 1).pow(2 - alpha)
        seen = true > 1e-4  # the slope of a weight near 0 is as uncertain as its threshold
        torch.testing.assert_close(slopes.double()[seen], real[seen], rtol=2e-3, atol=2e-5)
        torch.testing.assert_close(totals, slopes.sum(-1, keepdim=True))
        change, mean = torch.randn_like(scores), torch.randn(7, 1, device=device)
        expected = slopes * (change - mean)
        given, again = triton_entmax.entmax_gradient(scores, threshold, change, mean, alpha)
        torch.testing.assert_close(given, expected)
        torch.testing.assert_close(again, weights, rtol=0, atol=0)
    spoilt = rows().to(device)
    spoilt[2, 3] = torch.nan
    threshold = triton_entmax.entmax_threshold(spoilt, 1.5)
    weights = triton_entmax.entmax_weights(spoilt, threshold, 1.5)[0]
    assert weights[2].isnan().all()
    assert weights[[0, 1, 3, 4, 5, 6]].isfinite().all()


def through_the_blocks(device: str) -> None:
    """The whole attention by the kernels, output and gradients, against the reference."""
    from regard.core.backends import streams

    plain = streams.EntmaxStream._by_kernels
    torch.manual_seed(6)
    query, key, value = (torch.randn(2, 2, n, 11, device=device, requires_grad=True) for n in (29, 53, 53))
    for normalize in (regard.Sparsemax(), regard.Entmax(1.5)):
        for mask in (None, regard.causal(), regard.padding(torch.tensor([0, 31], device=device))):
            found = []
            for backend in ("blocked", "reference"):
                streams.EntmaxStream._by_kernels = lambda self, scores: True
                output = regard.attention(query, key, value, normalize=normalize, mask=mask, backend=backend).output
                found.append((output, *torch.autograd.grad(output.square().sum(), (query, key, value))))
                streams.EntmaxStream._by_kernels = plain
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_interpreted() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("TRITON IS NOT INSTALLED: the kernels of sparsemax and entmax are not tested at all")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("passed") == 2


@pytest.mark.cuda
def test_compiled() -> None:
    check("cuda")
    through_the_blocks("cuda")


if __name__ == "__main__":
    torch.set_num_threads(1)
    check("cpu")
    print("rows passed", flush=True)
    through_the_blocks("cpu")
    print("blocks passed", flush=True)
