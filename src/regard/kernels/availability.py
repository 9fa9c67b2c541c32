"""Whether Triton is installed, which GPU is the current one, and whether a CUDA graph is being captured.

`TRITON` is a constant, because torch.compile can use a constant without tracing the code that computes it.
"""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

TRITON = importlib.util.find_spec("triton") is not None
# A function that returns the index of the current GPU. It may be called only after CUDA is initialised: it does not
# test this at each call as torch.cuda.current_device does, which takes several times as long.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes `device` the current CUDA device, because Triton launches kernels on that one."""
    if device.type != "cuda" or torch.compiler.is_compiling() or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
