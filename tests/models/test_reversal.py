"""Reversal of long sequences: a context vector of fixed size cannot store them (Cho et al. 2014), but a decoder with
attention can generate them (Bahdanau et al. 2015)."""

import pytest
import torch
import torch.nn.functional as F

from regard.core.requests import full
from regard.models.frame import EncoderDecoder
from regard.models.recurrent.decoder import RecurrentDecoder
from regard.models.recurrent.encoder import RecurrentEncoder
from regard.nn.attention import Attention

LENGTH, SYMBOLS, SIZE, BATCH, STEPS = 24, 12, 40, 64, 130


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sources of random symbols, prefixes that begin with 0, and the reversed sources."""
    source = torch.randint(1, SYMBOLS + 1, (BATCH, LENGTH))
    target = source.flip(1)
    return source, F.pad(target[:, :-1], (1, 0)), target


def trained(attention: Attention | None) -> EncoderDecoder:
    torch.manual_seed(0)
    decoder = RecurrentDecoder(SYMBOLS + 1, SIZE, memory_size=2 * SIZE, attention=attention, order="luong")
    model = EncoderDecoder(RecurrentEncoder(SYMBOLS + 1, SIZE), decoder)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        source, prefix, target = batch()
        loss = F.cross_entropy(model.logits(model(source, prefix).states).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
def test_attention_reverses_what_its_twin_cannot():
    with_attention = trained(Attention(SIZE, 2 * SIZE, score="scaled_dot", hidden_size=SIZE))
    without = trained(None)
    source, prefix, target = batch()
    with torch.no_grad():
        decoded = with_attention(source, prefix, weights=full())
        right, other = (
            float((model.logits(model(source, prefix).states).argmax(-1) == target).double().mean())
            for model in (with_attention, without)
        )
    assert right > 0.9
    assert other < 0.5
    # The source position with the largest weight is at most one position away from the source of the generated word.
    looked = decoded.weights.argmax(-1)
    assert float(((looked - torch.arange(LENGTH - 1, -1, -1)).abs() <= 1).double().mean()) > 0.8
