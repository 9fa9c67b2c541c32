"""Options of a span pointer for question and passage: other scores, hard attention, or a mean instead of attention."""

import pytest
import torch

from regard.core.normalizers import Hard
from regard.core.requests import full
from regard.models.memory import Memory
from regard.models.span_pointer import SpanPointer

BATCH, WORDS, ASKED, PASSAGE, QUESTION, SIZE = 2, 11, 5, 7, 3, 4


def a_memory(count, size, lengths):
    values = torch.randn(BATCH, count, size)
    return Memory(values, values, torch.arange(count) < torch.tensor(lengths)[:, None], values[:, 0])


def inputs_of(module, call):
    """Return the first input that a module receives during a call."""
    given = []
    handle = module.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    call()
    handle.remove()
    return given[0]


def test_without_attention_each_word_reads_the_mean():
    pointer = SpanPointer(PASSAGE, question_size=QUESTION, size=SIZE, score="mean", matching="mean")
    passage, question = a_memory(WORDS, PASSAGE, [11, 6]), a_memory(ASKED, QUESTION, [3, 5])
    aligned = inputs_of(pointer.aligned, lambda: pointer(passage, question))
    matched = inputs_of(pointer.matched, lambda: pointer(passage, question))
    for row, (words, asked) in enumerate([(11, 3), (6, 5)]):
        mean = question.values[row, :asked].mean(0)
        torch.testing.assert_close(aligned[row, :, PASSAGE:], mean.expand(WORDS, -1))
        mean = matched[row, :words, : 2 * SIZE].mean(0)
        torch.testing.assert_close(matched[row, :, 2 * SIZE :], mean.expand(WORDS, -1))


def test_without_attention_there_are_no_weights_and_no_maps_for_scores():
    pointer = SpanPointer(PASSAGE, size=SIZE, score="mean", matching="mean")
    found = pointer(a_memory(WORDS, PASSAGE, [11, 6]), a_memory(ASKED, PASSAGE, [3, 0]), weights=full())
    assert found.weights is None
    assert found.matching is None
    assert found.start_logits.isfinite().all()
    assert not [name for name, _ in pointer.named_parameters() if name.startswith(("align_", "matching"))]


@pytest.mark.parametrize("score", ["dot", "scaled_dot", "cosine", "bilinear", "additive"])
def test_scores_by_name_learn(score):
    pointer = SpanPointer(PASSAGE, size=SIZE, score=score)
    found = pointer(a_memory(WORDS, PASSAGE, [11, 6]), a_memory(ASKED, PASSAGE, [3, 5]), weights=full())
    torch.testing.assert_close(found.weights[0].sum(-1), torch.ones(WORDS))
    (found.start_logits[0].square().sum() + found.end_logits[0].square().sum()).backward()
    assert [name for name, p in pointer.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_hard_choices_are_one_word_of_the_question_and_have_their_probability():
    pointer = SpanPointer(PASSAGE, size=SIZE, normalize=Hard("straight_through"))
    passage, question = a_memory(WORDS, PASSAGE, [11, 6]), a_memory(ASKED, PASSAGE, [3, 5])
    found = pointer(passage, question, weights=full())
    assert set(found.weights.unique().tolist()) == {0.0, 1.0}
    assert found.log_prob.shape == (BATCH, WORDS)
    assert (found.log_prob <= 0).all()
    assert SpanPointer(PASSAGE, size=SIZE)(passage, question).log_prob is None
    once, again = (pointer.eval()(passage, question).start_logits for _ in range(2))
    assert torch.equal(once, again)


def test_an_unknown_score_is_refused():
    with pytest.raises(ValueError, match="score must be one of dot"):
        SpanPointer(PASSAGE, size=SIZE, score="nothing")


@pytest.mark.parametrize("matching", ["additive", "mean"])
def test_each_hop_has_parameters_of_its_own(matching):
    passage, question = a_memory(WORDS, PASSAGE, [11, 6]), a_memory(ASKED, PASSAGE, [3, 5])
    one, three = (SpanPointer(PASSAGE, size=SIZE, matching=matching, hops=hops) for hops in (1, 3))
    three.load_state_dict(one.state_dict(), strict=False)
    read = [three.matched.read, *(pair["matched"].read for pair in three.further)]
    first, second, third = (inputs_of(reader, lambda: three(passage, question)) for reader in read)
    torch.testing.assert_close(first, inputs_of(one.matched.read, lambda: one(passage, question)))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    found = three(passage, question)
    (found.start_logits[0].square().sum() + found.end_logits[0].square().sum()).backward()
    assert [name for name, p in three.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_no_hop_is_refused():
    with pytest.raises(ValueError, match="hops must be at least 1, got 0"):
        SpanPointer(PASSAGE, size=SIZE, hops=0)
