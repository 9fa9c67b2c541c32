"""`merge` combines attention over parts of the keys: the output of each part is weighted by the part's share of Σ
exp(score) over all keys."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.attended import Attended

Part = Attended | tuple[Tensor, Tensor]


def merge(parts: Sequence[Part]) -> Attended:
    """Combine attention over disjoint parts p of the keys: L = ln Σ exp(L_p), output = Σ exp(L_p − L) output_p.

    A part is an `Attended` with `weights=logsumexp()`, or a pair of output (…, q, e) and log-sum-exp L_p (…, q). The
    `weights` of the result are the log-sum-exp over all parts, so the result can be merged again. Where a row attends
    to no key of a part (log-sum-exp −inf), the part adds nothing to that row.

    >>> from regard.core.attention import attention
    >>> from regard.core.requests import logsumexp
    >>> query, key, value = torch.randn(2, 4), torch.randn(6, 4), torch.randn(6, 3)
    >>> halves = [slice(0, 3), slice(3, 6)]
    >>> parts = [attention(query, key[half], value[half], weights=logsumexp()) for half in halves]
    >>> torch.allclose(merge(parts).output, attention(query, key, value).output, atol=1e-6)
    True
    """
    outputs, totals = zip(*(_read(part, place) for place, part in enumerate(_some(parts))), strict=True)
    _check_alike(outputs)
    dtype = torch.promote_types(outputs[0].dtype, totals[0].dtype)
    logs = torch.stack(totals).to(dtype)
    empty = logs == -math.inf
    best = logs.detach().amax(0)
    best = torch.where(best == -math.inf, 0, best)
    # A row that attends to no key of a part has a log-sum-exp of −inf in that part. The −inf is replaced by 0 before
    # exp, and the weight of the part by 0 after exp, so that neither the value nor the gradient is NaN.
    shares = torch.where(empty, 0, torch.exp(torch.where(empty, 0, logs) - best))
    whole = shares.sum(0)
    filled = ~empty.all(0)
    whole = torch.where(filled, whole, 1)
    shares = (shares / whole).unsqueeze(-1)
    output = torch.zeros_like(outputs[0], dtype=dtype)
    for share, part, nothing in zip(shares, outputs, empty.unsqueeze(-1), strict=True):
        output = output + share * torch.where(nothing, 0, part.to(dtype))
    return Attended(output.to(outputs[0].dtype), torch.where(filled, best + whole.log(), -math.inf))


def _some(parts: object) -> Sequence[Part]:
    if isinstance(parts, (Attended, Tensor)) or not isinstance(parts, Sequence):
        raise TypeError(f"merge() takes a list of parts, got {type(parts).__name__}")
    if not parts:
        raise ValueError("merge() takes at least one part, got none")
    return parts


def _read(part: object, place: int) -> tuple[Float[Tensor, "... q e"], Float[Tensor, "... q"]]:
    """Return the output and the log-sum-exp of a part; raise if the part is malformed."""
    pair: object = (part.output, part.weights) if isinstance(part, Attended) else part
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise TypeError(f"part {place} must be an Attended or a pair (output, logsumexp), got {type(part).__name__}")
    output, total = pair
    if not isinstance(output, Tensor) or not isinstance(total, Tensor) or total.shape != output.shape[:-1]:
        raise ValueError(f"part {place} has no log-sum-exp for each row of its output: compute it with logsumexp()")
    if not output.is_floating_point() or not total.is_floating_point():
        raise TypeError(f"part {place} must be float tensors, got {output.dtype} and {total.dtype}")
    return output, total


def _check_alike(outputs: Sequence[Tensor]) -> None:
    first = outputs[0]
    for place, output in enumerate(outputs):
        if output.shape != first.shape:
            shapes = f"{tuple(output.shape)}, part 0 of {tuple(first.shape)}"
            raise ValueError(f"part {place} has an output of {shapes}: parts of the keys have the same queries")
        if output.dtype != first.dtype or output.device != first.device:
            came = f"{output.dtype} on {output.device}, part 0 is {first.dtype} on {first.device}"
            raise ValueError(f"part {place} is {came}: they must be the same")
