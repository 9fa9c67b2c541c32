"""torch.func transforms of a call, in which values cannot be inspected, give the right results and gradients."""

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import regard
from regard.core.backends import mask_blocks

# Device, dtype and relative tolerance. A mapped call uses the reference where the equivalent loop uses a fused kernel.
PLACES = {"cpu": ("cpu", torch.float64, 1e-12)}
PLACES |= {"cuda": ("cuda", torch.float32, 2e-4), "cuda in bfloat16": ("cuda", torch.bfloat16, 2e-2)}
everywhere = pytest.mark.parametrize(
    "place", ["cpu", *(pytest.param(name, marks=pytest.mark.cuda) for name in PLACES if name != "cpu")]
)


def described(call: str, place: str = "cpu") -> dict[str, Any]:
    device, dtype, _ = PLACES[place]
    calls = {
        "plain": {},
        "causal": {"mask": regard.causal()},
        "padding": {"mask": regard.padding(torch.tensor([3, 5], device=device))},
        "window": {"mask": regard.window(2, 1)},
        "alibi": {"bias": regard.alibi(torch.tensor([0.5, 0.1], device=device, dtype=dtype))},
        "additive": {
            "score": regard.Additive(torch.linspace(-1, 1, 8, device=device, dtype=dtype)),
            "mask": regard.causal(),
        },
        "function": {"score": lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)},
        "sparsemax": {"normalize": regard.Sparsemax()},
        "entmax": {"normalize": regard.Entmax(1.3), "mask": regard.causal()},
        "top": {"weights": regard.top(2), "mask": regard.causal()},
        "reference": {"mask": regard.causal(), "backend": "reference"},
    }
    return calls[call]


CALLS = ["plain", "causal", "padding", "window", "alibi"]
CALLS += ["additive", "function", "sparsemax", "entmax", "top", "reference"]


def drawn(*shape: int, place: str = "cpu") -> torch.Tensor:
    device, dtype, _ = PLACES[place]
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return numbers.to(device, dtype)


def same(found: torch.Tensor, wanted: torch.Tensor, place: str = "cpu") -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert 0 < wanted.norm() < torch.inf, "nothing to compare"
    off = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    assert off <= PLACES[place][2], f"{off:.1e} off"


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # torch warns that it has only slow kernels for some operations under vmap
@everywhere
@pytest.mark.parametrize("length", [6, 600])
@pytest.mark.parametrize("call", CALLS)
def test_mapped_over_an_axis(call: str, length: int, place: str) -> None:
    """vmap, and gradients inside and outside of it, equal a loop over the mapped axis, on every backend."""
    arguments = described(call, place)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return regard.attention(x, x, x, **arguments).output

    def loop(function: Any) -> torch.Tensor:
        return torch.stack([function(x) for x in many])

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(attend(x).float().square().sum(), x)[0]

    many = drawn(2, 2, 2, length, 8, place=place)
    same(torch.vmap(attend)(many), loop(attend), place)
    wanted = loop(gradient)
    same(torch.vmap(torch.func.grad(lambda x: attend(x).float().square().sum()))(many), wanted, place)
    same(torch.func.grad(lambda many: torch.vmap(attend)(many).float().square().sum())(many), wanted, place)


def total_of(call: str, place: str = "cpu", **more: Any) -> Any:
    arguments = described(call, place) | more
    return lambda x: regard.attention(x, x, x, **arguments).output.square().sum()


derivatives_everywhere = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


@derivatives_everywhere
@pytest.mark.parametrize("length", [4, 20])
@pytest.mark.parametrize("call", ["plain", "causal", "additive"])
def test_second_and_forward_derivatives(call: str, length: int, place: str) -> None:
    """Derivatives that torch's kernels lack are computed by the reference: forward mode, second order, dual numbers."""
    total, plainly = total_of(call, place), total_of(call, place, backend="reference")
    x = drawn(2, length, 8, place=place)
    along = x.flip(0)
    if length == 4:
        wanted = torch.autograd.functional.hessian(plainly, x)
        for twice in (torch.func.hessian(total), torch.func.jacrev(torch.func.jacrev(total))):
            same(twice(x), wanted, place)
    slope = (torch.autograd.functional.jacobian(plainly, x) * along).sum()
    same(torch.func.jvp(total, (x,), (along,))[1], slope, place)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(total(forward_ad.make_dual(x, along))).tangent
    same(found, slope, place)


@derivatives_everywhere
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # torch warns that it has only slow kernels for some operations under vmap
@pytest.mark.parametrize("call", ["plain", "causal", "padding", "window", "alibi"])
def test_jacobian(call: str, place: str) -> None:
    """`torch.func.jacrev` runs the backward pass under vmap, and the forward pass outside of it."""
    arguments, x = described(call, place), drawn(2, 2, 6, 8, place=place)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return regard.attention(x, x, x, **arguments).output[:, :, -1]

    same(torch.func.jacrev(attend)(x), torch.autograd.functional.jacobian(attend, x), place)


@derivatives_everywhere
@pytest.mark.parametrize("call", ["sparsemax", "entmax"])
def test_entmax_has_derivatives_backwards(call: str, place: str) -> None:
    """Reverse mode gives first and second derivatives of entmax; forward mode raises."""
    total, x = total_of(call, place), drawn(2, 4, 8, place=place)
    wanted = torch.autograd.functional.hessian(total_of(call, place, backend="reference"), x)
    same(torch.func.jacrev(torch.func.jacrev(total))(x), wanted, place)
    with pytest.raises(NotImplementedError, match="none forwards: take jacrev"):
        torch.func.jvp(total, (x,), (x,))


def test_a_backend_without_rules_says_so() -> None:
    attend = torch.vmap(lambda x: regard.attention(x, x, x, backend="blocked").output)
    with pytest.raises(ValueError, match=r"'blocked' cannot serve this call: torch.func has no rules"):
        attend(drawn(2, 2, 6, 8))


@derivatives_everywhere
def test_mapped_over_masked_nan(place: str) -> None:
    many = drawn(3, 2, 2, 6, 8, place=place)
    spoilt, mask = many.clone(), regard.padding(torch.tensor([3, 6], device=many.device))
    spoilt[:, 0, :, 3:] = torch.nan
    mapped = torch.vmap(lambda query, key: regard.attention(query, key, key, mask=mask).output)
    same(mapped(many, spoilt), mapped(many, many), place)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # torch warns that it has only slow kernels for some operations under vmap
def test_mapped_over_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are split into several blocks, whose masks cannot be inspected under vmap."""
    monkeypatch.setattr(mask_blocks, "CPU_NUMBERS", 2**14)
    x, lengths = drawn(1, 2, 200, 8), torch.tensor([3, 120, 200])

    def attend(length: torch.Tensor) -> torch.Tensor:
        mask = regard.padding(length) & regard.causal()
        assert regard.explain(x, x, x, mask=mask).backend in ("sdpa", "reference")
        return regard.attention(x, x, x, mask=mask).output

    same(torch.vmap(attend)(lengths), torch.stack([attend(length) for length in lengths]))


def test_mapped_over_what_a_score_holds() -> None:
    x, scales = drawn(2, 6, 8), drawn(3, 8)

    def total(scale: torch.Tensor) -> torch.Tensor:
        return regard.attention(x, x, x, score=lambda query, key: (query * scale) @ key.mT).output.square().sum()

    same(torch.vmap(torch.func.grad(total))(scales), torch.stack([torch.func.grad(total)(scale) for scale in scales]))


def test_biases_may_be_mapped() -> None:
    query, key, value = (torch.randn(2, 6, 4) for _ in range(3))
    for make, given in ((regard.alibi, torch.rand(3, 2)), (regard.relative, torch.rand(3, 5))):
        attend = lambda tensor, make=make: regard.attention(query, key, value, bias=make(tensor)).output  # noqa: E731
        found = torch.func.vmap(attend)(given)
        torch.testing.assert_close(found, torch.stack([attend(tensor) for tensor in given]))

        slope = torch.func.grad(lambda tensor, attend=attend: attend(tensor).square().sum())
        torch.testing.assert_close(torch.func.vmap(slope)(given), torch.stack([slope(tensor) for tensor in given]))
