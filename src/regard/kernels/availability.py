"""Whether Triton is installed, which GPU is the current one, and whether a CUDA graph is being captured.

These are constants, because torch.compile can use constants without tracing the code that computes them.
"""

import importlib.util
from collections.abc import Callable

import torch

TRITON = importlib.util.find_spec("triton") is not None
# For tensors on CUDA, which is then initialised: torch's wrapper tests that, which takes several times as long.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
