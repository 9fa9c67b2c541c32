"""Beam search compared with exhaustive search, and with a simple beam search in Python of one row at a time."""

import math
from collections.abc import Callable

import pytest
import torch
from table_models import STOP, Table, asked_by

from regard.decode.beam import beam
from regard.decode.greedy import greedy
from regard.decode.penalties import Average, Gnmt
from regard.decode.records import Bounds, Hypothesis

PENALTIES: dict[str, tuple[Callable | None, Callable[[int], float]]] = {
    "none": (None, lambda n: 1.0),
    "gnmt": (Gnmt(0.6), lambda n: ((5 + n) / 6) ** 0.6),
    "gnmt2": (Gnmt(2.0), lambda n: ((5 + n) / 6) ** 2),
    "average": (Average(), lambda n: float(n)),
    "short": (Gnmt(-1.0), lambda n: 6 / (5 + n)),
    "uneven": (lambda n: 1.0 + (n % 3), lambda n: 1.0 + n % 3),
}


def exhaustive(table: Table, source: int, limit: int, minimum: int, penalty: Callable[[int], float]):
    """Return every output of allowed length with its score, best first, as (score, tokens)."""
    found = []

    def extend(tokens: tuple[int, ...], total: float) -> None:
        log_probs = table.log_probs(source, (0, *tokens))
        if len(tokens) >= minimum:
            found.append(((total + log_probs[STOP]) / penalty(len(tokens) + 1), tokens))
        if len(tokens) < limit:
            for token, log_prob in enumerate(log_probs):
                if token != STOP:
                    extend((*tokens, token), total + log_prob)

    extend((), 0.0)
    return sorted(found, key=lambda each: -each[0])


def plain_beam(table: Table, source: int, width: int, limit: int, penalty: Callable[[int], float]):
    """Run beam search by its definition, without early stopping; return all finished hypotheses, best first."""
    running, done = [(0.0, ())], []
    for _ in range(limit + 1):
        candidates = []
        for total, tokens in running:
            for token, log_prob in enumerate(table.log_probs(source, (0, *tokens))):
                if len(tokens) < limit or token == STOP:
                    candidates.append((total + log_prob, (*tokens, token)))
        candidates.sort(key=lambda each: -each[0])
        done += [
            (total / penalty(len(tokens)), tokens[:-1]) for total, tokens in candidates[:width] if tokens[-1] == STOP
        ]
        running = [each for each in candidates if each[1][-1] != STOP][:width]
        if len(done) >= width:
            break
    return sorted(done, key=lambda each: -each[0])


def run(table: Table, sources: list[int], **options) -> list[list[Hypothesis]]:
    start = torch.zeros(len(sources), dtype=torch.long)
    return beam(table, table.start(sources), start=start, stop=STOP, **options)


def same(found: list[Hypothesis], other: list[Hypothesis]) -> None:
    """Assert that two lists of hypotheses are equal bit for bit."""
    assert [each.tokens for each in found] == [each.tokens for each in other]
    for one, two in zip(found, other, strict=True):
        assert (one.score, one.log_prob) == (two.score, two.log_prob)
        assert torch.equal(one.log_probs, two.log_probs)
        assert (one.weights is None) == (two.weights is None)
        if one.weights is not None and two.weights is not None:
            assert torch.equal(one.weights, two.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_wide_enough_is_exhaustive_search(seed, name):
    table = Table(seed)
    penalty, plain = PENALTIES[name]
    sources, limits = [3, 5], [4, 3]
    found = run(table, sources, limit=torch.tensor(limits), width=130, n_best=7, length_penalty=penalty)
    for source, limit, hypotheses in zip(sources, limits, found, strict=True):
        expected = exhaustive(table, source, limit, 0, plain)[:7]
        assert [each.tokens for each in hypotheses] == [tokens for _, tokens in expected]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _ in expected], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_leaving_early_changes_nothing(width, name):
    penalty, plain = PENALTIES[name]
    for seed in range(6):
        table = Table(seed, vocabulary=5, sharpness=3.0)
        [found] = run(table, [seed], limit=7, width=width, n_best=width, length_penalty=penalty)
        expected = plain_beam(table, seed, width, 7, plain)[:width]
        assert [each.tokens for each in found] == [tokens for _, tokens in expected]
        assert [each.score for each in found] == pytest.approx([score for score, _ in expected], rel=1e-12)
        [[first]] = run(table, [seed], limit=7, width=width, n_best=1, length_penalty=penalty)
        same([first], found[:1])


def test_a_search_leaves_when_nothing_can_improve():
    class Sure(Table):
        def __call__(self, state, tokens):
            step = super().__call__(state, tokens)
            step.logits[:] = 0.0
            step.logits[:, STOP] = 20.0
            return step

    table = Sure(0)
    [[found]] = run(table, [1], limit=9, width=4, length_penalty=None)
    assert found.tokens == ()
    assert table.calls == 1  # the end token is almost certain at the first step, so the search stops after one step


@pytest.mark.parametrize("seed", range(8))
def test_width_one_is_greedy(seed):
    table = Table(seed, vocabulary=7, sharpness=3.0)
    start = torch.zeros(11, dtype=torch.long)
    limit = torch.tensor([5, 0, 9, 3, 7, 9, 9, 2, 1, 9, 4])
    state = table.start(list(range(11)))
    wanted = greedy(table, state, start=start, stop=STOP, limit=limit, minimum=1)
    for penalty in (None, Average()):
        found = beam(table, state, start=start, stop=STOP, limit=limit, width=1, length_penalty=penalty, minimum=1)
        assert all(len(each) == 1 for each in found)
        for [one], two in zip(found, wanted, strict=True):
            assert one.tokens == two.tokens
            assert one.log_prob == two.log_prob
            assert torch.equal(one.log_probs, two.log_probs)
            assert torch.equal(one.weights, two.weights)


@pytest.mark.slow
@pytest.mark.parametrize("shrink", [0.25, 0.01, None])
@pytest.mark.parametrize("patience", [1, 3])
def test_batched_is_one_by_one(shrink, patience, monkeypatch):
    monkeypatch.setattr(Bounds, "patience", patience)
    table = Table(7, vocabulary=7, sharpness=3.0)
    sources = list(range(13))
    limit = torch.tensor([5, 0, 9, 3, 7, 9, 8, 2, 1, 9, 4, 6, 9])
    together = run(table, sources, limit=limit, width=3, n_best=3, minimum=1, shrink=shrink)
    for i, source in enumerate(sources):
        [alone] = run(table, [source], limit=int(limit[i]), width=3, n_best=3, minimum=1)
        same(together[i], alone)


def test_rows_that_have_ended_are_dropped():
    sources, limit = list(range(8)), torch.tensor([1, 1, 1, 1, 1, 1, 1, 9])
    rows = {}
    for shrink in (0.25, None):
        table = Table(3, vocabulary=7, sharpness=0.1)
        run(table, sources, limit=limit, width=2, shrink=shrink)
        rows[shrink] = table.rows, table.calls
    assert rows[None] == (8 + 16 * (rows[None][1] - 1), rows[0.25][1])
    assert rows[0.25][0] == 8 + 16 + 2 * (rows[0.25][1] - 2)


def test_weights_are_those_of_the_step_that_gave_the_token():
    table = Table(1, vocabulary=6, sharpness=1.0)
    sources = [3, 5, 8, 13]
    for source, hypotheses in zip(sources, run(table, sources, limit=9, width=5, n_best=5, minimum=3), strict=True):
        assert len(hypotheses) == 5
        for each in hypotheses:
            assert len(each.tokens) >= 3
            history = (0, *each.tokens)
            assert each.weights.tolist() == [asked_by(source, history[: i + 1]) for i in range(len(each.tokens))]
            log_probs = [table.log_probs(source, history[: i + 1])[token] for i, token in enumerate(each.tokens)]
            torch.testing.assert_close(each.log_probs, torch.tensor(log_probs, dtype=torch.float64))
            assert each.log_prob == pytest.approx(math.fsum(log_probs) + table.log_probs(source, history)[STOP])


def test_weights_may_be_none_or_have_heads():
    table = Table(1, looks=False)
    assert all(each.weights is None for row in run(table, [1, 2], limit=4, n_best=2) for each in row)

    class Heads(Table):
        def __call__(self, state, tokens):
            step = super().__call__(state, tokens)
            return type(step)(step.logits, step.state, torch.stack([step.weights, -step.weights], 1))

    plain, heads = run(Table(1), [1, 2], limit=4), run(Heads(1), [1, 2], limit=4)
    for [one], [two] in zip(plain, heads, strict=True):
        torch.testing.assert_close(two.weights, torch.stack([one.weights, -one.weights], 1))


@pytest.mark.parametrize("minimum", [0, 2, 4])
def test_lengths_stay_within_bounds(minimum):
    table = Table(5, vocabulary=5, sharpness=0.5)
    limit = torch.tensor([4, 6, 3, 1])
    found = run(table, [0, 1, 2, 3], limit=limit, width=30, n_best=30, minimum=minimum, length_penalty=None)
    for most, hypotheses in zip(limit.tolist(), found, strict=True):
        lengths = {len(each.tokens) for each in hypotheses}
        assert min(lengths) >= min(minimum, most)
        assert max(lengths) <= most
    best = exhaustive(Table(5, vocabulary=5, sharpness=0.5), 2, 3, min(minimum, 3), lambda n: 1.0)
    wide = run(table, [2], limit=3, width=130, minimum=minimum, length_penalty=None)
    assert wide[0][0].tokens == best[0][1]


def test_the_n_best_are_sorted_and_distinct():
    for seed in range(5):
        for hypotheses in run(Table(seed, vocabulary=6), [1, 4, 6], limit=6, width=8, n_best=8):
            scores = [each.score for each in hypotheses]
            assert len(hypotheses) == 8
            assert scores == sorted(scores, reverse=True)
            assert len({each.tokens for each in hypotheses}) == 8


def test_fewer_come_where_fewer_exist():
    [hypotheses] = run(Table(1, vocabulary=3), [1], limit=1, width=9, n_best=9)
    assert sorted(each.tokens for each in hypotheses) == [(), (0,), (1,)]


def test_what_must_never_come_does_not():
    table = Table(4, vocabulary=6, sharpness=0.5)
    for hypotheses in run(table, [1, 2], limit=5, width=6, n_best=6, never=(0, 4)):
        assert {token for each in hypotheses for token in each.tokens} == {1, 3, 5}


def test_ties_go_to_the_higher_slot_then_the_lower_token():
    class Flat(Table):
        def __call__(self, state, tokens):
            step = super().__call__(state, tokens)
            step.logits[:] = 0.0
            return step

    [found] = run(Flat(0, vocabulary=300), [1], limit=2, width=4, n_best=4, length_penalty=None, minimum=1)
    # All tokens are equally likely. The stop token 2 is not allowed at first, and ends every hypothesis later.
    assert [each.tokens for each in found] == [(0,), (0, 0), (0, 1), (0, 3)]


def test_low_precision_scores_are_added_in_full():
    class Half(Table):
        def __call__(self, state, tokens):
            step = super().__call__(state, tokens)
            return type(step)(step.logits.bfloat16(), step.state, step.weights)

    [[found]] = run(Half(1, vocabulary=9), [1], limit=6, minimum=3)
    assert found.log_probs.dtype == torch.float32
    rounded = Half(1, vocabulary=9)
    history = (0, *found.tokens)
    expected = []
    for i, token in enumerate(found.tokens):
        state = rounded.start([1])
        for last in history[:i]:
            state = rounded(state, torch.tensor([last])).state
        expected.append(rounded(state, torch.tensor([history[i]])).logits.float().log_softmax(1)[0, token])
    assert torch.equal(found.log_probs, torch.stack(expected))


def test_nothing_to_do():
    assert run(Table(0), [], limit=3) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 0}, "width must be 1 or more; got 0"),
        ({"width": 2, "n_best": 3}, "n_best must be from 1 to width, 2; got 3"),
        ({"limit": -1}, "limit must be 0 or more for every row; got -1"),
        ({"limit": torch.tensor([3, 4, 5])}, r"limit must be an integer or one for each of 2 rows; got .*\(3,\)"),
        ({"limit": torch.tensor(1.5)}, "limit must be an integer or one for each of 2 rows; got torch.float32"),
        ({"minimum": -2}, "minimum must be 0 or more; got -2"),
        ({"never": (STOP,)}, "stop must be a token that may come; got 2"),
        ({"length_penalty": lambda n: n - 1}, "length_penalty must give a positive number for every length"),
    ],
)
def test_wrong_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        run(Table(0), [1, 2], **{"limit": 3, **options})


def test_wrong_steps_are_named():
    class Wrong(Table):
        def __call__(self, state, tokens):
            step = super().__call__(state, tokens)
            return type(step)(step.logits[None], step.state, None)

    with pytest.raises(ValueError, match=r"step must give logits of shape \(1, vocabulary\); got \(1, 1, 4\)"):
        run(Wrong(0), [1], limit=3)
    with pytest.raises(ValueError, match="stop must be one of the 2 tokens of the vocabulary; got 2"):
        run(Table(0, vocabulary=2), [1], limit=3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_refused(value):
    class Broken(Table):
        def __call__(self, state, tokens):
            step = super().__call__(state, tokens)
            step.logits[state.source == 4, 1] = value
            return step

    with pytest.raises(ValueError, match=r"NaN or infinite in rows \[1\], by token 0"):
        run(Broken(0), [1, 4], limit=3)
    with pytest.raises(ValueError, match=r"NaN or infinite in rows \[1\]"):
        greedy(Broken(0), Table(0).start([1, 4]), start=torch.tensor([0, 0]), stop=STOP, limit=3)
