"""The signature of a call: a cache key of everything but the values of its tensors.

Calls with equal signatures pass the same checks and use the same backend, except for reasons that depend on values.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.core.biases import Alibi, DenseBias, Relative
from regard.core.masks import And, Band, Dense, Padding, Segments
from regard.core.normalizers import Entmax, Hard, Sigmoid, Softmax, Sparsemax
from regard.core.requests import Entropy, Full, LogSumExp, Received, Rows, TopWeights
from regard.core.scores import Additive, Bilinear, Cosine, Dot, ScaledDot
from regard.core.transforms import peek
from regard.kernels import cuda_graphs

# torch's own functions, which are faster to call than their wrappers in Python.
_autocasts, _traces = torch._C._is_any_autocast_enabled, torch._C._is_tracing
_deterministic, _modes = torch._C._get_deterministic_algorithms, torch._C._len_torch_dispatch_stack
_UNKNOWN = "unknown"  # marks a record or tensor that has no signature


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
    """Return the signature of a call; None for the caller's own classes, and inside compilers, torch.func and autocast.

    It is one flat function, because every call that is not recalled (`recent_calls`) computes it.
    """
    if torch.compiler.is_compiling() or not type(query) is type(key) is type(value) is Tensor:
        return None
    if type(dropout) is not float or _autocasts() or _traces() or peek() is not None or forward_ad._current_level >= 0:
        return None
    if _modes():  # a mode may replace tensors by ones without memory
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
    """Return the cache key of the records of a call."""
    return (
        (score.scale, score.softcap) if type(score) is ScaledDot else record_key(score),
        None if type(normalize) is Softmax else record_key(normalize),
        None if mask is None else record_key(mask),
        None if bias is None else record_key(bias),
        None if request is None else record_key(request),
    )


def record_key(record: object) -> Any:
    """Return the cache key of a record: its kind, its values, and the traits of its tensors."""
    described = _KINDS.get(type(record))
    return _UNKNOWN if described is None else described(record)


def _tensor(tensor: Any) -> Any:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.layout is not torch.strided:
        return _UNKNOWN
    if tensor.is_neg():
        return _UNKNOWN
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _padding(mask: Padding) -> Any:
    lengths = _tensor(mask.lengths)
    return _UNKNOWN if lengths is _UNKNOWN else (Padding, lengths, mask.plain)


def _segments(mask: Segments) -> Any:
    query_ids, key_ids = _tensor(mask.query_ids), _tensor(mask.key_ids)
    if _UNKNOWN in (query_ids, key_ids):
        return _UNKNOWN
    return Segments, mask.plain, mask.query_ids is mask.key_ids, query_ids, key_ids


def _and(mask: And) -> Any:
    left, right = record_key(mask.left), record_key(mask.right)
    return _UNKNOWN if _UNKNOWN in (left, right) else (And, left, right)


def _holding(name: str, *others: str) -> Callable[[Any], Any]:
    """Return a function that returns the key of records with one tensor and some Python values."""

    def described(record: Any) -> Any:
        tensor = _tensor(getattr(record, name))
        return _UNKNOWN if tensor is _UNKNOWN else (type(record), tensor, *[getattr(record, other) for other in others])

    return described


def _rows(request: Rows) -> Any:
    if isinstance(request.index, slice):
        edges = (request.index.start, request.index.stop, request.index.step)
        return (Rows, slice, *edges) if all(edge is None or type(edge) is int for edge in edges) else _UNKNOWN
    few = request.index.device.type == "cpu" and request.index.numel() <= 64
    return (Rows, *request.index.tolist()) if few and type(request.index) is Tensor else _UNKNOWN


def _hard(normalize: Hard) -> Any:
    return _UNKNOWN if isinstance(normalize.expected, Tensor) else normalize


def _itself(record: Any) -> Any:
    return record


_KINDS: dict[type, Callable[[Any], Any]] = {
    Dot: lambda score: Dot,
    Cosine: lambda score: (Cosine, score.scale),
    Bilinear: _holding("weight"),
    Additive: _holding("weight", "activation"),
    Band: lambda mask: (Band, mask.low, mask.high),
    Padding: _padding,
    Segments: _segments,
    Dense: _holding("tensor"),
    And: _and,
    DenseBias: _holding("tensor", "plain"),
    Alibi: _holding("slopes", "plain", "offset"),
    Relative: _holding("table", "plain", "offset"),
    Rows: _rows,
    Hard: _hard,
    Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    **dict.fromkeys((Entmax, Sparsemax, Sigmoid, Full, TopWeights, Received, Entropy, LogSumExp), _itself),
}
# Records of these types cannot change and hold no tensors.
WITHOUT_TENSORS = {
    *(ScaledDot, Dot, Cosine, Band),
    *(Softmax, Entmax, Sparsemax, Sigmoid),
    *(Full, TopWeights, Received, Entropy, LogSumExp),
}
