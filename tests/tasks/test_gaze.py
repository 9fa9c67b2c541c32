"""Tests of the glimpse task: metrics, fixed locations of glimpses, drawn and idx images, predictions, errors."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import one_line, regard

import regard as package
from regard.data.worlds.digits import ink_box
from regard.tasks.glimpse.codec import GlimpseCodec
from regard.tasks.glimpse.config import DataSettings, GlimpseConfig, ModelSettings
from regard.tasks.glimpse.grey_images import grey_png
from regard.tasks.glimpse.material import Example, encode, examples_of, make_material
from regard.tasks.glimpse.network import build, places_of
from regard.tasks.glimpse.placing import ink_boxes, placed
from regard.tasks.glimpse.predictor import GlimpsePredictor
from regard.tasks.glimpse.presets import PRESETS
from regard.tasks.glimpse.scoring import inside, judge
from regard.tasks.glimpse.task import GLIMPSE
from regard.tasks.task import InputError
from regard.tasks.training import batches

CODEC = GlimpseCodec(tuple("0123456789"), 28, 28)
SMALL = {"size": 11, "hidden": 7, "saccade": 5, "glimpse": 4, "scales": 2, "steps": 3}


def network(**changes):
    torch.manual_seed(1)
    return build(ModelSettings(**(SMALL | changes)), 10)


def predictor(**changes):
    config = GlimpseConfig(model=ModelSettings(**(SMALL | changes)))
    return GlimpsePredictor(network(**changes).eval(), CODEC, config)


def idx(path: Path, array: np.ndarray) -> None:
    data = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def mnist(tmp_path) -> Path:
    """Return a folder in MNIST's layout: 20 training images in gzipped files and 7 test images, each with three bright
    lines."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name, count, end in (("train", 20, ".gz"), ("t10k", 7, "")):
        images = np.zeros((count, 28, 28), np.uint8)
        images[:, 10:19:3, 5:17] = 200
        idx(folder / f"{name}-images-idx3-ubyte{end}", images)
        idx(folder / f"{name}-labels-idx1-ubyte{end}", (np.arange(count) % 3).astype(np.uint8))
    return folder


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((0.0, 0.0), True),  # this location is pixel (30, 30) of an image of 60 × 60
        ((-1 / 3, -1 / 3), True),  # this location is pixel (20, 20), the upper left corner of the box
        ((1 / 3 + 1e-3, 0.0), False),  # this location is to the right of pixel 40, the right edge of the box
        ((0.0, -0.9), False),
    ],
)
def test_the_last_gaze_is_inside_the_box_or_not(place, expected):
    assert inside(place, (20, 20, 40, 40), (60, 60)) is expected


@pytest.mark.parametrize(("attention", "looks"), [("learned", 3), ("random", 3), ("none", 1)])
def test_pixels_read_are_the_numbers_taken_by_looks_at_different_places(attention, looks):
    assert network(attention=attention).pixels_read(28, 28) == pytest.approx(looks * 2 * 16 / 784)


@pytest.mark.parametrize("attention", ["random", "none"])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_twins_have_as_many_parameters(name, attention):
    settings = PRESETS[name].make().model
    counts = []
    for gaze in ("learned", attention):
        with torch.device("meta"):
            model = build(settings.model_copy(update={"attention": gaze}), 10)
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert abs(counts[0] - counts[1]) <= 0.05 * counts[0]


def test_the_fixed_gaze_stays_in_the_middle_and_the_random_one_depends_on_the_image_alone():
    images = torch.randint(256, (5, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(network(attention="none").eval()(images).locations, torch.zeros(5, 3, 2))
    wandering = network(attention="random").eval()
    together, alone = wandering(images).locations, wandering(images[3:4]).locations
    assert torch.equal(together[3:4], alone)
    assert not torch.equal(wandering.train()(images).locations, together)


def test_random_places_are_uniform():
    images = torch.randint(256, (2003, 1, 7, 5), dtype=torch.uint8)
    places = places_of(images, 3).flatten(1)
    assert places.abs().max() <= 1
    torch.testing.assert_close(places.mean(0), torch.zeros(6), atol=0.06, rtol=0)
    torch.testing.assert_close(places.var(0), torch.full((6,), 1 / 3), atol=0.03, rtol=0)
    assert torch.corrcoef(places.T).fill_diagonal_(0).abs().max() < 0.1


def test_a_placed_image_stands_whole_on_its_canvas():
    image = torch.randint(50, 256, (37, 1, 5, 3), dtype=torch.uint8)
    canvas = placed(image, 11)
    for row, whole in zip(image[:, 0], canvas[:, 0], strict=True):
        left, top, right, bottom = ink_box(whole.numpy())
        assert torch.equal(whole[top:bottom, left:right], row)
        assert whole.count_nonzero() == row.count_nonzero()
    assert len({ink_box(whole.numpy()) for whole in canvas[:, 0]}) > 10


def test_a_shift_moves_by_at_most_so_much():
    image = torch.zeros(200, 1, 9, 9, dtype=torch.uint8)
    image[:, 0, 4, 4] = 255
    found = placed(image, 9, shift=2).flatten(1).argmax(1)
    rows, columns = found // 9, found % 9
    assert set(rows.tolist()) == set(columns.tolist()) == {2, 3, 4, 5, 6}


def test_clutter_stands_beside_the_digit_and_never_on_it():
    image = torch.zeros(31, 1, 28, 28, dtype=torch.uint8)
    image[:, 0, 6:20, 9:18] = 150
    image[::2, 0, 6:20, 9:18] = 250  # digits of two brightnesses, so that clutter from another image is recognised
    canvas = placed(image, 60, clutter=True)
    plain = (canvas == 150).flatten(1).sum(1), (canvas == 250).flatten(1).sum(1)
    own = torch.where(torch.arange(31) % 2 == 0, plain[1], plain[0])
    assert (own >= 14 * 9).all()
    assert (canvas != 0).flatten(1).sum(1).gt(14 * 9).all()


def test_boxes_of_a_batch_are_those_of_its_images():
    images = (torch.rand(23, 12, 17) < 0.03).to(torch.uint8) * 255
    images[4] = 0
    assert ink_boxes(images).tolist() == [list(ink_box(image.numpy())) for image in images]


def test_a_canvas_that_is_too_small_is_an_error():
    with pytest.raises(ValueError, match="images of 5×7 do not fit on a canvas of 6×6"):
        placed(torch.zeros(1, 1, 5, 7, dtype=torch.uint8), 6)


@pytest.mark.parametrize(("layout", "side"), [("plain", 28), ("translated", 60), ("cluttered", 60)])
def test_the_world_trains_on_plain_digits_and_is_judged_on_the_layout(layout, side, tmp_path):
    config = GlimpseConfig(data=DataSettings(layout=layout, train=9, valid=3, test=4))
    made = make_material(config, tmp_path, None, lambda _: None)
    assert made.codec.size == made.valid[0].image.shape[1:] == (side, side)
    assert made.records[0]["image"].shape == (1, 28, 28)
    assert (len(made.records), len(made.valid), len(made.test)) == (9, 3, 4)
    again = make_material(config, tmp_path, made.codec, lambda _: None)
    assert all(np.array_equal(a.image, b.image) for a, b in zip(made.test, again.test, strict=True))


@pytest.mark.parametrize("layout", ["plain", "translated", "cluttered"])
def test_idx_files_are_read_placed_and_held_out(mnist, layout, tmp_path):
    config = GlimpseConfig(data=DataSettings(files=(mnist,), layout=layout, valid=4))
    told = []
    made = make_material(config, tmp_path, None, told.append)
    assert made.codec.classes == ("0", "1", "2")
    assert told == ["images of 28×28: 16 to train on, 4 held out of them, 7 to test"]
    assert len(made.test) == 7
    for one in made.test:
        left, top, right, bottom = one.box
        assert (right - left, bottom - top) == (12, 7)
        assert (one.image[0, top:bottom:3, left:right] == 200).all()
    examples, about = examples_of([mnist], config, made.codec)
    assert len(examples) == 7
    assert "7 test images" in about
    assert len(GLIMPSE.files(config)) == 4


def test_an_image_is_one_token_of_a_batch_with_and_without_graphs(tmp_path):
    for graphs in (False, True):
        config = GlimpseConfig(data=DataSettings(train=20, valid=1, test=1, batch_tokens=8))
        config = config.model_copy(update={"train": config.train.model_copy(update={"graphs": graphs})})
        made = make_material(config, tmp_path, None, lambda _: None)
        assert sorted(len(batch.label) for batch in batches(GLIMPSE, config, made)) == [4, 8, 8]


def test_accuracy_and_pointing_of_a_model_whose_gaze_and_answer_are_known():
    asked = predictor(attention="none")
    with torch.no_grad():
        for parameter in asked.network.model.action.parameters():
            parameter.zero_()
        asked.network.model.action.bias[7] = 1
    image = np.zeros((1, 28, 28), np.uint8)
    around, beside = (10, 10, 18, 18), (0, 0, 9, 9)
    examples = [Example(image, "7", around), Example(image, "7", beside), Example(image, "1", beside)]
    found = judge(asked, examples, asked.config, False)
    assert found.metrics == {"accuracy": 0.6667, "images": 3, "pixels_read": round(32 / 784, 4)}
    assert found.attention == {"pointing": 0.3333}


def test_a_batch_that_is_filled_up_counts_its_images_and_moves_every_parameter():
    config = GlimpseConfig(data=DataSettings(layout="translated"), model=ModelSettings(**SMALL))
    model = network().train()
    records = [encode(CODEC, Example(np.full((1, 28, 28), 99, np.uint8), "1", (0, 0, 1, 1))) for _ in range(6)]
    batch = GLIMPSE.collate(records, config, rows=8)
    found = GLIMPSE.outcome(model, batch, config, False)
    assert int(found.count) == 6
    found.total.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_answers_records_and_traces(tmp_path):
    image = np.random.default_rng(3).integers(0, 256, (1, 28, 28)).astype(np.uint8)
    (tmp_path / "digit.png").write_bytes(grey_png(image))
    good, bad = predictor().answers([{"image": str(tmp_path / "digit.png")}, {"image": b"no picture"}])
    assert isinstance(bad, InputError)
    assert good.line.startswith(f"{good.answer} ")
    record = json.loads(json.dumps(good.record()))
    assert record["gaze"][0] == {**record["gaze"][0], "x": 14.0, "y": 14.0}
    assert len(record["gaze"]) == 3
    assert sum(record["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    trace = good.trace()
    weights = trace.records[0].weights(head=0)
    assert weights.shape == (3, 49)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    assert weights[0].argmax() == 24  # the first glimpse is at the central cell of 7 × 7
    loaded = package.Trace.load(trace.save(tmp_path / "gaze.safetensors"))
    rows, columns = loaded.records[0].row_labels, loaded.records[0].column_labels
    assert rows.kind == "glimpses"
    assert columns.extra["grid"] == (7, 7)
    assert rows.extra["x"][0] == rows.extra["y"][0] == 0.5
    assert list(rows.extra["sides"]) == pytest.approx([4 / 28, 8 / 28])
    assert rows.extra["image"] == trace.records[0].row_labels.extra["image"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["attention=none", "deviation=0.3"], "model.deviation has no effect"),
        (["attention=none", "samples=3"], "learning.samples has no effect: it is a setting of a gaze that moves"),
        (["penalty=entropy"], "learning.penalty has no effect: it is a setting of attention over keys"),
        (["layout=translated", "shift=2"], "data.shift has no effect"),
        (["layout=round"], "data.layout: expected one of plain, translated, cluttered, got 'round'"),
        (["glimpses=0"], "model.steps: expected a whole number"),
    ],
)
def test_settings_without_effect_are_errors(settings, message, tmp_path):
    options = [part for one in settings for part in ("--set", one)]
    one_line(regard("train", "glimpse", "--preset", "tiny", *options, "--out", tmp_path / "run"), message)


def test_files_that_are_no_images_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    done = regard("train", "glimpse", "--preset", "mnist", "--data", tmp_path / "empty", "--out", tmp_path / "run")
    one_line(done, "no file train-images-idx3-ubyte (or .gz)")
