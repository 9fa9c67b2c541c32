"""The compiled loops of additive attention against tanh in float64, and the loading of their library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard.kernels import native_library
from regard.kernels.additive import pair_loops

pytestmark = pytest.mark.skipif(native_library.compiler() is None, reason="NO C COMPILER: the loops are not tested")

# (slices, rows, columns, features, scale of the inputs)
SHAPES = (
    (1, 1, 1, 1, 1.0),
    (2, 37, 41, 23, 1.0),
    (3, 5, 67, 64, 0.05),
    (2, 33, 7, 17, 0.3),
    (2, 13, 11, 16, 15.0),
    (1, 67, 9, 71, 1.0),
)


def operands(shape: tuple[int, int, int, int, float]) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    torch.manual_seed(3)
    z, q, k, f, size = shape
    query, key = torch.randn(z, q, f).mul(size).clamp(-40, 40), torch.randn(z, k, f).mul(size).clamp(-40, 40)
    near = float(query.abs().max() + key.abs().max()) <= 2
    return query, key, torch.randn(z, f), torch.randn(z, q, k), near


def factors(query: Tensor, key: Tensor, near: bool) -> tuple[Tensor, Tensor]:
    return (torch.expm1(2 * query), torch.expm1(2 * key)) if near else (torch.exp(2 * query), torch.exp(2 * key))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores(shape: tuple[int, int, int, int, float]) -> None:
    query, key, weight, _, near = operands(shape)
    hidden = torch.tanh(query.double().unsqueeze(-2) + key.double().unsqueeze(-3))
    true = (hidden * weight.double()[:, None, None]).sum(-1)
    found = pair_loops.scores(near)(*factors(query, key, near), weight)
    # The allowed error is a few float32 roundings, relative to the sum Σ |weight · tanh| of a score's terms.
    least = 0 if near else weight.abs().sum(-1).max()
    limit = 4e-7 * (hidden.abs() * weight.double().abs()[:, None, None]).sum(-1).clamp_min(least)
    assert ((found.double() - true).abs() <= limit).all()


@pytest.mark.parametrize("shared", [False, True], ids=["a weight for each slice", "one weight"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_in_one_call(shape: tuple[int, int, int, int, float], shared: bool) -> None:
    """With 5 rows and 67 columns, each tanh is computed by itself; with 37 and 41, by exponentials."""
    query, key, weight, _, near = operands(shape)
    weight = weight[0] if shared else weight
    hidden = torch.tanh(query.double().unsqueeze(-2) + key.double().unsqueeze(-3))
    by = weight.double().expand(shape[0], -1)[:, None, None]
    found = pair_loops.all_scores(query, key, weight, reach=43.0, near=2.0)
    assert found is not None
    least = 0 if near else weight.abs().sum(-1).max()
    limit = 6e-7 * (hidden.abs() * by.abs()).sum(-1).clamp_min(least)
    assert ((found.double() - (hidden * by).sum(-1)).abs() <= limit).all()


@pytest.mark.parametrize("number", [50.0, float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1], ids=["query", "key"])
def test_numbers_beyond_the_reach_of_exponentials_are_refused(place: int, number: float) -> None:
    given = [torch.zeros(1, 20, 8), torch.zeros(1, 30, 8)]
    given[place][0, 7, 3] = number
    assert pair_loops.all_scores(given[0], given[1], torch.ones(8), reach=43.0, near=2.0) is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_gradients(shape: tuple[int, int, int, int, float]) -> None:
    query, key, _, change, near = operands(shape)
    hidden = torch.tanh(query.double().unsqueeze(-2) + key.double().unsqueeze(-3))
    by = change.double().unsqueeze(-1)
    slope, plain, column_slope = pair_loops.sums(near)(*factors(query, key, near), change)
    limit, column_limit = (1e-6 * by.abs().sum(axis) for axis in (-2, -3))
    assert ((column_slope.double() - (by * (1 - hidden**2)).sum(-3)).abs() <= column_limit).all()
    assert ((slope.double() - (by * (1 - hidden**2)).sum(-2)).abs() <= limit).all()
    assert ((plain.double() - (by * hidden).sum(-2)).abs() <= limit).all()


def test_products_beyond_float32() -> None:
    """tanh(q + k) from e^{2q} e^{2k} is ±1 even if this product overflows or underflows."""
    query = torch.tensor([[[43.0, -43.0, 43.0]]])
    key = torch.tensor([[[43.0, -43.0, -43.0]]])
    found = pair_loops.scores(False)(*factors(query, key, False), torch.tensor([[1.0, 2.0, 4.0]]))
    torch.testing.assert_close(found, torch.tensor([[[1.0 - 2.0 + 0.0]]]))


def test_threads_change_no_bit() -> None:
    query, key, weight, change, near = operands((3, 101, 67, 33, 1.0))
    rows, columns = factors(query, key, near)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(
                (pair_loops.scores(near)(rows, columns, weight), *pair_loops.sums(near)(rows, columns, change))
            )
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


SCRIPT = """
from regard.kernels.additive import pair_loops
print(pair_loops.available())
"""


def process(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "REGARD_CACHE": str(cache), **environment}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=given, capture_output=True, text=True, check=True)


@pytest.mark.process
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert process(tmp_path).stdout == "True\n"
    (library,) = (tmp_path / "native").iterdir()
    before = library.stat().st_mtime_ns
    assert process(tmp_path).stdout == "True\n"
    assert [path.stat().st_mtime_ns for path in (tmp_path / "native").iterdir()] == [before]


@pytest.mark.process
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native").chmod(0o777)
    done = process(tmp_path)
    assert done.stdout == "False\n"
    assert "others may write it" in done.stderr


@pytest.mark.process
def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such thing >&2\nexit 1\n')
    broken.chmod(0o755)
    done = process(tmp_path, CC=str(broken))
    assert done.stdout == "False\n"
    assert "no such thing" in done.stderr
