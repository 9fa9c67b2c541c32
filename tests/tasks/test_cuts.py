"""Tests of several sub-word segmentations of each training text, which a resumed run computes in the same way."""

import os

import numpy as np
import pytest

from regard.data.text.bpe import train_bpe
from regard.tasks.translation.config import DataSettings
from regard.tasks.translation.material import file_material

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "boxed",
    "weather",
)


@pytest.fixture
def files(tmp_path):
    dice = np.random.default_rng(3)
    lines = [" ".join(dice.choice(WORDS, size=dice.integers(3, 9))) for _ in range(60)]
    for suffix, text in (("en", lines), ("de", [line[::-1] for line in lines])):
        (tmp_path / f"text.{suffix}").write_text("\n".join(text) + "\n", encoding="utf-8")
    return tuple(tmp_path / f"text.{suffix}" for suffix in ("en", "de"))


def settings(files, **more):
    return DataSettings(files=files, vocabulary=340, valid=5, test=5, **more)


def test_every_pair_stands_once_as_usual_and_then_in_other_cuts(files, tmp_path):
    plain = file_material(settings(files), tmp_path / "a")
    loose = file_material(settings(files, merge_dropout=0.4, cuts=3), tmp_path / "b")
    count = len(plain.records)
    assert len(loose.records) == 3 * count
    assert [len(side) for side in loose.lengths] == [3 * count] * 2
    other = 0
    for place in range(3 * count):
        found, usual = loose.records[place], plain.records[place % count]
        for side, codes in enumerate((loose.codec.codes.source, loose.codec.codes.target)):
            assert codes.decode(found[side].tolist()) == codes.decode(usual[side].tolist())
            assert loose.lengths[side][place] == len(found[side]) + 1
            if place < count:
                assert np.array_equal(found[side], usual[side])
            else:
                other += not np.array_equal(found[side], usual[side])
    # More than half of the 2 · 2 · count random segmentations differ from the segmentation without randomness.
    assert other > 2 * count


def test_a_run_that_goes_on_finds_the_same_cuts(files, tmp_path):
    first = file_material(settings(files, merge_dropout=0.4, cuts=2), tmp_path / "cache")
    again = file_material(settings(files, merge_dropout=0.4, cuts=2), tmp_path / "cache", first.codec.codes)
    assert len(first.records) == len(again.records)
    for place in range(len(first.records)):
        assert all(np.array_equal(a, b) for a, b in zip(first.records[place], again.records[place], strict=True))


def test_what_is_judged_is_cut_as_usual(files, tmp_path):
    loose = file_material(settings(files, merge_dropout=0.9, cuts=2), tmp_path / "cache")
    words = loose.test[0].source
    assert loose.codec.read_words(words).numbers == loose.codec.read_words(words).numbers


def test_dropout_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"dropout must be from 0 to 1, got 1\.5"):
        train_bpe(["Tom"], size=270).loosened(1.5)


def test_files_that_were_only_touched_are_cut_as_before(files, tmp_path):
    chosen = settings(files, merge_dropout=0.4, cuts=2)
    first = file_material(chosen, tmp_path / "cache")
    before = list(first.records)
    for path in files:
        os.utime(path, (1_000_000_000, 1_000_000_000))
    again = file_material(chosen, tmp_path / "cache", first.codec.codes)
    for old, new in zip(before, again.records, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))
