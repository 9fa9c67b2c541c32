"""Local attention with dot products on the CPU in compiled C: one parallel region per forward or backward pass.

For each query only the keys and values in its window are read. The arithmetic is float32, for bfloat16 inputs too.
Reference implementation: the operations of `regard.core.local`.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from regard.kernels.huge_pages import on_huge_pages
from regard.kernels.native_library import library

_FILE = "local_attention.c"
_PARALLEL = 2**18  # a call with at least this many multiplications uses several threads
_ANY = ctypes.c_void_p


@functools.cache
def available() -> bool:
    """Return whether the C library could be compiled and loaded."""
    return library(__package__ or "", _FILE) is not None


@functools.cache
def _functions() -> tuple[Any, Any]:
    loaded = library(__package__ or "", _FILE)
    assert loaded is not None  # the caller has tested available()
    forward, backward = loaded.regard_local_attention, loaded.regard_local_gradients
    forward.argtypes = [_ANY] * 8 + [ctypes.c_double, ctypes.c_long]
    backward.argtypes = [_ANY] * 11 + [ctypes.c_double, ctypes.c_long]
    forward.restype, backward.restype = ctypes.c_int, None
    return forward, backward


class Loops:
    """The C loops for query (b, h, q, d), key (b, h, k, d), value (b, h, k, e) and centre (b, h, q) of fixed layouts.

    The constructor reads shapes, strides and dtype once; `forward` and `gradients` require tensors that have the same.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, centre: Tensor, reach: int, scale: float, gaussian: bool
    ) -> None:
        (batch, heads, queries, size), (keys, value_size) = query.shape, value.shape[2:]
        numbers = [batch, heads, queries, keys, size, value_size, reach, int(query.dtype == torch.bfloat16)]
        numbers += [int(gaussian), *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *centre.stride()]
        self.numbers, self.scale, self.gaussian = (ctypes.c_long * len(numbers))(*numbers), scale, gaussian
        self.output = (batch, heads, queries, value_size)
        self.weights = (batch, heads, queries, 2 * reach + 1)
        self.parallel = batch * heads * queries * (2 * reach + 1) * (size + value_size) >= _PARALLEL

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, centre: Tensor, lengths: Tensor | None, learning: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]] | None:
        """Return output, weights and an empty tuple, because `gradients` needs no tensors besides the inputs.

        Return None if a centre is not finite.
        """
        output, weights = (on_huge_pages(query.new_empty(shape)) for shape in (self.output, self.weights))
        bad = _functions()[0](
            self.numbers, query.data_ptr(), key.data_ptr(), value.data_ptr(), centre.data_ptr(),
            None if lengths is None else lengths.data_ptr(), output.data_ptr(), weights.data_ptr(), self.scale,
            self._threads(),
        )  # fmt: skip
        return None if bad else (output, weights, ())

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, centre: Tensor, lengths: Tensor | None, change: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of query, key, value and centre."""
        change = change.contiguous()
        dquery, dkey, dvalue = (on_huge_pages(t.new_empty(t.shape)) for t in (query, key, value))
        dcentre = centre.new_empty(centre.shape) if self.gaussian else None
        _functions()[1](
            self.numbers, query.data_ptr(), key.data_ptr(), value.data_ptr(), centre.data_ptr(),
            None if lengths is None else lengths.data_ptr(), change.data_ptr(), dquery.data_ptr(), dkey.data_ptr(),
            dvalue.data_ptr(), None if dcentre is None else dcentre.data_ptr(), self.scale, self._threads(),
        )  # fmt: skip
        return dquery, dkey, dvalue, dcentre

    def _threads(self) -> int:
        return torch.get_num_threads() if self.parallel else 1
