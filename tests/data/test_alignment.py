"""Tests of word alignments: reading gold files, links from attention weights, and the alignment error rate."""

import pytest
import torch

from regard.data.data_files import DataError
from regard.data.text.alignment import (
    alignment_error_rate,
    joined_links,
    links_from_weights,
    parse_links,
    read_links,
    words_of_weights,
)


def test_hansards_gold(tmp_path):
    path = tmp_path / "gold"
    path.write_text("2-2 1-1\n3p1 2p1 4-2 1p1\n\n")
    first, second, third = read_links(path)
    assert first.sure == first.possible == {(0, 0), (1, 1)}
    assert second.sure == {(3, 1)}
    assert second.possible == {(3, 1), (2, 0), (1, 0), (0, 0)}
    assert third.sure == third.possible == frozenset()


def test_pharaoh_gold_counts_from_zero():
    gold = parse_links("0-0 1-2-P 3-1-S", first=0)
    assert gold.sure == {(0, 0), (3, 1)}
    assert gold.possible == {(0, 0), (1, 2), (3, 1)}


@pytest.mark.parametrize(
    ("text", "message"), [("1-1 2_2", "found '2_2'"), ("0-1", "counted from 1, found '0-1'"), ("1-", "'1-'")]
)
def test_bad_gold_names_file_and_line(tmp_path, text, message):
    path = tmp_path / "gold"
    path.write_text(f"1-1\n{text}\n")
    with pytest.raises(DataError, match=rf"gold:2: .*{message}"):
        read_links(path)


def test_error_rate_by_hand():
    sure = [{(0, 0), (1, 1), (2, 2)}, {(0, 0)}]
    possible = [{(0, 0), (1, 1), (2, 2), (3, 2)}, {(0, 0), (1, 0)}]
    found = [{(0, 0), (1, 1), (3, 2), (3, 3)}, {(1, 0)}]
    # For the predicted links A, sure links S and possible links P of both sentences: |A ∩ S| = 2 + 0, |A ∩ P| = 3 + 1,
    # |A| = 4 + 1 and |S| = 3 + 1, so the alignment error rate is 1 − 6/9.
    assert alignment_error_rate(found, sure, possible) == pytest.approx(1 / 3)
    assert alignment_error_rate(sure, sure, possible) == 0.0
    assert alignment_error_rate([set()], [{(0, 0)}], [set()]) == 1.0
    assert alignment_error_rate([set()], [set()], [set()]) == 0.0
    assert alignment_error_rate([{(0, 0)}], [{(0, 0)}], [set()]) == 0.0  # every sure link is also a possible link
    with pytest.raises(ValueError, match="argument 2"):
        alignment_error_rate([set()], [], [])


def test_links_are_the_best_source_word_of_each_target_word():
    weights = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1], [0.2, 0.2, 0.6], [0.6, 0.3, 0.1], [0.0, 0.0, 0.0]])
    assert links_from_weights(weights) == {(1, 0), (0, 1), (2, 2), (0, 3)}
    assert links_from_weights(weights, least=0.55) == {(1, 0), (2, 2), (0, 3)}
    assert links_from_weights(torch.zeros(0, 3)) == set()


def test_pieces_are_summed_over_the_source_and_averaged_over_the_target():
    # The source has three words, of the sub-words 0 | 1 2 | 3, the target two, of 0 1 | 2; both end with an end symbol.
    weights = torch.tensor(
        [
            [0.40, 0.25, 0.25, 0.05, 0.05],
            [0.10, 0.10, 0.30, 0.20, 0.30],
            [0.30, 0.00, 0.10, 0.20, 0.40],
            [0.00, 0.00, 0.00, 0.00, 1.00],
        ],
        dtype=torch.float64,
    )
    merged = words_of_weights(weights, source=[0, 1, 1, 2], target=[0, 0, 1])
    expected = torch.tensor([[0.25, 0.45, 0.125], [0.30, 0.10, 0.20]], dtype=torch.float64)
    torch.testing.assert_close(merged, expected)
    # In the first target row, source sub-word 0 has the largest weight, but the two sub-words of source word 1 have a
    # larger sum.
    assert links_from_weights(weights, source=[0, 1, 1, 2], target=[0, 0, 1]) == {(1, 0), (0, 1)}
    with pytest.raises(ValueError, match=r"weights are \(4, 5\), but 4 × 6 pieces are given"):
        words_of_weights(weights, source=[0, 1, 2, 3, 4, 5])


def test_gold_from_the_other_side():
    gold = parse_links("1-2 3p1").reversed()
    assert gold.sure == {(1, 0)}
    assert gold.possible == {(1, 0), (0, 2)}


def test_links_of_two_directions_joined():
    forward, backward = {(0, 0), (1, 1), (5, 2)}, {(0, 0), (1, 1), (2, 2), (4, 1)}
    assert joined_links(forward, backward, way="intersection") == {(0, 0), (1, 1)}
    assert joined_links(forward, backward, way="union") == forward | backward
    # The link (2, 2) is adjacent to (1, 1); (5, 2) and (4, 1) are adjacent to no link, and target word 1 of (4, 1)
    # already has a link.
    assert joined_links(forward, backward) == {(0, 0), (1, 1), (2, 2)}


def test_joined_links_grow_from_what_has_grown():
    assert joined_links({(0, 0), (1, 1), (2, 2)}, {(0, 0)}) == {(0, 0), (1, 1), (2, 2)}
    # The link (1, 0) is not added: after (1, 1) is added, both words of (1, 0) already have a link.
    assert joined_links({(0, 0), (1, 1)}, {(0, 0), (1, 1), (1, 0)}) == {(0, 0), (1, 1)}
    assert joined_links({(0, 1)}, {(1, 0)}) == set()  # no link is in both directions, so none can be added


@pytest.mark.usefixtures("as_installed")
def test_a_way_of_joining_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="way must be intersection, union or grow, got 'grow-diag'"):
        joined_links({(0, 0)}, {(0, 0)}, way="grow-diag")
