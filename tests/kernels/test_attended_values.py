"""The kernel that corrects weighted sums with values of NaN and Inf, compared with loops over keys in Python."""

import math

import pytest
import torch
from torch import Tensor

from interpreting import DEVICES

SPOILT = {"nan": [math.nan], "inf": [math.inf], "-inf": [-math.inf], "both": [math.inf, -math.inf], "none": []}


def by_loops(weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Return the weighted sums of the values over the keys that each query may attend, in float64."""
    b, h, q, k = weights.shape
    output = torch.zeros(b, h, q, value.shape[-1], dtype=torch.float64)
    allowed, group = allowed.expand(b, h, q, k), h // value.shape[1]
    for n, head, i in torch.cartesian_prod(torch.arange(b), torch.arange(h), torch.arange(q)).tolist():
        for j in allowed[n, head, i].nonzero().flatten().tolist():
            output[n, head, i] += weights[n, head, i, j].double() * value[n, head // group, j].double()
    return output


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_count_only_where_they_may_be_attended(device: str, spoilt: str, dtype: torch.dtype) -> None:
    from regard.kernels.triton.attended_values import repair

    b, h, q, k, e = 2, 2, 67, 71, 19
    allowed = torch.rand(b, 1, q, k) < 0.4
    allowed[:, :, 3] = False
    weights = (torch.rand(b, h, q, k) * allowed + 0.01 * allowed).to(dtype)
    # The values have one key head, and are stored in the memory layout (b, k, 1, e).
    value = torch.randn(b, k, 1, e).transpose(1, 2).to(dtype)
    for place, number in enumerate(SPOILT[spoilt]):
        value[1, 0, 5 + 60 * place, 2] = number
    given = [tensor.to(device) for tensor in (weights, value, allowed)]
    output = given[0] @ given[1]
    repair(output, *given)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        output.double().cpu(), by_loops(weights, value, allowed), rtol=near, atol=near, equal_nan=True
    )
