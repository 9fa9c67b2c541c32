"""Tests of driving in highway-env: scenes, the planner, and a network trained to imitate the planner."""

import numpy as np
import pytest
import torch

from regard.core.requests import full
from regard.tasks.driving.highway import (
    FEATURES,
    VEHICLES,
    Episode,
    Plan,
    decided,
    drive,
    driver_of,
    looked,
    make,
    network_of,
    planned,
)
from regard.tasks.driving.highway_view import watched
from regard.tasks.driving.imitation import Decisions, learn, summary, targets


def test_actions_of_one_value_are_equally_right():
    found = targets(np.array([[3.0, 1.0, 3.0, -np.inf]]))
    np.testing.assert_allclose(found, [[0.5, 0.0, 0.5, 0.0]], atol=1e-6)


def test_crash_rate_and_return_are_means_with_their_errors():
    found = summary([Episode(True, 1.0, 4)] * 20 + [Episode(False, 6.0, 9)] * 80)
    assert found["crashes"] == 0.2
    assert found["return"] == 5.0
    assert found["crashes_error"] == pytest.approx(0.04)
    assert found["return_error"] == pytest.approx(0.2)


def test_the_network_learns_what_the_planner_prefers():
    """The network learns that the sign of one feature of the other vehicle determines the best action."""
    random = np.random.default_rng(1)
    scenes = random.normal(size=(400, 2, len(FEATURES))).astype(np.float32)
    scenes[..., 0] = 1.0
    scenes[..., 1] *= 40  # column 1 is the position x of a vehicle in metres
    values = np.where(scenes[:, 1, 1:2] > 0, [[0.0, 1.0]], [[1.0, 0.0]])
    network = learn(Decisions(scenes, values), steps=60, seed=1, batch=128)
    logits = decided(network, torch.from_numpy(scenes)).logits
    assert (logits.argmax(1).numpy() == values.argmax(1)).mean() > 0.9


@pytest.mark.slow
def test_a_costly_mistake_weighs_more_than_a_cheap_one():
    """The first action is slightly better in nine copies of a scene, and ends in a crash in the tenth: the network
    avoids it."""
    scenes = np.ones((10, 2, len(FEATURES)), np.float32)
    values = np.array([[0.1, 0.0]] * 9 + [[-9.0, 0.0]])
    network = learn(Decisions(scenes, values), steps=60, seed=1, batch=64)
    assert decided(network, torch.from_numpy(scenes[:1])).logits.softmax(-1)[0, 1] > 0.5
    cheap = learn(Decisions(scenes, np.clip(values, -0.1, None)), steps=60, seed=1, batch=64)
    assert decided(cheap, torch.from_numpy(scenes[:1])).logits.softmax(-1)[0, 1] < 0.3


def test_decisions_come_back_from_a_file_and_are_joined(tmp_path):
    episodes = [Episode(scenes=[np.full((2, 7), n, np.float32)], values=[np.array([n, -np.inf])]) for n in range(3)]
    first, rest = Decisions.of(episodes[:1]), Decisions.of(episodes[1:])
    (first + rest).save(tmp_path / "episodes.npz")
    found = Decisions.load(tmp_path / "episodes.npz")
    assert len(found) == 3
    np.testing.assert_array_equal(found.scenes[:, 1, 6], [0, 1, 2])
    np.testing.assert_array_equal(found.values, [[0, -np.inf], [1, -np.inf], [2, -np.inf]])


def test_the_ego_vehicle_and_absent_vehicles_get_no_weight():
    scene = np.random.default_rng(1).normal(size=(5, len(FEATURES))).astype(np.float32)
    scene[:, 0] = [1, 1, 1, 0, 0]
    weights = looked(network_of(3).eval(), scene, weights=full()).weights
    assert weights[0, 0, [0, 3, 4]].eq(0).all()
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


def test_a_driver_that_is_none_is_refused():
    with pytest.raises(ValueError, match="expected random, idle or planner"):
        driver_of("nobody")


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "highway_env", None)
    with pytest.raises(ImportError, match=r"regard\[driving\]"):
        make("highway-v0")


@pytest.fixture
def crossing():
    pytest.importorskip("highway_env")
    env = make("intersection-v0")
    env.reset(seed=5)
    return env


def test_a_plan_changes_nothing_in_the_environment(crossing):
    before = [one.position.copy() for one in crossing.road.vehicles]
    values = planned(crossing, Plan(2, 100.0))
    assert values.shape == (3,)
    assert np.isfinite(values).any()
    after = [one.position for one in crossing.road.vehicles]
    assert all((one == other).all() for one, other in zip(before, after, strict=True))
    assert crossing.time == 0


def test_an_episode_is_decided_by_its_seed(crossing):
    first, second = (drive(crossing, driver_of("random"), 7) for _ in range(2))
    assert (first.reward, first.decisions, first.crashed) == (second.reward, second.decisions, second.crashed)
    judged = drive(crossing, driver_of("network", network_of(3).eval()), 7, judged=True)
    assert len(judged.scenes) == len(judged.values) == judged.decisions
    assert judged.scenes[0].shape == (VEHICLES, len(FEATURES))


def test_other_vehicles_are_seen_in_metres_from_the_ego_vehicle(crossing):
    scenes = []
    drive(crossing, lambda env, scene: scenes.append(scene) or 1, 7)
    scene = scenes[0]
    crossing.reset(seed=7)
    ego = crossing.vehicle
    np.testing.assert_allclose(scene[0, 1:5], [*ego.position, *ego.velocity], rtol=1e-5)
    others = [(*(one.position - ego.position), *(one.velocity - ego.velocity)) for one in crossing.road.vehicles]
    assert any(np.allclose(scene[1, 1:5], other, rtol=1e-4, atol=1e-4) for other in others)


def test_fewer_simulation_steps_a_second():
    pytest.importorskip("highway_env")
    assert make("highway-v0", frequency=5).config["simulation_frequency"] == 5
    assert make("highway-v0").config["simulation_frequency"] == 15


def test_an_unknown_environment_is_refused():
    pytest.importorskip("highway_env")
    with pytest.raises(ValueError, match="expected intersection-v0 or highway-v0"):
        make("parking-v0")


def test_an_episode_is_shown_with_the_vehicles_at_their_places():
    pytest.importorskip("highway_env")
    env = make("intersection-v0", frequency=5)
    torch.manual_seed(1)
    trace = watched(env, network_of(3).eval(), 3)
    [record] = trace.records
    weights, columns = record.weights(head=0), record.column_labels
    scenes = weights.shape[0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(scenes), atol=1e-4, rtol=0)
    assert len(columns.extra["ego"]) == 4 * scenes
    present = np.array(columns.extra["present"]).reshape(scenes, -1)
    assert (weights.numpy()[present == 0] == 0).all()
    # In the environment the ego vehicle starts heading north in the right lane; on the page it starts heading right.
    env.reset(seed=3)
    assert columns.extra["ego"][:2] == pytest.approx([-env.vehicle.position[1], env.vehicle.position[0]], abs=1e-3)
    assert columns.extra["ego"][2] == pytest.approx(0, abs=0.1)
