"""How much working memory a computation may take on a device before it is split into blocks."""

import functools

import torch


def affordable(device: torch.device, cpu_bytes: int, share: int) -> int:
    """Return the bytes of one block: `cpu_bytes`, or on a GPU its memory divided by `share` if that is more.

    Under torch.compile, return `cpu_bytes` on every device. On a CPU a block should fit into the cache. A GPU needs
    large blocks to be busy: each block takes several launches.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return cpu_bytes
    return max(cpu_bytes, _total(device) // share)


@functools.cache
def _total(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
