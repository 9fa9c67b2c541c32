"""Masks of linear attention, which computes no scores of pairs: a mask must exclude the same keys for all queries."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from regard.core.masks import Dense
from regard.core.problem import Problem
from regard.core.spans import all_of


def allowed_keys(problem: Problem) -> Bool[Tensor, "... k"] | None:
    """Return which keys the mask allows, (…, h or 1, k); None for a call without a mask that has keys."""
    mask, keys = problem.mask, problem.shape[-1]
    if mask is None:
        return None if keys else torch.ones(1, 0, dtype=torch.bool, device=problem.device)
    if not mask.by_key():
        came = f"one of shape {tuple(mask.tensor.shape)}" if isinstance(mask, Dense) else "one that differs by query"
        raise ValueError(
            "mask of linear_attention must hide the same keys from every query: expected padding(lengths) or a bool "
            f"tensor (…, 1, {keys}), got {came}; write causal=True for a causal pass"
        )
    allowed = mask.allowed(all_of(1), all_of(keys), problem.device)[..., 0, :]
    return allowed.expand(*allowed.shape[:-1], keys)


def filled(keep: Bool[Tensor, "... k"], queries: int, causal: bool) -> Bool[Tensor, "... q"]:
    """Return which queries have at least one key that they may attend."""
    seen = F.pad(keep, (1, 0)).cumsum(-1) > 0  # seen[..., n] is whether the mask allows any of the first n keys
    if not causal:
        return seen[..., -1:].expand(*seen.shape[:-1], queries)
    return seen[..., torch.arange(1, queries + 1, device=keep.device).clamp_max(keep.shape[-1])]
