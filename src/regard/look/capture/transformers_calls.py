"""Capture of Hugging Face transformers' attention functions, some of which run kernels that are not torch functions.

Transformers looks up its attention function in a table at every call, so the entries of the table are replaced while a
model is watched. An entry is an attention function. If calls of torch functions inside it are captured, nothing else is
recorded. If there are no such calls, as in a flash attention kernel, the arguments of the entry are recorded.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.core.masks import Mask, causal, window
from regard.look.capture.captured_call import Function, Recorder
from regard.look.capture.sdpa_calls import product_call


@contextmanager
def interface(recorder: Recorder) -> Iterator[None]:
    """In this context, calls through the attention interface of transformers are captured, if it was imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    table = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)
    if table is None:
        yield
        return
    # the attention functions in the table that the user had replaced before; they are restored at the end
    own = dict(getattr(table, "_local_mapping", {}))
    names = list(table)
    for name in names:
        table[name] = _capturing(recorder, table[name])
    try:
        yield
    finally:
        for name in names:
            if name in own:
                table[name] = own[name]
            else:
                del table[name]


def _capturing(recorder: Recorder, function: Function) -> Function:
    @functools.wraps(function)
    def captured(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        before = recorder.count
        with recorder.with_sinks(kwargs.get("s_aux")):
            result = function(module, query, key, value, attention_mask, *args, **kwargs)
        if recorder.count == before:
            with recorder.safely():
                _opaque(recorder, module, (query, key, value), attention_mask, result[0], kwargs)
        return result

    return captured


def _opaque(
    recorder: Recorder,
    module: torch.nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    attention_mask: Any,
    output: Tensor,
    options: dict[str, Any],
) -> None:
    """Record the call of an attention kernel from its arguments and its output."""
    query, key, value = tensors
    if options.get("cache") is not None or options.get("cu_seq_lens_q") is not None:
        recorder.cannot_see("a kernel on packed or paged sequences")
        return
    queries, keys = query.shape[-2], key.shape[-2]
    mask = _mask(module, attention_mask, queries, keys, options)
    turned = output.shape[1:3] == (queries, query.shape[1])
    recorder.record(
        product_call(
            query,
            key,
            value,
            output,
            kind="kernel",
            mask=mask,
            scale=options.get("scaling"),
            softcap=options.get("softcap"),
            dropout=options.get("dropout") or 0.0,
            sinks=options.get("s_aux"),
            view=lambda output: output.transpose(1, 2) if turned else output,
            note="recorded from a kernel's arguments: trust it as far as the check agrees",
        )
    )


def _mask(module: Any, attention_mask: Any, queries: int, keys: int, options: dict[str, Any]) -> Mask | Tensor | None:
    """Return the mask that a flash attention kernel applies: padding, causal, and a sliding window.

    Flash attention aligns the causal mask at the end: the last query may attend to all keys.
    """
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
        return attention_mask[..., :keys]
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    mask: Mask | None = None
    offset, reach = keys - queries, options.get("sliding_window")
    if is_causal and queries > 1:
        mask = causal(offset)
    if reach is not None and keys > reach:
        near = window(reach - 1, 0 if is_causal else reach - 1, offset)
        mask = near if mask is None else mask & near
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        real = attention_mask.bool()
        padding = real[:, None, None, :]
        # the kernel packs its sequences, so it returns zeros for padded queries: the mask excludes these queries too
        if queries == keys:
            padding = padding & real[:, None, :, None]
        return padding if mask is None else mask & padding
    return mask
