"""highway-env as a road: its vehicles as scenes, a planner that tries actions in copies of the simulator, episodes.

highway-env is an extra: `pip install "regard[driving]"`. It is imported where it is used.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.core.requests import Request
from regard.models.scene.controller import Controlled, Controller
from regard.models.scene.object_encoder import SceneEncoder
from regard.tasks.driving.network import Driver

FEATURES = ("presence", "x", "y", "vx", "vy", "cos_h", "sin_h")
VEHICLES = 15  # of a scene, the ego vehicle first
# Decisions that the planner looks ahead: one second each.
HORIZONS = {"intersection-v0": 6, "highway-v0": 5}
_NEAR = 100.0  # metres; vehicles farther away are left out of the planner's copies
_FREQUENCY = 5  # simulation steps a second in the planner's copies; the environment itself has 15

Scene = NDArray[np.float32]  # (vehicles, features)
Policy = Callable[[Any, Scene], int]  # an action for the environment and its scene


def make(name: str) -> Any:
    """The environment of that name with its own rewards, traffic and actions, and vehicles all around as vectors."""
    try:
        gymnasium, highway_env = import_module("gymnasium"), import_module("highway_env")
    except ImportError as error:
        raise ImportError("highway-env is not installed: pip install 'regard[driving]'") from error
    if name not in HORIZONS:
        raise ValueError(f"expected {' or '.join(HORIZONS)}, got {name!r}")
    gymnasium.register_envs(highway_env)
    observation: dict[str, Any] = {"type": "Kinematics", "vehicles_count": VEHICLES, "features": list(FEATURES)}
    observation["see_behind"] = True
    if name == "intersection-v0":  # as its defaults are: the places on the crossing matter
        observation |= {"absolute": True, "features_range": {"x": [-100, 100], "y": [-100, 100]}}
        observation["features_range"] |= {"vx": [-20, 20], "vy": [-20, 20]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are newer versions of the environments
        return gymnasium.make(name, config={"observation": observation}, disable_env_checker=True).unwrapped


def planned(env: Any, *, horizon: int) -> NDArray[np.float64]:
    """The value of each action: the reward of `horizon` decisions in a copy of the simulator, −∞ where unavailable.

    After the action, the better of keeping the speed and speeding up is counted. A crash costs one reward for each
    decision of the horizon; an arrival earns one for each decision that is left.
    """
    near = copy.deepcopy(env)
    near.config["simulation_frequency"] = _FREQUENCY * near.config["policy_frequency"]
    place = near.vehicle.position
    near.road.vehicles = [one for one in near.road.vehicles if np.linalg.norm(one.position - place) < _NEAR]
    index = near.action_type.actions_indexes
    values = np.full(near.action_space.n, -np.inf)
    for action in near.get_available_actions():
        values[action] = max(_rollout(near, action, index[then], horizon) for then in ("IDLE", "FASTER"))
    return values


def _rollout(env: Any, action: int, then: int, horizon: int) -> float:
    world, total = copy.deepcopy(env), 0.0
    for step in range(horizon):
        _, reward, ended, _, _ = world.step(then if step else action)
        total += reward
        if world.vehicle.crashed:
            return total - horizon
        if ended:
            return total + horizon - step - 1
    return total


def network_of(actions: int, *, size: int = 64, layers: int = 1, heads: int = 2) -> Driver:
    """The network of the driving task over objects, for so many actions: vehicles are what the ego vehicle attends.

    >>> network = network_of(5)
    >>> network(torch.zeros(2, 4, len(FEATURES)), torch.ones(2, 4, dtype=torch.bool)).logits.shape
    torch.Size([2, 5])
    """
    encoder = SceneEncoder(len(FEATURES), size, layers=layers, heads=heads)
    return Driver(encoder, Controller(size, actions=actions, size=size, heads=heads))


def looked(network: Driver, scene: Scene, *, weights: Request | None = None) -> Controlled:
    """What a network does in one scene."""
    with torch.no_grad():
        objects = torch.from_numpy(scene)[None]
        return network(objects, objects[..., 0] > 0.5, weights=weights)


def driver_of(name: str, network: Driver | None = None) -> Policy | None:
    """The driver of that name: `random`, `idle`, `network` with the network given; None for `planner`."""
    if name == "random":
        return lambda env, scene: int(env.np_random.integers(env.action_space.n))
    if name == "idle":
        return lambda env, scene: env.action_type.actions_indexes["IDLE"]
    if name == "planner":
        return None
    if network is None:
        raise ValueError(f"expected random, idle or planner, or a network, got {name!r}")
    return lambda env, scene: _best(looked(network, scene))


def _best(controlled: Controlled) -> int:
    assert controlled.logits is not None
    return int(controlled.logits.argmax())


@dataclass
class Episode:
    """What happened: whether the ego vehicle crashed, the sum of the rewards, and how many decisions it took.

    `scenes` and `values` are what the planner was asked, if it was.
    """

    crashed: bool = False
    reward: float = 0.0
    decisions: int = 0
    scenes: list[Scene] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)


def drive(env: Any, driver: Policy | None, seed: int, *, judged: bool = False, explore: float = 0.0) -> Episode:
    """One episode; without a driver the planner drives.

    With `judged` the planner says the values of all actions in each scene, whoever drives. A share `explore` of the
    actions is random, so that scenes after mistakes are judged too.
    """
    scene, _ = env.reset(seed=seed)
    random, episode = np.random.default_rng(seed), Episode()
    while True:
        if judged or driver is None:
            episode.scenes.append(scene)
            episode.values.append(planned(env, horizon=HORIZONS[env.spec.id]))
        odd = explore > 0 and random.random() < explore
        if odd:
            action = int(random.integers(env.action_space.n))
        else:
            action = int(episode.values[-1].argmax()) if driver is None else driver(env, scene)
        scene, reward, ended, truncated, _ = env.step(action)
        episode.reward += float(reward)
        episode.decisions += 1
        if ended or truncated:
            episode.crashed = bool(env.vehicle.crashed)
            return episode
