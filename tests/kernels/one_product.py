"""A kernel of one product of matrices, (16, 16) each, for the tests of the products that all kernels share."""

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
