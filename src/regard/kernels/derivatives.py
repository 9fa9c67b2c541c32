"""The error raised when the backward pass of a kernel is differentiated, which it does not support."""

import torch

REFERENCE = ": use backend='reference' for second derivatives"


def once_only(subject: str, instead: str = "") -> None:
    """Raise RuntimeError if autograd records this backward pass for second derivatives, which would be incomplete."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{subject} is differentiable once{instead}")
