"""The loops of `exponential` over all pairs of query and key in compiled C: the scores, and the sums over pairs that
their backward pass needs."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.native_library import library

_FILE = "pair_loops.c"
_UNITS = 64  # number of parts into which a call is divided for the threads
_ROWS = 32  # smallest number of rows in a segment; each segment has its own sums over its rows
_FEW = 5  # with at least this many pairs for each query and key, exponentials take less time than a tanh for each pair
PARALLEL = 2**16  # a call with at least this many hidden units in all pairs uses several threads


def available() -> bool:
    """Return whether the C library could be compiled and loaded."""
    return library(__package__ or "", _FILE) is not None


def plain(queries: int, keys: int) -> bool:
    """Return whether a tanh for each pair takes less time than exponentials, for these numbers of queries and keys."""
    return queries * keys < _FEW * (queries + keys)


def form(queries: int, keys: int) -> str:
    """Return the name of the formula that is used for these numbers of queries and keys."""
    return "tanh (compiled)" if plain(queries, keys) else "exponential (compiled)"


def all_scores(query: Tensor, key: Tensor, weight: Tensor, reach: float, near: float) -> Tensor | None:
    """Return the scores (z, q, k) of query (z, q, f) and key (z, k, f), in one call of C, by the formula of `form`.

    All are contiguous; the weight is (f,) or (z, f). Where exponentials are used, the absolute values of query and key
    must be at most `reach`; the formula for small arguments is used if their sum is at most `near`. The result is None
    if a number is larger or not finite.
    """
    (slices, queries, size), keys = query.shape, key.shape[1]
    result, pairs = query.new_empty(slices, queries, keys), slices * queries * keys * size
    call = _function("regard_additive_scores", 4, 6, 2)
    bad = call(
        query.data_ptr(), key.data_ptr(), weight.data_ptr(), result.data_ptr(),
        slices, queries, keys, size, weight.numel() // size, int(plain(queries, keys)), reach, near,
        torch.get_num_threads() if pairs >= PARALLEL else 1,
    )  # fmt: skip
    return None if bad else result


def scores(near: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function that computes scores (z, q, k) of z slices from rows e^{2 query} (z, q, f), columns e^{2 key}
    (z, k, f) and weights (z, f).

    With `near`, rows and columns are e^{2 query} − 1 and e^{2 key} − 1. Reference implementation: `_eager_scores` in
    `exponential`, or with `near` `_eager_small_scores`.
    """
    name = "regard_near_scores" if near else "regard_far_scores"

    def run(rows: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
        result = rows.new_empty(*rows.shape[:-1], columns.shape[-2])
        rows, columns, weight = _padded(rows, columns, weight)
        _call(name, rows, columns, (weight, result))
        return result

    return run


def sums(near: bool) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return the function that computes Σ_j ds tanh' and Σ_j ds tanh, (z, q, f) each, and Σ_i ds tanh' (z, k, f).

    ds is the gradient of the score of query i and key j, and z the number of slices. Rows and columns are those of
    `scores`. Reference implementation: `_eager_sums` in `exponential`, or with `near` `_eager_small_sums`.
    """
    name = "regard_near_sums" if near else "regard_far_sums"

    def run(rows: Tensor, columns: Tensor, dscores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = rows.shape[-1]
        rows, columns = _padded(rows, columns)
        parts = segments(*rows.shape)
        slope, plain, by_column = (
            torch.empty_like(rows),
            torch.empty_like(rows),
            columns.new_empty(parts, *columns.shape),
        )
        _call(name, rows, columns, (dscores, slope, plain, by_column), parts)
        column_slope = by_column[0] if parts == 1 else by_column.sum(0)
        return slope[..., :size], plain[..., :size], column_slope[..., :size]

    return run


def segments(slices: int, rows: int, features: int) -> int:
    """Return the number of segments into which the rows of a slice are divided, enough to keep many cores busy.

    The number depends only on the shape, so the order of each sum, and its rounding, does not depend on the threads.
    """
    return max(1, min(rows // _ROWS, _UNITS // max(1, slices * -(-features // 64))))


def loaded() -> ctypes.CDLL:
    """Return the loaded C library; `available()` must be true."""
    lib = library(__package__ or "", _FILE)
    assert lib is not None  # the caller has tested available()
    return lib


@functools.cache
def lanes() -> int:
    """Return the number of float32 in a SIMD vector of the library."""
    return int(loaded().regard_lanes())


def _padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with features padded by zeros to whole SIMD vectors: zeros add nothing to any sum."""
    missing = -tensors[0].shape[-1] % lanes()
    return tuple(F.pad(t, (0, missing)) if missing else t for t in tensors)


def _call(name: str, rows: Tensor, columns: Tensor, others: tuple[Tensor, ...], *numbers: int) -> None:
    slices, n_rows, features = rows.shape
    tensors = (rows, columns, *others)
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
    sizes = (slices, n_rows, columns.shape[-2], features, *numbers, torch.get_num_threads())
    _function(name, len(tensors), len(sizes) - 1)(*[tensor.data_ptr() for tensor in tensors], *sizes)


@functools.cache
def _function(name: str, tensors: int, integers: int, floats: int = 0) -> Any:
    """Return the C function of this name; its last argument is the number of threads."""
    function = getattr(loaded(), name)
    numbers = [ctypes.c_long] * integers + [ctypes.c_double] * floats + [ctypes.c_long]
    function.argtypes = [ctypes.c_void_p] * tensors + numbers
    function.restype = ctypes.c_int if floats else None
    return function
