"""Groups of dtypes that several kernels ask for."""

import torch

HALF = (torch.float16, torch.bfloat16)
