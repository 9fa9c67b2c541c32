"""Groups of dtypes that several kernels test for."""

import torch

HALF = (torch.float16, torch.bfloat16)
