"""The Transformer: an encoder of self-attention layers and a decoder with attention to the encoder's states.

Example of fast training in bfloat16 on CUDA, with a loss that never materialises all logits:

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

`compile_layers` is in `regard.models`, `linear_cross_entropy` in `regard.nn`. The command `regard train` with the
option `train.graphs=true` replays the forward and backward pass as one CUDA graph.
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
Feeds = int | Callable[[], nn.Module] | None  # a hidden size, or a factory of the feed-forward module of each layer


class TransformerEncoder(nn.Module):
    """Embeddings with positions, then layers of self-attention and feed-forward (Vaswani et al. 2017, section 3.1).

    A source (b, k) is encoded as a `Memory` with keys = values (b, k, size); `summary` is their mean over the positions
    that are not padding.
    `feed_forward` is the hidden size of a ReLU layer (default: 4 · size), or a function that returns another module,
    such as `lambda: FeedForward(512, 1376, activation="swiglu")`. `positions` is "sinusoidal", "learned", "relative",
    "rotary", "alibi", a module of `regard.nn`, or None (a bag of words). `embedding` may be shared with a decoder.
    `keys` and `values` choose the keys and values of the memory: the output "states" of the last layer, the "words"
    (embeddings with positions; in training with a separate dropout mask), or "both" (the sum of states and words).
    `dropout` applies to the embeddings and the output of each sublayer, `inner_dropout` (default: `dropout`) to the
    attention weights and inside the feed-forward modules. `residual` and `normalization` are as in
    `regard.nn.TransformerEncoderLayer`.

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
        """Return the memory (states) of `source`; `lengths` are its rows' numbers of tokens, without padding."""
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
        """Return a TransformerEncoder with a copy of torch's layers and with `embedding`, which torch does not include.

        `batch_first` is as in `MultiHeadAttention.from_torch`.
        """
        stack = EncoderStack.from_torch(encoder, batch_first=batch_first)
        vocabulary, size = embedding.weight.shape
        converted = cls(vocabulary, size, layers=0, heads=_heads(encoder), positions=positions, embedding=embedding)
        converted.stack = stack
        return converted.train(encoder.training)


@dataclass(frozen=True, eq=False)
class TransformerState:
    """The state of a decoder between two tokens: cached keys and values of its self-attention and of the memory.

    Each step changes the caches in place, so a state is no longer valid after a step from it.
    """

    # `memory` is None after the first token, when every layer has cached the memory's projected keys and values
    memory: Memory | None
    caches: list[KeyValueCache]
    memory_caches: list[KeyValueCache]
    mask: Bool[Tensor, "b k"] | None
    length: int
    weights: Request | None
    decoder: "TransformerDecoder"

    def grouped(self) -> TransformerBeams | None:
        """Return a state for beam search whose hypotheses share one memory per source; None if not supported."""
        looks = self.weights is not None
        return grouped(self.decoder, self.memory, self.caches, self.memory_caches, self.mask, self.length, looks)

    def reorder(self, index: Int[Tensor, " n"]) -> "TransformerState":
        """Return the state with the batch rows `index`, which beam search may repeat or leave out."""
        for cache in (*self.caches, *self.memory_caches):
            cache.reorder(index)
        memory = None if self.memory is None else self.memory.reorder(index)
        return replace(self, memory=memory, mask=None if self.mask is None else self.mask.index_select(0, index))


class TransformerDecoder(nn.Module):
    """A decoder whose layers have causal self-attention, attention to a memory, and a feed-forward module.

    (Vaswani et al. 2017, section 3.1.) The output layer uses the weights of the embedding (Press & Wolf 2017), or its
    own matrix and bias with `tied=False`. `memory_size` is the size of the memory if it differs from `size`. The other
    arguments are as in `TransformerEncoder`. Requested weights are those of the attention to the memory, a list of
    (b, h, t, k), first layer to last.

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
        # a module that replaces the output layer if it is not None: see models.quantized
        self.prepared_output: nn.Module | None = None
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
        """Return the state of every token of the prefix; a token attends to the memory and to the tokens up to
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
        """Return the logits of the next token from the states that `forward` returns."""
        if self.prepared_output is not None:
            return self.prepared_output(states)
        return F.linear(states, self.output_weight, self.output_bias)

    @property
    def output_weight(self) -> Float[Tensor, "v d"]:
        """Return the matrix that maps states to logits."""
        return self.input.embedding.weight if self.output is None else self.output.weight

    @property
    def output_bias(self) -> Float[Tensor, " v"] | None:
        """Return the bias that is added to the logits, or None."""
        return None if self.output is None else self.output.bias

    def start(self, memory: Memory, *, limit: int | None = None, weights: bool = False) -> TransformerState:
        """Return the state before the first token for at most `limit` tokens; `weights` requests attention weights."""
        sharding.refuse("decoding token by token")
        caches = [KeyValueCache(capacity=limit) for _ in self.stack.layers]
        projected = [KeyValueCache() for _ in self.stack.layers]
        return TransformerState(memory, caches, projected, memory.mask, 0, full() if weights else None, self)

    @pure
    def step(self, state: TransformerState | TransformerBeams | StaticBeams, tokens: Int[Tensor, " b"]) -> Step:
        """Return the logits of the next token, given the last token of each row; the attention weights are averaged
        over the heads of the last layer."""
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
        """Return a TransformerDecoder with a copy of torch's layers, and with `embedding`, also used as output weights.

        Torch's decoder has no embedding and no output layer. `batch_first` is as in `MultiHeadAttention.from_torch`.
        """
        stack = DecoderStack.from_torch(decoder, batch_first=batch_first)
        vocabulary, size = embedding.weight.shape
        converted = cls(vocabulary, size, layers=0, heads=_heads(decoder), positions=positions, embedding=embedding)
        converted.stack = stack
        return converted.train(decoder.training)


def _heads(stack: nn.TransformerEncoder | nn.TransformerDecoder) -> int:
    """Return the number of heads of a torch encoder or decoder."""
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
    """Return a mask (b, k) that is True at tokens and False at padding."""
    return torch.arange(source.shape[1], device=source.device) < lengths.unsqueeze(-1)


def _for_all(mask: Bool[Tensor, "b k"] | None) -> Bool[Tensor, "b 1 1 k"] | None:
    """Return the mask of keys with two more axes, so that it applies to all heads and queries."""
    return None if mask is None else mask[:, None, None, :]


def _values(memory: Memory) -> Tensor | None:
    """Return the memory's values; None if the values are the keys, so that one matrix product projects both."""
    return None if memory.values is memory.keys else memory.values
