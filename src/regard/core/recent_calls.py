"""The kernels of recent calls with dot products, found by torch's own check of a tensor instead of a signature.

The check is the one that torch.compile makes before it runs compiled code: one call in C++ compares type, shape,
strides, dtype, device, `requires_grad` and the dispatch keys, which include autocast, inference mode, tracing and
modes. It takes a third of the time of a signature. Without it, as in another version of torch, nothing is recalled and
each call has a signature.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.core.backends.result import Direct
from regard.core.masks import Band
from regard.core.normalizers import Softmax
from regard.core.scores import ScaledDot
from regard.core.transforms import peek
from regard.kernels import cuda_graphs

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)  # its stubs declare other arguments than it takes
Check = Callable[[Tensor], bool]
_FEW, _MOST, _OFTEN = 6, 1024, 64  # calls with equal records, different records, calls until one is replaced
_recent: dict[Hashable, tuple[tuple[Check, Check, Check, Direct], ...]] = {}
_missed = 0
_deterministic = torch._C._get_deterministic_algorithms


def recall(
    query: Any, key: Any, value: Any, score: object, normalize: object, mask: object, dropout: object
) -> Direct | None:
    """Return the function that computes calls like this one, if there was one; the call has no bias and no request."""
    if torch.compiler.is_compiling() or not type(query) is type(key) is type(value) is Tensor:
        return None
    records = _records(score, normalize, mask, dropout)
    # The check ends the process for a nested tensor, which has no strides.
    if records is None or query.is_nested or key.is_nested or value.is_nested:
        return None
    for query_check, key_check, value_check, direct in _recent.get(records, ()):
        if query_check(query) and key_check(key) and value_check(value):
            return direct
    return None


def remember(
    query: Tensor, key: Tensor, value: Tensor, score: object, normalize: object, mask: object, dropout: object,
    direct: Direct,
) -> None:  # fmt: skip
    """Store the function that computes calls like this one."""
    global _missed
    records = _records(score, normalize, mask, dropout)
    if records is None or _TensorGuards is None:
        return
    calls, _missed = _recent.get(records, ()), _missed + 1
    if len(calls) >= _FEW and _missed % _OFTEN:
        return
    if len(_recent) >= _MOST:
        _recent.clear()
    query_check, key_check, value_check = (
        _TensorGuards(t, dynamic_dims_sizes=[list(t.shape)], dynamic_dims_strides=[list(t.stride())]).check
        for t in (query, key, value)
    )
    _recent[records] = ((query_check, key_check, value_check, direct), *calls[: _FEW - 1])


def _records(score: object, normalize: object, mask: object, dropout: object) -> Hashable | None:
    """Return what a call depends on beside its tensors; None if a signature is needed."""
    if type(score) is not ScaledDot or type(normalize) is not Softmax or type(dropout) is not float:
        return None
    if peek() is not None or forward_ad._current_level >= 0:
        return None
    band = None if mask is None else (mask.low, mask.high) if type(mask) is Band else False
    if band is False:
        return None
    modes = (torch.is_grad_enabled(), _deterministic(), cuda_graphs.recording)
    return (score.scale, score.softcap, band, dropout, modes)
