"""Capture of nn.MultiheadAttention and the modules that use it, such as nn.TransformerEncoder and nn.Transformer.

Torch passes `F.multi_head_attention_forward` to a TorchFunctionMode as one function, and disables the mode while the
function runs, so the calls inside would not be captured. Therefore a copy of the function, which does not dispatch to
the mode again, runs with the mode enabled.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.look.capture.captured_call import Function, Handler, Recorder


@functools.cache
def open_form(function: FunctionType) -> FunctionType:
    """Return a copy of a torch function that skips the `__torch_function__` dispatch; torch's function is unchanged."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def seen(recorder: Recorder, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `F.multi_head_attention_forward`, run so that attention calls inside it are captured."""
    heads = kwargs.get("num_heads", args[4] if len(args) > 4 else None)
    assert isinstance(function, FunctionType)
    with recorder.inside(heads):
        return open_form(function)(*args, **kwargs)


HANDLERS: dict[Function, Handler] = {F.multi_head_attention_forward: seen}


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """In this context, nn.TransformerEncoder returns the same values at padded positions as without capture."""
    # A compiled encoder does not pack its sequences even without capture, so its outputs need no correction.
    compiled = {id(part) for module in model.modules() if _is_compiled(module) for part in module.modules()}
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    handles = [
        encoder.register_forward_hook(as_unwatched, with_kwargs=True)
        for encoder in encoders
        if id(encoder) not in compiled and not isinstance(encoder, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def as_unwatched(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """Return the output with the values that nn.TransformerEncoder returns at padded positions without capture.

    In inference the encoder packs padded sequences into a nested tensor, so its layers return 0 at padded positions,
    and its norm is applied to these zeros. Capture prevents packing, and padded positions would have other values. The
    result is None if the encoder would not pack, so that the hook leaves the output unchanged.
    """
    assert isinstance(encoder, nn.TransformerEncoder)
    names = ("src", "mask", "src_key_padding_mask", "is_causal")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    source, padding = arguments["src"], arguments.get("src_key_padding_mask")
    if not isinstance(padding, Tensor) or arguments.get("mask") is not None or not _would_pack(encoder, source):
        return None
    padded = padding if padding.dtype == torch.bool else padding != 0
    if getattr(encoder, "mask_check", True) and bool((padded[:, :-1] & ~padded[:, 1:]).any()):
        return None  # the encoder does not pack sequences if padding is anywhere but at the end
    blank = torch.zeros((), dtype=output.dtype, device=output.device).expand(output.shape[-1])
    if encoder.norm is not None:
        blank = encoder.norm(blank)
    return torch.where(padded[..., None], blank, output)


def _would_pack(encoder: nn.TransformerEncoder, source: Tensor) -> bool:
    first = encoder.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or not getattr(encoder, "use_nested_tensor", False):
        return False
    learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (source, *first.parameters()))
    return not (first.training or source.ndim != 3 or source.is_nested or torch.is_autocast_enabled() or learned)
