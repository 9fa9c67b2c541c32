"""Decoder layers in beam search: the hypotheses of a source are the queries of one batch row, all at one position."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.scores import ScaledDot
from regard.kernels.availability import TRITON
from regard.nn.multihead import MultiHeadAttention
from regard.nn.positions import Rotary

_KERNEL = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST = 256  # the largest head size that the Triton kernel supports

Pair = tuple[Tensor, Tensor]
# keep(layer, new) stores the new keys and values (b, 2h, s, d) of s hypotheses for a layer with h heads, and returns
# all n keys and values (b, h, n, d) stored so far.
Keep = Callable[[int, Tensor], Pair]


@runtime_checkable
class Carries(Protocol):
    """The interface of `TransformerBeams` and `StaticBeams` that the layers use; the fields are described there."""

    @property
    def decoder(self) -> Any: ...

    @property
    def looks(self) -> bool: ...

    @property
    def memory(self) -> Sequence[Pair]: ...

    @property
    def real(self) -> Tensor | None: ...

    @property
    def blank(self) -> Tensor | None: ...


def through(
    state: Carries, x: Tensor, keep: Keep, bias: Tensor, *, offset: int | Tensor
) -> tuple[Tensor, Tensor | None]:
    """Apply all layers to x (b, s, d), one token of s hypotheses per row; return the output and attention weights.

    The weights (b·s, k) are those of the last layer over the memory, None if not requested. `bias` (b, 1, s, n) masks
    the keys that are not in the history of a hypothesis. `offset` is the position of the tokens in x, a number or a
    tensor on the device. It is a tensor if the step is captured in a CUDA graph; then the layers use Triton kernels on
    CUDA.
    """
    stack, looked = state.decoder.stack, None
    time = offset if isinstance(offset, Tensor) else None
    fused = TRITON and time is not None and x.is_cuda and x.dtype in _KERNEL
    last = len(stack.layers) - 1
    for number, layer in enumerate(stack.layers):
        own, cross = layer.self_attention, layer.cross_attention
        packed = _turned(own, own.projection(layer.around_self_attention.enter(x)), offset)
        key, value = keep(number, packed[:, own.heads :])
        added = _read(own, packed[:, : own.heads], key, value, bias, time, fused)
        x = _left(layer.around_self_attention, x, added, fused)
        query = cross.projection.queries(layer.around_cross_attention.enter(x))
        key, value = state.memory[number]
        if number == last and state.looks:
            added, looked = _looked(cross, query, key, value, state.real, state.blank)
        else:
            added = _read(cross, query, key, value, state.real, None, fused)
        x = _left(layer.around_cross_attention, x, added, fused)
        x = _left(layer.around_feed_forward, x, layer.feed_forward(layer.around_feed_forward.enter(x)), fused)
    return (x if stack.norm is None else stack.norm(x)), looked


def _left(around: Any, x: Tensor, added: Tensor, fused: bool) -> Tensor:
    """Return the sum of x and the sublayer's output `added`, with the normalisation of the sublayer (no dropout)."""
    norm = around.norm
    if not around.residual:
        return added if around.first else norm(added)
    if around.first:
        return x + added
    if fused and type(norm) is nn.LayerNorm and norm.weight is not None and norm.weight.dtype == x.dtype == added.dtype:
        from regard.kernels.triton.beam_attention import added_norm  # imported here: the kernel needs Triton

        return added_norm(x, added, norm)
    return norm(x + added)


def _read(
    attention: MultiHeadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    time: Tensor | None,
    fused: bool,
) -> Tensor:
    """Return the attention output of the hypotheses; given the step number `time`, the kernel skips unused keys."""
    scale = _scale(attention)
    if fused and query.shape[-1] <= _LARGEST:
        from regard.kernels.triton.beam_attention import attend  # imported here: the kernel needs Triton

        return attention.output(attend(query, key, value, bias, scale=scale, time=time))
    outputs = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    return attention.output(outputs.transpose(1, 2).flatten(-2))


def _looked(
    attention: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, blank: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output of the attention to the memory, and its weights averaged over heads."""
    scores = query @ key.mT * _scale(attention)
    weights = (scores if real is None else scores + real).softmax(-1)
    output = attention.output((weights @ value).transpose(1, 2).flatten(-2))
    looked = weights.mean(1)
    if blank is not None:
        looked = looked.masked_fill(blank[:, None, None], 0)
    return output, looked.flatten(0, 1)


def _scale(attention: MultiHeadAttention) -> float:
    score = attention.score()
    assert isinstance(score, ScaledDot)
    return score.factor(attention.head_size)


def _turned(attention: MultiHeadAttention, packed: Tensor, offset: int | Tensor) -> Tensor:
    """Return packed queries, keys and values; if the layer has rotary positions, queries and keys are rotated.

    The queries and keys of all hypotheses are rotated by the same position, `offset`.
    """
    if not isinstance(attention.positions, Rotary):
        return packed
    rows, _, slots, _ = packed.shape
    turning, value = packed.transpose(1, 2).flatten(0, 1).unsqueeze(2).split([2 * attention.heads, attention.heads], 1)
    turned = torch.cat((attention.positions(turning, offset=offset), value), 1)
    return turned.squeeze(2).unflatten(0, (rows, slots)).transpose(1, 2)
