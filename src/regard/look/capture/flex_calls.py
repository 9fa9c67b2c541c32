"""Capture of FlexAttention calls at PyTorch's higher-order operator, which compiled and eager calls both use."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as operator

from regard.look.capture.captured_call import Call, Function, Handler, Recorder
from regard.look.recomputed_weights import Modified

_SINKS = "the kernel knows nothing of this layer's sinks: these are the weights before the sinks take their part"


def seen(recorder: Recorder, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the FlexAttention operator, record the attention call, and return the operator's result."""
    result = function(*args, **kwargs)
    with recorder.safely():
        _record(recorder, result[0], args, kwargs)
    return result


def _record(recorder: Recorder, output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bound = inspect.signature(type(operator).__call__).bind(operator, *args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    query, key, value = (_tensor(arguments[name]) for name in ("query", "key", "value"))
    if query.shape[0] != key.shape[0]:
        key, value = (tensor.expand(query.shape[0], -1, -1, -1) for tensor in (key, value))
    mask_mod: Callable[..., Tensor] = arguments["block_mask"][-1]
    source = Modified(
        query,
        key,
        float(arguments["scale"]),
        arguments["score_mod"],
        mask_mod,
        arguments["score_mod_other_buffers"],
        arguments["mask_mod_other_buffers"],
    )
    sinks = recorder.sinks is not None
    recorder.record(Call("flex", source, value, output, float(arguments["scale"]), note=_SINKS if sinks else None))


def _tensor(thing: object) -> Tensor:
    assert isinstance(thing, Tensor)
    return thing


HANDLERS: dict[Function, Handler] = {operator: seen}
