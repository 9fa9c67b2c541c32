"""Linear attention with elu or Performer features on the CPU in compiled C: one parallel region per pass.

All tensors of a head stay in the processor's cache until its output is computed. Reference implementation:
`regard.core.linear`.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from regard.kernels.huge_pages import on_huge_pages
from regard.kernels.native_library import library

_FILES = ("dot_attention.c", "linear_attention.c")  # the second file calls functions of the first
_CHUNK = 32  # number of positions in a causal chunk
_WIDEST = 512  # the largest size of a query, key or value
_SUMS = 2**18  # the largest number of elements of S, the sums of a head: features times size of the values
# A call uses several threads if its number of elements, multiplied by features / size, is at least this.
_PARALLEL = 2**18
_VECTOR = 16  # the number of float32 in the widest SIMD vector
_ANY = ctypes.c_void_p


class Done(NamedTuple):
    """The output (…, q, e), the divisors (…, q, 1), and whether all features, values and divisors are within the
    bounds of the C code (`fine`)."""

    output: Tensor
    divisor: Tensor
    fine: bool


def serves(query: Tensor, key: Tensor, value: Tensor, features: int) -> bool:
    """Return whether the loops can compute query (…, q, d), key (…, k, d) and value (…, k, e) with `features` features.

    The tensors have one or two leading axes: heads, or batch and heads.
    """
    if query.dtype not in (torch.float32, torch.bfloat16) or max(query.shape[-1], value.shape[-1]) > _WIDEST:
        return False
    if features * value.shape[-1] > _SUMS:
        return False
    heads = query.shape[:-2].numel()
    # For large tensors with fewer heads than threads, torch's products are faster, because in them several threads
    # share the work of a head.
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
    """Performer's directions as rows and as columns of a matrix, padded with zeros; `pointers` are None for elu."""

    def __init__(self, projection: Tensor | None) -> None:
        self.pointers: tuple[int | None, int | None] = None, None
        self.strides = 0, 0
        if projection is None:
            return
        # Rows are padded to an odd number of SIMD vectors: with an even number, often a power of two, rows would
        # compete for the same few sets of the processor's cache.
        self.rows, self.columns = (
            functional.pad(t, (0, (_VECTOR - t.shape[-1]) % (2 * _VECTOR))).contiguous()
            for t in (projection, projection.mT)
        )
        self.pointers = self.rows.data_ptr(), self.columns.data_ptr()
        self.strides = self.rows.stride(0), self.columns.stride(0)


def _shape(
    query: Tensor, key: Tensor, value: Tensor, projection: Tensor | None, matrices: _Matrices, causal: bool
) -> Any:
    """Return the fields of the C structure `linear_shape` for a call."""
    query, key, value = (t if t.ndim == 4 else t.unsqueeze(0) for t in (query, key, value))
    batch, heads, queries, size = query.shape
    keys, value_size = value.shape[2:]
    count = size if projection is None else projection.shape[0]  # the number of features
    # Without a causal mask, compute all pairs (chunk 1) if that takes fewer multiplications than the sums over keys.
    sums = (queries + keys) * count * value_size
    chunk = int(queries * keys * (count + value_size) < sums)
    if causal:  # for short sequences, one chunk of all positions makes the sums over many features unnecessary
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
    """Return output and divisors. If `fine` is False, rows of the output and of the divisors may be wrong.

    `projection` (m, d) holds Performer's directions divided by d^¼, in float32; it is None for elu features.
    """
    functions = _functions()
    assert functions is not None  # the caller has tested serves()
    matrices = _Matrices(projection)
    output = on_huge_pages(query.new_empty(*query.shape[:-1], value.shape[-1]))
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
    """Return the gradients of query, key and value, for a call whose forward pass returned `fine`."""
    functions = _functions()
    assert functions is not None  # the caller has tested serves()
    matrices = _Matrices(projection)
    change = change.contiguous()
    grads = [on_huge_pages(t.new_empty(t.shape)) for t in (query, key, value)]
    functions[1](
        _shape(query, key, value, projection, matrices, causal), query.data_ptr(), key.data_ptr(), value.data_ptr(),
        *matrices.pointers, output.data_ptr(), divisor.data_ptr(), change.data_ptr(),
        *[grad.data_ptr() for grad in grads], _threads(query, key, value, projection),
    )  # fmt: skip
    return grads[0], grads[1], grads[2]
