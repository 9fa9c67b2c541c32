"""Span pointers: attention compared with loops, the best span compared with exhaustive search; padding, empty
passages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import oracles
from regard.core.requests import full, top
from regard.core.scores import ScaledDot
from regard.models.memory import Memory
from regard.models.span_pointer import SpanPointer, best_span

BATCH, WORDS, ASKED, PASSAGE, QUESTION, SIZE = 2, 11, 5, 7, 3, 4


def a_memory(count, size, lengths=None, dtype=torch.float64):
    values = torch.randn(BATCH, count, size, dtype=dtype)
    mask = None if lengths is None else torch.arange(count) < torch.tensor(lengths)[:, None]
    return Memory(values, values, mask, torch.randn(BATCH, size, dtype=dtype))


def linear(layer, vector):
    bias = [0.0] * layer.out_features if layer.bias is None else layer.bias.tolist()
    return [oracles.dot(row, vector) + b for row, b in zip(layer.weight.tolist(), bias, strict=True)]


def test_each_passage_word_sees_its_own_question():
    """The weights of passage word i over question words j are ∝ exp⟨relu(W p_i), relu(W q_j)⟩ (Chen et al. 2017)."""
    pointer = SpanPointer(PASSAGE, size=SIZE).double()
    passage, question = a_memory(WORDS, PASSAGE, [11, 6]), a_memory(ASKED, PASSAGE, [3, 5])
    weights = pointer(passage, question, weights=full()).weights
    assert weights.shape == (BATCH, WORDS, ASKED)
    for row, (words, asked) in enumerate([(11, 3), (6, 5)]):
        keys = [[max(x, 0.0) for x in linear(pointer.align_passage, q)] for q in question.values[row].tolist()]
        for i in range(words):
            query = [max(x, 0.0) for x in linear(pointer.align_passage, passage.values[row, i].tolist())]
            expected = oracles.softmax([oracles.dot(query, key) for key in keys[:asked]]) + [0.0] * (ASKED - asked)
            torch.testing.assert_close(weights[row, i], torch.tensor(expected, dtype=torch.float64))


def test_words_are_aligned_by_the_keys_of_their_memories():
    """Before training, a passage word attends to the question word whose key equals its own, whatever the values
    are."""
    torch.manual_seed(1)
    pointer = SpanPointer(PASSAGE, key_size=29, size=29)
    words = 0.3 * torch.randn(ASKED, 29)
    order = torch.tensor([2, 0, 4, 1, 3, 0])
    passage = Memory(words[order].unsqueeze(0), torch.randn(1, 6, PASSAGE), None, torch.zeros(1, PASSAGE))
    question = Memory(words.unsqueeze(0), torch.randn(1, ASKED, PASSAGE), None, torch.zeros(1, PASSAGE))
    weights = pointer(passage, question, weights=full()).weights
    assert weights[0].argmax(-1).tolist() == order.tolist()
    assert pointer(passage, question).start_logits.shape == (1, 6)


def test_products_need_one_size():
    assert SpanPointer(PASSAGE, size=SIZE, products=True).aligned.gate.in_features == 3 * PASSAGE
    with pytest.raises(ValueError, match="products need passage and question of one size"):
        SpanPointer(PASSAGE, question_size=QUESTION, products=True)


def gru(network, steps):
    """Return the states of a GRU by a loop over vectors; torch's order of gates is r, z, n."""
    hidden, found = torch.zeros(network.hidden_size, dtype=torch.float64), []
    for x in steps:
        a, b = network.weight_ih_l0 @ x + network.bias_ih_l0, network.weight_hh_l0 @ hidden + network.bias_hh_l0
        (ra, za, na), (rb, zb, nb) = a.chunk(3), b.chunk(3)
        z = torch.sigmoid(za + zb)
        hidden = (1 - z) * torch.tanh(na + torch.sigmoid(ra + rb) * nb) + z * hidden
        found.append(hidden)
    return found


def gated(reader, steps):
    steps = [torch.sigmoid(reader.gate.weight @ x) * x for x in steps]
    there, back = gru(reader.read.forwards, steps), gru(reader.read.backwards, steps[::-1])[::-1]
    return [torch.cat(pair) for pair in zip(there, back, strict=True)]


def softmax_sum(scores, values):
    weights = oracles.softmax([float(s) for s in scores])
    return sum(w * v for w, v in zip(weights, values, strict=True)), weights


@torch.no_grad()
def test_the_whole_of_it_in_loops():
    pointer = SpanPointer(PASSAGE, question_size=QUESTION, size=SIZE).double()
    passage, question = a_memory(WORDS, PASSAGE, [11, 6]), a_memory(ASKED, QUESTION, [3, 5])
    found = pointer(passage, question, weights=full())
    for row, (words, asked) in enumerate([(11, 3), (6, 5)]):
        p, q = list(passage.values[row, :words]), list(question.values[row, :asked])
        keys = [(pointer.align_question.weight @ x + pointer.align_question.bias).clamp(min=0) for x in q]
        aligned = []
        for x in p:
            asks = (pointer.align_passage.weight @ x + pointer.align_passage.bias).clamp(min=0)
            aligned.append(torch.cat([x, softmax_sum([asks @ key for key in keys], q)[0]]))
        v = gated(pointer.aligned, aligned)
        layer = pointer.matching
        matched = []
        for i, x in enumerate(v):
            scores = [layer.score.weight @ torch.tanh(layer.query.weight @ x + layer.key.weight @ y) for y in v]
            read, weights = softmax_sum(scores, v)
            torch.testing.assert_close(found.matching[row, i, :words], torch.tensor(weights, dtype=torch.float64))
            matched.append(torch.cat([x, read]))
        h = gated(pointer.matched, matched)
        layer, ask = pointer.summarize, pointer.ask
        scores = [layer.score.weight @ torch.tanh(layer.query.weight @ ask + layer.key.weight @ y) for y in q]
        about, _ = softmax_sum(scores, q)
        for logits in (found.start_logits, found.end_logits):
            point = pointer.point
            keys = [point.state.weight @ x + point.state.bias for x in h]
            scores = torch.stack([point.weight @ torch.tanh(point.query.weight @ about + key) for key in keys])
            torch.testing.assert_close(logits[row, :words], scores)
            read, _ = softmax_sum(scores, h)
            about = pointer.advance(read[None], about[None])[0]


@pytest.mark.parametrize("matching", ["additive", "scaled_dot", None])
def test_padding_changes_nothing(matching):
    pointer = SpanPointer(PASSAGE, question_size=QUESTION, size=SIZE, matching=matching).double()
    passage, question = a_memory(WORDS, PASSAGE, [11, 6]), a_memory(ASKED, QUESTION, [3, 5])
    passage.values[1, 6:], question.values[0, 3:] = math.nan, math.inf
    found = pointer(passage, question, weights=full())
    assert (found.matching is None) == (matching is None)
    for row, (words, asked) in enumerate([(11, 3), (6, 5)]):
        p, q = passage.values[row : row + 1, :words], question.values[row : row + 1, :asked]
        alone = pointer(Memory(p, p, None, p[:, 0]), Memory(q, q, None, q[:, 0]), weights=full())
        torch.testing.assert_close(found.start_logits[row, :words], alone.start_logits[0])
        torch.testing.assert_close(found.end_logits[row, :words], alone.end_logits[0])
        torch.testing.assert_close(found.weights[row, :words, :asked], alone.weights[0])
    lowest = min(found.start_logits[1, :6].min(), found.end_logits[1, :6].min())
    assert found.start_logits[1, 6:].max() < lowest - 1e30
    assert found.start_logits.softmax(-1)[1, 6:].sum() == 0


def test_the_question_may_come_in_any_order():
    """The pointer treats the question as a set: only an encoder could make its order matter."""
    pointer = SpanPointer(PASSAGE, size=SIZE).double()
    passage, question = a_memory(WORDS, PASSAGE), a_memory(ASKED, PASSAGE)
    order = torch.tensor([3, 0, 4, 1, 2])
    moved = question.values[:, order]
    found = pointer(passage, question, weights=full())
    other = pointer(passage, Memory(moved, moved, None, question.summary), weights=full())
    torch.testing.assert_close(other.start_logits, found.start_logits)
    torch.testing.assert_close(other.weights, found.weights[..., order])


def test_nothing_to_read_or_to_ask_is_finite():
    pointer = SpanPointer(PASSAGE, size=SIZE).double()
    passage, question = a_memory(WORDS, PASSAGE, [0, 6]), a_memory(ASKED, PASSAGE, [3, 0])
    found = pointer(passage, question, weights=full())
    assert found.start_logits.isfinite().all()
    assert found.end_logits.isfinite().all()
    assert not found.weights[1].any()
    assert not found.matching[0].any()
    spans = best_span(found.start_logits, found.end_logits, longest=4)
    assert spans.score.isfinite().all()
    assert spans.end[1] < 6
    loss = F.cross_entropy(found.start_logits, torch.tensor([0, 2])) + F.cross_entropy(
        found.end_logits, torch.tensor([0, 3])
    )
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in pointer.parameters())


def exhaustive(start, end, longest):
    """Return the best span by exhaustive search; on a tie the first start, then the first end."""
    spans = [(i, j) for i in range(len(start)) for j in range(i, min(i + longest, len(end)))]
    return max(spans, key=lambda span: (start[span[0]] + end[span[1]], -span[0], -span[1]))


@given(
    st.integers(1, 13).flatmap(
        lambda n: st.tuples(
            # The logits have few distinct numbers, so that there are ties.
            *[st.lists(st.integers(-3, 3), min_size=n, max_size=n)] * 2,
            st.integers(1, 15),
        )
    )
)
def test_the_best_span_is_the_one_of_exhaustive_search(case):
    start, end, longest = case
    found = best_span(torch.tensor([start]).float(), torch.tensor([end]).float(), longest=longest)
    i, j = exhaustive(start, end, longest)
    assert (found.start.item(), found.end.item()) == (i, j)
    assert found.score.item() == start[i] + end[j]


def test_best_spans_of_a_batch():
    start, end = torch.randn(17, 101), torch.randn(17, 101)
    for longest in (1, 7, 101):
        found = best_span(start, end, longest=longest)
        for row in range(17):
            i, j = exhaustive(start[row].tolist(), end[row].tolist(), longest)
            assert (found.start[row].item(), found.end[row].item()) == (i, j)
    low = best_span(start.bfloat16(), end.bfloat16(), longest=7)
    high = best_span(start.bfloat16().double(), end.bfloat16().double(), longest=7)
    torch.testing.assert_close(low.score.double(), high.score)


@pytest.mark.parametrize("options", [{}, {"matching": None}, {"question_size": QUESTION}, {"score": ScaledDot()}])
def test_gradients_reach_every_parameter(options):
    pointer = SpanPointer(PASSAGE, size=SIZE, **options).double()
    passage, question = a_memory(WORDS, PASSAGE), a_memory(ASKED, options.get("question_size", PASSAGE))
    found = pointer(passage, question)
    (found.start_logits.square().sum() + found.end_logits.square().sum()).backward()
    assert {name for name, p in pointer.named_parameters() if p.grad is None or not p.grad.any()} == set()


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
def test_eight_answers_are_learnt():
    passage, question = torch.randn(8, WORDS, 8), torch.randn(8, ASKED, 8)
    start = torch.randint(WORDS - 3, (8,))
    end = start + torch.randint(3, (8,))
    memories = [Memory(x, x, None, x[:, 0]) for x in (passage, question)]
    pointer = SpanPointer(8, size=16)
    optimizer = torch.optim.Adam(pointer.parameters(), 2e-2)
    for _ in range(80):
        found = pointer(*memories)
        loss = F.cross_entropy(found.start_logits, start) + F.cross_entropy(found.end_logits, end)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = pointer(*memories)
    spans = best_span(found.start_logits, found.end_logits, longest=3)
    assert torch.equal(spans.start, start)
    assert torch.equal(spans.end, end)


def test_state_dict_round_trip_dropout_and_autocast():
    first, second = (SpanPointer(PASSAGE, size=SIZE, dropout=0.3) for _ in range(2))
    passage, question = (a_memory(n, PASSAGE, [n, n - 2], torch.float32) for n in (WORDS, ASKED))
    assert not torch.equal(first(passage, question).start_logits, first(passage, question).start_logits)
    second.load_state_dict(first.state_dict())
    first.eval(), second.eval()
    whole = first(passage, question, weights=top(2))
    torch.testing.assert_close(whole.end_logits, second(passage, question).end_logits)
    assert whole.weights.indices.shape == whole.matching.indices.shape == (BATCH, WORDS, 2)
    with torch.autocast("cpu", torch.bfloat16):
        low = first(passage, question)
    torch.testing.assert_close(low.start_logits[0].float(), whole.start_logits[0], atol=0.05, rtol=0.05)
    first.train()
    with torch.autocast("cpu", torch.bfloat16):
        first(passage, question).end_logits[0].sum().backward()
    assert first.ask.grad.isfinite().all()


@pytest.mark.usefixtures("as_installed")
def test_errors_say_what_was_expected():
    pointer = SpanPointer(PASSAGE, question_size=QUESTION, size=SIZE).double()
    passage, question = a_memory(WORDS, PASSAGE), a_memory(ASKED, QUESTION)
    with pytest.raises(ValueError, match="passage has size 3, the pointer expects 7"):
        pointer(question, question)
    with pytest.raises(ValueError, match="question has size 7, the pointer expects 3"):
        pointer(passage, passage)
    with pytest.raises(ValueError, match="longest must be at least 1, got 0"):
        best_span(torch.zeros(1, 2), torch.zeros(1, 2), longest=0)
    with pytest.raises(ValueError, match=r"start and end must be \(b, n\) alike"):
        best_span(torch.zeros(1, 2), torch.zeros(1, 3), longest=1)
