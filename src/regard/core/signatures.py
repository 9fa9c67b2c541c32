"""The signature of an attention call: a cache key of all its arguments but the values of its tensors.

Calls with equal signatures pass the same checks and use the same backend, unless a check or a backend depends on the
values of the tensors.
"""

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.core.masks import Band
from regard.core.normalizers import Entmax, Hard, Sigmoid, Softmax, Sparsemax
from regard.core.requests import Entropy, Full, LogSumExp, Received, Rows, TopWeights
from regard.core.scores import Cosine, Dot, ScaledDot
from regard.core.transforms import peek
from regard.kernels import cuda_graphs

# Functions of torch._C, which are faster to call than their wrappers in Python.
_autocasts, _traces = torch._C._is_any_autocast_enabled, torch._C._is_tracing
_deterministic, _modes = torch._C._get_deterministic_algorithms, torch._C._len_torch_dispatch_stack
_UNKNOWN = "unknown"  # returned for an object or tensor that has no cache key


def signature(
    query: Any,
    key: Any,
    value: Any,
    score: object,
    normalize: object,
    mask: object,
    bias: object,
    dropout: object,
    request: object,
) -> Hashable | None:
    """Return the signature of an attention call, or None if it has none.

    A call has no signature if it uses classes defined by the caller, or runs under torch.compile, torch.func or
    autocast. The code is one flat function, because every call that is not found in `recent_calls` computes its
    signature.
    """
    if torch.compiler.is_compiling() or not type(query) is type(key) is type(value) is Tensor:
        return None
    if type(dropout) is not float or _autocasts() or _traces() or peek() is not None or forward_ad._current_level >= 0:
        return None
    if _modes():  # a torch dispatch mode may replace tensors by tensors without memory
        return None
    records = records_of(score, normalize, mask, bias, request)
    if _UNKNOWN in records or not query.layout is key.layout is value.layout is torch.strided:
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():
        return None
    try:
        return (
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            query.device,
            key.device,
            value.device,
            query.requires_grad,
            key.requires_grad,
            value.requires_grad,
            torch.is_grad_enabled(),
            _deterministic(),
            cuda_graphs.recording,
            dropout,
            records,
        )
    except RuntimeError:  # nested tensors have no shape
        return None


def records_of(score: object, normalize: object, mask: object, bias: object, request: object) -> tuple[Any, ...]:
    """Return the cache key of the score, normaliser, mask, bias and request of a call."""
    return (
        (score.scale, score.softcap) if type(score) is ScaledDot else record_key(score),
        None if type(normalize) is Softmax else record_key(normalize),
        None if mask is None else record_key(mask),
        None if bias is None else record_key(bias),
        None if request is None else record_key(request),
    )


def record_key(record: object) -> Any:
    """Return the cache key of a score, mask or similar object: its class, its fields, and shape, dtype and device of
    its tensors."""
    kind = type(record)
    describe = _DESCRIBED.get(kind)
    if describe is None:
        if not kind.__module__.startswith("regard.") or not is_dataclass(kind):
            return _UNKNOWN  # the results of a class defined by the caller may depend on any state
        describe = _DESCRIBED[kind] = _by_fields(kind)
    return describe(record)


def _by_fields(kind: type) -> Callable[[Any], Any]:
    """Return the function that computes the cache key of instances of this dataclass from their fields."""
    names = tuple(field.name for field in fields(kind) if field.compare)

    def described(record: Any) -> Any:
        parts = [_part(getattr(record, name)) for name in names]
        if _UNKNOWN in parts:
            return _UNKNOWN
        tensors = {id(value) for name in names if isinstance(value := getattr(record, name), Tensor)}
        return kind, len(tensors), *parts  # distinguishes `Segments` whose queries and keys share one tensor of ids

    return described


def _part(value: Any) -> Any:
    """Return the cache key of a dataclass field: a number or string is its own key."""
    if value is None or type(value) in _PLAIN:
        return value
    return _tensor(value) if isinstance(value, Tensor) else record_key(value)


def _tensor(tensor: Any) -> Any:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.layout is not torch.strided:
        return _UNKNOWN
    if tensor.is_neg():
        return _UNKNOWN
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _rows(request: Rows) -> Any:
    """Return the cache key of a `Rows` request, which includes the row numbers.

    A request has no key if it has more than 64 row numbers or if they are not on the CPU.
    """
    if isinstance(request.index, slice):
        edges = (request.index.start, request.index.stop, request.index.step)
        return (Rows, slice, *edges) if all(edge is None or type(edge) is int for edge in edges) else _UNKNOWN
    few = request.index.device.type == "cpu" and request.index.numel() <= 64
    return (Rows, *request.index.tolist()) if few and type(request.index) is Tensor else _UNKNOWN


def _hard(normalize: Hard) -> Any:
    return _UNKNOWN if isinstance(normalize.expected, Tensor) else normalize


_PLAIN = (int, float, bool, str)
# For the class of an object, such as a mask or a tensor, the function that computes the cache key of the object. Other
# classes are added at first use.
_DESCRIBED: dict[type, Callable[[Any], Any]] = {
    Rows: _rows,
    Hard: _hard,
    Tensor: _tensor,
    torch.nn.Parameter: _tensor,
}
# Instances of these classes cannot change and hold no tensors; those of `Hard` that hold a tensor have no cache key.
WITHOUT_TENSORS = {
    *(ScaledDot, Dot, Cosine, Band),
    *(Softmax, Entmax, Sparsemax, Sigmoid, Hard),
    *(Full, TopWeights, Received, Entropy, LogSumExp),
}
