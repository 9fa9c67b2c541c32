"""The posterior of the source position of a known word: Bayes' rule, against values by hand and against likelihoods
computed one source position at a time."""

import pytest
import torch
from torch import Tensor

from regard.models.memory import Memory
from regard.models.posterior import log_likelihood, posterior
from regard.models.recurrent.cells import Recurrence
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.transformer.encoder_decoder import TransformerDecoder
from regard.nn.attention import Attention

B, K, T, D, VOCABULARY = 3, 7, 5, 8, 13
LENGTHS = [7, 0, 4]


def recurrent() -> RecurrentDecoder:
    made = RecurrentDecoder(
        VOCABULARY,
        D,
        memory_size=D,
        attention=Attention(D, D, hidden_size=6),
        order="luong",
        input_feeding=True,
        recurrence=Recurrence(embedding_size=4),
    )
    return made.double().eval()


def transformer() -> TransformerDecoder:
    return TransformerDecoder(VOCABULARY, D, layers=2, heads=2).double().eval()


DECODERS = {"recurrent": recurrent, "transformer": transformer}


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape)


def memory_of(*, same: bool = True) -> Memory:
    keys, values = torch.randn(2, B, K, D, dtype=torch.float64)
    mask = torch.arange(K) < torch.tensor(LENGTHS).unsqueeze(-1)
    return Memory(keys, keys if same else values, mask, torch.randn(B, D, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False], ids=["states", "words"])
@pytest.mark.parametrize("kind", DECODERS)
def test_each_position_is_read_alone(kind, same, monkeypatch):
    # This limit on the logits computed at a time is so low that a block of them ends in the middle of a sequence.
    monkeypatch.setattr("regard.models.posterior.LOGITS", 11 * VOCABULARY)
    decoder, memory, prefix, target = DECODERS[kind](), memory_of(same=same), tokens(B, T), tokens(B, T)
    found = log_likelihood(decoder, memory, prefix, target)
    for row in range(B):
        for j in range(LENGTHS[row]):
            one = Memory(
                memory.keys[row : row + 1, j : j + 1],
                memory.values[row : row + 1, j : j + 1],
                None,
                memory.summary[row : row + 1],
            )
            state = decoder.start(one)
            for i in range(T):
                step = decoder.step(state, prefix[row, i : i + 1])
                expected = step.logits.log_softmax(-1)[0, target[row, i]]
                torch.testing.assert_close(found[row, i, j], expected, rtol=1e-10, atol=1e-11)
                state = step.state


def test_what_is_not_known_has_no_say():
    decoder, memory, prefix, target = recurrent(), memory_of(), tokens(B, T), tokens(B, T)
    target[2, 3:] = -100
    found = log_likelihood(decoder, memory, prefix, target)
    assert not found[2, 3:].any()
    assert torch.equal(found[2, :3] < 0, memory.mask[2].expand(3, -1))
    weights = torch.rand(B, T, K, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(posterior(weights, found)[2, 3:], weights[2, 3:])


def test_the_posterior_by_hand():
    weights = torch.tensor([[[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    likely = torch.tensor([[[0.1, 0.4, 0.2, 0.9], [0.1, 0.2, 0.3, 0.4]]]).log()
    # The products are 0.05, 0.1, 0.05 and 0, which are divided by their sum 0.2; masked positions stay 0.
    expected = torch.tensor([[[0.25, 0.5, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    torch.testing.assert_close(posterior(weights, likely), expected)
    # The result does not depend on the overall likelihood of the word.
    torch.testing.assert_close(posterior(weights, likely - 500.0), expected, rtol=1e-4, atol=1e-5)


def test_half_precision_is_told_in_single():
    decoder = transformer().to(torch.bfloat16)
    memory = memory_of()
    half = Memory(memory.keys.bfloat16(), memory.keys.bfloat16(), memory.mask, memory.summary.bfloat16())
    assert log_likelihood(decoder, half, tokens(B, T), tokens(B, T)).dtype == torch.float32


def test_a_target_of_another_length_is_told(as_installed):
    with pytest.raises(ValueError, match=r"target must have the shape of prefix, \(3, 5\), got \(3, 4\)"):
        log_likelihood(recurrent(), memory_of(), tokens(B, T), tokens(B, T - 1))


def test_what_has_no_weight_has_no_say():
    weights = torch.tensor([[[0.75, 0.25, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]], requires_grad=True)
    likely = torch.tensor([[[0.0, 0.0, torch.nan], [0.0, 0.0, 0.0], [-torch.inf, -torch.inf, 0.0]]])
    found = posterior(weights, likely)
    # The likelihood of a position with weight 0 has no effect. Weights of 0 stay 0; if the word is impossible at every
    # position, the weights are returned unchanged.
    expected = torch.tensor([[[0.75, 0.25, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]])
    torch.testing.assert_close(found.detach(), expected)
    (gradient,) = torch.autograd.grad(found[0, 0, 0], weights)
    assert gradient.isfinite().all()


def test_nothing_to_read_or_nobody_to_ask():
    decoder = TransformerDecoder(7, 8, layers=1, heads=2).eval()
    for batch, keys in ((0, 3), (2, 0)):
        states = torch.zeros(batch, keys, 8)
        memory = Memory(states, states, None, torch.zeros(batch, 8))
        prefix = torch.ones(batch, 4, dtype=torch.long)
        assert log_likelihood(decoder, memory, prefix, prefix).shape == (batch, 4, keys)
