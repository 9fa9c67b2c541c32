"""A Triton kernel that multiplies two 16 × 16 matrices, to test the `product` function that other kernels call."""

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from regard.kernels.triton.additive.pairs import product


@triton.jit
def one_product(a, b, out, precision: tl.constexpr):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    found = product(tl.load(a + 16 * i + j), tl.load(b + 16 * i + j), tl.zeros((16, 16), tl.float32), precision)
    tl.store(out + 16 * i + j, found)
