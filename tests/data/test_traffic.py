"""Tests of the traffic simulator: times to collision, the expert's actions, the motion of objects, forced decisions."""

import dataclasses
import json
import math

import numpy as np
import pytest

from regard.data.data_files import DataError
from regard.data.driving.traffic_scenes import decided_json, load_scenes, nearest, parse_scene, write_scenes
from regard.data.worlds.traffic import (
    STEP,
    Traffic,
    drive,
    expert_policy,
    idle_policy,
    random_policy,
    record,
)
from regard.data.worlds.traffic_expert import ACTIONS, Scenes, expert, time_to_collision
from regard.data.worlds.traffic_roads import FAR, LANE, LENGTH, Markings, Mover, Road, road

LEAD = {"kind": "car", "x": 30, "y": 0, "heading": 0, "speed": 0}


def seconds(apart, closing, reach):
    return float(time_to_collision(*(np.array([pair], float) for pair in (apart, closing, reach)))[0])


@pytest.mark.parametrize(
    ("apart", "closing", "expected"),
    [
        ((35, 0), (-10, 0), 3.0),  # the boxes are 35 − 5 metres apart and approach at 10 m/s
        ((35, 0), (10, 0), math.inf),  # the object moves away from the ego vehicle
        ((35, 2.5), (-10, 0), math.inf),  # the object passes at the side of the ego vehicle
        ((25, 8), (-10, -3), 2.0),  # the boxes overlap in x from 2 to 3 s, in y from 2 to 3.33 s
        ((25, 8), (-10, -1), math.inf),  # the boxes overlap in y from 6 s on, when the object is behind the ego vehicle
        ((25, 17), (-5, -3), 5.0),  # the boxes overlap in x from 4 to 6 s, in y from 5 s on
        ((3, 1), (0, 0), 0.0),  # the boxes of both vehicles already overlap, without relative motion
        ((3, 1), (-1, 0), 0.0),  # the boxes already overlap
        ((-20, 0), (-1, 0), math.inf),  # the object is already behind the ego vehicle
        ((20, 0), (0, 0), math.inf),  # the ego vehicle and the object have the same velocity
    ],
)
def test_the_time_to_a_collision_of_two_boxes(apart, closing, expected):
    assert seconds(apart, closing, (5, 2)) == pytest.approx(expected)


def decided(*objects, speed=10.0, limit=10.0, y=0.0, heading=0.0):
    ego = {"speed": speed, "limit": limit, "y": y, "heading": heading}
    return expert(parse_scene({"ego": ego, "objects": list(objects)}))


@pytest.mark.parametrize(
    ("speed", "objects", "action"),
    [
        (10.0, [], "hold"),
        (8.0, [], "accelerate"),
        (12.0, [], "brake"),
        # The half lengths of both cars and the safety gap take 4.5 + 1.5 metres, so that the time to collision at 36.1
        # metres and 10 m/s is 3.01 seconds.
        (10.0, [{**LEAD, "x": 36.1}], "hold"),
        (10.0, [{**LEAD, "x": 35.9}], "brake"),
        # The ego vehicle covers the 27.1 metres to the safety gap in 3.01 s at 9 m/s.
        (8.0, [{**LEAD, "x": 33.1}], "accelerate"),
        (8.0, [{**LEAD, "x": 32.9}], "hold"),
        # The ego vehicle covers the 23.9 metres to the safety gap in 2.99 s at 8 m/s.
        (8.0, [{**LEAD, "x": 29.9}], "brake"),
        (10.0, [{**LEAD, "x": 20, "speed": 10}], "hold"),
        # The vehicle ahead is too near, so the ego vehicle brakes whatever the other's speed.
        (10.0, [{**LEAD, "x": 5.9, "speed": 10}], "brake"),
        (10.0, [{**LEAD, "x": -8, "speed": 14}], "hold"),  # a faster vehicle behind forces no action
        (10.0, [{**LEAD, "x": 20, "y": -LANE, "heading": math.pi, "speed": 12}], "hold"),  # a car in the oncoming lane
        (10.0, [{"kind": "pedestrian", "x": 20, "y": 2.9, "heading": -math.pi / 2, "speed": 0}], "hold"),
        # The distance in y without the half widths 0.95 and 0.25 and the margin 0.3 is 1.4 metres, which the pedestrian
        # covers in 0.93 s. The ego vehicle covers the distance in x in 1.6 s.
        (10.0, [{"kind": "pedestrian", "x": 20, "y": 2.9, "heading": -math.pi / 2, "speed": 1.5}], "brake"),
    ],
)
def test_the_expert_acts_by_time_to_collision(speed, objects, action):
    found = decided(*objects, speed=speed)
    assert ACTIONS[found.action[0]] == action


def test_the_expert_steers_around_what_stands_at_the_side():
    # The left edge of the parked car is at y = 1.0, so the ego vehicle must pass it at y = 1.0 − 0.8 − 0.95 = −0.75.
    parked = {**LEAD, "x": 25, "y": 1.95}
    found = decided(parked)
    assert found.steering[0] == pytest.approx(-0.75 / 12 / 4 / 0.05)
    assert ACTIONS[found.action[0]] == "hold"
    assert found.forced.tolist() == [[True]]
    assert decided(parked, y=-0.75).steering[0] == pytest.approx(0.0)
    # The parked car is far enough from the lane, so the expert does not steer.
    assert decided({**parked, "y": 2.8}).steering[0] == 0.0
    assert decided({**parked, "x": 40}).steering[0] == 0.0


def test_who_forces_a_decision_is_known_by_leaving_it_out():
    walker = {"kind": "pedestrian", "x": 20, "y": 1.0, "heading": -math.pi / 2, "speed": 1.5}
    other = {**LEAD, "y": -LANE, "heading": math.pi, "speed": 9}
    assert decided(other, walker).forced.tolist() == [[False, True]]
    # Each of the two objects alone already requires braking: without one of them the decision stays the same.
    assert decided({**LEAD, "x": 20}, walker).forced.tolist() == [[False, False]]
    parked = {**LEAD, "x": 12, "y": 1.95}
    # The pedestrian forces the braking, the parked car the steering.
    assert decided(walker, parked).forced.tolist() == [[True, True]]


def without(scenes: Scenes, column: int) -> Scenes:
    present = scenes.present.copy()
    present[:, column] = False
    return dataclasses.replace(scenes, present=present)


@pytest.fixture(scope="module")
def recorded():
    return record(7, 600)


def test_a_forced_decision_is_another_one_without_the_object_and_any_other_stays(recorded):
    scenes, decisions = recorded.scenes, recorded.decisions
    assert decisions.forced.any(1).mean() == pytest.approx(0.5, abs=0.1)
    for column in range(scenes.present.shape[1]):
        there = scenes.present[:, column]
        other = expert(without(scenes, column))
        differs = (other.action != decisions.action) | (np.abs(other.steering - decisions.steering) > 0.1)
        assert (differs == decisions.forced[:, column])[there].all()
    assert not decisions.forced[~scenes.present].any()


@pytest.mark.slow
def test_a_seed_makes_the_same_scenes_and_another_seed_others(recorded):
    again, other = record(7, 600), record(8, 600)
    for name in ("ego", "place", "velocity", "present"):
        assert np.array_equal(getattr(again.scenes, name), getattr(recorded.scenes, name))
    assert np.array_equal(again.decisions.forced, recorded.decisions.forced)
    assert not np.array_equal(other.scenes.ego, recorded.scenes.ego)


def a_road(*movers, limit=10.0):
    return Road("straight", limit, movers, Markings())


def test_the_ego_vehicle_moves_as_it_is_told():
    traffic = Traffic([a_road()])
    start = traffic.ego[0].copy()
    assert start.tolist() == [0.0, 0.0, 0.0, 8.0, 10.0]
    traffic.step(np.array([0]), np.array([0.0]))
    assert traffic.ego[0, :4].tolist() == pytest.approx([7.0 * STEP, 0, 0, 7.0])  # braking by 5 m/s² for 0.2 s
    traffic.step(np.array([2]), np.array([1.0]))
    heading = 7.4 * STEP * 0.05
    expected = [7.0 * STEP + 7.4 * STEP * math.cos(heading), 7.4 * STEP * math.sin(heading), heading, 7.4]
    assert traffic.ego[0, :4].tolist() == pytest.approx(expected)
    for _ in range(40):
        traffic.step(np.array([1]), np.array([1.0]))
    assert traffic.ego[0, 1] <= 0.8  # the kerb limits the lateral position of the ego vehicle


def test_a_script_has_three_velocities():
    mover = Mover("pedestrian", 50.0, 3.0, (1.0, 0.0), 10.0, (0.0, -2.0), FAR, 1.0, (0.0, 0.0), agility=100.0)
    traffic = Traffic([a_road(mover)])
    seen = []
    for _ in range(30):
        traffic.step(np.array([1]), np.array([0.0]))
        scene = traffic.observe()
        seen.append((traffic.ego[0, 0], *scene.velocity[0, 0], scene.place[0, 0, 1]))
    assert {tuple(one[1:3]) for one in seen if one[0] < 10} == {(1.0, 0.0)}
    assert any(one[1:3] == (0.0, -2.0) for one in seen)
    assert seen[-1][1:3] == (0.0, 0.0)
    # The pedestrian stops after y = 1 (`until`), and moves 0.4 m in one step.
    assert seen[-1][3] == pytest.approx(1.0, abs=0.41)


def test_a_collision_ends_a_drive_and_is_counted_once():
    wall = a_road(Mover("lorry", 60.0, 0.0))
    found = drive([wall, a_road()], idle_policy)
    assert found.collided.tolist() == [True, False]
    assert found.metres[0] == pytest.approx(60 - (4.5 + 8) / 2, abs=8 * STEP)
    assert found.metres[1] >= LENGTH
    assert found.hit.tolist() == [1, -1]
    figures = found.figures()
    assert figures["collisions_per_100km"] == pytest.approx(100 / (found.metres.sum() / 1000), abs=0.01)
    assert drive([wall], expert_policy).collided.tolist() == [False]


@pytest.mark.slow
def test_many_drives_are_as_each_of_them_alone():
    roads = [road(3, number) for number in range(5)]
    together = drive(roads, expert_policy)
    alone = [drive([one], expert_policy) for one in roads]
    assert together.metres.tolist() == pytest.approx([one.metres[0] for one in alone])
    assert together.collided.tolist() == [one.collided[0] for one in alone]


@pytest.mark.slow
def test_the_expert_drives_far_better_than_chance_and_not_without_collisions():
    roads = [road(1, number) for number in range(120)]
    best, idle, chance = (drive(roads, policy).figures() for policy in (expert_policy, idle_policy, random_policy(1)))
    assert 0 < best["collisions_per_100km"] < 0.3 * idle["collisions_per_100km"]
    assert best["collisions_per_100km"] < 0.1 * chance["collisions_per_100km"]
    assert best["progress"] > 0.9


def test_scenes_are_written_and_read_as_they_were(recorded, tmp_path):
    write_scenes(tmp_path / "scenes.jsonl", recorded)
    [found] = [load_scenes(tmp_path / "scenes.jsonl", seen=12).train]
    assert found is not None
    np.testing.assert_allclose(found.scenes.ego, recorded.scenes.ego, atol=1e-3)
    assert np.array_equal(found.scenes.present, recorded.scenes.present)
    assert np.array_equal(found.decisions.action, recorded.decisions.action)
    assert np.array_equal(found.decisions.forced, recorded.decisions.forced)
    there = recorded.scenes.present
    np.testing.assert_allclose(found.scenes.place[there], recorded.scenes.place[there], atol=2e-3)


def test_the_nearest_objects_are_seen():
    scene = parse_scene({"ego": {"speed": 1, "limit": 2}, "objects": [{**LEAD, "x": x} for x in (40, 5, 20)]})
    near, order = nearest(scene, 2)
    assert near.place[0, :, 0].tolist() == [5.0, 20.0]
    assert order.tolist() == [[1, 2]]
    assert nearest(scene, 5)[0].present.tolist() == [[True, True, True, False, False]]


GOOD = decided_json(record(5, 8), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ego": {"speed": math.nan, "limit": 10}}, "ego: speed must be a finite number"),
        ({"ego": {"limit": 10}}, "ego: the field speed is missing; the fields are limit"),
        ({"ego": {"speed": -1, "limit": 10}}, "speed must be at least 0"),
        ({"ego": {"speed": "fast", "limit": 10}}, "ego: speed must be a number, got 'fast'"),
        ({"objects": [{**LEAD, "kind": "tank"}]}, "object 0: kind must be one of car, lorry, cyclist, pedestrian"),
        ({"objects": [{**LEAD, "x": math.inf}]}, "object 0: x must be a finite number"),
        ({"objects": [LEAD, {"kind": "car", "x": 1}]}, "object 1: the field y is missing; the fields are kind, x"),
        ({"objects": [3]}, "object 0: expected kind, x, y, heading, speed, got int"),
        ({"objects": None}, "expected the fields ego and objects"),
        ({"action": "fly"}, "action must be one of brake, hold, accelerate, got 'fly'"),
        ({"steering": 2}, "steering must be from -1"),
        ({"forced": [99]}, "forced must be a list of numbers of objects"),
    ],
)
def test_a_scene_that_cannot_be_read_is_named_with_file_and_line(change, message, tmp_path):
    path = tmp_path / "scenes.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, **change})}\n")
    with pytest.raises(DataError) as caught:
        load_scenes(path, seen=12)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{]\n", "[1, 2]\n"])
def test_what_is_no_scene_at_all_is_an_error_with_the_file(text, tmp_path):
    (tmp_path / "scenes.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"scenes\.jsonl"):
        load_scenes(tmp_path / "scenes.jsonl", seen=12)
