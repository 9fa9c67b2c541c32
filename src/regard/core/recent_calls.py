"""A cache of the `Route` (choice of a backend) of recent calls; guards of torch.compile find the entry of a call.

The route of a call (`regard.core.dispatch.Route`) lists the backends and functions that can compute it.

A guard is the check that torch.compile makes before it runs compiled code: one call in C++ compares type, shape,
strides, dtype, device, `requires_grad` and the dispatch keys, which include torch.func, autocast, inference mode,
tracing and torch function modes. Score, normaliser, mask, bias and request are compared by identity
first, so that a repeated call runs few lines of Python: between two attention calls of a model, other work evicts these
lines from the processor's caches, and each line then takes several times as long. In a version of torch without these
guards, no call is stored, and the signature of each call (`signatures`: its cache key) is computed.
"""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from regard.core.attended import Attended
from regard.core.signatures import WITHOUT_TENSORS, record_key, records_of
from regard.kernels import cuda_graphs
from regard.kernels.native_library import extension

if TYPE_CHECKING:
    from regard.core.dispatch import Route

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)  # Any: torch's type stubs of TensorGuards are wrong
_MOST, _COUNTED = 8, 4096  # the largest numbers of stored calls, and of `Route` objects whose calls are counted
# In the entry of a stored call, `_NEVER` replaces an argument (such as a mask) that may hold tensors, because its class
# is not in `WITHOUT_TENSORS`: storing the argument itself would keep its tensors alive. The cache key of such an
# argument is compared instead of its identity.
_NEVER = object()
_has_gradients, _deterministic = torch.is_grad_enabled, torch._C._get_deterministic_algorithms
_modes = torch._C._len_torch_dispatch_stack  # the guards do not see modes of torch itself, such as `FakeTensorMode`
# The stored calls, newest first. Each entry has: score, normaliser, mask, bias and request, each replaced by `_NEVER`
# if it may hold tensors; weak references to score, mask and bias if they hold tensors; dropout; whether grad mode was
# on, deterministic algorithms were required and a CUDA graph was being recorded; the guard of query, key and value; the
# `Route` and its functions; the cache keys of score, normaliser, mask, bias and request; the classes of score, mask and
# bias.
_recent: tuple[tuple[Any, ...], ...] = ()
_missed: dict[int, int] = {}  # maps id(`Route`) to the number of its calls that `recall` did not find
# `recall` and the call of the route's function, compiled from C: it takes the arguments of `recall`, and returns the
# result (`Attended`), the `Route` if it has no functions or they refuse the values of the tensors, or None if no stored
# call matches. The variable is None until `recall` has found `_OFTEN` calls, or, where an earlier process has compiled
# the function, until a call is stored.
compiled_call: Callable[..., Any] | None = None
_extension: Any = None
_OFTEN = 64
_found = 0  # the number of calls that `recall` has found


def recall(
    query: Any, key: Any, value: Any, score: object, normalize: object, mask: object, bias: object, dropout: object,
    request: object,
) -> "Route | None":  # fmt: skip
    """Return the `Route` of a stored call whose arguments differ from these only in tensor values, or None."""
    global _found
    if is_dynamo_compiling() or not type(query) is type(key) is type(value) is Tensor or type(dropout) is not float:
        return None
    # torch's guard would crash the process on a nested tensor, which has no strides.
    if query.is_nested or key.is_nested or value.is_nested or forward_ad._current_level >= 0 or _modes():
        return None
    grad, deterministic = _has_gradients(), _deterministic()
    for (
        score_, normalize_, mask_, bias_, request_, score_held, mask_held, bias_held, dropout_, grad_, deterministic_,
        recording, check, route, _, _, _, _,
    ) in _recent:  # fmt: skip
        if (
            normalize is normalize_
            and request is request_
            and (mask is mask_ or _same(mask, mask_held))
            and (score is score_ or _same(score, score_held))
            and (bias is bias_ or _same(bias, bias_held))
        ):
            if dropout != dropout_ or grad is not grad_ or deterministic is not deterministic_:
                continue
            if recording is cuda_graphs.recording and check(query, key, value):
                _found += 1
                if _found == _OFTEN:
                    _load(compiles=True)
                return route
    return _recall_by_keys(query, key, value, score, normalize, mask, bias, dropout, request)


def _recall_by_keys(
    query: Any, key: Any, value: Any, score: object, normalize: object, mask: object, bias: object, dropout: object,
    request: object,
) -> "Route | None":  # fmt: skip
    """Return the `Route` as `recall` does, where score, normaliser, mask, bias or request are other objects than in the
    stored call.

    Score, normaliser, mask, bias and request are compared by their cache keys.
    """
    global _found
    grad, deterministic, own, records, kinds = _has_gradients(), _deterministic(), None, None, None
    for (
        score_, normalize_, mask_, bias_, request_, score_held, _, bias_held, dropout_, grad_, deterministic_,
        recording, check, route, _, _, known, kinds_,
    ) in _recent:  # fmt: skip
        if (
            (score is score_ or _same(score, score_held))
            and normalize is normalize_
            and (bias is bias_ or _same(bias, bias_held))
            and request is request_
        ):
            if mask is not mask_:
                if mask is None or mask_ is None:
                    continue
                own = own or record_key(mask)
                if own != known[2]:
                    continue
        else:
            kinds = kinds or (type(score), type(mask), type(bias))
            if kinds != kinds_:  # the cache keys differ too, and computing them takes longer
                continue
            records = records or records_of(score, normalize, mask, bias, request)
            if records != known:
                continue
        if dropout != dropout_ or grad is not grad_ or deterministic is not deterministic_:
            continue
        if recording is cuda_graphs.recording and check(query, key, value):
            _found += 1
            if _found == _OFTEN:
                _load(compiles=True)
            return route
    return None


def remember(
    query: Tensor, key: Tensor, value: Tensor, score: object, normalize: object, mask: object, bias: object,
    dropout: Any, request: object, route: "Route",
) -> None:  # fmt: skip
    """Store the `Route` of a call that `recall` did not find; if too many calls are stored, the oldest is dropped.

    Creating the guard takes as long as computing several signatures. Therefore, of the calls of one `Route` that
    `recall` did not find, only the first, second, fourth, eighth, … are stored.
    """
    global _recent
    if len(_missed) >= _COUNTED:
        _missed.clear()
    count = _missed[id(route)] = _missed.get(id(route), 0) + 1
    if count & (count - 1) or _TensorGuards is None:
        return
    records = score, normalize, mask, bias, request
    without_tensors = [record if record is None or type(record) in WITHOUT_TENSORS else _NEVER for record in records]
    modes = dropout, _has_gradients(), _deterministic(), cuda_graphs.recording
    held = [_held(record) for record in (score, mask, bias)]
    kinds = type(score), type(mask), type(bias)
    functions = route, route.with_request, route.direct
    call = (*without_tensors, *held, *modes, _check(query, key, value), *functions, records_of(*records), kinds)
    _recent = (call, *_recent[: _MOST - 1])
    if compiled_call is None:
        _load(compiles=False)
    else:
        _extension.store(_recent)


@functools.cache
def _load(*, compiles: bool) -> None:
    """Set `compiled_call`, if the extension module was compiled before or `compiles` is True."""
    global compiled_call, _extension
    if compiled_call is not None:
        return
    _extension = extension("regard.core", "recent_calls.c", compiles=compiles)
    if _extension is None:
        return
    functions = _has_gradients, _deterministic, _modes, forward_ad, cuda_graphs, _recall_by_keys
    _extension.prepare(Tensor, Attended, *functions)
    _extension.store(_recent)
    compiled_call = _extension.call


class _Held(NamedTuple):
    """Weak references to an object of regard that holds tensors (a score, mask or bias), and to its tensors.

    `check` tests that the tensors have not changed in shape, strides, dtype, device or `requires_grad`.
    """

    record: weakref.ref[Any]
    tensors: tuple[weakref.ref[Tensor], ...]
    check: Callable[..., bool]


def _held(record: Any) -> _Held | None:
    """Return weak references to a score, mask or bias and its tensors; None if it holds no tensors, or is a tensor."""
    if record is None or isinstance(record, Tensor) or type(record) in WITHOUT_TENSORS:
        return None
    tensors = tuple({id(tensor): tensor for tensor in record.tensors()}.values())
    if not tensors:
        return None
    return _Held(weakref.ref(record), tuple([weakref.ref(tensor) for tensor in tensors]), _check(*tensors))


def _same(record: object, held: _Held | None) -> bool:
    """Return whether `record` (a score, mask or bias) is the object of the weak reference `held`, with tensors that
    pass `held.check`."""
    return (
        held is not None
        and record is not None
        and held.record() is record
        and held.check(*[tensor() for tensor in held.tensors])
    )


def _check(*tensors: Tensor) -> Callable[..., bool]:
    """Return torch's guard of these tensors: a function that checks whether its arguments have the same types, shapes,
    strides, dtypes, devices, `requires_grad` and dispatch keys.

    torch's guard does not accept the same tensor twice: if query, key and value are not three different tensors, each
    of them has a guard of its own.
    """
    if len({id(tensor) for tensor in tensors}) == len(tensors):
        shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        return _TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    first, second, third = (_check(tensor) for tensor in tensors)
    return lambda query, key, value: first(query) and second(key) and third(value)
