"""The error raised when a hand-written backward pass is differentiated again."""

import torch

REFERENCE = ": use backend='reference' for second derivatives"


def once_only(subject: str, instead: str = "") -> None:
    """Raise if the backward pass is itself being differentiated: its graph would end here without an error."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{subject} is differentiable once{instead}")
