"""How much working memory a computation may take on a device before it is split into blocks."""

import functools

import torch


def affordable(device: torch.device, cpu_bytes: int, share: int) -> int:
    """Return `cpu_bytes`, or on a GPU one part in `share` of its memory.

    On a CPU a block should fit the cache. A GPU needs large blocks to be busy: each block costs several launches.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return cpu_bytes
    return max(cpu_bytes, _total(device) // share)


@functools.cache
def _total(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
