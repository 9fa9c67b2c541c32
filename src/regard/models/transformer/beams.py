"""Beam search in a Transformer decoder: one step for all hypotheses of a source, which share memory and cached keys.

The hypotheses of a source are the queries of one batch row. All of them attend to the same projected memory. Cached
keys and values of self-attention are never moved when a search step selects the parents of the new hypotheses: a mask
selects, for each hypothesis, the row's keys that belong to its history, and only this mask changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core import attention as core
from regard.core.normalizers import Softmax
from regard.core.scores import ScaledDot
from regard.models.memory import Memory, Step
from regard.models.transformer.beam_layers import Pair, through
from regard.nn.cache import KeyValueCache
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHeadAttention
from regard.nn.positions import LearnedPositions, Rotary, SinusoidalPositions
from regard.nn.transformer import TransformerDecoderLayer

_FIRST = 64  # the smallest initial capacity of the cache, in keys
_TIDY = 4  # on the CPU, keys that no hypothesis attends to are removed every `_TIDY` steps, if they are many
_ROUND = 8  # rows of a mask are padded to a multiple of this number, for aligned loads


def why_not(decoder: Any) -> str | None:
    """Return why `TransformerBeams` cannot be used with this decoder, or None if it can.

    If `TransformerBeams` cannot be used, each hypothesis is a row of the batch.
    """
    if core.observers:
        return "somebody watches: every attention goes the way it is watched"
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return "autocast is on"
    if decoder.training:
        return "the decoder is in training"
    for layer in decoder.stack.layers:
        if type(layer) is not TransformerDecoderLayer or type(layer.feed_forward) is not FeedForward:
            return "a layer is not made of the usual parts"
        for attention in (layer.self_attention, layer.cross_attention):
            if reason := _not_usual(attention):
                return reason
        if isinstance(layer.self_attention.positions, nn.Module) and not isinstance(
            layer.self_attention.positions, Rotary
        ):
            return "positions enter the scores"
        parts = (layer, layer.self_attention, layer.cross_attention)
        if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
            return "a layer has hooks"
    return None


def _not_usual(attention: Any) -> str | None:
    if type(attention) is not MultiHeadAttention:
        return f"{type(attention).__name__} is not a MultiHeadAttention"
    score = attention.score()
    if type(score) is not ScaledDot or score.softcap is not None or type(attention.normalize) is not Softmax:
        return "attention is not the softmax of scaled dot products"
    if attention.kv_heads != attention.heads:
        return "heads share keys"
    return None


@dataclass(frozen=True, eq=False)
class TransformerBeams:
    """The state of a decoder after `length` tokens, with s hypotheses for each of b rows (sources).

    Each step writes new keys and values into `storage` in place, so a state is no longer valid after a step from it.
    """

    decoder: Any
    memory: Sequence[Pair]  # the memory's projected keys and values (b, h, k, d), for each layer
    real: Float[Tensor, "b 1 1 k"] | None  # −∞ at padding of the memory, else 0
    blank: Bool[Tensor, "b"] | None  # `blank` is True for rows (sources) whose memory is empty
    # cached self-attention keys and values of each layer, concatenated along the axis of heads
    storage: list[Float[Tensor, "b g room d"]]
    seen: Bool[Tensor, "b s n"]  # `seen` is True for the cached keys that belong to the tokens of the hypothesis
    length: int
    looks: bool

    def step(self, tokens: Int[Tensor, " n"]) -> Step:
        """Process one token of each hypothesis, row by row (rows · hypotheses,); return logits of the next token."""
        rows, slots, before = self.seen.shape
        own = torch.eye(slots, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        seen = torch.cat((self.seen, own), -1)
        x = embedded(self.decoder.input, tokens, self.length).unflatten(0, (rows, slots))

        def keep(layer: int, new: Tensor) -> Pair:
            self.storage[layer] = _roomy(self.storage[layer], before, new)
            self.storage[layer][:, :, before : before + slots] = new
            key, value = self.storage[layer][:, :, : before + slots].chunk(2, 1)
            return key, value

        bias = _bias(seen, x.dtype).unsqueeze(1)
        x, looked = through(self, x, keep, bias, offset=self.length)
        state = replace(self, seen=seen, length=self.length + 1)
        return Step(self.decoder.logits(x.flatten(0, 1)), state, looked)

    def regroup(self, parents: Int[Tensor, "r s"], rows: Int[Tensor, " r"] | None = None) -> "TransformerBeams":
        """Return the state of new hypotheses that continue `parents` (indices within a row).

        `rows` are the rows to keep (None: all).
        """
        seen = self.seen if rows is None else self.seen.index_select(0, rows)
        seen = seen.gather(1, parents.unsqueeze(-1).expand(-1, -1, seen.shape[-1]))
        if rows is None:
            return replace(self, seen=seen)._tidy()
        return replace(
            self,
            memory=[(key.index_select(0, rows), value.index_select(0, rows)) for key, value in self.memory],
            real=None if self.real is None else self.real.index_select(0, rows),
            blank=None if self.blank is None else self.blank.index_select(0, rows),
            storage=[part.index_select(0, rows) for part in self.storage],
            seen=seen,
        )

    def _tidy(self) -> "TransformerBeams":
        """Remove the keys that no hypothesis of a row attends to any more, every `_TIDY` steps.

        Many keys are not needed, because most hypotheses share parents. On CUDA no keys are removed: to read the number
        of remaining keys would synchronise the device.
        """
        count = self.seen.shape[2]
        if self.seen.is_cuda or self.length % _TIDY or count < _FIRST // 2:
            return self
        alive = self.seen.any(1)
        most = int(alive.sum(1).max())
        if most > 0.7 * count:
            return self
        order = alive.byte().sort(dim=1, descending=True, stable=True).indices[:, :most]
        seen = self.seen.gather(2, order.unsqueeze(1).expand(-1, self.seen.shape[1], -1))
        for storage in self.storage:
            index = order[:, None, :, None].expand(-1, storage.shape[1], -1, storage.shape[3])
            storage[:, :, :most] = storage.gather(2, index)
        return replace(self, seen=seen)

    def reorder(self, index: Int[Tensor, " n"]) -> "TransformerBeams":
        """Return the state with the batch rows `index`; every row must have one hypothesis."""
        if self.seen.shape[1] != 1:
            raise ValueError(f"rows have {self.seen.shape[1]} hypotheses each: regroup names their parents")
        return self.regroup(index.new_zeros(index.shape[0], 1), index)

    def static(self, width: int, steps: int) -> "StaticBeams | None":
        """Return a state with fixed shapes for a search with `width` hypotheses per row; None if it is not supported.

        Fixed shapes are not supported after the first token, or if there are fewer learned positions than steps.
        """
        positions = self.decoder.input.positions
        if self.length or (isinstance(positions, LearnedPositions) and positions.capacity < _rounded(steps, 16)):
            return None
        return StaticBeams(self, width, steps)


class StaticBeams:
    """`TransformerBeams` with fixed shapes and the step number in a tensor, so that a CUDA graph can capture a step.

    The numbers of rows, memory positions and steps are rounded up, so that searches of similar size reuse one object
    and its CUDA graph; `load` copies the state of a new search into it.
    """

    def __init__(self, like: TransformerBeams, width: int, steps: int) -> None:
        self.decoder, self.looks, self.width = like.decoder, like.looks, width
        key = like.memory[0][0]
        self.rows, self.keys, self.steps = _rounded(key.shape[0], 8), _rounded(key.shape[2], 8), _rounded(steps, 16)
        self.parameters = _addresses(self.decoder)
        heads, size = key.shape[1], key.shape[3]
        self.memory = [
            (key.new_zeros(self.rows, heads, self.keys, size), key.new_zeros(self.rows, heads, self.keys, size))
            for _ in like.memory
        ]
        self.real = key.new_zeros(self.rows, 1, 1, self.keys)
        self.blank = torch.zeros(self.rows, dtype=torch.bool, device=key.device)
        room = _rounded(self.steps * width, _ROUND)
        self.storage = [key.new_zeros(self.rows, room, 2 * heads, size) for _ in like.memory]
        self.seen = key.new_full((self.rows, width, room), -torch.inf)
        self.own = _bias(torch.eye(width, dtype=torch.bool, device=key.device), key.dtype).expand(self.rows, -1, -1)
        self.slots = torch.arange(width, device=key.device)
        self.time = torch.zeros(1, dtype=torch.long, device=key.device)
        self.places = _places(self.decoder.input.positions, self.steps, key)

    def fits(self, state: TransformerBeams, width: int, steps: int) -> bool:
        """Return whether this object, and the CUDA graph captured with it, can be reused for a search from `state`."""
        key = state.memory[0][0]
        mine = (self.decoder, self.looks, self.width, self.rows, self.keys, self.real.dtype, self.real.device)
        size = (_rounded(key.shape[0], 8), _rounded(key.shape[2], 8))
        required = (state.decoder, state.looks, width, *size, key.dtype, key.device)
        return mine == required and self.steps == _rounded(steps, 16) and self.parameters == _addresses(self.decoder)

    def load(self, state: TransformerBeams) -> None:
        """Copy `state` into the tensors of fixed shape, to begin a search from it.

        All other elements of keys and values are set to zero: masked values must be finite, and the previous search may
        have left NaN.
        """
        rows, _, keys, _ = state.memory[0][0].shape
        for mine, theirs in zip(self.memory, state.memory, strict=True):
            for storage, new in zip(mine, theirs, strict=True):
                storage[:rows, :, :keys] = new
                storage[rows:].zero_()
                storage[:rows, :, keys:].zero_()
        for storage in self.storage:
            storage.zero_()
        self.real.fill_(-torch.inf)
        self.real[:rows, :, :, :keys] = 0 if state.real is None else state.real
        self.real[rows:] = 0
        self.blank.zero_()
        if state.blank is not None:
            self.blank[:rows] = state.blank
        self.seen.fill_(-torch.inf)
        self.time.zero_()

    def step(self, tokens: Int[Tensor, " n"]) -> Step:
        """Process one token of each hypothesis (rows·width,); return the logits of the next token."""
        index = self.time * self.width + self.slots
        self.seen.index_copy_(2, index, self.own)
        x = self.decoder.input.embedding(tokens) * self.decoder.input.scale
        if self.places is not None:
            x = x + self.places.index_select(0, self.time)
        x = x.unflatten(0, (self.rows, self.width))

        def keep(layer: int, new: Tensor) -> Pair:
            stored = self.storage[layer].index_copy_(1, index, new.transpose(1, 2))
            key, value = stored.transpose(1, 2).chunk(2, 1)
            return key, value

        bias = self.seen.unsqueeze(1)
        x, looked = through(self, x, keep, bias, offset=self.time)
        self.time.add_(1)
        return Step(self.decoder.logits(x.flatten(0, 1)), self, looked)

    def regroup(self, parents: Int[Tensor, "r s"], rows: Tensor | None = None) -> "StaticBeams":
        """Replace every hypothesis by a continuation of its parent; `parents` are indices within a row."""
        assert rows is None, "no row is left out where shapes are fixed"
        self.seen.copy_(self.seen.gather(1, parents.unsqueeze(-1).expand_as(self.seen)))
        return self

    def reorder(self, index: Int[Tensor, " n"]) -> "StaticBeams":
        """Raise an error: with fixed shapes, rows cannot be selected, only the hypotheses within a row."""
        raise ValueError(f"shapes are fixed at {self.rows} rows: regroup names parents within a row")


def grouped(
    decoder: Any,
    memory: Memory | None,
    caches: Sequence[KeyValueCache],
    memory_caches: Sequence[KeyValueCache],
    mask: Bool[Tensor, "b k"] | None,
    length: int,
    looks: bool,
) -> TransformerBeams | None:
    """Return a `TransformerBeams` with one hypothesis per row, from the fields of a decoder's ordinary state.

    The result is None if `why_not` returns a reason or the decoder has no layers.
    """
    if not decoder.stack.layers or why_not(decoder):
        return None
    blank = None if mask is None else ~mask.any(1)
    pairs = []
    for layer, cache in zip(decoder.stack.layers, memory_caches, strict=True):
        if memory is None:
            key, value = cache.read()
        else:
            key, value = _projected(layer.cross_attention, memory)
        # A row whose memory is empty must have a zero context, so it attends to its padding, whose values are set to
        # zero. Contiguous keys and values are loaded faster at every step.
        value = value if blank is None else value.masked_fill(blank[:, None, None, None], 0)
        pairs.append((key.contiguous(), value.contiguous()))
    key = pairs[0][0]
    real = None
    if mask is not None and blank is not None:
        real = _bias(mask | blank.unsqueeze(-1), key.dtype)[:, None, None, :]
    storage = [
        torch.cat(cache.read(), 1) if length else key.new_empty(key.shape[0], 2 * key.shape[1], 0, key.shape[3])
        for cache in caches
    ]
    seen = torch.ones(key.shape[0], 1, length, dtype=torch.bool, device=key.device)
    return TransformerBeams(decoder, pairs, real, blank, storage, seen, length, looks)


def embedded(module: Any, tokens: Int[Tensor, " n"], offset: int) -> Float[Tensor, "n d"]:
    """Return the vectors of one token per hypothesis, all at position `offset`; `module` is a `TokenInput`."""
    return module(tokens.unsqueeze(1), offset=offset).squeeze(1)


def _projected(attention: MultiHeadAttention, memory: Memory) -> Pair:
    """Return keys and values of the memory for one layer; masked positions are zeroed."""
    keys, values = memory.keys, memory.values
    if memory.mask is not None:
        keys = torch.where(memory.mask.unsqueeze(-1), keys, 0)
        values = keys if memory.values is memory.keys else torch.where(memory.mask.unsqueeze(-1), values, 0)
    return attention.projection.memories(keys, values)


def _roomy(storage: Tensor, used: int, new: Tensor) -> Tensor:
    """Return the storage of keys and values, or a copy with twice the capacity if the new keys do not fit into it."""
    rows, heads, count, size = new.shape
    if used + count <= storage.shape[2]:
        return storage
    larger = new.new_empty(rows, heads, max(_FIRST, 2 * used, used + count), size)
    larger[:, :, :used] = storage[:, :, :used]
    return larger


def _places(positions: nn.Module | None, count: int, like: Tensor) -> Tensor | None:
    """Return a table of the first `count` position vectors, or None if the decoder adds none to the embeddings."""
    if isinstance(positions, SinusoidalPositions):
        return positions.table(count, dtype=like.dtype, device=like.device)
    return positions.table(count).to(like.dtype) if isinstance(positions, LearnedPositions) else None


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias for attention scores: 0 where `allowed` is True, −∞ elsewhere."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)


def _addresses(decoder: nn.Module) -> tuple[int, ...]:
    """Return the addresses of the parameters, which a captured graph uses."""
    return tuple(parameter.data_ptr() for parameter in decoder.parameters())


def _rounded(count: int, step: int) -> int:
    """Return `count` rounded up to a multiple of `step`; a count below `step` is unchanged."""
    return count if count < step else -(-count // step) * step
