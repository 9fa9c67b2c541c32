"""Encoder outputs (`Memory`) whose keys or values include word embeddings, in recurrent and Transformer models."""

import pytest
import torch
from torch import Tensor

from regard.core.requests import full
from regard.models.frame import EncoderDecoder
from regard.models.memory import Memory
from regard.models.memory_words import with_words
from regard.models.recurrent.cells import Recurrence
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.recurrent.encoder import RecurrentEncoder
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder
from regard.nn.attention import Attention
from regard.nn.local import LocalAttention

B, K, T, D, E, VOCABULARY = 3, 7, 5, 8, 4, 13
LENGTHS = torch.tensor([7, 3, 5])


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def recurrent(**contents: str) -> RecurrentEncoder:
    return RecurrentEncoder(VOCABULARY, D, embedding_size=E, **contents).double().eval()


def transformer(**contents: str) -> TransformerEncoder:
    return TransformerEncoder(VOCABULARY, D, layers=2, heads=2, positions="rotary", **contents).double().eval()


ENCODERS = {"recurrent": recurrent, "transformer": transformer}


@pytest.fixture(params=ENCODERS)
def make(request):
    return ENCODERS[request.param]


def test_a_memory_of_words_by_hand():
    states, words = torch.full((1, 2, 1), 3.0), torch.tensor([[[1.0], [5.0]]])
    memory = Memory(states, states, torch.tensor([[True, False]]), torch.zeros(1, 1))
    found = with_words(memory, words, keys="both", values="words")
    # The second position is padding, to which no word embedding is added.
    assert found.keys.flatten().tolist() == [4.0, 3.0]
    assert found.values.flatten().tolist() == [1.0, 0.0]
    same = with_words(memory, words, keys="words", values="words")
    assert same.keys is same.values


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_content_that_there_is_not_is_told(as_installed, make, name):
    with pytest.raises(ValueError, match=f"{name} must be one of states, words, both, got 'word'"):
        make(**{name: "word"})


def test_states_are_as_they_were(make):
    plain, chosen = make(), make(values="words")
    chosen.load_state_dict(plain.state_dict(), strict=False)
    source = tokens(B, K)
    before, after = plain(source, LENGTHS), chosen(source, LENGTHS)
    assert before.keys is before.values
    assert torch.equal(before.keys, after.keys)
    assert torch.equal(before.summary, after.summary)
    assert "words.weight" not in plain.state_dict()  # checkpoints of earlier versions have no parameter `words.weight`


def test_words_know_nothing_of_their_neighbours(make):
    encoder = make(keys="both", values="words")
    source = tokens(B, K)
    changed = source.clone()
    changed[:, 2] = (source[:, 2] + 1) % VOCABULARY
    before, after = encoder(source, LENGTHS), encoder(changed, LENGTHS)
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(before.values[:, others], after.values[:, others])
    assert not torch.allclose(before.values[:, 2], after.values[:, 2])
    assert not torch.allclose(before.keys[0, 1], after.keys[0, 1])
    assert not before.values[1, 3:].any()
    assert not before.keys[1, 3:].any()
    real = (torch.arange(K) < LENGTHS.unsqueeze(-1)).unsqueeze(-1)
    close(before.keys, make_states(encoder, source) + before.values * real)


def make_states(encoder: RecurrentEncoder | TransformerEncoder, source: Tensor) -> Tensor:
    """Return the hidden states of an encoder, also if its output holds word embeddings in place of the states."""
    plain = recurrent() if isinstance(encoder, RecurrentEncoder) else transformer()
    plain.load_state_dict({name: part for name, part in encoder.state_dict().items() if name != "words.weight"})
    return plain(source, LENGTHS).keys


def test_values_of_words_are_their_embeddings():
    encoder, source = recurrent(values="words"), tokens(B, K)
    expected = encoder.embedding.weight[source] @ encoder.words.weight.T
    for row, length in enumerate(LENGTHS.tolist()):
        close(encoder(source, LENGTHS).values[row, :length], expected[row, :length])
    model = transformer(values="words")
    close(model(source).values, D**0.5 * model.input.embedding.weight[source])


MECHANISMS = {
    "additive": lambda: Attention(D, 2 * D, hidden_size=5),
    "bilinear": lambda: Attention(D, 2 * D, score="bilinear", value_size=3),
    "local": lambda: LocalAttention(D, 2 * D, reach=2, kind="predictive", hidden_size=5),
}
ORDERS = {"bahdanau": ("bahdanau", False), "luong": ("luong", False), "feeding": ("luong", True)}


def decoder_of(order: str, mechanism: str) -> RecurrentDecoder:
    name, feeding = ORDERS[order]
    return RecurrentDecoder(
        VOCABULARY,
        D,
        memory_size=2 * D,
        attention=MECHANISMS[mechanism](),
        order=name,
        input_feeding=feeding,
        recurrence=Recurrence(embedding_size=E),
    ).double()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_recurrent_decoder_searches_keys_and_takes_values(order, mechanism):
    decoder = decoder_of(order, mechanism)
    memory, prefix = recurrent(values="words")(tokens(B, K), LENGTHS), tokens(B, T)
    decoded = decoder(memory, prefix, weights=full())
    state, first = decoder.start(memory), None
    for i in range(T):
        step = decoder.step(state, prefix[:, i])
        close(step.logits, decoder.logits(decoded.states)[:, i])
        close(step.weights, decoded.weights[:, i])
        state, first = step.state, step if first is None else first
    other = Memory(memory.keys, torch.randn_like(memory.values), memory.mask, memory.summary)
    again = decoder.step(decoder.start(other), prefix[:, 0])
    close(again.weights, first.weights)  # the weights depend on the keys alone
    assert not torch.allclose(again.logits, first.logits)


def test_what_is_padded_cannot_matter_to_the_decoder():
    decoder, prefix = decoder_of("feeding", "additive"), tokens(B, T)
    memory = recurrent(values="words")(tokens(B, K), LENGTHS)
    spoiled = torch.where(memory.mask.unsqueeze(-1), memory.values, torch.nan)
    again = decoder(Memory(memory.keys, spoiled, memory.mask, memory.summary), prefix)
    assert torch.equal(decoder(memory, prefix).states, again.states)


def test_a_transformer_steps_as_it_reads():
    decoder = TransformerDecoder(VOCABULARY, D, layers=2, heads=2).double().eval()
    model, source, prefix = EncoderDecoder(transformer(values="words"), decoder), tokens(B, K), tokens(B, T)
    decoded = model(source, prefix, LENGTHS)
    state = model.start(source, LENGTHS)
    for i in range(T):
        step = model.step(state, prefix[:, i])
        close(step.logits, model.logits(decoded.states)[:, i])
        state = step.state
    plain = EncoderDecoder(transformer(), decoder)
    plain.encoder.load_state_dict(model.encoder.state_dict())
    assert not torch.allclose(plain(source, prefix, LENGTHS).states, decoded.states)


@pytest.mark.parametrize("content", [{"values": "words"}, {"keys": "both"}])
def test_padding_has_no_part_in_a_gradient(content):
    torch.manual_seed(3)
    encoder = RecurrentEncoder(11, 4, **content)
    with torch.no_grad():
        encoder.embedding.weight[0] = torch.nan
    memory = encoder(torch.tensor([[3, 4, 5], [6, 0, 0]]), torch.tensor([3, 1]))
    (memory.keys.square().sum() + memory.values.square().sum()).backward()
    assert encoder.words.weight.grad.isfinite().all()
    assert encoder.words.weight.grad.any()
