"""Decoding with the library's models: single steps give the log-probabilities of the model over the whole output."""

import pytest
import torch
from torch import Tensor, nn

from regard.core.requests import full
from regard.decode.beam import beam
from regard.decode.greedy import greedy
from regard.decode.records import Hypothesis
from regard.models.frame import EncoderDecoder
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.recurrent.encoder import RecurrentEncoder
from regard.models.transformer.encoder_decoder import TransformerDecoder, TransformerEncoder
from regard.nn.attention import Attention

BEGIN, END, WORDS = 1, 2, 11
LENGTHS = torch.tensor([5, 3, 7, 2])


def recurrent() -> EncoderDecoder:
    encoder = RecurrentEncoder(13, 6)
    return EncoderDecoder(encoder, RecurrentDecoder(WORDS, 6, memory_size=12, attention=Attention(6, 12)))


def transformer() -> EncoderDecoder:
    return EncoderDecoder(TransformerEncoder(13, 8, heads=2, layers=2), TransformerDecoder(WORDS, 8, heads=2, layers=2))


@pytest.fixture(params=[recurrent, transformer])
def model(request: pytest.FixtureRequest) -> EncoderDecoder:
    torch.manual_seed(31)
    model = request.param().double().eval()
    for parameter in model.parameters():  # larger weights than at initialisation, so that outputs vary
        nn.init.normal_(parameter, std=0.7)
    return model


def sources() -> Tensor:
    return torch.randint(3, 13, (4, 7), generator=torch.Generator().manual_seed(3))


def start(model: EncoderDecoder, source: Tensor, lengths: Tensor):
    memory = model.encoder(source, lengths)
    options = {"weights": True} if isinstance(model.decoder, TransformerDecoder) else {}
    # One position for the start token, nine for generated tokens.
    return model.decoder.start(memory, limit=9 + 1, **options)


def search(model: EncoderDecoder, source: Tensor, lengths: Tensor, **options) -> list[list[Hypothesis]]:
    state = start(model, source, lengths)
    begin = torch.full((len(source),), BEGIN)
    return beam(model.step, state, start=begin, stop=END, limit=9, minimum=2, **options)


def check(model: EncoderDecoder, source: Tensor, length: int, hypothesis: Hypothesis) -> None:
    """Compare a hypothesis's log-probabilities and weights with those of the model over the whole output."""
    with torch.no_grad():
        prefix = torch.tensor([[BEGIN, *hypothesis.tokens]])
        decoded = model(source[None, :length], prefix, torch.tensor([length]), weights=full())
        log_probs = model.logits(decoded.states).log_softmax(-1)[0]
    target = torch.tensor([*hypothesis.tokens, END])
    expected = log_probs.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(hypothesis.log_probs, expected[:-1])
    assert hypothesis.log_prob == pytest.approx(float(expected.sum()))
    weights = decoded.weights[-1].mean(1) if isinstance(decoded.weights, list | tuple) else decoded.weights
    torch.testing.assert_close(hypothesis.weights[:, :length], weights[0, :-1])
    assert not hypothesis.weights[:, length:].any()


@pytest.mark.slow
def test_beams_agree_with_the_whole_model(model):
    found = search(model, sources(), LENGTHS, width=3, n_best=3)
    assert len({each.tokens for row in found for each in row}) > 4
    for source, length, hypotheses in zip(sources(), LENGTHS.tolist(), found, strict=True):
        assert len(hypotheses) == 3
        for hypothesis in hypotheses:
            check(model, source, length, hypothesis)


@pytest.mark.slow
def test_batched_is_one_by_one(model):
    together = search(model, sources(), LENGTHS, width=3, n_best=2)
    for i, length in enumerate(LENGTHS.tolist()):
        [alone] = search(model, sources()[i : i + 1, :length], LENGTHS[i : i + 1], width=3, n_best=2)
        assert [each.tokens for each in together[i]] == [each.tokens for each in alone]
        for one, two in zip(together[i], alone, strict=True):
            assert one.score == pytest.approx(two.score, rel=1e-9)


def test_width_one_is_greedy(model):
    begin = torch.full((4,), BEGIN)
    wanted = greedy(model.step, start(model, sources(), LENGTHS), start=begin, stop=END, limit=9, minimum=2)
    found = search(model, sources(), LENGTHS, width=1)
    assert [each.tokens for [each] in found] == [each.tokens for each in wanted]
    for [one], two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.log_probs, two.log_probs, rtol=1e-9, atol=1e-9)
