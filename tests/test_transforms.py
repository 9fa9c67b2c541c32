"""torch.func over a call: numbers that cannot be looked at change neither the result nor the gradients."""

import pytest
import torch

import regard

CALLS = {
    "causal": {"mask": regard.causal()},
    "padding": {"mask": regard.padding(torch.tensor([3, 6]))},
    "window": {"mask": regard.window(2, 1)},
    "dense": {"mask": torch.tensor([[1, 0, 1, 1, 0, 1]] * 5 + [[0] * 6], dtype=torch.bool)},
    "alibi": {"bias": regard.alibi(torch.tensor([0.5, 0.1], dtype=torch.float64))},
    "additive": {"score": regard.Additive(torch.linspace(-1, 1, 8, dtype=torch.float64)), "mask": regard.causal()},
    "reference": {"mask": regard.causal(), "backend": "reference"},
}


@pytest.mark.parametrize("call", CALLS)
def test_mapped_over_an_axis(call: str) -> None:
    """vmap, and vmap of a gradient: what a loop gives; NaN in what is masked still reaches nothing."""
    many = torch.randn(3, 2, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def attend(x: torch.Tensor) -> torch.Tensor:
        return regard.attention(x, x, x, **CALLS[call]).output

    gradient = torch.func.grad(lambda x: attend(x).square().sum())
    for function in (attend, gradient):
        torch.testing.assert_close(torch.vmap(function)(many), torch.stack([function(x) for x in many]))


def test_mapped_over_masked_nan() -> None:
    many = torch.randn(3, 2, 2, 6, 8, generator=torch.Generator().manual_seed(3))
    spoilt, mask = many.clone(), regard.padding(torch.tensor([3, 6]))
    spoilt[:, 0, :, 3:] = torch.nan
    mapped = torch.vmap(lambda query, key: regard.attention(query, key, key, mask=mask).output)
    torch.testing.assert_close(mapped(many, spoilt), mapped(many, many))
