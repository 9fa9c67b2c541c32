"""Tests of visual question answering: generated data, files, ablations, penalties, estimators, predictions, traces."""

import json
from random import Random

import pytest
import torch
from PIL import Image

from regard.data.data_files import DataError
from regard.data.worlds.further_questions import further
from regard.data.worlds.scene_questions import FORMS, asked
from regard.tasks.attention_learning import loss_of
from regard.tasks.config import LearningSettings
from regard.tasks.image_inputs import png_of
from regard.tasks.joined_traces import joined_trace
from regard.tasks.task import InputError
from regard.tasks.vqa.config import DataSettings, ModelSettings, VqaConfig
from regard.tasks.vqa.material import Example
from regard.tasks.vqa.network import build
from regard.tasks.vqa.predictor import Seen
from regard.tasks.vqa.scoring import accuracy_by_form, pointing
from regard.tasks.vqa.task import VQA

DATA = DataSettings(train=12, valid=4, test=6, longer=2, questions=4, batch_tokens=16)
MODEL = ModelSettings(size=8, widths=(4, 4, 4), embedding=4, features=8)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return VQA.material(VqaConfig(data=DATA, model=MODEL), tmp_path_factory.mktemp("data"), None, lambda _: None)


def network(material, **settings):
    torch.manual_seed(1)
    model = MODEL.model_copy(
        update={key: value for key, value in settings.items() if key in ModelSettings.model_fields}
    )
    learning = LearningSettings(
        **{key: value for key, value in settings.items() if key not in ModelSettings.model_fields}
    )
    config = VqaConfig(data=DATA, model=model, learning=learning)
    return VQA.network(config, material.codec), config


def test_a_scene_of_the_world_comes_with_several_questions(material):
    assert len(material.records) == 12
    record = material.records[3]
    assert record["image"].shape == (3, 48, 48)
    assert 1 < len(record["question"]) == len(record["answer"]) <= 4
    [lengths] = material.lengths
    assert list(lengths) == [len(one["question"]) for one in material.records]
    assert material.example["image"] is material.test[0].pixels
    assert material.example["question"] == material.test[0].question


def test_a_batch_pads_questions_and_words(material):
    records = [material.records[0], VQA.encode(material.codec, material.test[0], None)]
    batch = VQA.collate(records, None)
    count = len(records[0]["question"])
    assert batch.question.shape[:2] == batch.answer.shape == (2, count)
    assert batch.answer[1, 1:].tolist() == [-1] * (count - 1)
    assert batch.image.dtype == torch.uint8


@pytest.mark.parametrize("form", FORMS)
def test_further_questions_are_true_of_the_scene(form):
    """Two generated questions about a scene with the same words have the same answer and the same gold boxes."""
    items = list(asked(4, count=40, forms=(form,)))
    same = 0
    for item in items:
        for other in further(item.scene, Random(1), count=20, forms=(form,)):
            assert other.form == form
            assert set(other.regions) <= {shape.box for shape in item.scene.objects}
            if other.question == item.question:
                same += 1
                assert (other.answer, sorted(other.regions)) == (item.answer, sorted(item.regions))
    assert same > 10


@pytest.mark.parametrize("model", [MODEL, ModelSettings(), ModelSettings(size=96, hops=3)])
def test_the_twin_without_attention_has_as_many_parameters(model):
    def count(settings):
        return sum(parameter.numel() for parameter in build(settings, 40, 21).parameters())

    assert count(model.model_copy(update={"attention": "none"})) == pytest.approx(count(model), rel=0.05)


def test_the_question_alone_is_answered_without_the_picture(material):
    model, _ = network(material, image=False)
    batch = VQA.collate([material.records[0]], None)
    first = model.eval()(batch.image, batch.question).logits
    torch.testing.assert_close(model(255 - batch.image, batch.question).logits, first)
    assert model.image is None


def test_padded_questions_change_no_other_answer(material):
    model, _ = network(material)
    model.eval()
    alone = VQA.collate([VQA.encode(material.codec, material.test[0], None)], None)
    both = VQA.collate([VQA.encode(material.codec, material.test[0], None), material.records[0]], None)
    torch.testing.assert_close(
        model(both.image, both.question).logits[0, 0], model(alone.image, alone.question).logits[0, 0]
    )


@pytest.mark.parametrize("penalty", ["squares", "doubly_stochastic", "entropy"])
def test_penalties_add_to_the_loss(material, penalty):
    model, config = network(material, penalty=penalty, beta=1.0)
    batch = VQA.collate([material.records[0], VQA.encode(material.codec, material.test[0], None)], None)
    model.eval()
    outcome = VQA.outcome(model, batch, config, True)
    assert outcome.weights[0].shape == (*batch.answer.shape, 2, 36)
    plain = VQA.outcome(model, batch, config, False)
    torch.testing.assert_close(plain.total, outcome.total)
    assert int(outcome.count) == int((batch.answer >= 0).sum())
    assert loss_of(outcome, model, config.learning).total > plain.total


@pytest.mark.parametrize("estimator", ["straight_through", "reinforce", "gumbel"])
def test_hard_attention_teaches_its_scores(material, estimator):
    model, config = network(material, normalize="hard", estimator=estimator, counts=False)
    batch = VQA.collate([material.records[number] for number in range(4)], None)
    outcome = VQA.outcome(model, batch, config, estimator == "reinforce")
    loss_of(outcome, model, config.learning).total.backward()
    assert all(hop.key.weight.grad.any() for hop in model.classifier.hops)


def test_a_predictor_answers_with_records_and_a_map_for_each_hop(material, tmp_path):
    model, config = network(material)
    predictor = VQA.predictor(model, material.codec, config)
    example = material.test[0]
    (tmp_path / "bad.png").write_bytes(b"no picture")
    given = [
        example.inputs,
        {"image": tmp_path / "bad.png", "question": "What?"},
        {"image": png_of(example.pixels), "question": " "},
        {"image": png_of(example.pixels), "question": "What color is the glorp?"},
    ]
    first, bad, empty, odd = predictor.answers(given)
    record = json.loads(json.dumps(first.record()))
    assert record["answer"] == first.answer == max(record["answers"], key=record["answers"].get)
    assert first.line == f"{first.answer} {record['probability']:.2f}"
    assert len(record["weights"]) == 2
    assert record["grid"] == [6, 6]
    question = "What is left of the star?"
    answered = Seen(example.pixels, question, {"circle": 0.75, "cross": 0.25}, first.weights, first.grid)
    (named,) = joined_trace([answered], VQA.view).records
    assert named.name == f"0. {question} circle 0.75"
    rows = first.trace().records[0].weights(head=0)
    torch.testing.assert_close(rows.sum(-1), torch.ones(2))
    assert isinstance(bad, InputError)
    assert "bad.png" in str(bad)
    assert isinstance(empty, InputError)
    assert "must have from 1 to 200 words, it has 0" in str(empty)
    assert odd.record()["unknown"] == ["glorp"]
    judged = VQA.judge(predictor, material.test, config, True)
    assert set(judged.faithfulness) == {"attended", "random"}
    assert set(judged.metrics["accuracy_by_form"]) == {one.form for one in material.test}


@pytest.mark.parametrize("settings", [{"attention": "none"}, {"image": False}], ids=["none", "question only"])
def test_without_attention_there_is_no_trace(material, settings):
    model, config = network(material, **settings)
    predictor = VQA.predictor(model, material.codec, config)
    [seen] = predictor.answers([material.test[0].inputs])
    assert seen.trace() is None
    assert VQA.judge(predictor, material.test, config, True).attention == {}


def test_figures_by_hand():
    picture = torch.zeros(3, 16, 16, dtype=torch.uint8).numpy()
    # The last hop of stacked attention attends to the last cell.
    weights = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]])
    seen = [Seen(picture, "?", {"red": 0.9, "blue": 0.1}, weights, (2, 2))] * 4
    boxes = [((8, 8, 16, 16),), ((0, 0, 8, 8),), ((0, 0, 4, 4), (10, 10, 14, 14)), ()]
    answers, forms = ("red", "blue", "red", "red"), ("colour", "colour", "count", "count")
    examples = [Example([picture], 0, "?", *one) for one in zip(answers, boxes, forms, strict=True)]
    assert pointing(seen, examples) == pytest.approx(2 / 3)
    assert accuracy_by_form(seen, examples) == {"colour": 0.5, "count": 1.0}
    assert pointing(seen[3:], examples[3:]) is None


@pytest.fixture
def folder(tmp_path):
    """Return a folder of nine training pictures with two questions each, and test questions with an unseen answer."""
    for part, count in (("train", 9), ("test", 2)):
        (tmp_path / part / "images").mkdir(parents=True)
        entries = []
        for number in range(count):
            Image.new("RGB", (40, 30), (20 * number, 90, 200)).save(tmp_path / part / "images" / f"{number}.png")
            entries += [
                ["what color is it?", "blue" if number % 2 else "red", number],
                ["is it a circle?", "yes", number],
            ]
        if part == "test":
            entries.append(["what color is it?", "mauve", 1])
        (tmp_path / part / "questions.json").write_text(json.dumps(entries))
    return tmp_path


def test_files_are_read_and_unseen_answers_counted(folder, tmp_path):
    said: list[str] = []
    config = VqaConfig(data=DataSettings(files=(folder,), picture=32), model=MODEL)
    material = VQA.material(config, tmp_path / "cache", None, said.append)
    assert "1 of 5 test questions have an answer that cannot be given" in said
    assert (len(material.records), len(material.valid), len(material.test)) == (8, 2, 5)
    assert material.records[0]["image"].shape == (3, 32, 32)
    assert set(material.codec.answers) == {"yes", "red", "blue"}
    assert [path.parent.name for path in VQA.files(config)] == ["train", "test"]
    model = VQA.network(config, material.codec)
    judged = VQA.judge(VQA.predictor(model, material.codec, config), material.test, config, False)
    assert judged.metrics["unseen_answers"] == 1
    examples, about = VQA.examples([folder], config, material.codec)
    assert [one.answer for one in examples] == [one.answer for one in material.test]
    assert (examples[2].pixels == material.test[2].pixels).all()
    assert str(folder) in about


def test_a_codec_is_saved_and_two_spellings_are_one_word(material, tmp_path):
    material.codec.save(tmp_path)
    again = VQA.codec(tmp_path, None)
    assert again == material.codec
    assert again.encode("What color is the star?") == again.encode("what colour is the star ?")


def test_data_that_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(DataError, match="expected one file or folder, found 2"):
        VQA.files(VqaConfig(data=DataSettings(files=(tmp_path, tmp_path))))
    crowded = VqaConfig(data=DATA.model_copy(update={"objects": (6, 6)}), model=MODEL)
    with pytest.raises(DataError, match="the built-in world"):
        VQA.material(crowded, tmp_path, None, lambda _: None)


def test_every_width_needs_its_kernel():
    with pytest.raises(ValueError, match="expected one for each of the 3 widths"):
        ModelSettings(kernels=(4, 2))
    assert ModelSettings(widths=(4, 4), kernels=(4, 2)).kernels == (4, 2)
