"""Tests of a translator's training data: splitting corpora by source sentence, and progress messages."""

import tracemalloc
from pathlib import Path

import pytest

from regard.data.data_files import DataError
from regard.data.text.corpus import TextCorpus
from regard.tasks.translation.config import DataSettings
from regard.tasks.translation.material import Limits, file_material, find_rows, index, split_by_source


def corpus_of(folder: Path, count: int, words: int) -> TextCorpus:
    """Return a corpus in which every source sentence occurs twice, each time with another target."""
    paths = [folder / "long.en", folder / "long.de"]
    paths[0].write_text("".join(f"{row // 2} {'word ' * words}\n" for row in range(count)))
    paths[1].write_text("".join(f"{row} {'Wort ' * words}\n" for row in range(count)))
    return index(find_rows(paths), folder / "index", limits=Limits(longest=1000, ratio=9.0))


def test_no_source_stands_in_two_parts(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 3000, 3)
    rows, (valid, test) = split_by_source(corpus, 40, 60)
    assert (len(valid), len(test)) == (40, 60)
    held = [example.source[0] for example in (*valid, *test)]
    assert len(set(held)) == 100
    assert not {str(row // 2) for row in rows} & set(held)
    assert len(rows) == 3000 - 2 * 100, "both lines of a source that is held out, and no others"
    assert [*rows] == sorted(rows)


def test_a_split_does_not_hold_the_texts_in_memory(tmp_path: Path) -> None:
    """The text of the corpus has 6 MB; a split stores one number for each of its 3,000 lines, 0.02 MB."""
    corpus = corpus_of(tmp_path, 3_000, 400)
    tracemalloc.start()
    try:
        split_by_source(corpus, 5, 5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1e6


def test_reading_says_what_it_does(tmp_path: Path) -> None:
    lines = [f"a line of number {n}" for n in range(400)]
    for name, text in (("a.en", lines), ("a.fr", [line.upper() for line in lines])):
        (tmp_path / name).write_text("\n".join(text) + "\n")
    said: list[str] = []
    settings = DataSettings(files=(tmp_path / "a.en", tmp_path / "a.fr"), vocabulary=300, valid=20, test=20)
    material = file_material(settings, tmp_path / "cache", say=said.append)
    assert said[0] == "reading a.en and a.fr"
    assert "400 lines read" in said[1]
    assert said[2] == "360 pairs to learn from, 20 to validate and 20 to test by"
    assert len(said) == 5
    assert len(material.records) == 360


@pytest.mark.parametrize(("valid", "test"), [(0, 7), (7, 0)])
def test_one_part_alone(tmp_path: Path, valid: int, test: int) -> None:
    rows, parts = split_by_source(corpus_of(tmp_path, 200, 2), valid, test)
    assert [len(part) for part in parts] == [valid, test]
    assert len(rows) == 200 - 2 * 7


def test_sources_that_come_often_are_counted_once(tmp_path: Path) -> None:
    """A repeated source sentence counts once when validation and test pairs are split off; too few distinct sources are
    an error."""
    corpus = corpus_of(tmp_path, 400, 2)  # the corpus has 400 pairs of 200 distinct source sentences
    rows, parts = split_by_source(corpus, 40, 60)
    assert [len(part) for part in parts] == [40, 60]
    assert len(rows) == 400 - 2 * 100
    with pytest.raises(DataError, match="400 pairs with 200 different sources are too few to hold out 60 and 60"):
        split_by_source(corpus, 60, 60)
