"""Gradients of the kernel that returns output and weights, against autograd through softmax in float64."""

from typing import Any

import pytest
import torch
from drawn_masks import mask_of
from torch import Tensor

import regard
from interpreting import DEVICES

# Calls by name: (batch, heads, key heads, queries, keys, size, value size), and rules of the mask.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 2, 2, 37, 71, 16, 24), {}),
    "grouped": ((2, 4, 2, 19, 35, 24, 24), {}),
    "one": ((1, 1, 1, 1, 1, 8, 8), {}),
    "causal": ((1, 4, 2, 67, 67, 24, 24), {"band": (None, 0)}),
    "late": ((1, 2, 1, 37, 41, 16, 16), {"band": (None, -3)}),
    "window": ((1, 1, 1, 131, 67, 16, 16), {"band": (-7, 3)}),
    "padding": ((3, 2, 1, 37, 41, 16, 16), {"lengths": [41, 5, 0], "band": (None, 2)}),
    "segments": ((2, 2, 2, 67, 67, 16, 16), {"segments": True}),
    "dense": ((2, 2, 1, 37, 41, 16, 16), {"mask": True}),
}
SCALE = 0.3


class Call:
    """A call with its kernel, drawn tensors, and the mask as a bool tensor."""

    def __init__(
        self, case: str, device: str, dtype: torch.dtype = torch.float16, beside: regard.Mask | None = None
    ) -> None:
        from regard.core.backends.kernel_arguments import by_pairs, pairs_of
        from regard.core.problem import build
        from regard.kernels.triton.learned_weights import learned

        (b, h, g, q, k, d, e), given = CASES[case]
        torch.manual_seed(3)
        # The queries are in memory order (b, n, h, d), as a layer's projection returns them.
        query = torch.randn(b, q, h, d).to(device, dtype).transpose(1, 2)
        self.leaves = [query, *(torch.randn(b, g, k, size).to(device, dtype) for size in (d, e))]
        self.mask, self.shape, self.device = mask_of(given, b, q, k, device), (b, h, q, k), device
        if beside is not None:
            self.mask = beside if self.mask is None else self.mask & beside
        self.allowed = torch.ones(b, h, q, k, dtype=torch.bool, device=device)
        if self.mask is not None:
            allowed = self.mask.aligned(self.shape).allowed(range(q), range(k), torch.device(device))
            self.allowed = self.allowed & allowed
        settings: Any = (regard.ScaledDot(SCALE), regard.Softmax(), self.mask, None, 0.0, regard.full(), None)
        problem = build(*self.leaves, *settings)
        assert by_pairs(problem)
        self.pairs_of = pairs_of(problem)
        self.run = learned(*self.leaves, SCALE, self.mask is not None)
        # As from a layer that merges the heads, the gradient of the output is in memory order (b, n, h, e) too.
        self.upstream = [torch.randn(b, q, h, e).to(device, dtype).transpose(1, 2), torch.randn(b, h, q, k)]
        self.upstream[1] = self.upstream[1].to(device, dtype)

    def learn(self, wanted: tuple[bool, ...] = (True,) * 3) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        leaves = [t.detach().requires_grad_(needed) for t, needed in zip(self.leaves, wanted, strict=True)]
        pairs = self.pairs_of(self.mask, None, torch.device(self.device))
        return leaves, self.run(*leaves, pairs)

    def expected(self, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return output and weights by their formula; a fully masked row has weights of 0."""
        query, key, value = leaves
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        filled = self.allowed.any(-1, keepdim=True)
        scores = torch.where(self.allowed, query @ key.mT * SCALE, torch.where(filled, -torch.inf, 0.0).double())
        weights = torch.where(filled, torch.softmax(scores, -1), 0.0)
        return weights @ value, weights


def near(found: Tensor, true: Tensor) -> None:
    """Check that the error is a few rounding errors of the dtype; the numbers are of order 1."""
    found, true = found.detach(), true.detach()
    limit = 6 * torch.finfo(found.dtype).eps * max(float(true.norm()), 0.1 * true.numel() ** 0.5)
    assert found.shape == true.shape
    assert float((found.double() - true).norm()) <= limit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("least", [0, 2**22], ids=["padded", ""])
@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str, least: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels.triton import learned_weights

    monkeypatch.setattr(learned_weights, "PADDED", least)
    call = Call(case, device, dtype)
    leaves, results = call.learn()
    true = [t.detach().double().requires_grad_() for t in leaves]
    right = call.expected(true)
    for found, exact in zip(results, right, strict=True):
        near(found, exact)
    for used in ([0], [1], [0, 1]):  # gradients of the output, of the weights, and of both
        upstream = [call.upstream[n] for n in used]
        grads = torch.autograd.grad([results[n] for n in used], leaves, upstream, retain_graph=True, allow_unused=True)
        exact = torch.autograd.grad(
            [right[n] for n in used], true, [t.double() for t in upstream], retain_graph=True, allow_unused=True
        )
        for found, wanted in zip(grads, exact, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                near(found, wanted)
    empty = ~call.allowed.any(-1)
    for tensor in (*results, grads[0]):
        assert tensor is not None
        assert torch.count_nonzero(tensor[empty]) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shift", "factor"), [(10.0, 1.0), (0.0, 4096.0), (10.0, 1024.0)], ids=str)
def test_values_far_from_zero_and_large_gradients(shift: float, factor: float, dtype: torch.dtype, device: str) -> None:
    """Products with common parts cancel, and in float16 some exceed its range: as under a gradient scaler."""
    call = Call("plain", device, dtype)
    call.leaves[2] = call.leaves[2] + shift
    call.upstream[0] = call.upstream[0] * factor
    leaves, (output, _) = call.learn()
    true = [t.detach().double().requires_grad_() for t in leaves]
    grads = torch.autograd.grad(output, leaves, call.upstream[0])
    exact = torch.autograd.grad(call.expected(true)[0], true, call.upstream[0].double())
    for found, wanted in zip(grads, exact, strict=True):
        assert found.isfinite().all()
        assert (found.double() - wanted).norm() <= 8 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_gradients_of_one_tensor(wanted: tuple[bool, ...], device: str) -> None:
    call = Call("causal", device)
    leaves, (output, weights) = call.learn(wanted)
    assert weights.requires_grad is (not wanted[2])
    true = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    leaf, exact = (next(t for t in tensors if t.requires_grad) for tensors in (leaves, true))
    (found,) = torch.autograd.grad(output, leaf, call.upstream[0])
    near(found, torch.autograd.grad(call.expected(true)[0], exact, call.upstream[0].double())[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("case", ["late", "window", "padding", "dense"])
def test_masked_values_of_nan_have_no_effect(case: str, poison: float, device: str) -> None:
    """Keys and values that no query may attend, and queries that may attend to no key, are NaN or Inf."""
    keys = CASES[case][0][4]
    call = Call(case, device, beside=regard.dense((torch.arange(keys, device=device) != 9).view(1, 1, 1, keys)))
    clean_leaves, clean = call.learn()
    right = torch.autograd.grad(clean, clean_leaves, call.upstream)
    seen, filled = call.allowed.any(-2)[:, :1], call.allowed.any(-1)
    assert not seen.all()
    call.leaves[0] = call.leaves[0].clone().masked_fill_(~filled.unsqueeze(-1), poison)
    for n in (1, 2):
        call.leaves[n] = call.leaves[n].clone().masked_fill_(~seen.unsqueeze(-1), poison)
    leaves, results = call.learn()
    for found, wanted in zip(
        (*results, *torch.autograd.grad(results, leaves, call.upstream)), (*clean, *right), strict=True
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spoilt", ["query", "key", "value"])
def test_nan_reaches_attended_pairs_alone(spoilt: str, device: str) -> None:
    """With a causal mask, a vector of NaN at position 40 has no effect on gradients that do not depend on it."""
    call = Call("causal", device)
    clean_leaves, clean = call.learn()
    right = torch.autograd.grad(clean[0], clean_leaves, call.upstream[0])
    n = ["query", "key", "value"].index(spoilt)
    call.leaves[n] = call.leaves[n].clone()
    call.leaves[n][:, :, 40] = torch.nan
    leaves, (output, weights) = call.learn()
    query, key, _ = torch.autograd.grad(output, leaves, call.upstream[0])
    torch.testing.assert_close(output[:, :, :40], clean[0][:, :, :40])
    torch.testing.assert_close(query[:, :, :40], right[0][:, :, :40])
    assert output[:, :, 40].isnan().all()
    assert weights[:, :, 40].isnan().any() == (spoilt != "value")
    assert query[:, :, 40].isnan().all()
    if spoilt == "query":
        torch.testing.assert_close(query[:, :, 41:], right[0][:, :, 41:])
        torch.testing.assert_close(key[:, :, 41:], right[1][:, :, 41:])
        assert key[:, :, :41].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["grouped", "padding"])
@pytest.mark.parametrize("weighed", [False, True], ids=["output", "both"])
def test_second_derivatives(case: str, weighed: bool, device: str) -> None:
    call = Call(case, device)
    leaves, results = call.learn()
    true = [t.detach().double().requires_grad_() for t in leaves]
    right = call.expected(true)
    seconds = []
    for tensors, of in ((results, leaves), (right, true)):
        total = sum((t * u.to(t.dtype)).sum() for t, u in zip(tensors[: 1 + weighed], call.upstream, strict=False))
        grads = torch.autograd.grad(total, of, create_graph=True)
        seconds.append(torch.autograd.grad(sum(grad.double().square().sum() for grad in grads), of))
    for found, wanted in zip(*seconds, strict=True):
        assert float((found.double() - wanted).norm()) <= 2e-2 * float(wanted.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_changed_before_the_backward_pass(device: str) -> None:
    call = Call("padding", device)
    call.mask = regard.padding(torch.tensor([41, 5, 0], device=device))
    leaves, (output, _) = call.learn()
    call.mask.lengths.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output.sum(), leaves)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_made_in_inference_mode(device: str) -> None:
    call = Call("padding", device)
    leaves, (output, _) = call.learn()
    right = torch.autograd.grad(output, leaves, call.upstream[0])
    with torch.inference_mode():
        call.mask = mask_of(CASES["padding"][1], 3, 37, 41, device)
    leaves, (output, _) = call.learn()
    for found, wanted in zip(torch.autograd.grad(output, leaves, call.upstream[0]), right, strict=True):
        assert torch.equal(found, wanted)
