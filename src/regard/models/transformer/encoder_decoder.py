"""The Transformer: an encoder of self-attention layers and a decoder with attention to the encoder's states.

How to train it fast, here in bfloat16 on CUDA (the loss never materialises all logits):

    embedding = nn.Embedding(32000, 512)
    encoder = TransformerEncoder(32000, 512, layers=6, heads=8, embedding=embedding)
    decoder = TransformerDecoder(32000, 512, layers=6, heads=8, embedding=embedding)
    model = EncoderDecoder(encoder, decoder).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    compile_layers(model)  # one compilation for all encoder layers, one for all decoder layers

    for source, prefix, target in batches:
        with torch.autocast("cuda", torch.bfloat16):
            states = model(source, prefix).states
            loss, count = linear_cross_entropy(states, model.output_weight, target, bias=model.output_bias)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()

`compile_layers` is in `regard.models`, `linear_cross_entropy` in `regard.nn`. `regard train` with `train.graphs=true`
replays forward and backward pass as one CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core import sharding
from regard.core.masks import causal, padding
from regard.core.requests import Request, full
from regard.models.memory import Decoded, Memory, Step, pure
from regard.models.memory_words import Content, check_content, with_words
from regard.models.transformer.beams import StaticBeams, TransformerBeams, grouped
from regard.models.transformer.stacks import DecoderStack, EncoderStack, Stacked
from regard.models.transformer.token_input import Added, Inside, TokenInput, embedding_for, inside, positions_of
from regard.nn.cache import KeyValueCache
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHeadAttention
from regard.nn.positions import LearnedPositions, SinusoidalPositions
from regard.nn.transformer import Norm, Normalization, TransformerDecoderLayer, TransformerEncoderLayer

Positions = str | Added | Inside | None
Feeds = int | Callable[[], nn.Module] | None  # a hidden size, or a factory of the feed-forward part of each layer


class TransformerEncoder(nn.Module):
    """Embeddings with positions, then layers of self-attention and feed-forward (Vaswani et al. 2017, section 3.1).

    source (b, k) → `Memory` with keys = values (b, k, size); `summary` is their mean over the real positions.
    `feed_forward` is the hidden size of a ReLU layer (4 · size unless given), or a function that makes another kind,
    such as `lambda: FeedForward(512, 1376, activation="swiglu")`. `positions`: sinusoidal, learned, relative, rotary,
    alibi, a module of `regard.nn`, or None (a bag of words). `embedding` may be shared with a decoder. `keys` and
    `values` of the memory are the "states", the "words" with their positions (in training after a separate dropout),
    or "both".
    `dropout` applies to the embeddings and the output of each sublayer, `inner_dropout` (default: `dropout`) to the
    attention weights and inside the feed-forward parts. `residual` and `normalization` are as in the layers of
    `regard.nn`.

    >>> encoder = TransformerEncoder(11, 8, layers=2, heads=2, positions="rotary").eval()
    >>> memory = encoder(torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2]))
    >>> memory.values.shape, memory.mask[1]
    (torch.Size([2, 3, 8]), tensor([ True,  True, False]))
    """

    def __init__(
        self,
        vocabulary: int,
        size: int,
        *,
        layers: int,
        heads: int,
        feed_forward: Feeds = None,
        positions: Positions = "sinusoidal",
        norm: Norm = "pre",
        normalization: Normalization = nn.LayerNorm,
        dropout: float = 0.0,
        inner_dropout: float | None = None,
        residual: bool = True,
        embedding: nn.Embedding | None = None,
        keys: Content = "states",
        values: Content = "states",
    ) -> None:
        super().__init__()
        check_content(keys=keys, values=values)
        self.keys, self.values = keys, values
        placed = positions_of(positions, size, heads)
        inner = dropout if inner_dropout is None else inner_dropout
        self.size = self.memory_size = size
        self.input = _input(vocabulary, size, placed, embedding, dropout)
        self.stack = EncoderStack(
            (
                TransformerEncoderLayer(
                    MultiHeadAttention(size, heads, dropout=inner, positions=inside(placed)),
                    _feed(feed_forward, size, inner),
                    norm=norm,
                    normalization=normalization,
                    dropout=dropout,
                    residual=residual,
                )
                for _ in range(layers)
            ),
            normalization(size) if norm == "pre" else None,
        )

    def forward(self, source: Int[Tensor, "b k"], lengths: Int[Tensor, " b"] | None = None) -> Memory:
        """Return the memory of some sources; `lengths` holds the number of real tokens of each row (None: all)."""
        states = self.read(source, lengths).output
        if lengths is None:
            memory = Memory(states, states, None, states.mean(1))
        else:
            mask = _real(source, lengths)
            states = torch.where(mask.unsqueeze(-1), states, 0)
            summary = states.sum(1) / lengths.clamp(min=1).unsqueeze(-1)
            memory = Memory(states, states, mask, summary.to(states.dtype))
        if self.keys == self.values == "states":
            return memory
        return with_words(memory, self.input(source), keys=self.keys, values=self.values)

    def read(
        self, source: Int[Tensor, "b k"], lengths: Int[Tensor, " b"] | None = None, *, weights: Request | None = None
    ) -> Stacked:
        """Return the states of every position, and the requested weights of each layer's self-attention."""
        if lengths is not None and lengths.shape != source.shape[:1]:
            raise ValueError(f"lengths must have one number a source, {source.shape[0]}, got {tuple(lengths.shape)}")
        mask = None if lengths is None else padding(lengths)
        return self.stack(self.input(source), mask=mask, weights=weights)

    @classmethod
    def from_torch(
        cls,
        encoder: nn.TransformerEncoder,
        embedding: nn.Embedding,
        *,
        positions: Positions = None,
        batch_first: bool | None = None,
    ) -> "TransformerEncoder":
        """Return torch's encoder with an embedding before it, which torch does not include.

        `batch_first` is as for `MultiHeadAttention.from_torch`.
        """
        stack = EncoderStack.from_torch(encoder, batch_first=batch_first)
        vocabulary, size = embedding.weight.shape
        made = cls(vocabulary, size, layers=0, heads=_heads(encoder), positions=positions, embedding=embedding)
        made.stack = stack
        return made.train(encoder.training)


@dataclass(frozen=True, eq=False)
class TransformerState:
    """The state of a decoder between tokens: its own keys and values, and the memory's, projected once.

    The caches change with each step: a state is no longer valid after a step from it.
    """

    memory: Memory | None  # None after the first token, when every layer has cached its keys and values
    caches: list[KeyValueCache]
    memory_caches: list[KeyValueCache]
    mask: Bool[Tensor, "b k"] | None
    length: int
    weights: Request | None
    decoder: "TransformerDecoder"

    def grouped(self) -> TransformerBeams | None:
        """Return the state for grouped hypotheses, which share their memory; None if they cannot be grouped."""
        looks = self.weights is not None
        return grouped(self.decoder, self.memory, self.caches, self.memory_caches, self.mask, self.length, looks)

    def reorder(self, index: Int[Tensor, " n"]) -> "TransformerState":
        """Return the rows of the batch given by `index`, as beam search needs them."""
        for cache in (*self.caches, *self.memory_caches):
            cache.reorder(index)
        memory = None if self.memory is None else self.memory.reorder(index)
        return replace(self, memory=memory, mask=None if self.mask is None else self.mask.index_select(0, index))


class TransformerDecoder(nn.Module):
    """Masked self-attention, attention to a memory, feed-forward; logits by the weights of the embedding.

    (Vaswani et al. 2017, section 3.1; tied weights: Press & Wolf 2017.) `memory_size` is the size of the memory if it
    differs from `size`; with `tied=False` the output has its own matrix and bias. The rest is as in TransformerEncoder.
    Requested weights are those of the attention to the memory, a list of (b, h, t, k), first layer to last.

    >>> decoder = TransformerDecoder(7, 8, layers=2, heads=2).eval()
    >>> memory = TransformerEncoder(11, 8, layers=2, heads=2).eval()(torch.tensor([[3, 4, 5]]))
    >>> decoded = decoder(memory, torch.tensor([[1, 2]]))
    >>> state = decoder.start(memory)
    >>> for token in (1, 2):
    ...     step = decoder.step(state, torch.tensor([token]))
    ...     state = step.state
    >>> torch.allclose(step.logits, decoder.logits(decoded.states)[:, -1], atol=1e-5)
    True
    """

    def __init__(
        self,
        vocabulary: int,
        size: int,
        *,
        layers: int,
        heads: int,
        feed_forward: Feeds = None,
        positions: Positions = "sinusoidal",
        norm: Norm = "pre",
        normalization: Normalization = nn.LayerNorm,
        dropout: float = 0.0,
        inner_dropout: float | None = None,
        residual: bool = True,
        memory_size: int | None = None,
        embedding: nn.Embedding | None = None,
        tied: bool = True,
    ) -> None:
        super().__init__()
        placed = positions_of(positions, size, heads)
        inner = dropout if inner_dropout is None else inner_dropout
        self.size = size
        self.input = _input(vocabulary, size, placed, embedding, dropout)
        self.output = None if tied else nn.Linear(size, vocabulary)
        self.prepared_output: nn.Module | None = None  # replaces the output layer if set: see models.quantized
        self.stack = DecoderStack(
            (
                TransformerDecoderLayer(
                    MultiHeadAttention(size, heads, dropout=inner, positions=inside(placed)),
                    MultiHeadAttention(size, heads, key_size=memory_size, dropout=inner),
                    _feed(feed_forward, size, inner),
                    norm=norm,
                    normalization=normalization,
                    dropout=dropout,
                    residual=residual,
                )
                for _ in range(layers)
            ),
            normalization(size) if norm == "pre" else None,
        )

    def forward(
        self,
        memory: Memory,
        prefix: Int[Tensor, "b t"],
        *,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Decoded:
        """Return states for every token of the prefix, each of which attends to the memory and the tokens up to
        itself."""
        done = self.stack(
            self.input(prefix),
            memory.keys,
            _values(memory),
            mask=causal(),
            memory_mask=_for_all(memory.mask),
            weights=weights,
            generator=generator,
        )
        return Decoded(done.output, done.weights)

    def logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """Return scores of the next token."""
        if self.prepared_output is not None:
            return self.prepared_output(states)
        return F.linear(states, self.output_weight, self.output_bias)

    @property
    def output_weight(self) -> Float[Tensor, "v d"]:
        """Return the matrix that maps states to logits."""
        return self.input.embedding.weight if self.output is None else self.output.weight

    @property
    def output_bias(self) -> Float[Tensor, " v"] | None:
        """Return the bias of the logits."""
        return None if self.output is None else self.output.bias

    def start(self, memory: Memory, *, limit: int | None = None, weights: bool = False) -> TransformerState:
        """Return the state before the first token for at most `limit` tokens; `weights` requests attention weights."""
        sharding.refuse("decoding token by token")
        caches = [KeyValueCache(capacity=limit) for _ in self.stack.layers]
        projected = [KeyValueCache() for _ in self.stack.layers]
        return TransformerState(memory, caches, projected, memory.mask, 0, full() if weights else None, self)

    @pure
    def step(self, state: TransformerState | TransformerBeams | StaticBeams, tokens: Int[Tensor, " b"]) -> Step:
        """Return the scores of the next token, given one for each row; weights are averaged over the last layer's
        heads."""
        sharding.refuse("decoding token by token")
        if not isinstance(state, TransformerState):
            return state.step(tokens)
        done = self.stack(
            self.input(tokens.unsqueeze(1), offset=state.length),
            *(() if state.memory is None else (state.memory.keys, _values(state.memory))),
            mask=causal(),
            memory_mask=_for_all(state.mask),
            caches=state.caches,
            memory_caches=state.memory_caches,
            weights=state.weights,
        )
        seen = None if done.weights is None else done.weights[-1].mean(1).squeeze(1)
        after = replace(state, memory=None, length=state.length + 1)
        return Step(self.logits(done.output.squeeze(1)), after, seen)

    @classmethod
    def from_torch(
        cls,
        decoder: nn.TransformerDecoder,
        embedding: nn.Embedding,
        *,
        positions: Positions = None,
        batch_first: bool | None = None,
    ) -> "TransformerDecoder":
        """Return torch's decoder with an embedding before it and a tied output after it, which torch does not include.

        `batch_first` is as for `MultiHeadAttention.from_torch`.
        """
        stack = DecoderStack.from_torch(decoder, batch_first=batch_first)
        vocabulary, size = embedding.weight.shape
        made = cls(vocabulary, size, layers=0, heads=_heads(decoder), positions=positions, embedding=embedding)
        made.stack = stack
        return made.train(decoder.training)


def _heads(stack: nn.TransformerEncoder | nn.TransformerDecoder) -> int:
    """Return the number of heads of one of torch's stacks."""
    return next(part.num_heads for part in stack.modules() if isinstance(part, nn.MultiheadAttention))


def _input(
    vocabulary: int, size: int, placed: Added | Inside | None, embedding: nn.Embedding | None, dropout: float
) -> TokenInput:
    added = placed if isinstance(placed, (SinusoidalPositions, LearnedPositions)) else None
    return TokenInput(embedding_for(vocabulary, size, embedding), added, dropout=dropout)


def _feed(feed_forward: Feeds, size: int, dropout: float) -> nn.Module:
    if feed_forward is None or isinstance(feed_forward, int):
        return FeedForward(size, feed_forward, dropout=dropout)
    return feed_forward()


def _real(source: Tensor, lengths: Tensor) -> Bool[Tensor, "b k"]:
    """Return which positions are tokens."""
    return torch.arange(source.shape[1], device=source.device) < lengths.unsqueeze(-1)


def _for_all(mask: Bool[Tensor, "b k"] | None) -> Bool[Tensor, "b 1 1 k"] | None:
    """Return a mask of keys, the same for all heads and queries."""
    return None if mask is None else mask[:, None, None, :]


def _values(memory: Memory) -> Tensor | None:
    """Return the memory's values if they differ from its keys: one tensor is projected in one product."""
    return None if memory.values is memory.keys else memory.values
