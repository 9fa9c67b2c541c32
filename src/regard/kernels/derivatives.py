"""The error of a backward pass written by hand, where a second derivative is asked for."""

import torch

REFERENCE = ": use backend='reference' for second derivatives"


def once_only(subject: str, instead: str = "") -> None:
    """Raise if the backward pass is itself being differentiated: its graph would end here without notice."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{subject} is differentiable once{instead}")
