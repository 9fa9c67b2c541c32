"""Classifiers: the context of a learned query compared with loops; padding, word order, questions, several labels."""

import math

import pytest
import torch
from torch.nn import functional as F

import oracles
from regard.core.normalizers import Hard, Sparsemax
from regard.core.requests import full, top
from regard.core.scores import Cosine, ScaledDot
from regard.models.classifier import Classifier
from regard.models.memory import Memory

BATCH, KEYS, SIZE, CLASSES = 2, 7, 5, 3


def a_memory(lengths=None, dtype=torch.float64, values=None):
    keys = torch.randn(BATCH, KEYS, SIZE, dtype=dtype)
    mask = None if lengths is None else torch.arange(KEYS) < torch.tensor(lengths)[:, None]
    values = keys if values is None else values
    return Memory(keys, values, mask, torch.randn(BATCH, SIZE, dtype=dtype))


def linear(layer, vector):
    bias = [0.0] * layer.out_features if layer.bias is None else layer.bias.tolist()
    return [oracles.dot(row, vector) + b for row, b in zip(layer.weight.tolist(), bias, strict=True)]


def additive_by_hand(classifier, query, keys, values, real):
    """Return attention weights and context for one query vector and one sequence of keys and values, as lists."""
    layer = classifier.attention
    asked, weight = linear(layer.query, query), layer.score.weight.tolist()
    scores = [oracles.additive(asked, linear(layer.key, key), weight) for key in keys[:real]]
    weights = oracles.softmax(scores) + [0.0] * (len(keys) - real)
    return weights, [math.fsum(w * v[c] for w, v in zip(weights, values, strict=True)) for c in range(len(values[0]))]


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_additive_attention_is_the_word_attention_of_the_paper(looks, apart):
    classifier = Classifier(CLASSES, memory_size=SIZE, hidden_size=11, looks=looks).double()
    values = torch.randn(BATCH, KEYS, SIZE, dtype=torch.float64) if apart else None
    memory = a_memory([7, 4], values=values)
    found = classifier(memory, weights=full())
    assert found.weights.shape == (BATCH, looks, KEYS)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(BATCH, looks, dtype=torch.float64))
    for row, real in enumerate([7, 4]):
        read = []
        for look in range(looks):
            weights, context = additive_by_hand(
                classifier,
                classifier.query[look].tolist(),
                memory.keys[row].tolist(),
                memory.values[row].tolist(),
                real,
            )
            torch.testing.assert_close(found.weights[row, look], torch.tensor(weights, dtype=torch.float64))
            read += context
        expected = torch.tensor(linear(classifier.output, read), dtype=torch.float64)
        torch.testing.assert_close(found.logits[row], expected)


def test_a_question_asks_and_is_heard():
    classifier = Classifier(CLASSES, memory_size=SIZE, query_size=11, hidden_size=13).double()
    memory, question = a_memory([7, 4]), torch.randn(BATCH, 11, dtype=torch.float64)
    found = classifier(memory, question, weights=full())
    for row, real in enumerate([7, 4]):
        asked = question[row].tolist()
        values = memory.values[row].tolist()
        weights, context = additive_by_hand(classifier, asked, memory.keys[row].tolist(), values, real)
        torch.testing.assert_close(found.weights[row, 0], torch.tensor(weights, dtype=torch.float64))
        expected = torch.tensor(linear(classifier.output, context + asked), dtype=torch.float64)
        torch.testing.assert_close(found.logits[row], expected)


def test_without_attention_the_summary_decides():
    classifier = Classifier(CLASSES, memory_size=SIZE, attention=None).double()
    memory = a_memory()
    found = classifier(memory, weights=full())
    torch.testing.assert_close(found.logits, classifier.output(memory.summary))
    assert found.weights is None
    other = Memory(torch.randn_like(memory.keys), torch.randn_like(memory.values), None, memory.summary)
    assert torch.equal(classifier(other).logits, found.logits)
    asked = Classifier(CLASSES, memory_size=SIZE, query_size=11, attention=None).double()
    question = torch.randn(BATCH, 11, dtype=torch.float64)
    expected = asked.output(torch.cat([memory.summary, question], -1))
    torch.testing.assert_close(asked(memory, question).logits, expected)


@pytest.mark.parametrize("attention", ["additive", "dot", "scaled_dot", "cosine", "bilinear", ScaledDot(), Cosine(3.0)])
def test_padding_and_order_change_nothing(attention):
    classifier = Classifier(CLASSES, memory_size=SIZE, attention=attention).double()
    memory = a_memory([7, 4])
    keys = memory.keys.clone()
    keys[1, 4:] = math.nan
    found = classifier(memory, weights=full())
    dirty = classifier(Memory(keys, keys, memory.mask, memory.summary), weights=full())
    torch.testing.assert_close(dirty.logits, found.logits)
    alone = keys[1:, :4]
    torch.testing.assert_close(classifier(Memory(alone, alone, None, memory.summary[1:])).logits[0], found.logits[1])
    order = torch.randperm(KEYS)
    moved = memory.keys[:, order]
    shuffled = classifier(Memory(moved, moved, memory.mask[:, order], memory.summary), weights=full())
    torch.testing.assert_close(shuffled.logits, found.logits)
    torch.testing.assert_close(shuffled.weights, found.weights[..., order])


def test_nothing_to_read_gives_the_bias():
    classifier = Classifier(CLASSES, memory_size=SIZE).double()
    found = classifier(a_memory([0, 4]), weights=full())
    torch.testing.assert_close(found.logits[0], classifier.output.bias)
    assert not found.weights[0].any()
    found.logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in classifier.parameters())


def test_other_requests_and_normalisers():
    classifier = Classifier(CLASSES, memory_size=SIZE, normalize=Sparsemax()).double()
    found = classifier(a_memory(), weights=top(2))
    assert found.weights.values.shape == found.weights.indices.shape == (BATCH, 1, 2)
    hard = Classifier(CLASSES, memory_size=SIZE, normalize=Hard(estimator="reinforce")).double()
    drawn = hard(a_memory(), weights=full())
    assert drawn.log_prob.shape == (BATCH, 1)
    assert ((drawn.weights == 0) | (drawn.weights == 1)).all()


@pytest.mark.parametrize("options", [{}, {"looks": 3}, {"attention": "bilinear"}, {"query_size": 11}])
def test_gradients_reach_every_parameter(options):
    classifier = Classifier(CLASSES, memory_size=SIZE, **options).double()
    question = torch.randn(BATCH, 11, dtype=torch.float64) if "query_size" in options else None
    classifier(a_memory([7, 4]), question).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in classifier.parameters())


def test_the_gradient_is_right():
    classifier = Classifier(CLASSES, memory_size=SIZE).double()
    mask = torch.arange(KEYS) < torch.tensor([7, 4])[:, None]
    keys = torch.randn(BATCH, KEYS, SIZE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: classifier(Memory(x, x, mask, x[:, 0])).logits, (keys,))


def sentences(words, count):
    """Return encoded sentences of seven words (`Memory`), the class of each, and the position of the word that
    decides."""
    kinds, places = torch.arange(count) % CLASSES, torch.randint(KEYS, (count,))
    index = torch.randint(3, (count, KEYS))
    index[torch.arange(count), places] = 3 + kinds
    keys = words[index]
    return Memory(keys, keys, None, keys.mean(1)), kinds, places


def trained(data, steps):
    classifier = Classifier(CLASSES, memory_size=16)
    optimizer = torch.optim.Adam(classifier.parameters(), 1e-2)
    for _ in range(steps):
        memory, kinds, _ = data()
        loss = F.cross_entropy(classifier(memory).logits, kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return classifier, loss.item()


@pytest.mark.usefixtures("as_installed")
def test_eight_memories_are_learnt():
    memory, kinds, places = sentences(torch.randn(3 + CLASSES, 16), 8)
    _, loss = trained(lambda: (memory, kinds, places), 150)
    assert loss < 0.05


def test_attention_finds_the_word_that_matters():
    words = torch.randn(3 + CLASSES, 16)
    classifier, _ = trained(lambda: sentences(words, 61), 200)
    memory, kinds, places = sentences(words, 101)
    found = classifier(memory, weights=full())
    assert torch.equal(found.logits.argmax(-1), kinds)
    # A classifier can recognise one of three classes without attending to its word, because the words of the two other
    # classes are absent.
    pointed = (found.weights[:, 0].argmax(-1) == places).float().mean()
    assert pointed > 0.6


def test_state_dict_round_trip_dropout_and_autocast():
    first, second = (Classifier(CLASSES, memory_size=SIZE, dropout=0.5) for _ in range(2))
    memory = a_memory([7, 4], dtype=torch.float32)
    assert not torch.equal(first(memory).logits, first(memory).logits)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.eval()(memory).logits, second.eval()(memory).logits)
    with torch.autocast("cpu", torch.bfloat16):
        low = first(memory)
    torch.testing.assert_close(low.logits.float(), first(memory).logits, atol=0.05, rtol=0.05)


def test_errors_say_what_was_expected():
    memory = a_memory(dtype=torch.float32)
    with pytest.raises(ValueError, match="query must be None"):
        Classifier(CLASSES, memory_size=SIZE)(memory, torch.zeros(BATCH, SIZE))
    asked = Classifier(CLASSES, memory_size=SIZE, query_size=11)
    with pytest.raises(ValueError, match=r"query must be \(b, 11\), got None"):
        asked(memory)
    with pytest.raises(ValueError, match=r"query must be \(b, 11\), got shape \(2, 5\)"):
        asked(memory, torch.zeros(BATCH, SIZE))
    with pytest.raises(ValueError, match="summary of the memory has size 5, the classifier expects 6"):
        Classifier(CLASSES, memory_size=6, attention=None)(memory)
    with pytest.raises(ValueError, match="looks must be 1"):
        Classifier(CLASSES, memory_size=SIZE, attention=None, looks=2)
