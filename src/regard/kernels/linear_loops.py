"""Linear attention with elu or Performer features on the CPU in compiled C: one parallel region for each pass.

A head stays in the cache from its features to its output. Reference implementation: `regard.core.linear`.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from regard.kernels.native_library import library

_FILES = ("dot_attention.c", "linear_attention.c")  # the second uses the products of the first
_CHUNK = 64  # number of positions of a causal chunk
_WIDEST = 512  # the largest size of a vector
_SUMS = 2**18  # the largest number of sums of a head: features times size of the values
_PARALLEL = 2**18  # elements from which on a call uses several threads, fewer with more features than elements
_VECTOR = 16  # the largest number of elements of a vector
_ANY = ctypes.c_void_p


class Done(NamedTuple):
    """The output (…, q, e), the divisors (…, q, 1), and whether all numbers are within the bounds."""

    output: Tensor
    divisor: Tensor
    fine: bool


def serves(query: Tensor, key: Tensor, value: Tensor, features: int) -> bool:
    """Return whether the loops compute query (…, q, d), key (…, k, d) and value (…, k, e), with one or two axes before
    them, with this number of features."""
    if query.dtype not in (torch.float32, torch.bfloat16) or max(query.shape[-1], value.shape[-1]) > _WIDEST:
        return False
    if features * value.shape[-1] > _SUMS:
        return False
    heads = query.shape[:-2].numel()
    # With fewer heads than threads, the threads of torch's products share a head.
    few = heads < torch.get_num_threads() and query.numel() + key.numel() >= _PARALLEL
    return not few and all(t.stride(-1) == 1 for t in (query, key, value)) and _functions() is not None


@functools.cache
def _functions() -> tuple[Any, Any] | None:
    loaded = library(__package__ or "", *_FILES)
    if loaded is None:
        return None
    forward, backward = loaded.regard_linear_attention, loaded.regard_linear_gradients
    forward.argtypes, backward.argtypes = [_ANY] * 8 + [ctypes.c_long], [_ANY] * 12 + [ctypes.c_long]
    forward.restype, backward.restype = ctypes.c_int, None
    return forward, backward


class _Matrices:
    """Performer's directions in rows and in columns, padded with zeros for whole vectors; None for elu features."""

    def __init__(self, projection: Tensor | None) -> None:
        self.pointers: tuple[int | None, int | None] = None, None
        self.strides = 0, 0
        if projection is None:
            return
        # Strides of an odd number of vectors: others place the rows in the same few sets of the cache.
        self.rows, self.columns = (
            functional.pad(t, (0, (_VECTOR - t.shape[-1]) % (2 * _VECTOR))).contiguous()
            for t in (projection, projection.mT)
        )
        self.pointers = self.rows.data_ptr(), self.columns.data_ptr()
        self.strides = self.rows.stride(0), self.columns.stride(0)


def _shape(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, matrices: _Matrices, causal: bool
) -> Any:
    """Return the numbers of `linear_shape` in C."""
    query, key, value = (t if t.ndim == 4 else t.unsqueeze(0) for t in (query, key, value))
    batch, heads, queries, size = query.shape
    keys, value_size = value.shape[2:]
    count = size if projection is None else projection.shape[0]  # of features
    # The products of all pairs, if they are fewer than those with sums over the keys.
    sums = (queries + keys) * count * value_size
    chunk = int(queries * keys * (count + value_size) < sums)
    if causal:  # a single chunk of a few more positions saves the sums over many features
        few = queries * (count + value_size) <= 2 * count * value_size + _CHUNK * (count + value_size)
        chunk = max(queries, _CHUNK) if few and projection is not None else _CHUNK
    numbers = [batch, heads, queries, keys, size, value_size, int(query.dtype == torch.bfloat16), int(causal), chunk]
    numbers += [step for t in (query, key, value) for step in t.stride()[:3]]
    numbers += [count, *matrices.strides]
    return (ctypes.c_long * len(numbers))(*numbers)


def _threads(query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None) -> int:
    count = query.shape[-1] if projection is None else projection.shape[0]
    elements = query.numel() + key.numel() + value.numel()
    return torch.get_num_threads() if elements * count >= _PARALLEL * query.shape[-1] else 1


def forward(query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, causal: bool) -> Done:
    """Return output and divisors; of rows after a number that is not fine, they may be wrong.

    `projection` (m, d): Performer's directions divided by d^¼, in float32; None for elu features.
    """
    functions = _functions()
    assert functions is not None  # checked by serves()
    matrices = _Matrices(projection)
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    divisor = query.new_empty((*query.shape[:-1], 1), dtype=torch.float32)
    bad = functions[0](
        _shape(query, key, value, projection, matrices, causal), query.data_ptr(), key.data_ptr(), value.data_ptr(),
        *matrices.pointers, output.data_ptr(), divisor.data_ptr(), _threads(query, key, value, projection),
    )  # fmt: skip
    return Done(output, divisor, not bad)


def backward(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, output: Tensor, divisor: Tensor,
    change: Tensor, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, of a call that was fine."""
    functions = _functions()
    assert functions is not None  # checked by serves()
    matrices = _Matrices(projection)
    change = change.contiguous()
    grads = [t.new_empty(t.shape) for t in (query, key, value)]
    functions[1](
        _shape(query, key, value, projection, matrices, causal), query.data_ptr(), key.data_ptr(), value.data_ptr(),
        *matrices.pointers, output.data_ptr(), divisor.data_ptr(), change.data_ptr(),
        *[grad.data_ptr() for grad in grads], _threads(query, key, value, projection),
    )  # fmt: skip
    return grads[0], grads[1], grads[2]
