"""Greedy decoding, sampling and the ranking of tokens, compared with Python code for one row at a time."""

import math
from collections import Counter

import pytest
import torch
from table_models import STOP, Table, asked_by

from regard.decode.greedy import greedy
from regard.decode.ranking import best
from regard.decode.records import Bounds
from regard.decode.sample import draw, sample


def plain_greedy(table: Table, source: int, limit: int, minimum: int) -> tuple[tuple[int, ...], float]:
    tokens: tuple[int, ...] = ()
    total = 0.0
    while True:
        log_probs = table.log_probs(source, (0, *tokens))
        allowed = [t for t in range(len(log_probs)) if t != STOP or len(tokens) >= minimum]
        token = STOP if len(tokens) >= limit else max(allowed, key=lambda t: log_probs[t])
        total += log_probs[token]
        if token == STOP:
            return tokens, total
        tokens = (*tokens, token)


@pytest.mark.parametrize("shrink", [0.25, 0.01, None])
@pytest.mark.parametrize("patience", [1, 3])
def test_greedy_takes_the_likeliest(shrink, patience, monkeypatch):
    monkeypatch.setattr(Bounds, "patience", patience)
    table = Table(2, vocabulary=5, sharpness=2.0)
    limits = [9, 9, 0, 9, 5, 9, 2, 9, 9, 1, 9]
    start = torch.zeros(11, dtype=torch.long)
    found = greedy(
        *(table, table.start(list(range(11)))),
        **{"start": start, "stop": STOP, "limit": torch.tensor(limits), "minimum": 1, "shrink": shrink},
    )
    assert len({len(each.tokens) for each in found}) > 3
    for source, (limit, each) in enumerate(zip(limits, found, strict=True)):
        tokens, total = plain_greedy(table, source, limit, 1)
        assert each.tokens == tokens
        assert each.score == each.log_prob == pytest.approx(total, rel=1e-12)
        assert each.weights.tolist() == [asked_by(source, (0, *tokens)[: i + 1]) for i in range(len(tokens))]
        assert each.log_probs.shape == (len(tokens),)


def test_greedy_drops_rows_that_have_stopped():
    limit = torch.tensor([1, 1, 1, 9])
    table = Table(2, vocabulary=5, sharpness=0.1)
    start = torch.zeros(4, dtype=torch.long)
    greedy(table, table.start([0, 1, 2, 3]), start=start, stop=STOP, limit=limit, minimum=9)
    assert (table.calls, table.rows) == (10, 4 + 4 + 8)


def test_greedy_without_weights_and_without_rows():
    table = Table(2, looks=False)
    [found] = greedy(table, table.start([1]), start=torch.tensor([0]), stop=STOP, limit=3)
    assert found.weights is None
    assert greedy(table, table.start([]), start=torch.zeros(0, dtype=torch.long), stop=STOP, limit=3) == []


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [1, 3, 63, 64, 1024, 1087, 3001])
def test_best_is_a_stable_sort(size, count):
    values = torch.randint(0, 7, (11, size)).float()  # the logits have few distinct values, so that there are many ties
    values[3] = -math.inf
    values[4, 1:] = -math.inf
    found, index = best(values, count)
    for row in range(11):
        numbers = values[row].tolist()
        order = sorted(range(size), key=lambda i: -numbers[i])[:count]
        assert index[row, : len(order)].tolist() == order
        assert found[row, : len(order)].tolist() == [numbers[i] for i in order]
        assert found[row, len(order) :].tolist() == [-math.inf] * (count - len(order))
        assert index[row].max() < size


def test_best_looks_across_chunks():
    values = torch.rand(3, 5000)
    values[:, 4000], values[:, 4001], values[:, 10], values[:, 2000] = 9.0, 5.0, 5.0, 5.0
    found, index = best(values, 4)
    assert index.tolist() == [[4000, 10, 2000, 4001]] * 3
    assert found.tolist() == [[9.0, 5.0, 5.0, 5.0]] * 3


def chi_square(counts: Counter[int], shares: list[float], total: int) -> float:
    return sum((counts[i] - total * share) ** 2 / (total * share) for i, share in enumerate(shares) if share > 0)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        *[({}, 7), ({"temperature": 0.5}, 7), ({"temperature": 2.0}, 7), ({"top_k": 3}, 3), ({"top_p": 0.7}, 3)],
        *[({"top_k": 5, "top_p": 0.5, "temperature": 2.0}, 2), ({"top_k": 1}, 1)],
    ],
)
def test_draws_follow_the_distribution(options, kept):
    total = 20_000
    logits = [0.1, 2.0, -1.0, 1.5, 0.7, 1.0, -0.5]
    heat = options.get("temperature", 1.0)
    order = sorted(range(7), key=lambda i: -logits[i])[:kept]
    mass = [math.exp(logits[i] / heat) if i in order else 0.0 for i in range(7)]
    shares = [each / sum(mass) for each in mass]
    log_probs = torch.tensor(logits).log_softmax(0).expand(total, 7)
    generator = torch.Generator().manual_seed(11)
    points = torch.rand(total, dtype=torch.float64, generator=generator)
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
    counts = Counter(draw(log_probs, points, **settings).tolist())
    assert set(counts) == set(order)
    # Χ² with 6 degrees of freedom exceeds this limit with probability 0.1 %.
    assert chi_square(counts, shares, total) < 22.5


def test_a_point_names_its_token():
    log_probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).log().expand(5, 5)
    points = torch.tensor([0.0, 0.2499, 0.2501, 0.5, 1 - 2**-53], dtype=torch.float64)
    options = {"temperature": 1.0, "top_k": None, "top_p": None}
    assert draw(log_probs, points, **options).tolist() == [1, 1, 3, 3, 3]
    assert draw(log_probs, points, **{**options, "top_p": 0.7}).tolist() == [3] * 5
    # Top-p sorts the tokens, so the likeliest token 3 is the first.
    assert draw(log_probs, points, **{**options, "top_p": 1.0}).tolist() == [3, 3, 3, 3, 1]


def sampled(table: Table, sources: list[int], **options):
    start = torch.zeros(len(sources), dtype=torch.long)
    return sample(table, table.start(sources), start=start, stop=STOP, limit=8, **options)


def test_samples_repeat_with_their_seed_and_whatever_is_dropped(monkeypatch):
    table = Table(2, vocabulary=5)
    runs = []
    for seed, shrink, patience in [(1, 0.25, 1), (1, None, 1), (1, 0.01, 3), (2, 0.25, 1)]:
        monkeypatch.setattr(Bounds, "patience", patience)
        generator = torch.Generator().manual_seed(seed)
        runs.append([each.tokens for each in sampled(table, list(range(17)), shrink=shrink, generator=generator)])
    assert runs[0] == runs[1] == runs[2] != runs[3]


def test_a_sample_tells_the_models_own_probabilities():
    table = Table(3, vocabulary=5)
    generator = torch.Generator().manual_seed(3)
    for source, each in enumerate(sampled(table, [0, 1, 2], temperature=3.0, minimum=2, generator=generator)):
        history = (0, *each.tokens)
        assert len(each.tokens) >= 2
        expected = [table.log_probs(source, history[: i + 1])[token] for i, token in enumerate(each.tokens)]
        torch.testing.assert_close(each.log_probs, torch.tensor(expected, dtype=torch.float64))
        assert each.weights.tolist() == [asked_by(source, history[: i + 1]) for i in range(len(each.tokens))]


def test_whole_sequences_follow_the_distribution():
    total = 4000
    table = Table(6, vocabulary=3, sharpness=1.0)
    generator = torch.Generator().manual_seed(5)
    start = torch.zeros(total, dtype=torch.long)
    found = sample(table, table.start([1] * total), start=start, stop=STOP, limit=2, generator=generator)
    counts = Counter(each.tokens for each in found)
    first = table.log_probs(1, (0,))
    shares = {(): math.exp(first[STOP])}
    for a in (0, 1):
        second = table.log_probs(1, (0, a))
        shares[(a,)] = math.exp(first[a] + second[STOP])
        shares.update({(a, b): math.exp(first[a] + second[b]) for b in (0, 1)})
    assert set(counts) <= set(shares)
    statistic = sum((counts[key] - total * share) ** 2 / (total * share) for key, share in shares.items())
    assert statistic < 22.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "temperature must be more than 0, got 0.0: for the likeliest tokens use greedy"),
        ({"top_k": 0}, "top_k must be 1 or more; got 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]; got 1.5"),
    ],
)
def test_wrong_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        sampled(Table(0), [1], **options)
