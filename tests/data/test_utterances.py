"""Tests of the synthesised utterances: reproducibility by seed, and sound at the times of each word."""

import numpy as np
import pytest

from regard.data.worlds.phones import LEXICON, PHONES
from regard.data.worlds.utterances import WORDS, splits, utterances


@pytest.mark.parametrize("word", WORDS)
def test_letters_spell_the_word_and_every_sound_exists(word):
    assert "".join(letters for letters, _ in LEXICON[word]) == word
    assert all(name in PHONES for _, names in LEXICON[word] for name in names)


def test_the_same_seed_gives_the_same_utterances():
    one, two, other = (next(utterances(seed, count=1)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.samples, two.samples)
    assert one.text == two.text
    assert len(one.samples) != len(other.samples) or not np.allclose(one.samples, other.samples)


def test_parts_have_different_utterances_of_the_lengths_asked_for():
    made = splits(1, train=3, valid=3, test=3, longer=3, words=(2, 3), beyond=(5, 6))
    parts = (made.train, made.valid, made.test)
    assert all(2 <= len(item.words) <= 3 for part in parts for item in part)
    assert all(5 <= len(item.words) <= 6 for item in made.longer)
    assert len({item.samples.tobytes() for part in parts for item in part}) == 9


@pytest.mark.parametrize("rate", [8000, 16_000])
def test_words_are_loud_when_they_are_said_and_pauses_are_not(rate):
    for item in utterances(7, count=8, words=(2, 4), rate=rate):
        power = np.square(item.samples.astype(np.float64))
        spans = [slice(round(begin * rate), round(end * rate)) for begin, end in item.times]
        pauses = [
            slice(round((end + 0.02) * rate), round((begin - 0.02) * rate))
            for (_, end), (begin, _) in zip(item.times, item.times[1:], strict=False)
            if begin - end > 0.06
        ]
        for pause in pauses:
            assert power[pause].mean() < 0.2 * min(power[span].mean() for span in spans)


def test_letters_fill_their_words_in_order():
    for item in utterances(2, count=5):
        assert len(item.letter_times) == len(item.text)
        assert all(begin <= end for begin, end in item.letter_times)
        starts = [begin for begin, _ in item.letter_times]
        assert starts == sorted(starts)
        assert (item.letter_times[0][0], item.letter_times[-1][1]) == (item.times[0][0], item.times[-1][1])
        assert item.times[-1][1] < len(item.samples) / item.rate


@pytest.mark.parametrize("words", [(0, 2), (3, 2), (1, 99)])
def test_lengths_out_of_bounds_are_refused(words):
    with pytest.raises(ValueError, match="words must be"):
        next(utterances(1, count=1, words=words))
