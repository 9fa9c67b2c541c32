"""Every score × normaliser × mask or bias × backend against the oracle, in both precisions."""

from functools import cache

import pytest
import torch

import oracles
import regard
from cases import NORMALIZERS, PLACES, SCORES, paths

TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 2e-5}}


@cache
def expected(score: str, normalize: str, place: str) -> tuple[torch.Tensor, torch.Tensor]:
    case = SCORES[score]
    query, key, value, *parameters = (tensor.tolist() for tensor in case.inputs())
    answer = oracles.attend(
        query, key, value, case.oracle(*parameters), NORMALIZERS[normalize].oracle,
        PLACES[place].allowed, PLACES[place].added,
    )  # fmt: skip
    return torch.tensor(answer.output, dtype=torch.float64), torch.tensor(answer.weights, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", paths())
def test_agrees_with_the_oracle(path: str, place: str, dtype: torch.dtype, record_property) -> None:
    backend, score, normalize = path.split("/")
    query, key, value, *parameters = (tensor.to(dtype) for tensor in SCORES[score].inputs())

    attended = regard.attention(
        query, key, value,
        score=SCORES[score].build(*parameters), normalize=NORMALIZERS[normalize].record,
        mask=PLACES[place].mask, bias=PLACES[place].bias(dtype), weights=regard.full(), backend=backend,
    )  # fmt: skip

    output, weights = expected(score, normalize, place)
    assert attended.output.dtype == attended.weights.dtype == dtype
    torch.testing.assert_close(attended.output.double(), output, **TOLERANCE[dtype])
    torch.testing.assert_close(attended.weights.double(), weights, **TOLERANCE[dtype])
    error = max((attended.output - output).abs().max().item(), (attended.weights - weights).abs().max().item())
    record_property("combination", (str(dtype).removeprefix("torch."), error))


def test_at_least_300_combinations() -> None:
    assert len(paths()) * len(PLACES) >= 300
