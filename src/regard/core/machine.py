"""What is installed here, as constants: torch.compile reads them without looking into how they were found.

And what the device is doing.
"""

import importlib.util

import torch

TRITON = importlib.util.find_spec("triton") is not None


def capturing(device: torch.device) -> bool:
    """Is a CUDA graph being made of what happens?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
