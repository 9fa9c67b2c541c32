"""Fused additive attention on CUDA: checks, and the expression of every activation by tanh, |x| or gelu."""

import os
from typing import Any

import torch
from torch import Tensor

from regard.kernels.additive.small_calls import COLUMNS, stores_scores

ACTIVATIONS = ("tanh", "sigmoid", "gelu", "leaky_relu")
FORMS = ("auto", "stored", "series", "exact")
_LEAK = 0.2  # slope of leaky_relu, as in graph attention and regard.core.scores


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    activation: str = "tanh",
    band: tuple[int | None, int | None] = (None, None),
    lengths: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    relative: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    form: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return softmax_j(Σ_f w_f act(q_if + k_jf) + bias) @ value and the log-sum-exp of the scores.

    query (b, h, q, f), key (b, g, k, f), value (b, g, k, e), weight (f,) or (h, f); g key heads. Query i attends to
    key j if band[0] <= j - i <= band[1], j < lengths[b], query_ids[b, i] == key_ids[b, j] and mask[b, h, i, j]; a
    condition that is not given (None) always holds. `relative` (h, 2r + 1) adds relative[h, clip(j - i, -r, r) + r] to
    the score. A query that attends to no key has the output 0 and the log-sum-exp -inf. Reference implementation:
    `regard.core.backends.reference` with an `Additive` score.
    """
    _check(query, key, value, weight, activation, form, bias, relative)
    settings: dict[str, Any] = {
        "band": band, "lengths": lengths, "query_ids": query_ids, "key_ids": key_ids, "mask": mask,
        "relative": relative, "dropout": dropout, "seed": seed, "form": form,
    }  # fmt: skip
    if activation == "tanh":
        return _fused(query, key, value, weight, "tanh", bias=bias, **settings)
    if activation == "sigmoid":  # sigmoid(x) = 1/2 + tanh(x/2) / 2
        output, lse = _fused(query * 0.5, key * 0.5, value, weight * 0.5, "tanh", bias=bias, **settings)
        return output, lse + _per_head(weight.float().sum(-1) * 0.5)
    # gelu and leaky_relu are an even function plus a term linear in q + k. The key's part of this term is a bias; the
    # query's part is equal for all keys of a row and only shifts the row's log-sum-exp.
    slope, kernel, gain = (0.5, "gelu", 1.0) if activation == "gelu" else ((1 + _LEAK) / 2, "abs", (1 - _LEAK) / 2)
    shift = slope * _linear(key, weight, query.shape[1])[:, :, None, :]
    total = shift if bias is None else bias + shift
    output, lse = _fused(query, key, value, weight * gain, kernel, bias=total, **settings)
    return output, lse + slope * _linear(query, weight, query.shape[1])


def _per_head(x: Tensor) -> Tensor:
    return x[None, :, None] if x.dim() else x


def _linear(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    """Return Σ_f w_f x_f (b, h, n) in float32; the heads of x are repeated to `heads` query heads."""
    wide = x.repeat_interleave(heads // x.shape[1], 1).float()
    return (wide * (weight if weight.dim() == 1 else weight[:, None, :]).float()).sum(-1)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    kernel: str,
    *,
    band: tuple[int | None, int | None],
    lengths: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    relative: Tensor | None,
    dropout: float,
    seed: int,
    form: str,
) -> tuple[Tensor, Tensor]:
    from regard.kernels.triton.additive.operator import additive

    if lengths is not None:  # the kernels take 32-bit lengths, at most the number of keys
        lengths = lengths if lengths.dtype == torch.int32 else lengths.long().clamp_max(key.shape[-2]).int()
        lengths = lengths.contiguous()
    if query_ids is not None and key_ids is not None:  # the kernels compare ids of one dtype, of any width
        wide = torch.promote_types(query_ids.dtype, key_ids.dtype)
        query_ids, key_ids = query_ids.to(wide).contiguous(), key_ids.to(wide).contiguous()
    key, value = key.to(query.dtype), value.to(query.dtype)
    weight = weight.to(query.dtype) if weight.dtype == torch.float64 else weight
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    table = None if relative is None else relative.contiguous()
    rest = (weight, lengths, query_ids, key_ids, mask, bias, table, *band, kernel, dropout, seed, form)
    columns = value.shape[-1]
    if columns <= COLUMNS:
        return additive(query, key, value, *rest)
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, weight))
    if stores_scores(query.shape, key.shape, columns, query.dtype, kernel, form, learning):
        return additive(query, key, value, *rest[:-1], "stored")
    # The values are split into groups of columns, and each call recomputes the scores. The outputs are concatenated
    # along the columns, and autograd adds the gradients of the calls.
    parts = [additive(query, key, part, *rest) for part in value.split(COLUMNS, -1)]
    return torch.cat([output for output, _ in parts], -1), parts[0][1]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    activation: str,
    form: str,
    bias: Tensor | None,
    relative: Tensor | None,
) -> None:
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"the kernels run on CUDA, and query is on {query.device}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
    if form == "series" and (query.dtype == torch.float32 or activation == "leaky_relu"):
        raise ValueError("the series serves bfloat16 and float16 with tanh, sigmoid or gelu")
    if form == "stored" and activation not in ("tanh", "sigmoid"):
        raise ValueError("stored scores serve tanh and sigmoid")
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError("query, key and value must have four axes: batch, heads, rows, size")
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads, key has {key.shape[1]}: query heads must be a multiple of key heads"
        )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key has shape {tuple(key.shape)}, value {tuple(value.shape)}: they must agree but in size")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"query has shape {tuple(query.shape)}, key {tuple(key.shape)}: batch and size must agree")
    if weight.shape not in ((query.shape[3],), (query.shape[1], query.shape[3])):
        raise ValueError(f"weight has shape {tuple(weight.shape)}: expected (f,) or (h, f) with f = {query.shape[3]}")
    if bias is not None and bias.dim() != 4:
        raise ValueError("bias must have four axes: batch, heads, queries, keys")
    if relative is not None and (relative.dim() != 2 or relative.shape[1] % 2 == 0):
        raise ValueError("relative must be (heads, 2 * radius + 1)")
