"""Stacks of Transformer layers without token embeddings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.masks import Mask
from regard.core.requests import Request
from regard.nn.cache import KeyValueCache
from regard.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer


@dataclass(frozen=True, eq=False)
class Stacked:
    """The output of a stack of layers, and the requested weights of each layer, first to last."""

    output: Float[Tensor, "b q d"]
    weights: list[Any] | None = None


class EncoderStack(nn.Module):
    """Encoder layers, and an optional normalisation after the last (Vaswani et al. 2017, figure 1, left).

    >>> from regard.nn import FeedForward, MultiHeadAttention
    >>> stack = EncoderStack(TransformerEncoderLayer(MultiHeadAttention(8, 2), FeedForward(8)) for _ in range(3))
    >>> stack(torch.zeros(2, 5, 8)).output.shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, layers: Iterable[TransformerEncoderLayer], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(
        self,
        x: Float[Tensor, "b q d"],
        *,
        mask: Mask | Tensor | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Stacked:
        """Apply every layer, with the mask `mask`, to x (b, q, d)."""
        seen = []
        for layer in self.layers:
            done = layer(x, mask=mask, weights=weights, generator=generator)
            x = done.output
            seen.append(done.weights)
        return Stacked(_normed(self.norm, x), None if weights is None else seen)

    @classmethod
    def from_torch(cls, encoder: nn.TransformerEncoder, *, batch_first: bool | None = None) -> "EncoderStack":
        """Return an EncoderStack with copies of the layers of a torch encoder, such as `encoder` of an nn.Transformer.

        `batch_first` is as in `MultiHeadAttention.from_torch`.
        """
        theirs = _of(encoder, nn.TransformerEncoderLayer)
        layers = [TransformerEncoderLayer.from_torch(layer, batch_first=batch_first) for layer in theirs]
        return cls(layers, _copied(encoder.norm)).train(encoder.training)


class DecoderStack(nn.Module):
    """Decoder layers that attend to one memory, and a last normalisation (Vaswani et al. 2017, figure 1, right).

    Pass `mask=causal()` for an autoregressive decoder. With `caches`, one for each layer, x holds only the new
    positions. With `memory_caches`, the first call stores the memory's keys and values as projected by each layer, and
    later calls omit `memory`.

    >>> from regard.nn import FeedForward, MultiHeadAttention
    >>> def layer() -> TransformerDecoderLayer:
    ...     return TransformerDecoderLayer(MultiHeadAttention(8, 2), MultiHeadAttention(8, 2), FeedForward(8))
    >>> stack = DecoderStack(layer() for _ in range(3))
    >>> stack(torch.zeros(2, 5, 8), torch.zeros(2, 7, 8)).output.shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, layers: Iterable[TransformerDecoderLayer], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(
        self,
        x: Float[Tensor, "b q d"],
        memory: Float[Tensor, "b k m"] | None = None,
        value: Float[Tensor, "b k e"] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        memory_caches: Sequence[KeyValueCache] | None = None,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Stacked:
        """Apply every layer to x (b, q, d); the weights are those of each layer's attention to the memory."""
        seen = []
        for index, layer in enumerate(self.layers):
            done = layer(
                x,
                memory,
                value,
                mask=mask,
                memory_mask=memory_mask,
                cache=None if caches is None else caches[index],
                memory_cache=None if memory_caches is None else memory_caches[index],
                weights=weights,
                generator=generator,
            )
            x = done.output
            seen.append(done.weights)
        return Stacked(_normed(self.norm, x), None if weights is None else seen)

    @classmethod
    def from_torch(cls, decoder: nn.TransformerDecoder, *, batch_first: bool | None = None) -> "DecoderStack":
        """Return a DecoderStack with copies of the layers of a torch decoder, such as `decoder` of an nn.Transformer.

        `batch_first` is as in `MultiHeadAttention.from_torch`.
        """
        theirs = _of(decoder, nn.TransformerDecoderLayer)
        layers = [TransformerDecoderLayer.from_torch(layer, batch_first=batch_first) for layer in theirs]
        return cls(layers, _copied(decoder.norm)).train(decoder.training)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _of(stack: nn.TransformerEncoder | nn.TransformerDecoder, kind: type) -> list[Any]:
    """Return the layers of a torch encoder or decoder; raise a TypeError if a layer is not of type `kind`."""
    layers = list(stack.layers.children())
    for layer in layers:
        if not isinstance(layer, kind):
            raise TypeError(f"every layer must be an nn.{kind.__name__}, got {type(layer).__name__}")
    return layers


def _copied(norm: nn.Module | None) -> nn.Module | None:
    """Return a copy of the normalisation after the last layer of a torch encoder or decoder."""
    if norm is None:
        return None
    if not isinstance(norm, nn.LayerNorm):
        raise TypeError(f"norm must be an nn.LayerNorm or None, got {type(norm).__name__}")
    options: dict[str, Any] = {"eps": norm.eps, "elementwise_affine": norm.elementwise_affine}
    copied = nn.LayerNorm(list(norm.normalized_shape), bias=norm.bias is not None, **options)
    if norm.weight is not None:
        copied.to(norm.weight)
    copied.load_state_dict(norm.state_dict())
    return copied
