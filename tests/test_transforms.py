"""torch.func over a call: numbers that cannot be looked at change neither the result nor the gradients."""

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import regard

WEIGHT = torch.linspace(-1, 1, 8, dtype=torch.float64)
CALLS = {
    "plain": {},
    "causal": {"mask": regard.causal()},
    "padding": {"mask": regard.padding(torch.tensor([3, 5]))},
    "window": {"mask": regard.window(2, 1)},
    "alibi": {"bias": regard.alibi(torch.tensor([0.5, 0.1], dtype=torch.float64))},
    "additive": {"score": regard.Additive(WEIGHT), "mask": regard.causal()},
    "function": {"score": lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)},
    "sparsemax": {"normalize": regard.Sparsemax()},
    "entmax": {"normalize": regard.Entmax(1.3), "mask": regard.causal()},
    "top": {"weights": regard.top(2), "mask": regard.causal()},
    "reference": {"mask": regard.causal(), "backend": "reference"},
}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's own, of its CPU kernel in vmap
@pytest.mark.parametrize("length", [6, 600])
@pytest.mark.parametrize("call", CALLS)
def test_mapped_over_an_axis(call: str, length: int) -> None:
    """vmap, and vmap of a gradient: what a loop gives, where fused and blocked backends would serve too."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        return regard.attention(x, x, x, **CALLS[call]).output

    def loop(function: Any) -> torch.Tensor:
        return torch.stack([function(x) for x in many])

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(attend(x).square().sum(), x)[0]

    many = drawn(2, 2, 2, length, 8)
    torch.testing.assert_close(torch.vmap(attend)(many), loop(attend))
    mapped = torch.vmap(torch.func.grad(lambda x: attend(x).square().sum()))
    torch.testing.assert_close(mapped(many), loop(gradient))


def total_of(call: str, **more: Any) -> Any:
    return lambda x: regard.attention(x, x, x, **CALLS[call] | more).output.square().sum()


@pytest.mark.parametrize("length", [4, 20])
@pytest.mark.parametrize("call", ["plain", "causal", "additive"])
def test_second_and_forward_derivatives(call: str, length: int) -> None:
    """Where torch's kernels have none, the plain form has them: forwards, twice, and by dual numbers."""
    total, plainly = total_of(call), total_of(call, backend="reference")
    x, along = drawn(2, length, 8), drawn(2, length, 8).flip(0)
    if length == 4:
        wanted = torch.autograd.functional.hessian(plainly, x)
        for twice in (torch.func.hessian(total), torch.func.jacrev(torch.func.jacrev(total))):
            torch.testing.assert_close(twice(x), wanted)
    slope = (torch.autograd.functional.jacobian(plainly, x) * along).sum()
    torch.testing.assert_close(torch.func.jvp(total, (x,), (along,))[1], slope)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(total(forward_ad.make_dual(x, along))).tangent
    torch.testing.assert_close(found, slope)


@pytest.mark.parametrize("call", ["sparsemax", "entmax"])
def test_entmax_has_derivatives_backwards(call: str) -> None:
    """Of second order too; forwards it says so."""
    total, x = total_of(call), drawn(2, 4, 8)
    wanted = torch.autograd.functional.hessian(total_of(call, backend="reference"), x)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(total))(x), wanted)
    with pytest.raises(NotImplementedError, match="none forwards: take jacrev"):
        torch.func.jvp(total, (x,), (x,))


def test_a_backend_without_rules_says_so() -> None:
    attend = torch.vmap(lambda x: regard.attention(x, x, x, backend="blocked").output)
    with pytest.raises(ValueError, match=r"'blocked' cannot serve this call: torch.func has no rules"):
        attend(drawn(2, 2, 6, 8))


def test_mapped_over_masked_nan() -> None:
    many = torch.randn(3, 2, 2, 6, 8, generator=torch.Generator().manual_seed(3))
    spoilt, mask = many.clone(), regard.padding(torch.tensor([3, 6]))
    spoilt[:, 0, :, 3:] = torch.nan
    mapped = torch.vmap(lambda query, key: regard.attention(query, key, key, mask=mask).output)
    torch.testing.assert_close(mapped(many, spoilt), mapped(many, many))
