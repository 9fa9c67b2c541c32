"""Large new tensors on huge pages: the request reaches the operating system, and results are as before."""

import sys
from pathlib import Path

import pytest
import torch

import regard
from regard.kernels.huge_pages import LARGE, on_huge_pages

MAPS = Path("/proc/self/smaps")
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

linux = pytest.mark.skipif(
    sys.platform != "linux" or not _HUGE.exists() or not MAPS.exists(), reason="this system has no huge pages"
)


def requested(address: int) -> bool:
    """Return whether huge pages are requested for the memory at an address: flag hg of its mapping."""
    inside = False
    for line in MAPS.read_text().splitlines():
        first, _, _ = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, stop = (int(edge, 16) for edge in first.split("-"))
            inside = start <= address < stop
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the address is not mapped")


@linux
def test_huge_pages_are_requested_for_a_large_tensor() -> None:
    tensor = torch.empty(2 * LARGE // 4)
    middle = tensor.data_ptr() + tensor.nbytes // 2
    assert not requested(middle)
    assert on_huge_pages(tensor) is tensor
    assert requested(middle)


@linux
def test_the_output_of_a_large_call_is_on_huge_pages() -> None:
    """The first and last rows are those of calls with these rows alone."""
    torch.manual_seed(3)
    query, key = torch.randn(LARGE // 4 // 64 + 100, 64), torch.randn(3, 64)
    output = regard.attention(query, key, key).output
    assert requested(output.data_ptr() + output.nbytes // 2)
    for rows in (slice(0, 50), slice(-50, None)):
        exact = torch.softmax(query[rows].double() @ key.double().mT / 8, -1) @ key.double()
        torch.testing.assert_close(output[rows].double(), exact, rtol=1e-5, atol=1e-5)


def test_small_tensors_are_left_alone() -> None:
    tensor = torch.arange(5.0)
    assert on_huge_pages(tensor) is tensor
    assert tensor.tolist() == [0, 1, 2, 3, 4]
