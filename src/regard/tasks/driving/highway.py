"""Driving in the simulator highway-env: scenes of its vehicles, episodes, and a planner.

The planner simulates each action in a copy of the simulator. highway-env is an optional dependency, installed with
`pip install "regard[driving]"`; it is imported only in the functions that use it.
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
from torch import Tensor

from regard.core.requests import Request
from regard.models.scene.controller import Controlled, Controller
from regard.models.scene.object_encoder import SceneEncoder
from regard.tasks.driving.network import Driver

FEATURES = ("presence", "x", "y", "vx", "vy", "cos_h", "sin_h")
VEHICLES = 15  # number of vehicles in a scene, including the ego vehicle
FAST = 5  # simulation steps per second in the copies that the planner simulates; the default of highway-env is 15
_UNITS = (1.0, 40.0, 10.0, 10.0, 10.0, 1.0, 1.0)  # divisors that scale the values of `FEATURES` to about 1


@dataclass(frozen=True)
class Plan:
    """The planner's horizon: the number of decisions, one per second, and the range of simulated vehicles in metres."""

    decisions: int
    near: float


PLANS = {"intersection-v0": Plan(6, 100.0), "highway-v0": Plan(5, 60.0)}

Scene = NDArray[np.float32]  # (vehicles, features): the ego vehicle first; other vehicles are relative to it
# a policy: a function that returns an action, given the environment and the scene in it
Policy = Callable[[Any, Scene], int]


def make(name: str, *, frequency: int | None = None) -> Any:
    """Return an environment of highway-env by its name; observations are feature vectors of vehicles.

    Rewards, traffic and actions are those of the environment. `frequency` is the number of simulation steps per second;
    None means the environment's own (15). Fewer steps are faster.
    """
    try:
        gymnasium, highway_env = import_module("gymnasium"), import_module("highway_env")
    except ImportError as error:
        raise ImportError("highway-env is not installed: pip install 'regard[driving]'") from error
    if name not in PLANS:
        raise ValueError(f"expected {' or '.join(PLANS)}, got {name!r}")
    gymnasium.register_envs(highway_env)
    observation = {"type": "Kinematics", "vehicles_count": VEHICLES, "features": list(FEATURES), "see_behind": True}
    # Observations are in metres: if the environment normalised them, the length of a car on highway-v0 would be 0.025.
    config: dict[str, Any] = {"observation": observation | {"normalize": False, "absolute": False}}
    if frequency is not None:
        config["simulation_frequency"] = frequency
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium warns that newer versions of an environment exist
        return gymnasium.make(name, config=config, disable_env_checker=True).unwrapped


def planned(env: Any, plan: Plan) -> NDArray[np.float64]:
    """Return the value of each action: the total reward of a few decisions in a copy of the simulator.

    After the action, the ego vehicle either holds its speed or accelerates; the value is the larger of the two total
    rewards. A crash ends the simulation and subtracts 1 for each decision of the plan; an arrival at the destination
    adds 1 for each remaining decision. Unavailable actions have the value −∞.
    """
    near = copy.deepcopy(env)
    near.config["simulation_frequency"] = FAST * near.config["policy_frequency"]
    near.observation_type.observe = lambda: None
    place = near.vehicle.position
    near.road.vehicles = [one for one in near.road.vehicles if np.linalg.norm(one.position - place) < plan.near]
    index = near.action_type.actions_indexes
    values = np.full(near.action_space.n, -np.inf)
    for action in near.get_available_actions():
        values[action] = max(_rollout(near, action, index[then], plan.decisions) for then in ("IDLE", "FASTER"))
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


def seen(env: Any, observation: Scene) -> Scene:
    """Return an observation as a scene; on highway-v0 the ego vehicle's position along the road is set to 0."""
    scene = observation.astype(np.float32)
    if env.spec.id == "highway-v0":
        scene[0, FEATURES.index("x")] = 0.0
    return scene


def network_of(actions: int, *, size: int = 64, layers: int = 1, heads: int = 2) -> Driver:
    """Return the driving task's network over objects, with this number of actions.

    >>> decided(network_of(5), torch.zeros(2, 4, len(FEATURES))).logits.shape
    torch.Size([2, 5])
    """
    encoder = SceneEncoder(2 * len(FEATURES), size, hidden_size=2 * size, layers=layers, heads=heads)
    return Driver(encoder, Controller(size, actions=actions, size=size, heads=heads))


def decided(network: Driver, scenes: Tensor, *, weights: Request | None = None) -> Controlled:
    """Return the network's output for scenes (b, vehicles, features).

    The features of each vehicle are concatenated with those of the ego vehicle, because both determine whether their
    paths intersect.
    """
    rows = scenes / scenes.new_tensor(_UNITS)
    objects = torch.cat([rows, rows[:, :1].expand_as(rows)], -1)
    return network(objects, scenes[..., 0] > 0.5, weights=weights)


@torch.no_grad()
def looked(network: Driver, scene: Scene, *, weights: Request | None = None) -> Controlled:
    """Return the network's output for one scene, without gradients."""
    return decided(network, torch.from_numpy(scene)[None], weights=weights)


def driver_of(name: str, network: Driver | None = None) -> Policy | None:
    """Return the policy named `random`, `idle`, or `network`, which uses the given network; None for `planner`."""
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
    """The result of an episode: whether the ego vehicle crashed, the sum of the rewards, and the number of decisions.

    `scenes` are the scenes that the planner evaluated, if any, and `values` the values of the actions in them.
    """

    crashed: bool = False
    reward: float = 0.0
    decisions: int = 0
    scenes: list[Scene] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)


def drive(env: Any, driver: Policy | None, seed: int, *, judged: bool = False, explore: float = 0.0) -> Episode:
    """Run one episode with a policy `driver`; None means that the planner selects the actions.

    If `judged`, the planner computes the values of all actions in each scene, even if another policy drives. A fraction
    `explore` of the actions is random, so that the episode includes scenes after driving mistakes.
    """
    scene = seen(env, env.reset(seed=seed)[0])
    random, episode = np.random.default_rng(seed), Episode()
    while True:
        if judged or driver is None:
            episode.scenes.append(scene)
            episode.values.append(planned(env, PLANS[env.spec.id]))
        odd = explore > 0 and random.random() < explore
        if odd:
            action = int(random.integers(env.action_space.n))
        else:
            action = int(episode.values[-1].argmax()) if driver is None else driver(env, scene)
        observation, reward, ended, truncated, _ = env.step(action)
        scene = seen(env, observation)
        episode.reward += float(reward)
        episode.decisions += 1
        if ended or truncated:
            episode.crashed = bool(env.vehicle.crashed)
            return episode
