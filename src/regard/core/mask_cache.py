"""A cache of results computed from a mask or bias object, valid while the object exists and its tensors do not change.

On the CPU changes are detected by comparing the tensors' contents, because writes by NumPy to shared memory do not
increase the version counter. On a GPU comparing contents would be a synchronisation, so version counters are compared.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.core.biases import Alibi, Bias, DenseBias, Relative
from regard.core.masks import Band, Dense, Mask, Padding, Segments
from regard.core.transforms import transformed
from regard.kernels.availability import capturing

T = TypeVar("T")
_SIMPLE = (Band, Padding, Segments, Dense, Alibi, Relative, DenseBias)  # classes whose instances contain no other masks
_MOST = 32  # the largest number of cached results for one mask
_SHORT = 2**16  # the largest number of entries of a mask's tensors that are compared on the CPU
# The entry of a mask: its tensors (none if its results must not be cached), and a dictionary of results. Each result is
# stored with the contents or versions of the tensors for which it is valid.
_Entry = tuple[tuple[Tensor, ...], dict[Hashable, tuple[tuple[Any, ...], Any]]]
_stored: WeakKeyDictionary[Mask | Bias, _Entry] = WeakKeyDictionary()


def stored(mask: Mask | Bias, device: torch.device, key: Hashable, compute: Callable[[], T]) -> T:
    """Return compute(), or its result cached for this mask under `key`; `device` is the device of the queries.

    `compute` must not return the mask itself: the cache would then keep it alive forever.
    """
    if torch.compiler.is_compiling():  # torch.compile cannot guard on the contents of a WeakKeyDictionary
        return compute()
    entry = _stored.get(mask)
    if entry is None:
        entry = mask.tensors() if _is_record(mask) else (), {}
        _stored[mask] = entry
    tensors, results = entry
    if not tensors or _uncertain(tensors, device):
        return compute()
    on_cpu = device.type == "cpu"
    # Each CUDA stream has results of its own: another stream would have to wait until a result is computed.
    stream = None if on_cpu or device.type != "cuda" else torch.cuda.current_stream(device).cuda_stream
    key = key, device, stream, torch.is_inference_mode_enabled()
    cached = results.get(key)
    if cached is not None and _unchanged(cached[0], tensors, on_cpu):
        return cached[1]
    if len(results) >= _MOST:
        results.clear()
    marks = tuple(t.detach().clone() if on_cpu else t._version for t in tensors)
    result = compute()
    results[key] = marks, result
    return result


def _is_record(mask: Mask | Bias) -> bool:
    """Return whether the mask consists of regard's own classes; a user-defined class may depend on more than its
    tensors."""
    if type(mask) in _SIMPLE:
        return True
    if not type(mask).__module__.startswith("regard."):
        return False
    parts = [part for part in (getattr(mask, name, None) for name in ("left", "right", "mask")) if part is not None]
    return all(_is_record(part) for part in parts)


def _unchanged(marks: tuple[Any, ...], tensors: tuple[Tensor, ...], on_cpu: bool) -> bool:
    """Return whether the tensors still have the contents (on a GPU the version counters) that `marks` holds."""
    for tensor, mark in zip(tensors, marks, strict=True):
        if not torch.equal(tensor, mark) if on_cpu else tensor._version != mark:
            return False
    return True


def _uncertain(tensors: tuple[Tensor, ...], device: torch.device) -> bool:
    """Return whether results computed from these tensors must not be cached.

    Tensors created in inference mode have no version counter. A captured CUDA graph must compute the result at each
    replay. Dispatch modes and transforms replace the tensors. Comparing long tensors takes too long.
    """
    if torch.compiler.is_compiling() or transformed() or capturing(device) or torch._C._len_torch_dispatch_stack():
        return True
    entries, on_cpu = 0, device.type == "cpu"
    for t in tensors:
        # A result computed from a tensor that requires grad would hold an autograd graph.
        if type(t) is not Tensor or t.requires_grad or (not on_cpu and t.is_inference()):
            return True
        entries += t.numel()
    return on_cpu and entries > _SHORT


def aligned(mask: Mask, shape: tuple[int, ...], device: torch.device) -> Mask:
    """Return the mask aligned with scores of this shape; it is cached as long as the mask's tensors do not change."""
    return stored(mask, device, ("aligned", shape), lambda: mask.on(device).aligned(shape))
