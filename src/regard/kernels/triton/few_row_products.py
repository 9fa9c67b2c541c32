"""Float32 matrix products of a few rows, for loops in which each step depends on the previous product.

cuBLAS computes float32 products without tensor cores and, for so few rows, uses half of the device. This kernel
computes a product as three TF32 products of numbers split in two, which is as accurate as float32. The summed axis may
be split into parts, whose products the caller adds up.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _DEPTH = 32, 64, 64
_MOST = 512  # largest number of rows for this kernel; with more rows, cuBLAS uses the whole device
_SHARE = 512  # a summed axis is split into parts of about this length


@triton.jit
def _product(
    left, right, added, out, M, N, K, share, l_w, l_m, r_w, r_k, r_n, a_w, a_m, o_p, o_w, o_m,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    w, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    rows, columns = (m < M)[:, None], (n < N)[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    if added is not None:
        total += tl.load(added + w * a_w + m[:, None] * a_m + n[None, :], mask=rows & columns, other=0.0)
    for start in tl.range(part * share, tl.minimum(part * share + share, K), BK):
        k = start + tl.arange(0, BK)
        a = tl.load(left + w * l_w + m[:, None] * l_m + k[None, :], mask=rows & (k < K)[None, :], other=0.0)
        b = tl.load(right + w * r_w + k[:, None] * r_k + n[None, :] * r_n, mask=(k < K)[:, None] & columns, other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32x3")
    tl.store(out + part * o_p + w * o_w + m[:, None] * o_m + n[None, :], total, mask=rows & columns)


def serves(rows: Tensor) -> bool:
    """Return whether `multiply` should compute a product of rows (…, m, k).

    The result is True if the rows are few, float32 precision is required, and the device has TF32.
    """
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    return rows.dtype == torch.float32 and rows.shape[-2] <= _MOST and exact and _knows(rows.device)


@functools.cache
def _knows(device: torch.device) -> bool:
    """Return whether the device can run the kernel: NVIDIA GPUs from Ampere on, and CPUs in Triton's interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def parts(summed: int) -> int:
    """Return the number of parts into which a summed axis of this length should be split."""
    return max(1, summed // _SHARE)


def multiply(left: Tensor, right: Tensor, out: Tensor, *, added: Tensor | None = None) -> Tensor:
    """Write added + left @ right into `out` and return it.

    The operands are batches of w matrices: left (w, m, k), right (w, k, n) and added (w, m or 1, n).
    `out` is (w, m, n), or (p, w, m, n): then `left @ right` is split along k into p parts, which the caller adds up;
    `added` is added to each part. The rows of `left`, `added` and `out` are contiguous. Reference implementation:
    `torch.baddbmm`.
    """
    count, rows, summed = left.shape
    columns, pieces = right.shape[-1], len(out) if out.dim() == 4 else 1
    share = triton.cdiv(triton.cdiv(summed, pieces), _DEPTH) * _DEPTH
    more = (0, 0) if added is None else (added.stride(0), added.stride(1) if added.shape[1] > 1 else 0)
    steps = out.stride()[:3] if out.dim() == 4 else (0, *out.stride()[:2])
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS), count * pieces)
    _product[grid](
        left, right, added, out, rows, columns, summed, share, *left.stride()[:2], *right.stride(), *more, *steps,
        PARTS=pieces, BM=_ROWS, BN=_COLUMNS, BK=_DEPTH, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
