"""Every score × normaliser × mask or bias × backend against the oracle, in both precisions."""

import pytest
import torch
from torch.testing import assert_close

import regard
from cases import PLACES, SCORES, answer, attend, paths
from regard.core.backends import flex
from regard.core.problem import build

TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 2e-5}}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", paths())
def test_agrees_with_the_oracle(path: str, place: str, dtype: torch.dtype, record_property) -> None:
    _, score, normalize = path.split("/")
    inputs, where = [tensor.to(dtype) for tensor in SCORES[score].inputs()], PLACES[place]
    attended = attend(path, inputs, mask=where.mask, bias=where.bias(dtype), weights=regard.full())

    expected = answer(score, normalize, place)
    assert attended.output.dtype == attended.weights.dtype == dtype
    assert_close(attended.output.double(), expected.output, **TOLERANCE[dtype])
    assert_close(attended.weights.double(), expected.weights, **TOLERANCE[dtype])
    differences = (attended.output - expected.output, attended.weights - expected.weights)
    error = max(difference.abs().max().item() for difference in differences)
    record_property("combination", (str(dtype).removeprefix("torch."), error))


def test_at_least_300_combinations() -> None:
    assert len(paths()) * len(PLACES) >= 300


# FlexAttention: `|` and `~` have no cheap list of blocks, everything else it is given as rules for one pair

LOWERED = [name for name in PLACES if "|" not in name and "~" not in name]


@pytest.mark.usefixtures("as_installed")  # it traces the rules, and cannot trace the checks
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("score", "place"),
    [
        *(("scaled", place) for place in LOWERED),
        *(("softcap", place) for place in LOWERED),
        *((score, "alibi") for score in ("dot", "cosine", "bilinear", "bilinear-heads")),
    ],
)
def test_the_rules_given_to_flex_agree_with_the_oracle(score: str, place: str) -> None:
    """Uncompiled it runs anywhere: what is tested here is the lowering, in test_cuda.py the kernel."""
    query, key, value, *parameters = SCORES[score].inputs()
    where = PLACES[place]
    problem = build(
        query, key, value, SCORES[score].build(*parameters), regard.Softmax(), where.mask, where.bias(torch.float64),
        0.0, None, None,
    )  # fmt: skip
    output = flex.attend(problem, compiled=False).output
    assert_close(output, answer(score, "softmax", place).output, rtol=1e-5, atol=1e-6)
