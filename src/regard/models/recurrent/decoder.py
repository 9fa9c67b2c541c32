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
    """The state of the decoder between tokens, and the memory, projected once."""

    hidden: Hidden
    feed: Float[Tensor, "b d"]  # the last input of the output layer, for input feeding
    attention: Any  # the state of the attention mechanism
    projected: Projected | None
    summary: Float[Tensor, "b s"]

    def reorder(self, index: Int[Tensor, "n"]) -> "RecurrentState":
        """Return the rows of the batch named by `index`."""
        return RecurrentState(
            tuple(part.index_select(1, index) for part in self.hidden),
            self.feed.index_select(0, index),
            _reordered(self.attention, index),
            None if self.projected is None else self.projected.reorder(index),
            self.summary.index_select(0, index),
        )


class _Read(NamedTuple):
    """The contexts of some queries, (b, t, e), the requested weights, and the mechanism's next state."""

    context: Tensor
    weights: Tensor | Top | None
    log_prob: Tensor | None
    state: Any


class RecurrentDecoder(nn.Module):
    """A recurrent network that generates y_i from y_{i-1}, its state, and a context from the memory.

    order="bahdanau" (Bahdanau et al. 2015, appendix A.2): c_i = attend(s_{i-1}), s_i = f(s_{i-1}, [y_{i-1}; c_i]), and
    the input of the output layer is tanh(W_o [s_i; c_i; y_{i-1}]). order="luong" (Luong et al. 2015, section 3): h_t =
    f(h_{t-1}, y_{t-1}), c_t = attend(h_t), and the input of the output layer is h~_t = tanh(W_c [c_t; h_t]); with
    `input_feeding` h~_{t-1} is part of the next input. `attention` is any layer of `regard.nn` that `Attends`; without
    one, every c_i is C = `memory.summary` (Cho et al. 2014). The first state is tanh(W_s · summary).

    Training takes one call of the network and one of attention in Luong's order without feeding. Otherwise it is a loop
    over steps; for one GRU layer with additive attention a hand-written loop, on CUDA replayed as one graph.

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
        """Return states for each token of the prefix: `logits` of state i score token i + 1."""
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
        """Return scores of the next token."""
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
        """Return the state before the first token; the memory is projected here, once. `limit` is not needed."""
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
        """Return keys and values in the form that the mechanism needs."""
        keys, values, mask = memory.keys, memory.values, memory.mask
        same = keys is values
        if mask is not None:  # NaN in padding times a weight of 0 would be NaN
            keys = keys.masked_fill(~mask.unsqueeze(-1), 0.0)
            values = keys if same else values.masked_fill(~mask.unsqueeze(-1), 0.0)
        projected = attention.project(keys, mask=mask)
        return projected if same else projected._replace(value=attention.project(values, mask=mask).value)

    def step(self, state: RecurrentState, tokens: Int[Tensor, "b"]) -> Step:
        """Run one decoding step; its results equal those of `forward`."""
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
        """Loop over steps, where one step's output is the next one's input."""
        words = embedded(self.embedding, self.dropout, prefix)
        if additive_loops.serves(self.network, self.attention, feeding=self.input_feeding):
            gates, mapping = self._gates(words.turned())
            assert mapping is not None
            assert state.projected is not None
            found = self._by_hand(gates, mapping, state.hidden[0][0], state.projected)
            states = found.states
            if found.contexts is not None:
                states = self._mixed(states, found.contexts, words.turned() if found.turned else words)
            states = states.transpose(0, 1) if found.turned else states
            return Decoded(self.dropout(states), None if request is None else request.of(found.weights))
        gates, mapping = self._gates(words)
        # Rows are indexed over all steps, and received weight is summed over them: both need all weights.
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

    def _by_hand(self, gates: Tensor, mapping: Tensor, state: Tensor, projected: Projected) -> additive_loops.Found:
        """Run the hand-written loop if this decoder can use it, else return None."""
        if self.input_feeding:
            return additive_loops.feeding(self.network, self.attention, self.readout, gates, mapping, state, projected)
        return additive_loops.bahdanau(self.network, self.attention, gates, mapping, state, projected)

    def _gates(self, words: Tokens) -> tuple[Tensor, Tensor | None]:
        """Return the input gates of the tokens, for all steps by one product, and the columns for input feeding."""
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
        """Run one step from the token's input gates: the network's output (b, 1, d), the context, and the next
        state."""
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
        """Return the contexts of the queries (b, t, d): by attention, or the memory's summary."""
        if self.attention is None or state.projected is None:
            return _Read(_spread(state.summary, query), None, None, None)
        found, after = self.attention.attend(
            query, state.projected, state=state.attention, weights=request, generator=generator
        )
        return _Read(found.output, found.weights, found.log_prob, after)

    def _mixed(self, hidden: Tensor, context: Tensor, words: Tokens | None) -> Tensor:
        """Return the input of the output layer, for any number of steps; its parts are mapped without concatenation."""
        first, second = (hidden, context) if self.order == "bahdanau" else (context, hidden)
        sizes = [first.shape[-1], second.shape[-1]]
        weights = self.readout.weight.split([*sizes, self.readout.in_features - sum(sizes)], 1)
        found = linear(first, weights[0], self.readout.bias) + linear(second, weights[1])
        if self.order == "bahdanau" and words is not None:
            found = found + words.mapped(weights[2])
        return torch.tanh(found)


def _fed(gates: Tensor, feed: Tensor, mapping: Tensor | None) -> Tensor:
    """Return the gates with the fed-back output, if there is input feeding."""
    return gates if mapping is None else gates + F.linear(feed, mapping)


def _spread(summary: Tensor, like: Tensor) -> Tensor:
    """Return the summary at every step of `like`."""
    return summary.unsqueeze(1).expand(-1, like.shape[1], -1)


def _joined(found: list[Tensor | Top | None]) -> Tensor | Top | None:
    """Concatenate the results of single steps, as one call would return them."""
    tensors = [one for one in found if isinstance(one, Tensor)]
    if tensors:
        return torch.cat(tensors, 1)
    tops = [one for one in found if isinstance(one, Top)]
    return Top(*(torch.cat(parts, 1) for parts in zip(*tops, strict=True))) if tops else None


def _reordered(state: Any, index: Tensor) -> Any:
    """Return a mechanism's state (nested tuples of tensors, batch first) for other rows."""
    if isinstance(state, Tensor):
        return state.index_select(0, index)
    if isinstance(state, tuple):
        parts = [_reordered(part, index) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state
