"""A cache of results computed from a mask or bias object, valid while the object exists and its tensors do not change.

On the CPU the tensors' contents are compared, because memory shared with NumPy has no version counter. On a GPU that
would be a synchronisation, so version counters are compared.
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
_SIMPLE = (Band, Padding, Segments, Dense, Alibi, Relative, DenseBias)  # records without parts
_MOST = 32  # largest number of results for one mask
_SHORT = 2**16  # largest number of entries of a mask's tensors that are compared on the CPU
# The tensors of each mask, none if its results must not be cached, and its results with what they are valid for.
_Entry = tuple[tuple[Tensor, ...], dict[Hashable, tuple[tuple[Any, ...], Any]]]
_stored: WeakKeyDictionary[Mask | Bias, _Entry] = WeakKeyDictionary()


def stored(mask: Mask | Bias, device: torch.device, key: Hashable, compute: Callable[[], T]) -> T:
    """Return compute(), or its earlier result for this mask and key; `device` is that of the queries.

    `compute` must not return the mask, which would then never be freed.
    """
    if torch.compiler.is_compiling():  # guards on a weak dictionary would fail
        return compute()
    entry = _stored.get(mask)
    if entry is None:
        entry = mask.tensors() if _is_record(mask) else (), {}
        _stored[mask] = entry
    tensors, results = entry
    if not tensors or _uncertain(tensors, device):
        return compute()
    on_cpu = device.type == "cpu"
    # A result belongs to one stream: another stream would have to wait for it.
    stream = None if on_cpu or device.type != "cuda" else torch.cuda.current_stream(device).cuda_stream
    key = key, device, stream, torch.is_inference_mode_enabled()
    found = results.get(key)
    if found is not None and _unchanged(found[0], tensors, on_cpu):
        return found[1]
    if len(results) >= _MOST:
        results.clear()
    marks = tuple(t.detach().clone() if on_cpu else t._version for t in tensors)
    result = compute()
    results[key] = marks, result
    return result


def _is_record(mask: Mask | Bias) -> bool:
    """Return whether the mask consists of regard's own records; a class of the caller's may depend on anything."""
    if type(mask) in _SIMPLE:
        return True
    if not type(mask).__module__.startswith("regard."):
        return False
    parts = [part for part in (getattr(mask, name, None) for name in ("left", "right", "mask")) if part is not None]
    return all(_is_record(part) for part in parts)


def _unchanged(marks: tuple[Any, ...], tensors: tuple[Tensor, ...], on_cpu: bool) -> bool:
    """Return whether the tensors' contents, or on a GPU their versions, are unchanged."""
    for tensor, mark in zip(tensors, marks, strict=True):
        if not torch.equal(tensor, mark) if on_cpu else tensor._version != mark:
            return False
    return True


def _uncertain(tensors: tuple[Tensor, ...], device: torch.device) -> bool:
    """Return whether the result must not be cached.

    Tensors of inference mode have no version counter. A captured graph must compute the result at each replay. Dispatch
    modes and transforms replace the tensors. Comparing long tensors takes too long.
    """
    if torch.compiler.is_compiling() or transformed() or capturing(device) or torch._C._len_torch_dispatch_stack():
        return True
    entries, on_cpu = 0, device.type == "cpu"
    for t in tensors:
        # A result without a graph may be stored.
        if type(t) is not Tensor or t.requires_grad or (not on_cpu and t.is_inference()):
            return True
        entries += t.numel()
    return on_cpu and entries > _SHORT


def aligned(mask: Mask, shape: tuple[int, ...], device: torch.device) -> Mask:
    """Return the mask aligned with scores of this shape: the same object while its tensors do not change."""
    return stored(mask, device, ("aligned", shape), lambda: mask.on(device).aligned(shape))
