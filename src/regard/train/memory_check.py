"""Whether a model can be trained on this machine at all, found out before any memory is taken."""

import os
from collections.abc import Callable

import torch
from torch import nn

_BYTES = 16  # of a parameter while it is trained: float32 weight, gradient and AdamW's two moments


def check_capacity(build: Callable[[], nn.Module], device: torch.device) -> None:
    """Raises `MemoryError` when the parameters alone are more than the device holds.

    Linux promises memory that it does not have and ends the process when it is used: asking is not enough.

    >>> check_capacity(lambda: nn.Linear(2**20, 2**24), torch.device("cpu"))
    Traceback (most recent call last):
    MemoryError: 17,592,202,821,632 parameters take 262,144 GiB to train, and this machine has ...
    """
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build().parameters())
    needed, present = count * _BYTES, _memory(device)
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
    except (ValueError, OSError, AttributeError):  # not every system says
        return None
