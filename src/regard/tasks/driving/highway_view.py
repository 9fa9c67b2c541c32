"""Converts an episode of highway-env to a trace for an HTML page: the vehicles seen from above, and the weights."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.core.requests import full
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.tasks.driving.highway import VEHICLES, looked, seen
from regard.tasks.driving.network import Driver

_FULL = full()
_NAMES = ("x", "y", "heading", "speed", "length", "width", "present")
_CROSSING = "intersection-v0"


def watched(env: Any, network: Driver, seed: int) -> Trace:
    """Run an episode with the network; return its attention weights as a trace, decisions × observed vehicles."""
    scene = seen(env, env.reset(seed=seed)[0])
    known: dict[int, Any] = {}  # vehicles by `id`, in the order of first observation
    moments: list[dict[int, tuple[float, list[float]]]] = []
    ego: list[float] = []
    rows: list[str] = []
    total, ended = 0.0, False
    while not ended:
        controlled = looked(network, scene, weights=_FULL)
        assert controlled.logits is not None
        assert isinstance(controlled.weights, torch.Tensor)
        weights, chances = controlled.weights[0, 0].tolist(), controlled.logits[0].softmax(-1)
        others = _others(env)
        known |= {id(one): one for one in others}
        moments.append({id(one): (weights[place], _state(env, one)) for place, one in enumerate(others, 1)})
        ego += _state(env, env.vehicle)[:4]
        action = int(chances.argmax())
        name = env.action_type.actions[action].lower().replace("_", " ")
        rows.append(f"{env.time:.0f} s {name} {float(chances.max()):.2f}")
        observation, reward, ended, truncated, _ = env.step(action)
        scene, total, ended = seen(env, observation), total + float(reward), ended or truncated
    end = "crash" if env.vehicle.crashed else "no crash"
    title = f"{env.spec.id}, episode {seed}: {end} in {len(rows)} decisions, return {total:.1f}"
    return _trace(title, rows, moments, ego, list(known), env)


def _trace(title: str, rows: list[str], moments: list[Any], ego: list[float], known: list[int], env: Any) -> Trace:
    weights = torch.zeros(len(rows), len(known))
    numbers = np.zeros((len(rows), len(known), len(_NAMES)))
    for row, moment in enumerate(moments):
        for identity, (weight, state) in moment.items():
            weights[row, known.index(identity)] = weight
            numbers[row, known.index(identity)] = [*state, 1.0]
    extra = {name: _rounded(numbers[..., place]) for place, name in enumerate(_NAMES)}
    extra |= {"ego": _rounded(np.array(ego)), "lanes": _lanes(env)}
    extra["crossings"] = [0.0] if env.spec.id == _CROSSING else []
    trace = Trace.from_weights({"drive": weights[None]}, title=title)
    columns = Labels("objects", tuple(f"car {place}" for place in range(len(known))), extra)
    trace.label(rows=rows, columns=columns, of="drive")
    return trace


def _others(env: Any) -> list[Any]:
    """Return the observed vehicles in the order of the observation's rows, without the ego vehicle."""
    near = env.road.close_objects_to(
        env.vehicle, env.PERCEPTION_DISTANCE, count=VEHICLES - 1, see_behind=True, sort=True, vehicles_only=False
    )
    return near[-VEHICLES + 1 :]


def _state(env: Any, vehicle: Any) -> list[float]:
    """Return position, heading, speed and size in page coordinates, in which the ego vehicle starts heading right."""
    (x, y), heading = vehicle.position, vehicle.heading
    if env.spec.id == _CROSSING:  # in intersection-v0 the ego vehicle starts heading up
        x, y, heading = -y, x, heading + np.pi / 2
    else:
        y -= _middle(env)
    return [float(x), float(y), float(heading), float(vehicle.speed), vehicle.LENGTH, vehicle.WIDTH]


def _lanes(env: Any) -> list[float]:
    """Return the y coordinates of the lane markings, from left to right as seen by the driver."""
    if env.spec.id == _CROSSING:
        return [-4.0, 0.0, 4.0]
    count = env.config["lanes_count"]
    return [4.0 * place - 2.0 * count for place in range(count + 1)]


def _middle(env: Any) -> float:
    """Return the y coordinate of the road's centre; lanes are 4 metres wide, and the first lane's centre is y = 0."""
    return 2.0 * (env.config["lanes_count"] - 1)


def _rounded(values: NDArray[Any]) -> list[float]:
    return [round(value, 3) for value in values.flatten().tolist()]
