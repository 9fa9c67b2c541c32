"""What is installed here and what the device is doing.

Constants, because torch.compile reads them without tracing how they were found.
"""

import importlib.util

import torch

TRITON = importlib.util.find_spec("triton") is not None


def capturing(device: torch.device) -> bool:
    """Is a CUDA graph being captured on the current stream?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
