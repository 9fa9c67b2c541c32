"""Tests of the studio's interactive translator: translations with a given prefix, alternative words, removed source
words."""

import pytest
import torch

from regard.data.text.vocabulary import Vocabulary
from regard.tasks.translation.codec import WordCoder
from regard.tasks.translation.config import ModelSettings, TranslationDecoding
from regard.tasks.translation.interactive import LiveTranslator
from regard.tasks.translation.network import build
from regard.tasks.translation.predictor import Translator

SOURCE = ("Tom", "chases", "Jerry", "sees", "the")
TARGET = ("汤姆", "追逐", "杰瑞", "看见")


@pytest.fixture(params=["additive", "none", "transformer"])
def live(request) -> LiveTranslator:
    changes = {"kind": "transformer", "heads": 2} if request.param == "transformer" else {"attention": request.param}
    settings = ModelSettings(size=8, dropout=0.0, **changes)
    coder = WordCoder(Vocabulary(SOURCE), Vocabulary(TARGET))
    model = build(settings, coder.sizes, shared=False).eval()
    return LiveTranslator("a run", Translator(model, coder, TranslationDecoding(), end_mark=False))


def test_hypotheses_are_sorted_and_each_place_has_alternatives(live):
    found = live.translate("Tom chases Jerry", beams=3)
    assert found.source == ("Tom", "chases", "Jerry")
    assert len({one.tokens for one in found.beams}) == len(found.beams)
    for one in found.beams:
        assert one.weights.shape == (len(one.tokens), 3)
        assert len(one.alternatives) == len(one.tokens)
        for others in one.alternatives:
            chances = [other.probability for other in others]
            assert chances == sorted(chances, reverse=True)
            assert 0.0 < sum(chances) <= 1.0 + 1e-5


def test_a_forced_beginning_is_kept(live):
    found = live.translate("Tom chases Jerry", beams=2, forced=("杰瑞", "看见"))
    assert all(one.tokens[:2] == ("杰瑞", "看见") for one in found.beams)


@pytest.mark.slow
def test_the_log_probability_is_that_of_the_tokens(live):
    """The log-probability of a translation is the sum of the logs of `score` over its tokens, plus the end symbol's."""
    [one] = live.translate("Tom chases Jerry", beams=1, forced=("汤姆", "追逐")).beams
    kept = torch.ones(1, 3, dtype=torch.bool)
    factors = [live.score("Tom chases Jerry", one.tokens, place, kept).item() for place in range(len(one.tokens))]
    assert one.log_prob <= torch.tensor(factors).log().sum().item() + 1e-4


def test_words_left_out_are_as_if_never_written(live):
    kept = torch.tensor([[True, False, True], [True, True, True]])
    found = live.score("Tom chases Jerry", ("汤姆",), 0, kept)
    alone = live.score("Tom Jerry", ("汤姆",), 0, torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(found[:1], alone, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_translated_is_said(live):
    with pytest.raises(ValueError, match="from 1 to 200 tokens, got 0"):
        live.translate("   ", beams=1)
    with pytest.raises(ValueError, match="no token 'Spike'"):
        live.translate("Tom", beams=1, forced=("Spike",))
