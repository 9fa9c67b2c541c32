"""Torch operations that compute what the compiled loops of dot-product attention compute, and can be differentiated
twice.

They serve the backward pass with `create_graph=True`, and show what the C code of `regard.kernels.dot_attention` does.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.kernels.dot_form import Form, Limits, Rows


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: Form,
    limits: Limits,
    rows: Rows | None,
    seed: int,
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the output and the requested result (all weights if nothing was requested), computed by torch operations.

    The C code has computed this call in the forward pass. Unlike the result of the C code, the result of the torch
    operations can be differentiated twice. `weigh` returns all weights of query, key and value, computed by the C code:
    for sparsemax and entmax, they show which keys have a weight above 0.
    """
    if query.ndim == 3:  # the batch axis is missing
        lifted = formula(query[None], key[None], value[None], form, limits, rows, seed, weigh)
        return lifted[0].squeeze(0), lifted[1].squeeze(0)
    scale, softcap, shift, alpha, dropout = form.factors
    group, device = query.shape[1] // key.shape[1], query.device
    key_given, value_given = key, value
    # The C code accepted the call, so numbers that are not finite belong to keys that are masked for all queries.
    key, value = (t.float().nan_to_num(0.0, 0.0, 0.0).repeat_interleave(group, 1) for t in (key, value))
    scores = query.float().nan_to_num(0.0, 0.0, 0.0) @ key.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap > 0.0 else scores
    scores = scores if limits.bias is None else scores + limits.bias
    i, j = torch.arange(query.shape[2], device=device)[:, None], torch.arange(key.shape[2], device=device)
    if limits.slopes is not None:
        scores = scores - limits.slopes[:, None, None] * (i + form.offset - j).abs()
    allowed, (low, high) = scores.detach() > -math.inf, form.band
    allowed = allowed if low is None else allowed & (j - i >= low)
    allowed = allowed if high is None else allowed & (j - i <= high)
    allowed = allowed if limits.allowed is None else allowed & limits.allowed
    if limits.lengths is not None:
        allowed = allowed & (j < limits.lengths.view(-1, 1, 1, 1))
    if limits.query_ids is not None and limits.key_ids is not None:
        allowed = allowed & (limits.query_ids[:, None, :, None] == limits.key_ids[:, None, None, :])
    if form.normalizer == "sigmoid":
        weights = torch.sigmoid(torch.where(allowed, scores, 0.0) + shift)
    elif form.normalizer != "softmax":
        weights = weigh(query.detach(), key_given.detach(), value_given.detach()).view(scores.shape)
        scores = torch.where(allowed, scores, 0.0)
        if form.normalizer == "power":
            weights = _to_the_power(scores, weights, alpha)
        else:
            weights = _on_support(scores, weights > 0, form.normalizer == "entmax")
    else:
        # A row of −inf alone would give weights of NaN.
        lowest = scores.new_zeros(()).masked_fill(allowed.any(-1, keepdim=True), -math.inf)
        scores = torch.where(allowed, scores, lowest)
        weights = torch.softmax(scores, -1)
    weights = torch.where(allowed, weights, 0.0)
    summed = weights * dropout_factors(weights.shape, dropout, seed) if dropout > 0.0 else weights
    output = (summed @ value).to(query.dtype)
    if form.request == "logsumexp":
        return output, torch.where(allowed.any(-1), scores.logsumexp(-1), -math.inf)
    return output, _requested_of(weights, form.request, rows)


def _requested_of(weights: Tensor, request: str, rows: Rows | None) -> Tensor:
    if request == "received":
        return weights.sum(2)
    if request == "entropy":
        return -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
    return weights if rows is None else weights.index_select(2, rows.positions)


def _on_support(scores: Tensor, support: Tensor, square: bool) -> Tensor:
    """Return the weights of sparsemax, or of entmax with α = 1.5 if `square`, given which keys have a weight above 0.

    Given which keys have a weight above 0, the threshold of the scores follows from their mean for sparsemax, and from
    a quadratic equation for entmax.
    """
    count = support.sum(-1, keepdim=True).clamp_min(1).to(scores.dtype)  # 1 / count would have torch's default dtype
    scores = scores / 2 if square else scores
    mean = torch.where(support, scores, 0.0).sum(-1, keepdim=True) / count
    if not square:
        return torch.where(support, scores - mean + 1 / count, 0.0)
    spread = torch.where(support, scores - mean, 0.0).square().sum(-1, keepdim=True)
    filled = support.any(-1, keepdim=True)
    root = torch.where(filled, (1 - spread) / count, 1.0).clamp_min(1e-12).sqrt()
    return torch.where(support, scores - mean + root, 0.0).square()


def _to_the_power(scores: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Return the weights of entmax in a form that can be differentiated twice, given their values in `weights`.

    The value of the threshold t of the scores follows from the largest weight. Two steps of Newton's method from this
    value change it only by rounding errors, but give t its first and second derivatives with respect to the scores.
    """
    factor, power = alpha - 1, 1 / (alpha - 1)
    support, scores = weights > 0, scores * (alpha - 1)
    best = weights.argmax(-1, keepdim=True)
    t = (scores.gather(-1, best) - weights.gather(-1, best) ** factor).detach()
    for _ in range(2):
        base = torch.where(support, (scores - t).clamp_min(1e-30), 1.0)
        sums = torch.where(support, base**power, 0.0).sum(-1, keepdim=True)
        slopes = torch.where(support, power * base ** (power - 1), 0.0).sum(-1, keepdim=True)
        t = t + torch.where(slopes > 0, (sums - 1) / torch.where(slopes > 0, slopes, 1.0), 0.0)
    return torch.where(support, torch.where(support, (scores - t).clamp_min(1e-30), 1.0) ** power, 0.0)


def dropout_factors(shape: tuple[int, ...], probability: float, seed: int) -> Tensor:
    """Return the dropout factors of the C code for weights (b, h, q, k): 0 if dropped, else 1 / (1 − probability)."""
    batch, heads, queries, keys = shape
    row = (torch.arange(batch * heads * queries, device="cpu") + 1) * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        row = (row ^ _shifted(row, shift)) * _signed(factor)
    low, high = (row & 0xFFFFFFFF).view(batch, heads, queries, 1), _shifted(row, 32).view(batch, heads, queries, 1)
    numbers = _mixed(_mixed(torch.arange(keys, device="cpu") ^ low) + high & 0xFFFFFFFF)
    return (numbers >= int(probability * 2**32)).float() / (1 - probability)


def _mixed(numbers: Tensor) -> Tensor:
    """Return the hash `mixed` of the C code for numbers of 32 bits, stored in int64."""
    numbers = (numbers ^ numbers >> 16) * 0x7FEB352D & 0xFFFFFFFF
    numbers = (numbers ^ numbers >> 15) * 0x846CA68B & 0xFFFFFFFF
    return numbers ^ numbers >> 16


def _signed(number: int) -> int:
    """Return the signed 64-bit integer that has the same bits as an unsigned 64-bit integer."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(numbers: Tensor, places: int) -> Tensor:
    """Return int64 numbers shifted to the right as if they were unsigned."""
    return numbers >> places & (1 << (64 - places)) - 1
