"""Tests of the reading comprehension model: input features, padding, ablations, and training."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from regard.core.requests import full
from regard.data.text.passages import Passage
from regard.data.text.questions import Question
from regard.data.worlds.stories import example, stories
from regard.models.span_pointer import best_span
from regard.tasks.reading.codec import FEATURES, LETTERS, ReadingCodec, encode, question_of
from regard.tasks.reading.config import ModelSettings, ReadingConfig
from regard.tasks.reading.network import Texts, build, loss
from regard.tasks.reading.presets import PRESETS

SMALL = ModelSettings(size=12, dropout=0.0)


def batch(records):
    """Return records as a batch, padded with zeros."""
    columns = {}
    for name in records[0]:
        values = [torch.as_tensor(record[name]) for record in records]
        if values[0].ndim:
            columns[f"{name}_lengths"] = torch.tensor([len(value) for value in values])
            columns[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
        else:
            columns[name] = torch.stack(values)
    return SimpleNamespace(**columns)


def point(network, records, **options):
    made = batch(records)
    return network(Texts.of(made, "passage"), Texts.of(made, "question"), **options)


def some(count, *, sentences=(3, 6), **options):
    questions = [question_of(story) for story in stories(1, count=count, sentences=sentences)]
    codec = ReadingCodec.build(questions)
    return questions, codec, [encode(codec, question, **options) for question in questions]


def test_a_story_as_a_record():
    question = question_of(example())
    codec = ReadingCodec.build([question])
    record = encode(codec, question, characters=True)
    assert (record["start"], record["end"]) == (8, 9)
    assert codec.vocabulary.decode(record["question"].tolist()) == ("where", "is", "the", "ball", "?")
    assert record["passage_features"].shape == (17, FEATURES)
    assert record["passage_letters"].shape == (17, LETTERS)
    # The first words of the passage are: Emma took the ball . Emma went to the kitchen .
    assert record["passage_features"][:11, 0].tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0]
    # Feature of words that begin with a capital letter.
    assert record["passage_features"][:6, 2].tolist() == [1, 0, 0, 0, 0, 1]
    assert record["passage_features"][:6, 4].tolist() == [0, 0, 0, 0, 1, 0]  # feature of punctuation marks
    assert record["passage_features"][:6, 5].tolist() == [1, 0, 0, 0, 0, 1]  # feature of the first words of sentences
    assert record["question_features"][:, 0].tolist() == [0, 0, 1, 1, 0]


def test_features_of_the_other_text_can_be_switched_off():
    _, _, records = some(3, exact_match=False)
    assert not any(record[f"{name}_features"][:, :2].any() for record in records for name in ("passage", "question"))


def test_first_letters_join_forms_of_a_word():
    passage = Passage.of("They travelled in 1990")
    question = Question(passage, ("Who", "travels", "?"), ("They",), (0, 0))
    record = encode(ReadingCodec.build([question]), question)
    assert record["passage_features"][1].tolist() == [0, 1, 0, 0, 0, 0]
    assert record["passage_features"][3].tolist() == [0, 0, 0, 1, 0, 0]


def test_letters_of_a_long_word_are_its_ends():
    passage = Passage.of("Donaudampfschifffahrtsgesellschaft a")
    question = Question(passage, ("a",), ("a",), (1, 1))
    letters = encode(ReadingCodec.build([question]), question, characters=True)["passage_letters"]
    other = Passage.of("Donaudamllschaft a")
    same = encode(ReadingCodec.build([question]), Question(other, ("a",), ("a",), (1, 1)), characters=True)
    assert np.array_equal(letters, same["passage_letters"])
    assert letters[1, 1:].tolist() == [0] * (LETTERS - 1)


def test_words_that_are_rare_have_no_vector():
    passage = Passage.of("a a b")
    first, second = (Question(passage, question, ("a",), (0, 0)) for question in (("b", "c"), ("c",)))
    assert ReadingCodec.build([first], rare=2).vocabulary.words == ("a", "b")
    # A passage that two questions share is counted once, so that each of the words a, b and c occurs twice.
    assert ReadingCodec.build([first, second], rare=2).vocabulary.words == ("a", "b", "c")


def test_the_codec_is_what_it_was_when_loaded(tmp_path):
    codec = ReadingCodec.build([question_of(example())], candidates=("no", "a,b"))
    codec.save(tmp_path)
    assert ReadingCodec.load(tmp_path) == codec
    assert codec.passage("It rained. Tom ran.").words == ("It", "rained", ".", "Tom", "ran", ".", "no", "a,b")
    assert ReadingCodec.build([question_of(example())]).passage("It rained.").words == ("It", "rained", ".")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["none", "dot", "additive", "bilinear", "hard"])
@pytest.mark.parametrize("matching", ["none", "additive", "scaled_dot"])
def test_padding_changes_nothing(attention, matching):
    _, codec, records = some(3, characters=True)
    settings = SMALL.model_copy(
        update={"attention": attention, "matching": matching, "characters": 5, "layers": 2, "hops": 2}
    )
    network = build(settings, codec.vocabulary.size).eval()
    together = point(network, records)
    for row, record in enumerate(records):
        alone = point(network, [record])
        count = len(record["passage"])
        torch.testing.assert_close(together.start_logits[row, :count], alone.start_logits[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(together.end_logits[row, :count], alone.end_logits[0], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SMALL, *(preset.make().model for preset in PRESETS.values())])
def test_the_twin_without_attention_has_as_many_parameters(settings):
    counts = [
        sum(parameter.numel() for parameter in build(each, 500).parameters())
        for each in (settings, settings.model_copy(update={"attention": "none"}))
    ]
    assert abs(counts[1] - counts[0]) < 0.05 * counts[0]


def test_weights_are_there_with_attention_alone():
    _, codec, records = some(2)
    found = point(build(SMALL.model_copy(update={"attention": "none"}), codec.vocabulary.size), records, weights=full())
    assert found.weights is None
    assert found.matching is None
    attending = point(build(SMALL, codec.vocabulary.size).eval(), records, weights=full())
    torch.testing.assert_close(attending.weights[0, 0].sum(), torch.tensor(1.0))
    assert attending.matching.shape[1] == attending.matching.shape[2] == attending.start_logits.shape[1]


@pytest.mark.parametrize("align", ["states", "words"])
@pytest.mark.parametrize("attention", ["none", "dot", "bilinear", "hard"])
def test_gradients_reach_every_parameter(attention, align):
    _, codec, records = some(4, characters=True)
    update = {"attention": attention, "align": align, "products": align == "words", "characters": 5}
    network = build(SMALL.model_copy(update=update), codec.vocabulary.size)
    made = batch(records)
    loss(point(network, records), made.start, made.end).backward()
    assert [name for name, parameter in network.named_parameters() if parameter.grad is None] == []


def test_hard_choices_have_their_probability():
    _, codec, records = some(3)
    network = build(SMALL.model_copy(update={"attention": "hard"}), codec.vocabulary.size)
    found, real = point(network, records), batch(records).passage > 0
    assert found.log_prob.shape == found.start_logits.shape
    assert (found.log_prob[real] < 0).all()


def test_a_question_without_a_span_adds_no_loss():
    _, codec, records = some(3)
    network = build(SMALL, codec.vocabulary.size)
    pointed, made = point(network, records), batch(records)
    start, end = made.start.clone(), made.end.clone()
    whole = loss(pointed, start, end)
    first = loss(pointed, torch.tensor([start[0], -1, -1]), torch.tensor([end[0], -1, -1]))
    rest = loss(pointed, torch.tensor([-1, start[1], start[2]]), torch.tensor([-1, end[1], end[2]]))
    torch.testing.assert_close(first + rest, whole)


def test_a_reader_of_letters_wants_letters():
    _, codec, records = some(2)
    with pytest.raises(ValueError, match="encode with characters=True"):
        point(build(SMALL.model_copy(update={"characters": 5}), codec.vocabulary.size), records)


@pytest.mark.slow
@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize("attention", ["none", "dot", "hard"])
def test_a_few_stories_are_learnt(attention):
    _, codec, records = some(8, sentences=(3, 3))
    network = build(SMALL.model_copy(update={"attention": attention, "size": 24}), codec.vocabulary.size)
    made = batch(records)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss(point(network, records), made.start, made.end).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    found = point(network.eval(), records)
    spans = best_span(found.start_logits, found.end_logits, longest=4)
    assert ((spans.start == made.start) & (spans.end == made.end)).sum() >= 7


def test_settings_are_checked():
    assert {preset.make().preset for preset in PRESETS.values()} == set(PRESETS)
    with pytest.raises(ValidationError, match="attention"):
        ModelSettings(attention="nothing")
    with pytest.raises(ValidationError, match="unknown"):
        ReadingConfig(unknown=1)
