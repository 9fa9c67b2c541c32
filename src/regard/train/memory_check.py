"""A check before training whether this machine has enough memory for a model, and a measure of peak memory."""

import os
import sys
from collections.abc import Callable

import torch
from torch import nn

_BYTES = 16  # bytes per parameter in training: float32 weight, gradient and AdamW's two moments
_WHOLE = 8  # bytes per parameter when a sharded model is created: the whole float32 weight, and a copy to be sharded


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def check_capacity(build: Callable[[], nn.Module], device: torch.device, *, shards: int = 1) -> None:
    """Raise `MemoryError` if training the parameters alone, without activations, needs more memory than there is.

    With several `shards`, a worker stores one shard, and also the whole model at the start and during validation. A
    trial allocation would not be a check, because Linux overcommits memory and kills the process that uses too much.

    >>> check_capacity(lambda: nn.Linear(2**20, 2**24), torch.device("cpu"))
    Traceback (most recent call last):
    MemoryError: 17,592,202,821,632 parameters take 262,144 GiB to train, and this machine has ...
    """
    with torch.device("meta"):
        count = count_parameters(build())
    needed = count * (_BYTES if shards == 1 else max(_WHOLE, _BYTES // shards + _WHOLE // 2))
    present = _memory(device)
    if present is not None and needed > present:
        gib = 2**30
        raise MemoryError(
            f"{count:,} parameters take {needed // gib:,} GiB to train, and this machine has {present / gib:,.0f} GiB"
        )


def _memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # os.sysconf is not available on every operating system
        return None


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated on a GPU, or resident on a CPU; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows has no module `resource`
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
