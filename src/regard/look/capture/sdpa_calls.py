"""Capture of calls of `F.scaled_dot_product_attention`, which most models use."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from regard.core.masks import Mask, causal
from regard.core.normalizers import Softmax
from regard.core.problem import build
from regard.core.scores import ScaledDot
from regard.look.capture.captured_call import DROPOUT, Call, Function, Handler, Recorder, four_axes
from regard.look.recomputed_weights import Pairs


def product_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    kind: str,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    note: str | None = None,
    view: Callable[[Tensor], Tensor] = lambda output: output,
) -> Call:
    """Return the captured call of an attention with scaled dot products and softmax.

    A bool mask is True at the pairs that may attend; a float mask is added to the scores.
    """
    adds = isinstance(mask, Tensor) and mask.dtype != torch.bool
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    mask, bias = (None, mask) if adds and isinstance(mask, Tensor) else (mask, None)
    key, value = key.to(query.dtype), value.to(query.dtype)
    problem = build(query, key, value, ScaledDot(scale, softcap), Softmax(), mask, bias, 0.0, None, None)
    return Call(
        kind,
        Pairs(problem, sinks=sinks),
        problem.value,
        output,
        scale,
        note=DROPOUT if dropout > 0 else note,
        checkable=dropout == 0,
        view=view,
    )


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, float | None]:
    return query, key, value, attn_mask, dropout_p, is_causal, scale


def seen(recorder: Recorder, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run `F.scaled_dot_product_attention`, record the call, and return its result."""
    output: Tensor = function(*args, **kwargs)
    with recorder.safely():
        _record(recorder, output, *_arguments(*args, **kwargs))
    return output


def _record(
    recorder: Recorder,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> None:
    if query.is_nested or key.is_nested:
        recorder.cannot_see("a call on nested tensors")
        return
    mask: Mask | Tensor | None = attn_mask
    if isinstance(attn_mask, CausalBias):
        mask = causal(key.shape[-2] - query.shape[-2] if attn_mask.variant == CausalVariant.LOWER_RIGHT else 0)
    elif attn_mask is None and is_causal:
        mask = causal()
    heads = recorder.heads(query.shape[0]) if query.ndim == 3 else None
    if query.ndim == 3 and isinstance(mask, Tensor) and mask.ndim == 3:
        mask = four_axes(mask, heads)
    query, key, value = (four_axes(tensor, heads) for tensor in (query, key, value))
    view = functools.partial(four_axes, heads=heads)
    call = product_call(query, key, value, output, kind="sdpa", mask=mask, scale=scale, dropout=dropout, view=view)
    recorder.record(call)


HANDLERS: dict[Function, Handler] = {F.scaled_dot_product_attention: seen}
