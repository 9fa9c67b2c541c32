"""Stacked attention: two hops compared with float64 formulas, gradients, masked keys, and invalid arguments."""

import pytest
import torch
from torch import Tensor

from regard.core.normalizers import Hard
from regard.core.requests import full
from regard.models.classifier import Classifier
from regard.models.memory import Memory
from regard.models.stacked_attention import StackedClassifier


def memory(*, mask: Tensor | None = None) -> Memory:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    return Memory(keys, keys, mask, keys.mean(1))


def questions() -> Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def model(**settings) -> StackedClassifier:
    torch.manual_seed(3)
    return StackedClassifier(7, memory_size=4, features=6, **settings).double().eval()


def by_hand(stacked: StackedClassifier, values: Tensor, query: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return logits and weights by the formulas in StackedClassifier's docstring, one question at a time."""
    logits = torch.zeros(*query.shape[:2], 7, dtype=torch.float64)
    weights = [torch.zeros(*query.shape[:2], values.shape[1], dtype=torch.float64) for _ in stacked.hops]
    for row in range(len(values)):
        for number in range(query.shape[1]):
            known, read = query[row, number], torch.zeros(4).double()
            for index, (ask, hop) in enumerate(zip(stacked.queries, stacked.hops, strict=True)):
                known = known + read
                asked = hop.query.weight @ (ask[2].weight @ (ask[0].weight @ known + ask[0].bias).relu() + ask[2].bias)
                # Scaled dot products are divided by √4, for keys of size 4.
                scores = (values[row] @ hop.key.weight.T) @ asked / 2.0
                weights[index][row, number] = scores.softmax(0)
                read = scores.softmax(0) @ values[row]
                count = (scores - 2).sigmoid().sum()
            whole = torch.cat([read, query[row, number], count[None]])
            said, turned = (stacked.features.weight @ whole + stacked.features.bias).chunk(2)
            logits[row, number] = stacked.output.weight @ (said * (1 + turned)) + stacked.output.bias
    return logits, weights


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_hops_are_those_of_the_formula(hops):
    stacked, source, query = model(hops=hops), memory(), questions()
    found = stacked(source, query, weights=full())
    logits, maps = by_hand(stacked, source.values, query)
    torch.testing.assert_close(found.logits, logits)
    assert len(found.weights) == hops
    for got, expected in zip(found.weights, maps, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["scaled_dot", "additive", "bilinear"])
def test_gradients_are_those_of_differences(score):
    stacked, source = model(hops=2, attention=score), memory()
    query = questions().requires_grad_()
    assert torch.autograd.gradcheck(lambda one: stacked(source, one).logits, (query,))
    stacked(source, query).logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in stacked.parameters())


def test_masked_keys_have_no_part():
    mask = torch.tensor([[True, True, True, False, False]] * 2)
    stacked, source, query = model(), memory(mask=mask), questions()
    found = stacked(source, query, weights=full())
    changed = source.keys.clone()
    changed[:, 3:] = torch.nan
    again = stacked(Memory(changed, changed, mask, source.summary), query)
    torch.testing.assert_close(again.logits, found.logits)
    assert all(not weights[..., 3:].any() for weights in found.weights)


def test_questions_about_one_memory_do_not_see_one_another():
    stacked, source, query = model(), memory(), questions()
    alone = torch.cat([stacked(source, query[:, number : number + 1]).logits for number in range(3)], 1)
    torch.testing.assert_close(stacked(source, query).logits, alone)


def test_the_answer_is_read_by_the_last_hop_alone():
    """If the last hop has uniform weights, its context, and so the answer, does not depend on the first hop."""
    stacked, source, query = model(), memory(), questions()
    seeing = stacked(source, query, weights=full())
    with torch.no_grad():
        stacked.hops[1].query.weight.zero_()
        before = stacked(source, query, weights=full())
        stacked.hops[0].query.weight.mul_(-3.0)
        after = stacked(source, query, weights=full())
    assert not torch.allclose(before.weights[0], after.weights[0])
    torch.testing.assert_close(after.weights[1], torch.full_like(after.weights[1], 0.2))
    torch.testing.assert_close(after.logits, before.logits)
    assert not torch.allclose(before.logits, seeing.logits)


def test_without_attention_the_summary_is_read():
    stacked, query = model(attention=None), questions()
    source = memory()
    found = stacked(source, query, weights=full())
    other = Memory(source.keys * 0, source.values * 0, None, source.summary)
    torch.testing.assert_close(stacked(other, query).logits, found.logits)
    assert found.weights == ()


def test_hard_hops_have_a_log_probability_each():
    stacked = model(normalize=Hard("reinforce")).train()
    found = stacked(memory(), questions(), weights=full())
    assert found.log_prob.shape == (2, 3, 2)
    assert (found.log_prob < 0).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 7), r"query must be \(2, n, 4\), got shape \(2, 3, 7\)"),
        ((2, 3, 5), "query must be"),
        ((1, 3, 4), "query must"),
    ],
)
def test_queries_of_another_shape_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        model()(memory(), torch.zeros(shape, dtype=torch.float64))


def test_no_hops_are_refused_and_the_classifier_points_here():
    with pytest.raises(ValueError, match="hops must be at least 1, got 0"):
        StackedClassifier(3, memory_size=4, hops=0)
    with pytest.raises(ValueError, match="StackedClassifier"):
        Classifier(3, memory_size=4, query_size=4, looks=2)
