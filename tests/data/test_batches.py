"""Tests of token batches: every pair once per epoch, at most the given number of tokens, resuming from a state."""

import json

import numpy as np
import pytest
import torch

from regard.data.text.corpus import encode, index
from regard.data.text.parallel_text import Tsv
from regard.data.token_batches import TokenBatches, collate

RANDOM = np.random.Generator(np.random.PCG64(3))
SOURCE = RANDOM.integers(1, 40, 997)
TARGET = np.maximum(1, SOURCE + RANDOM.integers(-5, 6, 997))


def batches(**changed) -> TokenBatches:
    return TokenBatches(SOURCE, TARGET, **{"tokens": 300, "seed": 11, "bucket": 256, **changed})


def pairs_of(made: list[list[int]]) -> list[int]:
    return sorted(pair for batch in made for pair in batch)


def test_every_pair_once_an_epoch_within_the_budget():
    made = list(batches())
    assert pairs_of(made) == list(range(997))
    for batch in made:
        assert len(batch) * SOURCE[batch].max() <= 300
        assert len(batch) * TARGET[batch].max() <= 300


def test_like_lengths_stand_together():
    """In batches of similar lengths, less than a tenth of the tokens is padding; in random batches, nearly half is."""
    real = padded = 0
    for batch in batches(bucket=997):
        real += int(TARGET[batch].sum())
        padded += len(batch) * int(TARGET[batch].max())
    assert real / padded > 0.9


def test_epochs_differ_and_seeds_decide():
    one = batches()
    first, second = list(one), list(one)
    assert one.epoch == 2
    assert first != second
    assert pairs_of(first) == pairs_of(second) == list(range(997))
    assert list(batches()) == first
    assert list(batches(seed=12)) != first
    assert list(one.batches(0)) == first
    assert one.count(0) == len(first)


def test_batches_are_not_in_order_of_length():
    widths = [int(TARGET[batch].max()) for batch in batches(bucket=997)]
    assert widths != sorted(widths)


@pytest.mark.parametrize("after", [0, 1, 7, 70])
def test_a_state_continues_with_the_very_next_batch(after):
    whole = batches()
    expected = list(whole) + list(whole)
    broken = batches()
    seen = []
    stream = iter(broken)
    for _ in range(after):
        seen.append(next(stream))
    state = json.loads(json.dumps(broken.state()))
    resumed = batches()
    resumed.resume(state)
    assert resumed.state() == state
    assert seen + list(resumed) + list(resumed) == expected


def test_a_state_taken_between_epochs_begins_the_next():
    done = batches()
    list(done)
    resumed = batches()
    resumed.resume(done.state())
    assert next(iter(resumed)) == next(iter(done.batches(1)))


@pytest.mark.parametrize(("name", "value"), [("tokens", 301), ("seed", 12), ("bucket", 128), ("ranks", 2)])
def test_a_state_of_other_batches_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} was .* when the state was taken, and is {value} now"):
        batches(**{name: value}).resume(batches().state())


def test_a_state_of_another_corpus_is_refused():
    other = TokenBatches(SOURCE + 1, TARGET, tokens=300, seed=11, bucket=256)
    with pytest.raises(ValueError, match="length was"):
        other.resume(batches().state())


def test_ranks_share_an_epoch_and_keep_step():
    shares = [list(batches(rank=rank, ranks=3)) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    together = [pair for share in shares for pair in pairs_of(share)]
    assert len(set(together)) == len(together)
    whole = list(batches())
    assert 0 <= len(whole) - 3 * len(shares[0]) < 3
    assert [batch for trio in zip(*shares, strict=True) for batch in trio] == whole[: 3 * len(shares[0])]


def test_a_pair_beyond_the_budget_stands_alone():
    made = list(TokenBatches([3, 50, 3], [3, 60, 3], tokens=10, seed=0))
    assert [1] in made
    assert pairs_of(made) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": 0}, "tokens, bucket and grid"),
        ({"rank": 2, "ranks": 2}, "rank must be from 0"),
        ({"bucket": 0}, "bucket"),
        ({"grid": 0}, "grid"),
    ],
)
def test_impossible_wishes_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        batches(**changed)
    with pytest.raises(ValueError, match="lists of equal length"):
        TokenBatches([1, 2], [1], tokens=5, seed=0)
    with pytest.raises(ValueError, match="no records"):
        TokenBatches([], [], tokens=5, seed=0)


def test_collate_pads_and_marks():
    batch = collate([([5, 6, 7], [8]), ([9], [10, 11])], pad=90, bos=91, eos=92, ignore=-7)
    assert batch.source.tolist() == [[5, 6, 7, 92], [9, 92, 90, 90]]
    assert batch.source_lengths.tolist() == [4, 2]
    assert batch.prefix.tolist() == [[91, 8, 90], [91, 10, 11]]
    assert batch.target.tolist() == [[8, 92, -7], [10, 11, 92]]
    assert batch.target_lengths.tolist() == [2, 3]
    assert batch.tokens == 5
    assert {tensor.dtype for tensor in (batch.source, batch.prefix, batch.target, batch.source_lengths)} == {
        torch.int64
    }
    assert batch.to("cpu").source is batch.source
    with pytest.raises(ValueError, match="at least one pair"):
        collate([])


def test_batches_over_a_corpus_on_disk(tmp_path):
    (tmp_path / "t.tsv").write_text("".join(f"{'a ' * (n % 7 + 1)}\t{'b ' * (n % 5 + 1)}\n" for n in range(50)))
    texts = index(Tsv(tmp_path / "t.tsv"), tmp_path)

    def numbers(given: list[str]) -> list[list[int]]:
        return [[7] * len(text.split()) for text in given]

    corpus = encode(texts, numbers, numbers, size=300, key="n", cache=tmp_path)
    made = TokenBatches(corpus.lengths(0), corpus.lengths(1), tokens=21, seed=1)
    rows = 0
    for batch in made:
        packed = collate([corpus[pair] for pair in batch])
        assert packed.source_lengths.tolist() == [pair % 7 + 2 for pair in batch]
        assert packed.source.shape[0] * (packed.source.shape[1] - 1) <= 21
        rows += len(batch)
    assert rows == 50
