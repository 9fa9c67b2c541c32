"""The masks of the cases of kernel tests."""

import torch

import regard


def mask_of(given: dict, b: int, q: int, k: int, device: str) -> regard.Mask | None:
    """Return the mask of a case with `q` queries and `k` keys in `b` sequences: the intersection of the given rules.

    The rules are "band", the pair (low, high) of `Band`; "lengths", a list; "segments", three of about equal length;
    and "mask", a random tensor for each sequence.
    """
    parts: list[regard.Mask] = []
    if "band" in given:
        low, high = given["band"]
        parts.append(regard.causal(offset=high) if low is None else regard.window(-low, high))
    if "lengths" in given:
        parts.append(regard.padding(torch.tensor(given["lengths"], device=device)))
    if "segments" in given:
        ids = torch.arange(q, device=device).expand(b, q) * 3 // q
        parts.append(regard.segments(ids, ids))
    if "mask" in given:
        parts.append(regard.dense(torch.rand(b, 1, q, k, generator=torch.Generator().manual_seed(2)).to(device) > 0.6))
    mask: regard.Mask | None = None
    for part in parts:
        mask = part if mask is None else mask & part
    return mask
