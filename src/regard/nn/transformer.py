"""Transformer layers composed of parts: attention, feed-forward, residual connections, normalisation.

Attention is passed to a layer, so it may be a `MultiHeadAttention` with any score and positions, or a
`LinearAttention`. The layer owns the normalisations and the dropout after each part.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.core import torch_names
from regard.core.masks import Mask
from regard.core.requests import Request
from regard.core.torch_names import Unknown
from regard.nn.argument_checks import check_input
from regard.nn.cache import KeyValueCache
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHeadAttention
from regard.nn.projection import applied, own

Norm = Literal["pre", "post"]
# A function that creates a normalisation for vectors of a size: nn.LayerNorm, nn.RMSNorm, or `unnormalized`.
Normalization = Callable[[int], nn.Module]


def unnormalized(size: int) -> nn.Module:
    """Return a module that returns its input unchanged, for a Transformer layer without normalisation."""
    return nn.Identity()


@dataclass(frozen=True, eq=False)
class Layered:
    """The result of a layer: its output, and the requested attention weights."""

    output: Float[Tensor, "b q d"]
    weights: Any = None


class _Residual(nn.Module):
    """A residual connection around attention or feed-forward (`part`): x + part(norm(x)) for "pre", norm(x + part(x))
    for "post".

    Dropout is applied to the part's output. With `residual=False` the term x + is omitted.
    """

    def __init__(
        self, size: int, norm: Norm, normalization: Normalization, dropout: float, residual: bool = True
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be from 0 to below 1, got {dropout}")
        self.first = norm == "pre"
        self.norm = normalization(size)
        self.dropout = dropout
        self.residual = residual

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of attention or feed-forward (the `part`): x, normalised if the norm comes first ("pre")."""
        return applied(own(self, "norm"), x) if self.first else x

    def leave(self, x: Tensor, added: Tensor) -> Tensor:
        """Return the residual sum x + part, normalised if the norm comes after the sum ("post").

        Under autocast a normalisation returns float32. Its output is cast to the dtype of `added`, which halves the
        memory. A sum without normalisation is not cast.
        """
        dtype = added.dtype
        if self.dropout > 0.0 and self.training:
            added = F.dropout(added, self.dropout)
        x = x + added if self.residual else added
        if self.first:
            return x
        x = applied(own(self, "norm"), x)
        return x if x.dtype == dtype else x.to(dtype)

    def extra_repr(self) -> str:
        without = "" if self.residual else ", residual=False"
        return f"norm={'pre' if self.first else 'post'!r}, dropout={self.dropout}{without}"


class TransformerEncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each with a residual connection (Vaswani et al. 2017, section 3.1).

    norm "post": x ← N(x + A(x)), x ← N(x + F(x)), as in the paper; "pre": x ← x + A(N(x)), x ← x + F(N(x)), which
    trains without warm-up (Xiong et al. 2020). `attention` is a MultiHeadAttention or a module with a `size` and the
    same forward. `normalization` creates N from a size (nn.LayerNorm, nn.RMSNorm, or `unnormalized` for none).
    `dropout` is applied to the output of each part. With `residual=False` there are no residual connections, for
    ablations.

    >>> layer = TransformerEncoderLayer(MultiHeadAttention(8, 2), FeedForward(8, 32), norm="pre")
    >>> layer(torch.zeros(2, 3, 8)).output.shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norm: Norm = "pre",
        normalization: Normalization = nn.LayerNorm,
        dropout: float = 0.0,
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.size = _size(attention, feed_forward)
        self.attention = attention
        self.feed_forward = feed_forward
        self.around_attention = _Residual(self.size, norm, normalization, dropout, residual)
        self.around_feed_forward = _Residual(self.size, norm, normalization, dropout, residual)

    def forward(
        self,
        x: Float[Tensor, "b q d"],
        *,
        mask: Mask | Tensor | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
        **unknown: Unknown,
    ) -> Layered:
        """Map x (b, q, d) to output (b, q, d); the mask is a Mask, or a bool tensor that broadcasts to (b, h, q, k)."""
        if unknown:
            torch_names.refuse("TransformerEncoderLayer", self.forward, unknown, torch_names.ENCODER_CALL)
        check_input(x, "x", self.size)
        first, second = own(self, "around_attention"), own(self, "around_feed_forward")
        options: dict[str, Any] = {} if generator is None else {"generator": generator}
        attended = own(self, "attention")(first.enter(x), mask=mask, weights=weights, **options)
        x = first.leave(x, attended.output)
        added = own(self, "feed_forward")(second.enter(x))
        return Layered(second.leave(x, added), attended.weights)

    @classmethod
    def from_torch(
        cls, layer: nn.TransformerEncoderLayer, *, batch_first: bool | None = None
    ) -> "TransformerEncoderLayer":
        """Return a layer with a copy of the weights of torch's Transformer layer; `batch_first` is as for
        `MultiHeadAttention.from_torch`."""
        converted = cls(
            MultiHeadAttention.from_torch(layer.self_attn, batch_first=batch_first),
            FeedForward.from_torch(layer),
            norm="pre" if layer.norm_first else "post",
            normalization=_like(layer.norm1),
            dropout=layer.dropout1.p,
        )
        converted.around_attention.norm.load_state_dict(layer.norm1.state_dict())
        converted.around_feed_forward.norm.load_state_dict(layer.norm2.state_dict())
        return converted.train(layer.training)


class TransformerDecoderLayer(nn.Module):
    """Self-attention, attention to the memory, and feed-forward (Vaswani et al. 2017, section 3.1).

    In the first attention, queries, keys and values are projections of x; in the second attention, keys and values are
    projections of the encoder's outputs. Give `mask=causal()` for a decoder that must not attend to later positions.
    With a `cache` only new positions are given, and `memory_cache` stores the memory's keys and values, projected at
    the first call.

    >>> layer = TransformerDecoderLayer(MultiHeadAttention(8, 2), MultiHeadAttention(8, 2), FeedForward(8, 32))
    >>> layer(torch.zeros(2, 3, 8), torch.zeros(2, 5, 8)).output.shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        self_attention: nn.Module,
        cross_attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norm: Norm = "pre",
        normalization: Normalization = nn.LayerNorm,
        dropout: float = 0.0,
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.size = _size(self_attention, feed_forward, cross_attention)
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.feed_forward = feed_forward
        self.around_self_attention = _Residual(self.size, norm, normalization, dropout, residual)
        self.around_cross_attention = _Residual(self.size, norm, normalization, dropout, residual)
        self.around_feed_forward = _Residual(self.size, norm, normalization, dropout, residual)

    def forward(
        self,
        x: Float[Tensor, "b q d"],
        memory: Float[Tensor, "b k m"] | None = None,
        value: Float[Tensor, "b k e"] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        cache: KeyValueCache | None = None,
        memory_cache: KeyValueCache | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
        **unknown: Unknown,
    ) -> Layered:
        """Map x (b, q, d) to output (b, q, d), with attention to a memory (b, k, m); weights are (b, h, q, k).

        `value` (b, k, e) is given where the values of the memory differ from its keys.
        """
        if unknown:
            torch_names.refuse("TransformerDecoderLayer", self.forward, unknown, torch_names.DECODER_CALL)
        if memory is None and (memory_cache is None or not memory_cache.is_fixed):
            raise ValueError("memory must be given, or a memory_cache that holds it already, got neither")
        check_input(x, "x", self.size)
        options = _specified(generator=generator)
        attended = self.self_attention(
            self.around_self_attention.enter(x), mask=mask, **_specified(cache=cache), **options
        )
        x = self.around_self_attention.leave(x, attended.output)
        looked = self.cross_attention(
            self.around_cross_attention.enter(x),
            memory,
            value,
            mask=memory_mask,
            weights=weights,
            **_specified(cache=memory_cache),
            **options,
        )
        x = self.around_cross_attention.leave(x, looked.output)
        added = self.feed_forward(self.around_feed_forward.enter(x))
        return Layered(self.around_feed_forward.leave(x, added), looked.weights)

    @classmethod
    def from_torch(
        cls, layer: nn.TransformerDecoderLayer, *, batch_first: bool | None = None
    ) -> "TransformerDecoderLayer":
        """Return a layer with a copy of the weights of torch's Transformer layer; `batch_first` is as for
        `MultiHeadAttention.from_torch`."""
        converted = cls(
            MultiHeadAttention.from_torch(layer.self_attn, batch_first=batch_first),
            MultiHeadAttention.from_torch(layer.multihead_attn, batch_first=batch_first),
            FeedForward.from_torch(layer),
            norm="pre" if layer.norm_first else "post",
            normalization=_like(layer.norm1),
            dropout=layer.dropout1.p,
        )
        converted.around_self_attention.norm.load_state_dict(layer.norm1.state_dict())
        converted.around_cross_attention.norm.load_state_dict(layer.norm2.state_dict())
        converted.around_feed_forward.norm.load_state_dict(layer.norm3.state_dict())
        return converted.train(layer.training)


def _specified(**options: Any) -> dict[str, Any]:
    """Return the keyword arguments that are not None, so that an attention layer need not accept an unused argument."""
    return {name: value for name, value in options.items() if value is not None}


def _size(attention: nn.Module, *others: nn.Module) -> int:
    """Return the size that attention and feed-forward have in common, or raise an error that names a different size."""
    sizes = [getattr(part, "size", None) for part in (attention, *others)]
    if not isinstance(sizes[0], int):
        raise TypeError(f"attention must have a size, as MultiHeadAttention does, got {type(attention).__name__}")
    for part, size in zip(others, sizes[1:], strict=True):
        if size is not None and size != sizes[0]:
            raise ValueError(f"attention has size {sizes[0]}, {type(part).__name__} has {size}: they must be equal")
    return sizes[0]


def _like(norm: nn.LayerNorm) -> Normalization:
    """Return a function that creates layer normalisations with the options of the given one."""
    weight = norm.weight
    return functools.partial(
        nn.LayerNorm, eps=norm.eps, bias=norm.bias is not None, device=weight.device, dtype=weight.dtype
    )
