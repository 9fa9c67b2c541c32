"""Whether Triton is installed, and whether a CUDA graph is being captured.

These are constants, because torch.compile can use constants without tracing the code that computes them.
"""

import importlib.util

import torch

TRITON = importlib.util.find_spec("triton") is not None


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
