"""A recurrent decoder of token sequences that attends to a memory at every step."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core import sharding
from regard.core.requests import Received, Request, Rows, Top, full
from regard.kernels.products import linear
from regard.models.memory import Decoded, Memory, Step
from regard.models.recurrent import additive_loops
from regard.models.recurrent.cells import Hidden, Recurrence, advance, run
from regard.models.recurrent.token_embeddings import Tokens, embedded
from regard.nn.protocol import Attends, Projected

ORDERS = ("bahdanau", "luong")


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """The state of the decoder between two tokens, with the memory, which is projected once at the start."""

    hidden: Hidden
    # the last input of the output layer, which input feeding adds to the network's next input
    feed: Float[Tensor, "b d"]
    # Tensors that the attention layer needs at the next step, such as the coverage or the previous alignment.
    attention: Any
    projected: Projected | None
    summary: Float[Tensor, "b s"]

    def reorder(self, index: Int[Tensor, "n"]) -> "RecurrentState":
        """Return the state with the batch rows `index`, which may be repeated or left out."""
        return RecurrentState(
            tuple(part.index_select(1, index) for part in self.hidden),
            self.feed.index_select(0, index),
            _reordered(self.attention, index),
            None if self.projected is None else self.projected.reorder(index),
            self.summary.index_select(0, index),
        )


class _Read(NamedTuple):
    """The result of attention: contexts (b, t, e), the requested weights, and tensors for the next step (coverage)."""

    context: Tensor
    weights: Tensor | Top | None
    log_prob: Tensor | None
    state: Any


class RecurrentDecoder(nn.Module):
    """A recurrent network that generates y_i from y_{i-1}, its state, and a context from the memory.

    With order="bahdanau" (Bahdanau et al. 2015, appendix A.2), the previous state attends: c_i = attend(s_{i-1}), s_i =
    f(s_{i-1}, [y_{i-1}; c_i]), and the input of the output layer is tanh(W_o [s_i; c_i; y_{i-1}]). With order="luong"
    (Luong et al. 2015, section 3), the new state attends: h_t = f(h_{t-1}, y_{t-1}), c_t = attend(h_t), and the input
    of the output layer is h~_t = tanh(W_c [c_t; h_t]); with `input_feeding`, h~_{t-1} is part of the next input of the
    network. `attention` is any layer of `regard.nn` that implements the protocol `Attends`; without attention, every
    context c_i is `memory.summary` (Cho et al. 2014). The first state is tanh(W_s · summary).

    In Luong's order without input feeding, `forward` calls the network once and attention once. Otherwise it loops over
    the steps. For one GRU layer with additive attention, a hand-written loop of `kernels.recurrent` runs the steps; on
    CUDA one graph replays this loop.

    >>> from regard.core.requests import full
    >>> from regard.nn.attention import Attention
    >>> decoder = RecurrentDecoder(7, 4, memory_size=6, attention=Attention(4, 6))
    >>> values = torch.randn(2, 5, 6)
    >>> memory = Memory(values, values, None, torch.randn(2, 6))
    >>> decoded = decoder(memory, torch.tensor([[1, 2, 3], [1, 4, 5]]), weights=full())
    >>> decoded.states.shape, decoded.weights.shape
    (torch.Size([2, 3, 4]), torch.Size([2, 3, 5]))
    """

    def __init__(
        self,
        vocabulary: int,
        size: int,
        *,
        memory_size: int,
        attention: Attends | None = None,
        order: Literal["bahdanau", "luong"] = "bahdanau",
        input_feeding: bool = False,
        recurrence: Recurrence = Recurrence(),
        summary_size: int | None = None,
    ) -> None:
        super().__init__()
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        if input_feeding and order != "luong":
            raise ValueError("input_feeding goes with order='luong': Bahdanau's order feeds the context already")
        summary_size = memory_size if summary_size is None else summary_size
        embedding_size = recurrence.embedding_size or size
        context_size = summary_size if attention is None else attention.output_size
        fed = context_size if order == "bahdanau" else size if input_feeding else 0
        self.size, self.order, self.input_feeding, self.recurrence = size, order, input_feeding, recurrence
        self.attention = attention
        self.embedding = nn.Embedding(vocabulary, embedding_size)
        self.dropout = nn.Dropout(recurrence.dropout)
        self.network = recurrence.network(embedding_size + fed, size)
        self.bridge = nn.Linear(summary_size, recurrence.parts * recurrence.layers * size)
        seen = size + context_size + (embedding_size if order == "bahdanau" else 0)
        self.readout = nn.Linear(seen, size)
        self.output = nn.Linear(size, vocabulary)

    def forward(
        self,
        memory: Memory,
        prefix: Int[Tensor, "b t"],
        *,
        weights: Request | None = None,
        generator: torch.Generator | None = None,
    ) -> Decoded:
        """Return the states of a whole prefix of tokens; `logits` of state i are the scores of token i + 1."""
        state = self.start(memory)
        if self.input_feeding or (self.order == "bahdanau" and self.attention is not None):
            return self._in_steps(state, prefix, weights, generator)
        inputs = vectors = self.dropout(self.embedding(prefix))
        if self.order == "bahdanau":
            inputs = torch.cat((vectors, _spread(state.summary, vectors)), -1)
        hidden, _ = run(self.network, inputs, state.hidden)
        read = self._read(state, hidden, weights, generator)
        states = self._mixed(hidden, read.context, Tokens(vectors, None))
        return Decoded(self.dropout(states), read.weights, read.log_prob)

    def logits(self, states: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """Return logits of the next token from states before the output layer."""
        return self.output(states)

    @property
    def output_weight(self) -> Float[Tensor, "v d"]:
        """Return the matrix of the output layer."""
        return self.output.weight

    @property
    def output_bias(self) -> Float[Tensor, "v"]:
        """Return the bias of the output layer."""
        return self.output.bias

    def start(self, memory: Memory, *, limit: int | None = None) -> RecurrentState:
        """Return the state before the first token, with the projected memory; `limit` is ignored."""
        sharding.refuse("a recurrent decoder")
        summary = memory.summary
        first = torch.tanh(self.bridge(summary))
        parts = first.unflatten(-1, (self.recurrence.parts, self.recurrence.layers, self.size)).permute(1, 2, 0, 3)
        projected = None
        if self.attention is not None:
            projected = self._projected(memory, self.attention)
        hidden = tuple(part.contiguous() for part in parts)
        return RecurrentState(hidden, torch.zeros_like(hidden[0][0]), None, projected, summary)

    def _projected(self, memory: Memory, attention: Attends) -> Projected:
        """Return the keys and values of the memory, projected as the attention layer needs them."""
        keys, values, mask = memory.keys, memory.values, memory.mask
        same = keys is values
        if mask is not None:  # padding is set to zero, because NaN in padding times a weight of 0 would be NaN
            keys = keys.masked_fill(~mask.unsqueeze(-1), 0.0)
            values = keys if same else values.masked_fill(~mask.unsqueeze(-1), 0.0)
        projected = attention.project(keys, mask=mask)
        return projected if same else projected._replace(value=attention.project(values, mask=mask).value)

    def step(self, state: RecurrentState, tokens: Int[Tensor, "b"]) -> Step:
        """Run one decoding step for one token of each row; its logits equal those of `forward` at this token."""
        sharding.refuse("a recurrent decoder")
        words = Tokens(self.dropout(self.embedding(tokens)).unsqueeze(1), None)
        gates, mapping = self._gates(words)
        top, read, state = self._advance(state, gates.squeeze(1), mapping, full(), None)
        output = state.feed.unsqueeze(1) if self.input_feeding else self._mixed(top, read.context, words)
        weights = read.weights
        assert not isinstance(weights, Top)
        logits = self.logits(self.dropout(output.squeeze(1)))
        return Step(logits, state, None if weights is None else weights.squeeze(1))

    def _in_steps(
        self, state: RecurrentState, prefix: Tensor, request: Request | None, generator: torch.Generator | None
    ) -> Decoded:
        """Return the states of a prefix of tokens by a loop, because each step needs the result of the step before."""
        words = embedded(self.embedding, self.dropout, prefix)
        if additive_loops.serves(self.network, self.attention, feeding=self.input_feeding):
            gates, mapping = self._gates(words.turned())
            assert mapping is not None
            assert state.projected is not None
            result = self._by_hand(gates, mapping, state.hidden[0][0], state.projected)
            states = result.states
            if result.contexts is not None:
                states = self._mixed(states, result.contexts, words.turned() if result.turned else words)
            states = states.transpose(0, 1) if result.turned else states
            return Decoded(self.dropout(states), None if request is None else request.of(result.weights))
        gates, mapping = self._gates(words)
        # A `Rows` request numbers its rows over all steps, and a `Received` request sums weights over all steps. For
        # these two requests each step therefore computes full weights.
        whole = isinstance(request, (Rows, Received))
        hidden: list[Tensor] = []
        reads: list[_Read] = []
        fed: list[Tensor] = []
        for i in range(prefix.shape[1]):
            top, read, state = self._advance(state, gates[:, i], mapping, full() if whole else request, generator)
            hidden.append(top)
            reads.append(read)
            fed.append(state.feed)
        weights = _joined([read.weights for read in reads])
        if whole and request is not None and isinstance(weights, Tensor):
            weights = request.of(weights)
        log_probs = [read.log_prob for read in reads if read.log_prob is not None]
        if self.input_feeding:
            states = torch.stack(fed, 1)
        else:
            states = self._mixed(torch.cat(hidden, 1), torch.cat([read.context for read in reads], 1), words)
        return Decoded(self.dropout(states), weights, torch.cat(log_probs, 1) if log_probs else None)

    def _by_hand(
        self, gates: Tensor, mapping: Tensor, state: Tensor, projected: Projected
    ) -> additive_loops.LoopResult:
        """Run all steps in the hand-written loop for this decoder's order."""
        if self.input_feeding:
            return additive_loops.feeding(self.network, self.attention, self.readout, gates, mapping, state, projected)
        return additive_loops.bahdanau(self.network, self.attention, gates, mapping, state, projected)

    def _gates(self, words: Tokens) -> tuple[Tensor, Tensor | None]:
        """Return the tokens' part of the input gates of all steps, and the weight that maps fed-back vectors to gates.

        One matrix product computes the gates of all steps. The weight is None if no vector is fed back to the network's
        input.
        """
        network, size = self.network, words.vectors.shape[-1]
        tokens, fed = network.get_parameter("weight_ih_l0").split([size, network.input_size - size], 1)
        gates = words.mapped(tokens, network.get_parameter("bias_ih_l0"))
        return gates, fed if network.input_size > size else None

    def _advance(
        self,
        state: RecurrentState,
        gates: Tensor,
        mapping: Tensor | None,
        request: Request | None,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, _Read, RecurrentState]:
        """Run one step of the recurrent network from the token's input gates (b, g).

        Return the network's output (b, 1, d), the result of attention, and the decoder's next state.
        """
        if self.order == "bahdanau":
            read = self._read(state, state.hidden[0][-1].unsqueeze(1), request, generator)
            top, hidden = advance(self.network, _fed(gates, read.context.squeeze(1), mapping), state.hidden)
            top, feed = top.unsqueeze(1), state.feed
        else:
            top, hidden = advance(self.network, _fed(gates, state.feed, mapping), state.hidden)
            top = top.unsqueeze(1)
            read = self._read(state, top, request, generator)
            feed = self._mixed(top, read.context, None).squeeze(1) if self.input_feeding else state.feed
        return top, read, RecurrentState(hidden, feed, read.state, state.projected, state.summary)

    def _read(
        self, state: RecurrentState, query: Tensor, request: Request | None, generator: torch.Generator | None
    ) -> _Read:
        """Return the contexts of the queries (b, t, d), by attention, or without attention the memory's summary."""
        if self.attention is None or state.projected is None:
            return _Read(_spread(state.summary, query), None, None, None)
        attended, after = self.attention.attend(
            query, state.projected, state=state.attention, weights=request, generator=generator
        )
        return _Read(attended.output, attended.weights, attended.log_prob, after)

    def _mixed(self, hidden: Tensor, context: Tensor, words: Tokens | None) -> Tensor:
        """Return the input of the output layer, tanh(W [hidden; context; words]), for any number of steps.

        Each part is multiplied by its own columns of W, which avoids concatenating the parts. Luong's order has the
        context before the hidden state, and no words.
        """
        first, second = (hidden, context) if self.order == "bahdanau" else (context, hidden)
        sizes = [first.shape[-1], second.shape[-1]]
        weights = self.readout.weight.split([*sizes, self.readout.in_features - sum(sizes)], 1)
        mixed = linear(first, weights[0], self.readout.bias) + linear(second, weights[1])
        if self.order == "bahdanau" and words is not None:
            mixed = mixed + words.mapped(weights[2])
        return torch.tanh(mixed)


def _fed(gates: Tensor, feed: Tensor, mapping: Tensor | None) -> Tensor:
    """Return the input gates plus the mapped `feed` vector (context or last output); without a map, the gates."""
    return gates if mapping is None else gates + F.linear(feed, mapping)


def _spread(summary: Tensor, like: Tensor) -> Tensor:
    """Return the summary (b, s) repeated for every step of `like` (b, t, …), as a view (b, t, s)."""
    return summary.unsqueeze(1).expand(-1, like.shape[1], -1)


def _joined(weights: list[Tensor | Top | None]) -> Tensor | Top | None:
    """Return the weights of single steps concatenated, as one call of attention over all steps would return them."""
    tensors = [part for part in weights if isinstance(part, Tensor)]
    if tensors:
        return torch.cat(tensors, 1)
    tops = [part for part in weights if isinstance(part, Top)]
    return Top(*(torch.cat(parts, 1) for parts in zip(*tops, strict=True))) if tops else None


def _reordered(state: Any, index: Tensor) -> Any:
    """Return `RecurrentState.attention` (nested tuples of tensors, batch first) with the batch rows `index`."""
    if isinstance(state, Tensor):
        return state.index_select(0, index)
    if isinstance(state, tuple):
        parts = [_reordered(part, index) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state
