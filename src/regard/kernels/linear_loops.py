"""Linear attention with elu features on the CPU in compiled C: one parallel region for each pass.

A head stays in the cache from its features to its output. Reference implementation: `regard.core.linear`.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.kernels.native_library import library

_FILES = ("dot_attention.c", "linear_attention.c")  # the second uses the products of the first
_CHUNK = 64  # number of positions of a causal chunk
_WIDEST = 512  # the largest size of a vector
_PARALLEL = 2**18  # elements from which on a call uses several threads
_ANY = ctypes.c_void_p


class Done(NamedTuple):
    """The output (…, q, e), the divisors (…, q, 1), and whether all numbers are within the bounds."""

    output: Tensor
    divisor: Tensor
    fine: bool


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the loops compute query (…, q, d), key (…, k, d) and value (…, k, e), with one or two axes before
    them."""
    if query.dtype not in (torch.float32, torch.bfloat16) or max(query.shape[-1], value.shape[-1]) > _WIDEST:
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
    forward.argtypes, backward.argtypes = [_ANY] * 6 + [ctypes.c_long], [_ANY] * 10 + [ctypes.c_long]
    forward.restype, backward.restype = ctypes.c_int, None
    return forward, backward


def _shape(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Any:
    """Return the numbers of `linear_shape` in C."""
    query, key, value = (t if t.ndim == 4 else t.unsqueeze(0) for t in (query, key, value))
    batch, heads, queries, size = query.shape
    keys, value_size = value.shape[2:]
    # The products of all pairs, if they are fewer than those with sums over the keys.
    sums = (queries + keys) * size * value_size
    chunk = _CHUNK if causal else int(queries * keys * (size + value_size) < sums)
    numbers = [batch, heads, queries, keys, size, value_size, int(query.dtype == torch.bfloat16), int(causal), chunk]
    numbers += [step for t in (query, key, value) for step in t.stride()[:3]]
    return (ctypes.c_long * len(numbers))(*numbers)


def _threads(*tensors: Tensor) -> int:
    return torch.get_num_threads() if sum(t.numel() for t in tensors) >= _PARALLEL else 1


def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Done:
    """Return output and divisors; of rows after a number that is not fine, they may be wrong."""
    functions = _functions()
    assert functions is not None  # checked by serves()
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    divisor = query.new_empty((*query.shape[:-1], 1), dtype=torch.float32)
    bad = functions[0](
        _shape(query, key, value, causal), query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr(),
        divisor.data_ptr(), _threads(query, key, value),
    )  # fmt: skip
    return Done(output, divisor, not bad)


def backward(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, divisor: Tensor, change: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, of a call that was fine."""
    functions = _functions()
    assert functions is not None  # checked by serves()
    change = change.contiguous()
    grads = [t.new_empty(t.shape) for t in (query, key, value)]
    functions[1](
        _shape(query, key, value, causal), query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr(),
        divisor.data_ptr(), change.data_ptr(), *[grad.data_ptr() for grad in grads], _threads(query, key, value),
    )  # fmt: skip
    return grads[0], grads[1], grads[2]
