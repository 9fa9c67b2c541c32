"""Rows divided by their Euclidean norm on the CPU by one call of compiled C, with one more for the gradient.

Reference implementation: `regard.core.scores.unit`.
"""

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from regard.kernels.huge_pages import on_huge_pages
from regard.kernels.native_library import library

_FILE = "unit_rows.c"
_LARGEST = 1024  # the largest number of entries of a row (LARGEST in C)
_OF_THREAD = 2**16  # the number of entries for which one more thread is worthwhile
_ANY = ctypes.c_void_p


def serves(x: Tensor) -> bool:
    """Return whether the C code can compute the unit vectors of x (…, n, d), a plain tensor with at most four axes."""
    plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and 2 <= x.ndim <= 4
    return plain and 0 < x.shape[-1] <= _LARGEST and x.stride(-1) == 1 and library(__package__ or "", _FILE) is not None


@functools.cache
def _functions() -> tuple[Any, Any]:
    loaded = library(__package__ or "", _FILE)
    assert loaded is not None  # the caller has tested serves()
    forward, backward = loaded.regard_unit_rows, loaded.regard_unit_rows_gradient
    forward.argtypes, backward.argtypes = [*[_ANY] * 3, ctypes.c_long], [*[_ANY] * 4, ctypes.c_long]
    forward.restype = backward.restype = None
    return forward, backward


def unit_rows(x: Tensor) -> Tensor:
    """Return x / |x| for each row of x (…, n, d), in the dtype of x; rows of zeros stay zero, with a gradient of 0."""
    return _apply(x) if x.requires_grad and torch.is_grad_enabled() else _forward(x)


def _forward(x: Tensor) -> Tensor:
    out = on_huge_pages(x.new_empty(x.shape))
    _functions()[0](_numbers(x, x), x.data_ptr(), out.data_ptr(), _threads(x))
    return out


def _numbers(x: Tensor, change: Tensor) -> Any:
    """Return the struct `shape` of the C code."""
    batch, heads = (1, 1, *x.shape[:-2])[-2:]
    steps = [(0, 0, *tensor.stride()[:-1])[-3:] for tensor in (x, change)]
    numbers = [batch, heads, *x.shape[-2:], int(x.dtype == torch.bfloat16), *steps[0], *steps[1]]
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _threads(x: Tensor) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() // _OF_THREAD))


class _UnitRows(torch.autograd.Function):
    """The autograd function of `unit_rows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), change = ctx.saved_tensors, grads[0]
        if torch.is_grad_enabled():  # with create_graph=True, so the gradients may be differentiated again
            # Dividing by the largest entry first prevents overflow and underflow of the squares.
            largest = x.detach().float().abs().amax(-1, keepdim=True)
            largest = largest.masked_fill(largest == 0, math.inf)
            scaled, wide = x.float() / largest, change.float()
            norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
            norm = norm.masked_fill(norm == 0, math.inf)
            unit = scaled / norm
            return ((wide - unit * (unit * wide).sum(-1, keepdim=True)) / norm / largest).to(x.dtype)
        change = change.resolve_neg()
        change = change if change.stride(-1) == 1 else change.contiguous()
        x = x if x.stride(-1) == 1 else x.contiguous()  # hooks on saved tensors may have changed the strides
        out = on_huge_pages(x.new_empty(x.shape))
        _functions()[1](_numbers(x, change), x.data_ptr(), change.data_ptr(), out.data_ptr(), _threads(x))
        return out


# `_UnitRows.apply` without the rules for torch.func and for default arguments, which are not needed: calls inside
# torch.func are computed by torch operations.
_apply: Any = super(torch.autograd.Function, _UnitRows).apply  # pyrefly: ignore[missing-attribute]
