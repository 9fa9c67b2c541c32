"""Argument names of PyTorch's attention and their equivalents in regard, for error messages."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Never, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
if TYPE_CHECKING:
    Unknown = Never  # unknown keywords are invalid: type checkers report them, and at run time `refuse` raises
else:
    Unknown = object  # beartype does not support Never

_WEIGHTS = "write weights=regard.full(), and read Attended.weights"
# Keywords of F.scaled_dot_product_attention and of a call of nn.MultiheadAttention.
CALL = {
    "is_causal": "write mask=regard.causal()",
    "attn_mask": "write mask= for a bool tensor (True = may attend), bias= for numbers added to the scores",
    "key_padding_mask": "write mask=regard.padding(lengths), or mask=~key_padding_mask[:, None, None]",
    "dropout_p": "write dropout=",
    "scale": "write score=regard.ScaledDot(scale)",
    "enable_gqa": "fewer key heads than query heads are understood",
    "need_weights": _WEIGHTS,
    "average_attn_weights": f"{_WEIGHTS}.mean(-3)",
}
LINEAR_CALL = {
    "is_causal": "write causal=True",
    "attn_mask": "write mask= for keys hidden from every query alike (…, 1, k); pairs have no mask in linear attention",
    "key_padding_mask": CALL["key_padding_mask"],
}
LAYER_CALL = CALL | {
    "attn_mask": "write mask= and bias= as regard.nn.torch_masks(attn_mask, heads=…) translates them",
    "key_padding_mask": "write mask= as regard.nn.torch_masks(None, key_padding_mask, heads=…) translates it",
    "dropout_p": "write dropout= where the layer is made",
    "scale": "write score=regard.ScaledDot(scale) where the layer is made",
}
ENCODER_CALL = {
    "src_mask": "write mask=~src_mask (True = may attend here)",
    "src_key_padding_mask": "write mask=~src_key_padding_mask[:, None, None], or mask=regard.padding(lengths)",
    "is_causal": "write mask=regard.causal()",
}
DECODER_CALL = {
    "tgt_mask": "write mask=~tgt_mask (True = may attend here), or mask=regard.causal()",
    "tgt_key_padding_mask": "write mask=~tgt_key_padding_mask[:, None, None], or mask=regard.padding(lengths)",
    "memory_key_padding_mask": "write memory_mask=~memory_key_padding_mask[:, None, None], or regard.padding(lengths)",
    "tgt_is_causal": "write mask=regard.causal()",
    "memory_is_causal": "write memory_mask=regard.causal()",
}
LAYER = {
    "embed_dim": "write size=",
    "num_heads": "write heads=",
    "kdim": "write key_size=",
    "vdim": "write value_size=",
    "batch_first": "layers of regard take (batch, length, size)",
    "add_bias_kv": "there is no such option",
    "add_zero_attn": "there is no such option",
    "device": "write layer.to(device)",
    "dtype": "write layer.to(dtype)",
}


def refuse(name: str, function: Callable[..., object], unknown: Mapping[str, object], known: Mapping[str, str]) -> None:
    """Raise a TypeError for the first unknown keyword; the message says what to write instead."""
    for word in unknown:
        if word in known:
            raise TypeError(f"{name}() has no {word}: {known[word]}")
        names = [p for p in inspect.signature(function).parameters if p not in ("self", "unknown")]
        near = difflib.get_close_matches(word, names, 1)
        hint = f": did you mean {near[0]}?" if near else f": it takes {', '.join(names)}"
        raise TypeError(f"{name}() has no {word}{hint}")


def made_with(known: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of constructors: the error for a torch argument names its equivalent in this library."""

    def wrapped(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__qualname__.split(".")[0]
        names = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            unknown = {word: None for word in kwargs if word not in names}
            if unknown:
                refuse(name, function, unknown, known)
            return function(*args, **kwargs)

        return call

    return wrapped
