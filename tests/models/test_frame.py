"""`EncoderDecoder`: any encoder works with any decoder, because only a `Memory` connects them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.core.requests import full
from regard.models.frame import EncoderDecoder
from regard.models.memory import Decoded, Memory, Step
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.recurrent.encoder import RecurrentEncoder
from regard.nn.attention import Attention

B, K, T, VOCABULARY = 3, 7, 5, 11


class Pictures(nn.Module):
    """An encoder of vectors instead of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 6)

    def forward(self, source: Tensor, lengths: Tensor | None = None) -> Memory:
        values = self.map(source)
        return Memory(values, values, None, values.mean(1))


@dataclass
class Started:
    memory: Memory
    limit: int | None

    def reorder(self, index: Tensor) -> "Started":
        return Started(self.memory.reorder(index), self.limit)


class Counter(nn.Module):
    """A decoder that returns its inputs."""

    output_weight = torch.ones(2, 3)
    output_bias = None

    def forward(self, memory: Memory, prefix: Tensor, *, weights=None, generator=None) -> Decoded:
        return Decoded(memory.summary.unsqueeze(1) + prefix.unsqueeze(-1), weights, None)

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.output_weight.T

    def start(self, memory: Memory, *, limit: int | None = None):
        return Started(memory, limit)

    def step(self, state, tokens: Tensor) -> Step:
        return Step(state.memory.summary + tokens.unsqueeze(-1), state, None)


def test_a_decoder_of_words_asks_a_memory_of_anything():
    decoder = RecurrentDecoder(VOCABULARY, 5, memory_size=6, attention=Attention(5, 6))
    model = EncoderDecoder(Pictures(), decoder)
    decoded = model(torch.randn(B, K, 4), torch.randint(0, VOCABULARY, (B, T)), weights=full())
    assert decoded.weights.shape == (B, T, K)
    assert model.logits(decoded.states).shape == (B, T, VOCABULARY)


def test_everything_is_handed_on():
    model = EncoderDecoder(RecurrentEncoder(VOCABULARY, 3, bidirectional=False), Counter())
    source, lengths, prefix = torch.randint(0, VOCABULARY, (B, K)), torch.tensor([7, 2, 5]), torch.ones(B, T).long()
    memory = model.encoder(source, lengths)
    decoded = model(source, prefix, lengths, weights=full())
    torch.testing.assert_close(decoded.states, (memory.summary + 1).unsqueeze(1).expand(B, T, 3))
    assert decoded.weights == full()
    state = model.start(source, lengths, limit=9)
    torch.testing.assert_close(state.memory.values, memory.values)
    assert state.limit == 9
    torch.testing.assert_close(model.step(state, prefix[:, 0]).logits, memory.summary + 1)
    assert model.output_weight is Counter.output_weight
    assert model.output_bias is None


def test_the_state_dict_goes_round():
    def made() -> EncoderDecoder:
        decoder = RecurrentDecoder(VOCABULARY, 5, memory_size=6, attention=Attention(5, 6))
        return EncoderDecoder(RecurrentEncoder(VOCABULARY, 3), decoder)

    model, other = made(), made()
    source, prefix = torch.randint(0, VOCABULARY, (B, K)), torch.randint(0, VOCABULARY, (B, T))
    assert not torch.equal(model(source, prefix).states, other(source, prefix).states)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(source, prefix).states, other(source, prefix).states)
