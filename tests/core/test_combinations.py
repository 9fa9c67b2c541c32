"""Scores, normalisers, masks and biases on every backend against the oracle, in float32 and float64."""

import itertools

import pytest
import torch
from torch.testing import assert_close

import regard
from cases import BACKENDS, NORMALIZERS, PLACES, SCORES, answer, attend, paths, serves
from regard.core.backends import flex
from regard.core.problem import build

pytestmark = pytest.mark.slow

TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 2e-5}}


def combinations() -> list[tuple[str, str]]:
    """Return combinations of a backend, a score, a normaliser and a mask in which every pair of these occurs.

    Pairs suffice: scores, masks and normalisers are computed one after another, so an error involves two of them. Each
    score is combined with each mask on each backend that supports it; the normalisers alternate.
    """
    found = []
    for backend in BACKENDS:
        scores = [score for score in SCORES if serves(backend, score, "softmax")]
        for p, place in enumerate(PLACES):
            for s, score in enumerate(scores):
                normalizers = [name for name in NORMALIZERS if serves(backend, score, name)]
                count = -(-len(normalizers) // len(scores))  # how many normalisers each score is tested with
                chosen = {(s + p + n * len(scores)) % len(normalizers) for n in range(count)}
                found += [(f"{backend}/{score}/{normalizers[n]}", place) for n in sorted(chosen)]
    return found


@pytest.mark.parametrize(("path", "place"), combinations())
def test_agrees_with_the_oracle(path: str, place: str, record_property) -> None:
    _, score, normalize = path.split("/")
    where, expected = PLACES[place], answer(score, normalize, place)
    for dtype, tolerance in TOLERANCE.items():
        inputs = [tensor.to(dtype) for tensor in SCORES[score].inputs()]
        attended = attend(path, inputs, mask=where.mask, bias=where.bias(dtype), weights=regard.full())
        assert attended.output.dtype == attended.weights.dtype == dtype
        assert_close(attended.output.double(), expected.output, **tolerance)
        assert_close(attended.weights.double(), expected.weights, **tolerance)
        differences = (attended.output - expected.output, attended.weights - expected.weights)
        error = max(difference.abs().max().item() for difference in differences)
        record_property("combination", (str(dtype).removeprefix("torch."), error))


LOOPS = ("dot", "scaled", "softcap", "cosine", "bilinear", "bilinear-heads")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("normalize", NORMALIZERS)
@pytest.mark.parametrize("score", LOOPS)
def test_the_compiled_loops_agree_with_the_oracle(score: str, normalize: str, place: str) -> None:
    """The loops compute float32 only. Random numbers of the oracle are exact in float32."""
    where, expected = PLACES[place], answer(score, normalize, place)
    inputs = [tensor.float() for tensor in SCORES[score].inputs()]
    options = {"mask": where.mask, "bias": where.bias(torch.float32), "weights": regard.full()}
    attended = attend(f"loops/{score}/{normalize}", inputs, **options)
    assert_close(attended.output.double(), expected.output, **TOLERANCE[torch.float32])
    assert_close(attended.weights.double(), expected.weights, **TOLERANCE[torch.float32])


def test_every_pair_is_among_the_combinations() -> None:
    found = {(*path.split("/"), place) for path, place in combinations()}
    promised = {(*path.split("/"), place) for path in paths() for place in PLACES}
    assert len(found) >= 300
    for first, second in itertools.combinations(range(4), 2):
        met, wanted = ({(each[first], each[second]) for each in group} for group in (found, promised))
        assert met == wanted


# Masks and biases that FlexAttention supports: functions of one pair of positions, without `|` and `~`.

LOWERED = [name for name in PLACES if "|" not in name and "~" not in name]


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")  # FlexAttention cannot trace the shape checks of the tests
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
    """Tests the masks as FlexAttention receives them, uncompiled on the CPU; test_cuda.py tests the compiled kernel."""
    query, key, value, *parameters = SCORES[score].inputs()
    where = PLACES[place]
    problem = build(
        query, key, value, SCORES[score].build(*parameters), regard.Softmax(), where.mask, where.bias(torch.float64),
        0.0, None, None,
    )  # fmt: skip
    output = flex.attend(problem, compiled=False).output
    assert_close(output, answer(score, "softmax", place).output, rtol=1e-5, atol=1e-6)
