"""Gradients that have no gradients: said where somebody asks for them."""

import torch


def once_only(backend: str) -> None:
    """Raise if the backward pass is itself being differentiated: its graph would end here without a word."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backend {backend!r} is differentiable once: use backend='reference' for second derivatives"
        )
