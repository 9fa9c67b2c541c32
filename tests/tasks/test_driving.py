"""Tests of driving from objects: network with and without attention, metrics, predictions, drives, invalid inputs."""

import json
import math

import numpy as np
import pytest
import torch
from tiny_runs import one_line, regard, tiny_settings

import regard as package
from regard.core.requests import full
from regard.data.driving.traffic_scenes import parse_scene, scene_json, write_scenes
from regard.data.record_batches import padded
from regard.data.worlds.traffic import Recorded, record
from regard.data.worlds.traffic_expert import ACTIONS, Decisions, expert
from regard.tasks.attention_learning import asks_attention, loss_of
from regard.tasks.catalog import TASKS
from regard.tasks.config_overrides import configure
from regard.tasks.driving.codec import DrivingCodec
from regard.tasks.driving.config import DriverLearning, DrivingConfig, ModelSettings
from regard.tasks.driving.material import Records
from regard.tasks.driving.network import build
from regard.tasks.driving.predictor import DrivingPredictor
from regard.tasks.driving.scoring import agreement, pointing
from regard.tasks.task import SettingError

DRIVING = TASKS["driving"]
SMALL = {"model.size": "12", "hidden": "10", "heads": "2"}
WALKER = {"kind": "pedestrian", "x": 20, "y": 1, "heading": -1.57, "speed": 1.4}
SCENE = {"ego": {"speed": 10, "limit": 11}, "objects": [WALKER, {**WALKER, "kind": "car", "x": 60, "heading": 0}]}


@pytest.fixture(scope="module")
def recorded():
    return record(3, 64)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driving")
    done = regard("train", "driving", *tiny_settings("driving"), "--out", folder / "run")
    assert done.exit_code == 0, done.output
    return folder / "run"


def batch_of(recorded):
    records = Records(DrivingCodec(), recorded)
    return padded([records[n] for n in range(len(records))], {})


def made(**settings):
    config = configure(DRIVING, "tiny", [], {**SMALL, **settings})
    torch.manual_seed(5)
    return config, DRIVING.network(config, DrivingCodec())


def test_the_ego_vehicle_asks_and_is_none_of_the_keys(recorded):
    batch = batch_of(recorded)
    _, network = made()
    found = network(batch.objects, batch.present, weights=full()).weights
    assert not found[:, 0, 0].any()
    assert not found[:, 0][~batch.present].any()
    seen = batch.present[:, 1:].any(1)
    torch.testing.assert_close(found.sum(-1)[seen], torch.ones(int(seen.sum()), 1))


def test_objects_in_another_order_change_nothing(recorded):
    batch = batch_of(recorded)
    _, network = made(layers="1")
    network.eval()
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(batch.objects.shape[1] - 1)])
    one = network(batch.objects, batch.present, weights=full())
    two = network(batch.objects[:, order], batch.present[:, order], weights=full())
    torch.testing.assert_close(two.logits, one.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(two.weights, one.weights[..., order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [12, 64])
def test_the_twin_without_attention_has_as_many_parameters(size, recorded):
    counts = []
    for attention in ("none", "scaled_dot"):
        network = build(ModelSettings(attention=attention, size=size, heads=2), DrivingCodec().features)
        counts.append(sum(parameter.numel() for parameter in network.parameters()))
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


def test_the_twin_reads_the_mean_of_the_objects(recorded):
    batch = batch_of(recorded)
    _, network = made(attention="none")
    found = network(batch.objects, batch.present, weights=full())
    assert found.weights is None
    row = int(batch.present.sum(1).argmax())
    alone = network(batch.objects[row : row + 1], batch.present[row : row + 1])
    torch.testing.assert_close(alone.logits[0], found.logits[row], atol=1e-5, rtol=1e-5)
    # The network without attention averages the objects; if every object occurs twice, the mean is the same.
    twice = torch.cat([batch.objects[row], batch.objects[row, 1:]])[None]
    there = torch.cat([batch.present[row], batch.present[row, 1:]])[None]
    torch.testing.assert_close(network(twice, there).logits[0], found.logits[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        *({"attention": name} for name in ("none", "dot", "cosine", "bilinear", "additive")),
        *({"normalize": name} for name in ("sparsemax", "entmax", "sigmoid", "hard")),
        {"normalize": "hard", "estimator": "reinforce"},
        {"penalty": "entropy"},
        {"layers": "1"},
    ],
    ids=lambda settings: " ".join(f"{key}={value}" for key, value in settings.items()),
)
def test_every_mechanism_learns_from_a_batch(settings, recorded):
    config, network = made(**settings)
    batch = batch_of(recorded)
    outcome = DRIVING.outcome(network, batch, config, asks_attention(network, config.learning))
    loss_of(outcome, network, config.learning).total.backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    assert int(outcome.count) == 64
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    assert all(gradients[name].any() for name in ("encoder.inner.weight", "controller.controls.weight"))


@torch.no_grad()
def test_the_loss_is_of_the_action_and_of_the_steering(recorded):
    config, network = made()
    batch = batch_of(recorded)
    done = network(batch.objects, batch.present)
    wrong = [-float(done.logits[n].log_softmax(-1)[batch.action[n]]) for n in range(64)]
    far = [10 * float(done.controls[n, 0] - batch.steering[n]) ** 2 for n in range(64)]
    assert float(DRIVING.outcome(network, batch, config, False).total) == pytest.approx(sum(wrong) + sum(far), rel=1e-4)


def test_pointing_judges_forced_decisions_alone(recorded):
    forced = np.zeros((4, 12), bool)
    forced[0, 2] = forced[1, [0, 1]] = forced[2, 3] = True  # no object of the scene forces the fourth decision
    scenes = recorded.scenes.take(np.arange(4))
    scenes.present[:] = True
    scenes.present[2, 11] = False
    decisions = Decisions(np.array([0, 1, 2, 1]), np.zeros(4), forced)
    weights = np.zeros((4, 12))
    weights[0, 2] = weights[1, 1] = weights[3, 5] = 0.9
    weights[2, 11], weights[2, 3] = 0.9, 0.1  # slot 11, which has the larger weight, holds no object
    judged = Recorded(scenes, decisions, np.zeros(4, int), np.zeros(4, int))
    assert pointing(weights, judged) == (1.0, 3)
    weights[0, 5] = 1.0
    assert pointing(weights, judged) == (pytest.approx(2 / 3), 3)
    chances = np.eye(3)[[0, 1, 1, 1]]
    assert agreement(chances, judged) == 0.75


@pytest.mark.slow
def test_a_result_has_the_policies_side_by_side(run):
    result = json.loads((run / "result.json").read_text())
    for name in ("", "expert_", "random_", "idle_"):
        assert {f"{name}{key}" for key in ("collisions_per_100km", "progress", "km")} <= set(result["metrics"])
    assert result["metrics"]["expert_km"] > 0
    assert 0 <= result["attention"]["pointing"] <= 1
    assert set(result["longer"]["metrics"]) == {"agreement", "steering_error", "scenes"}


@pytest.mark.slow
def test_a_decision_names_the_objects_it_looked_at(run, tmp_path):
    (tmp_path / "scene.json").write_text(json.dumps(SCENE))
    [found] = package.load(run).predict([tmp_path / "scene.json"])
    assert found.answer in ACTIONS
    assert sum(found.probabilities.values()) == pytest.approx(1)
    order = sorted(zip(found.weights.tolist(), ["pedestrian", "car"], strict=True), reverse=True)
    expected = ", ".join(f"{name} {weight:.2f}" for weight, name in order)
    assert found.line == f"{found.answer} {found.probabilities[found.answer]:.2f}: {expected}"
    assert found.record()["objects"] == ["pedestrian", "car"]
    trace = found.trace()
    assert trace.records[0].column_labels.extra["x"] == [20, 60]
    assert trace.records[0].column_labels.extra["ego"] == [0, 0, 0, 10]


@pytest.mark.slow
def test_objects_beyond_those_seen_have_no_weight(run):
    far = [{**WALKER, "x": 20 + n} for n in range(15)]
    [found, empty] = package.load(run).predict([{"scene": {**SCENE, "objects": one}} for one in (far, [])])
    assert (found.weights[:12] > 0).all()
    assert not found.weights[12:].any()
    assert empty.trace() is None
    assert empty.line == f"{empty.answer} {empty.probabilities[empty.answer]:.2f}"


@pytest.mark.slow
def test_a_drive_is_shown_step_by_step(run):
    [found] = package.load(run).predict([{"scene": {"road": 3}}])
    assert found.answer in found.line
    record = found.record()
    assert record["road"] == 3
    assert [step["action"] in ACTIONS for step in record["steps"]] == [True] * len(found.moments)
    map_ = found.trace().records[0]
    extra, (rows, columns) = map_.column_labels.extra, map_.weights(head=0).shape
    assert len(extra["ego"]) == 4 * rows
    assert all(len(extra[name]) == rows * columns for name in ("x", "y", "heading", "speed", "present"))
    present = torch.tensor(extra["present"]).reshape(rows, columns)
    assert not map_.weights(head=0)[present == 0].any()


@pytest.mark.slow
def test_a_run_begins_with_a_forced_decision_and_its_page_with_a_drive(run):
    result = json.loads((run / "result.json").read_text())
    scene = parse_scene(result["example"]["scene"])
    assert expert(scene).forced.any()
    loaded = package.load(run)
    material = DRIVING.material(loaded.config, run / "data", loaded.codec, print)
    assert DRIVING.asked(material.test[0]) == {"scene": {"road": 0}}
    assert set(DRIVING.asked(material.test[1])["scene"]) == {"ego", "objects"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "scene.json:1: not JSON"),
        ("[]", "scene.json: expected a scene with ego and objects, got list"),
        (json.dumps({**SCENE, "ego": {"speed": math.nan, "limit": 9}}), "scene.json: ego: speed must be a finite"),
        (json.dumps({**SCENE, "objects": [{**WALKER, "kind": "dog"}]}), "scene.json: object 0: kind must be one of"),
        (json.dumps({**SCENE, "objects": [{"kind": "car"}]}), "scene.json: object 0: the field x is missing"),
        (json.dumps({"road": -1}), 'scene.json: expected {"road": number}'),
    ],
)
def test_a_scene_that_cannot_be_read_is_reported_and_others_are_answered(run, text, message, tmp_path):
    (tmp_path / "scene.json").write_text(text)
    (tmp_path / "good.json").write_text(json.dumps(SCENE))
    done = regard("predict", run, tmp_path / "scene.json", tmp_path / "good.json")
    assert done.exit_code == 1
    assert message in done.output
    assert any(line.split()[:1] and line.split()[0] in ACTIONS for line in done.output.splitlines())


def test_a_missing_file_is_named(run, tmp_path):
    done = regard("predict", run, tmp_path / "none.json")
    assert "none.json: No such file" in done.output


def test_it_is_trained_and_evaluated_on_scenes_of_ones_own(recorded, tmp_path):
    path = tmp_path / "scenes.jsonl"
    write_scenes(path, recorded)
    few = [word for one in ("steps=2", "validate_every=2", "warmup=1", *(f"{k}={v}" for k, v in SMALL.items()))
           for word in ("--set", one)]  # fmt: skip
    done = regard("train", "driving", "--data", path, "--preset", "tiny", *few, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    metrics = json.loads((tmp_path / "run/result.json").read_text())["metrics"]
    # Scenes recorded in a file allow no simulated drives.
    assert set(metrics) == {"agreement", "steering_error", "scenes"}
    done = regard("evaluate", tmp_path / "run", "--data", path, "--json")
    assert json.loads(done.stdout)["metrics"]["scenes"] == 64
    with path.open("a") as file:
        file.write(json.dumps({**scene_json(recorded.scenes, 0), "action": "stop"}) + "\n")
    again = regard("train", "driving", "--data", path, "--preset", "tiny", *few, "--out", tmp_path / "other")
    one_line(again, "scenes.jsonl:65: action must be one of brake, hold, accelerate, got 'stop'")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": "5"}, "is not a multiple of model.heads 5"),
        ({"attention": "none", "normalize": "entmax"}, "model.normalize has no effect"),
        ({"alpha": "2"}, "model.alpha has no effect"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        configure(DRIVING, "tiny", [], settings)


def test_a_predictor_leaves_the_network_as_it_was(recorded):
    config, network = made()
    network.train()
    predictor = DrivingPredictor(network, DrivingCodec(), config)
    assert isinstance(config, DrivingConfig)
    assert isinstance(config.learning, DriverLearning)
    chances, steering, weights = predictor.decide(recorded.scenes)
    assert network.training
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-5)
    assert np.abs(steering).max() <= 1
    assert weights is not None
    actions, same = predictor.policy(recorded.scenes)
    assert np.array_equal(actions, chances.argmax(1))
    np.testing.assert_allclose(same, steering, atol=1e-6)
