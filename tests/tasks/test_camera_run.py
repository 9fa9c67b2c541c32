"""Tests of driving from camera frames: runs on a driving log, baselines, attention maps, weights of the frames."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import one_line, regard

import regard as package
from regard.data.driving.driving_log import split_blocks
from regard.tasks.catalog import TASKS
from regard.tasks.config_overrides import configure
from regard.tasks.driving.camera_material import CameraCodec, camera_material
from regard.tasks.driving.camera_predictor import CameraPredictor
from regard.tasks.driving.camera_scoring import baselines
from regard.tasks.task import SettingError

DRIVING = TASKS["driving"]
FEW = {
    **{
        "input": "camera",
        "picture": "[16, 32]",
        "widths": "[4, 4]",
        "model.size": "8",
        "frames": "2",
        "crop": "[0, 0]",
    },
    **{"block": "12", "gap": "4", "data.valid": "10", "data.test": "10", "batch_tokens": "8"},
    **{"steps": "6", "validate_every": "3", "warmup": "1"},
}


def words(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def write_drive(folder: Path, count: int = 72) -> Path:
    """Write a driving log whose frames show a bright bar that moves from side to side; the steering is its position."""
    (folder / "IMG").mkdir(parents=True)
    lines = ["center,left,right,steering,throttle,brake,speed"]
    for number in range(count):
        steering = round(math.sin(number / 4), 3)
        picture = np.full((16, 32, 3), 40, np.uint8)
        middle = round(16 + 12 * steering)
        picture[:, middle - 2 : middle + 2] = 220
        Image.fromarray(picture).save(folder / f"IMG/f{number:03d}.png")
        lines.append(f"/other/IMG/f{number:03d}.png,,,{steering},1.0,0.0,30")
    (folder / "driving_log.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drive(tmp_path_factory.mktemp("drive") / "log")


@pytest.fixture(scope="module")
def run(drive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("camera") / "run"
    done = regard("train", "driving", "--data", drive, *words(FEW), "--out", out)
    assert done.exit_code == 0, done.output
    return out


def test_a_result_has_the_errors_beside_both_baselines(run):
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    assert set(metrics) >= {"steering_mse", "zero_mse", "repeat_mse", "throttle_mse", "brake_mse", "frames"}
    better = [name for name in ("zero", "repeat") if metrics[f"{name}_mse"] <= metrics["steering_mse"]]
    assert metrics["beaten_by"] == (", ".join(better) or "neither baseline")
    assert metrics["knows_angles"] == "no"
    config = json.loads((run / "config.json").read_text())
    assert config["preset"] == "camera"
    # The setting model.hidden has an effect only with input=objects, so a camera run does not record it.
    assert "hidden" not in config["model"]


def test_baselines_are_of_the_frames_of_the_test_part(drive, tmp_path):
    config = configure(DRIVING, "small", [drive], FEW)
    material = camera_material(config, tmp_path, None, lambda _: None)
    gold = [math.sin(one.place / 4) for one in material.test]
    before = [math.sin((one.place - 1) / 4) for one in material.test]
    found = baselines(material.test)
    assert found["zero_mse"] == pytest.approx(np.mean(np.square(gold)), abs=1e-3)
    assert found["repeat_mse"] == pytest.approx(np.mean(np.square(np.subtract(gold, before))), abs=1e-3)
    frames = material.test[0].footage.frames
    parts = split_blocks(len(frames), block=12, gap=4, valid=10, test=10, seed=config.data.seed)
    trained = parts.train
    shown = [record["controls"][0] for record in material.records[: len(trained)]]
    assert shown == pytest.approx([frames[place].controls[0] for place in trained])
    assert not any(abs(one.place - place) < 4 for one in (*material.valid, *material.test) for place in trained)


def test_a_mirrored_frame_has_the_opposite_steering(drive, tmp_path):
    config = configure(DRIVING, "camera", [drive], FEW)
    records = camera_material(config, tmp_path, None, lambda _: None).records
    plain, mirrored = records[9], records[9 + len(records) // 2]
    assert (mirrored["frames"] == plain["frames"][..., ::-1]).all()
    assert mirrored["controls"].tolist() == [-plain["controls"][0], *plain["controls"][1:]]
    assert mirrored["angles"].tolist() == (-plain["angles"]).tolist()


@pytest.mark.parametrize("given", ["picture", "folder", "number", "paths"])
def test_a_run_answers_frames_with_a_map_over_the_picture_and_weights_over_time(run, drive, given, tmp_path):
    frames = [drive / f"IMG/f{number:03d}.png" for number in (20, 21, 22)]
    for path in frames:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    scene = {"picture": str(frames[-1]), "folder": str(tmp_path), "number": {"frame": 22}, "paths": frames}[given]
    [found] = package.load(run).predict([{"scene": scene}])
    assert found.answer.startswith("steering ")
    assert found.answer in found.line
    where, when = found.trace().records
    seen = 1 if given == "picture" else 2
    assert where.weights(head=0).shape == (seen, 4 * 8)
    assert when.weights(head=0).shape == (1, seen)
    for record in (where, when):
        torch.testing.assert_close(record.weights(head=0).sum(-1), torch.ones(record.queries))
    assert where.column_labels.kind == "patches"
    record = json.loads(json.dumps(found.record()))
    assert len(record["gates"]) == len(record["weights"]) == seen
    if given == "number":
        assert record["logged"]["steering"] == pytest.approx(math.sin(22 / 4), abs=1e-3)


def test_a_folder_and_a_number_of_the_log_give_the_same_answer(run, drive, tmp_path):
    for number in (20, 21, 22):
        name = f"f{number:03d}.png"
        (tmp_path / name).write_bytes((drive / "IMG" / name).read_bytes())
    one, other = package.load(run).predict([str(tmp_path), {"scene": {"frame": 22}}])
    assert one.controls == pytest.approx(other.controls, abs=1e-5)


@pytest.mark.parametrize(
    ("scene", "message"),
    [
        ("nothing.png", "nothing.png: no such file"),
        ({"frame": 400}, "expected a frame from 0 to 71, got 400"),
        ({"frame": True}, "expected"),
        ({"frames": ["/etc/passwd"]}, 'expected {"frame": number} or the path of a frame'),
        (["/etc/passwd"], "expected paths of frames"),
    ],
)
def test_what_is_no_frame_is_named(run, scene, message):
    [found] = package.load(run).answers([{"scene": scene}])
    assert message in str(found)


def test_commands_take_a_camera_run(run, drive, tmp_path):
    page = tmp_path / "page.html"
    done = regard("predict", run, drive / "IMG/f030.png", "--look", page)
    assert done.exit_code == 0, done.output
    assert "throttle" in done.output
    assert page.is_file()
    assert regard("look", run, "--out", tmp_path / "look.html").exit_code == 0
    evaluated = regard("evaluate", run, "--data", drive, "--json")
    assert evaluated.exit_code == 0, evaluated.output
    assert json.loads(evaluated.stdout)["metrics"]["frames"] == 72


def test_a_driver_that_knows_angles_begins_with_the_last_angle(drive, tmp_path):
    config = configure(DRIVING, "camera", [drive], FEW | {"angles": "true"})
    material = camera_material(config, tmp_path, None, lambda _: None)
    network = DRIVING.network(config, material.codec)
    found = DRIVING.judge(CameraPredictor(network, material.codec, config), material.test, config, False).metrics
    assert found["steering_mse"] == pytest.approx(found["repeat_mse"], abs=1e-5)
    assert found["knows_angles"] == "yes"


def test_a_loss_is_the_squared_error_with_a_share_of_the_pedals(drive, tmp_path):
    config = configure(DRIVING, "camera", [drive], FEW | {"penalty": "entropy", "pedal_weight": "0.5"})
    material = camera_material(config, tmp_path, None, lambda _: None)
    # Before training, the network returns 0 for every control of the vehicle.
    network = DRIVING.network(config, material.codec)
    records = [one.record() for one in material.test[:3]]
    outcome = DRIVING.outcome(network, DRIVING.collate(records, config, rows=5), config, True)
    gold = torch.tensor([one.controls for one in material.test[:3]])
    expected = gold[:, 0].square().sum() + 0.5 * gold[:, 1:].square().sum()
    torch.testing.assert_close(outcome.total, expected)
    assert int(outcome.count) == 3
    assert outcome.weights[0].shape == (5, 1, 2)
    assert outcome.mask.sum() == 6


def test_a_missing_or_damaged_frame_is_an_error_with_the_line_or_a_counted_skip(tmp_path):
    folder = write_drive(tmp_path / "log")
    (folder / "IMG/f040.png").write_bytes(b"no picture")
    out = ("--out", tmp_path / "run")
    one_line(regard("train", "driving", "--data", folder, *words(FEW), *out), "driving_log.csv:42", "f040.png")
    (folder / "IMG/f050.png").unlink()
    one_line(regard("train", "driving", "--data", folder, *words(FEW), *out), "driving_log.csv:52", "f050.png")
    said: list[str] = []
    config = configure(DRIVING, "camera", [folder], FEW | {"skip_faults": "true"})
    material = camera_material(config, tmp_path / "cache", CameraCodec.of(config), said.append)
    assert "72 lines read, 70 frames kept; skipped: 1 damaged picture, 1 missing picture" in said
    assert "2 lines skipped" in material.about
    frames = material.test[0].footage.frames
    assert [place for place, frame in enumerate(frames) if frame.first == place] == [0, 40, 49]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input": "camera", "gap": "2"}, "data.gap from 3, the history"),
        ({"input": "camera", "crop": "[0.6, 0.5]"}, "leaves nothing of a frame"),
        ({"input": "camera", "drives": "3"}, "data.drives has no effect"),
        ({"input": "camera", "watch": "agreement"}, "steering_mse"),
        ({"frames": "3"}, "model.frames has no effect: it is a setting of input=camera"),
        ({"watch": "steering_mse"}, "is of input=camera"),
    ],
)
def test_settings_that_do_not_fit_are_refused(drive, settings, message):
    with pytest.raises(SettingError) as error:
        configure(DRIVING, "small", [drive], settings)
    assert message in str(error.value)


def test_what_is_asked_for_stays_when_the_camera_chooses_its_preset(drive):
    # These numbers equal the values of the preset `small`.
    asked = {"input": "camera", "batch_tokens": "512", "steps": "12000"}
    config = configure(DRIVING, "small", [drive], asked)
    assert (config.preset, config.data.batch_tokens, config.train.steps) == ("camera", 512, 12_000)
    assert config.train.watch == "steering_mse"


def test_a_camera_without_a_log_is_refused(tmp_path):
    one_line(regard("train", "driving", "--set", "input=camera", "--out", tmp_path / "run"), "give --data DIR")
