"""Attention of other libraries on the same tensors. A function or its call raises if the library cannot run it."""

import importlib
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Run = Callable[[], Tensor]  # one measured call; returns its output


Result = TypeVar("Result")


def sdpa_backend(name: str, raw: Callable[[], Result]) -> Callable[[], Result]:
    """Return `raw` restricted to the backend `name` of scaled_dot_product_attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, name)

    def run() -> Result:
        with sdpa_kernel(chosen):
            return raw()

    return run


def flex(query: Tensor, key: Tensor, value: Tensor, *, before: int) -> Run:
    """Return a call of compiled FlexAttention, in which a query attends to itself and `before` earlier keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k <= before)

    blocks = create_block_mask(allowed, None, None, query.shape[-2], key.shape[-2], device=query.device.type)
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, key, value, block_mask=blocks)


def xformers_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Run:
    """Return a call of xFormers' memory-efficient attention."""
    import xformers.ops as ops  # pyrefly: ignore[missing-import]

    tokens_first = [t.detach().transpose(1, 2) for t in (query, key, value)]
    bias = ops.LowerTriangularMask() if causal else None
    return lambda: ops.memory_efficient_attention(*tokens_first, attn_bias=bias).transpose(1, 2)


def x_transformers(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Run:
    """Return a call of the flash attention of x-transformers."""
    attend = importlib.import_module("x_transformers.attend").Attend(causal=causal, flash=True)
    return lambda: attend(query, key, value)[0]


def keras_additive(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Run:
    """Return a call of Keras' AdditiveAttention on its torch backend."""
    os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras reads KERAS_BACKEND once, at import
    import keras  # pyrefly: ignore[missing-import]

    layer = keras.layers.AdditiveAttention(dtype=str(query.dtype).removeprefix("torch."))
    flat = [t.flatten(0, 1) for t in (query, value, key)]  # Keras takes the value before the key, and no heads
    layer.build([tuple(t.shape) for t in flat])
    layer.scale.assign(weight.detach())
    return lambda: layer([t.flatten(0, 1) for t in (query, value, key)]).unflatten(0, query.shape[:2])
