"""Results computed from a mask or bias object, stored as long as the object lives and its tensors are not written to.

On the CPU nothing is stored: there such results cost little, and memory shared with NumPy changes without notice.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.core.biases import Bias
from regard.core.masks import Mask
from regard.core.transforms import transformed
from regard.kernels.availability import capturing

T = TypeVar("T")
_MOST = 32  # results of one mask
_stored: WeakKeyDictionary[Mask | Bias, dict[Hashable, tuple[tuple[int, ...], Any]]] = WeakKeyDictionary()


def stored(mask: Mask | Bias, device: torch.device, key: Hashable, compute: Callable[[], T]) -> T:
    """Return compute(), or its earlier result for this mask and key; `device` is that of the queries.

    `compute` must not return the mask, which would then never be freed.
    """
    tensors = mask.tensors()
    if device.type == "cpu" or not tensors or _uncertain(tensors, device):
        return compute()
    # A result is computed in the order of one stream: another one would have to wait for it.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    key = key, device, stream, torch.is_inference_mode_enabled()
    versions = tuple(t._version for t in tensors)
    results = _stored.setdefault(mask, {})
    found = results.get(key)
    if found is not None and found[0] == versions:
        return found[1]
    if len(results) >= _MOST:
        results.clear()
    result = compute()
    results[key] = versions, result
    return result


def _uncertain(tensors: tuple[Tensor, ...], device: torch.device) -> bool:
    """Return whether the result may be wrong for the next call.

    Tensors of inference mode count no changes. A captured graph must compute the result at each replay. Dispatch modes
    and transforms put other tensors in place of these.
    """
    if torch.compiler.is_compiling() or transformed() or capturing(device) or torch._C._len_torch_dispatch_stack():
        return True
    return any(type(t) is not Tensor or t.is_inference() for t in tensors)


def aligned(mask: Mask, shape: tuple[int, ...], device: torch.device) -> Mask:
    """Return the mask aligned with scores of this shape: the same object for as long as its tensors do not change."""
    return stored(mask, device, ("aligned", shape), lambda: mask.on(device).aligned(shape))
