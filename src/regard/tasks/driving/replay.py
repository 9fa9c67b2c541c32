"""A drive of the model on a simulated road, step by step, with its actions and attention weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regard.data.worlds.traffic import STEP, STEPS, Traffic
from regard.data.worlds.traffic_expert import ACTIONS, Scenes
from regard.data.worlds.traffic_roads import KINDS, LANE, LENGTH, Markings, road
from regard.look.labels import Labels
from regard.look.trace import Trace
from regard.tasks.task import InputError

_EACH = 2  # a replay contains every second step of the drive
_LARGEST = 10**6  # the largest road number

Decide = Callable[[Scenes], tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]]


@dataclass(frozen=True, eq=False)
class Moment:
    """A step of a drive: the scene, the probabilities of the actions, the steering, and the attention weights.

    `objects` holds the indices of the scene's objects among all objects of the road; `weights` holds the attention
    weights of these objects.
    """

    step: int
    scene: Scenes
    objects: NDArray[np.int64]
    chances: NDArray[np.float32]
    steering: float
    weights: NDArray[np.float32] | None

    @property
    def action(self) -> str:
        return ACTIONS[int(self.chances.argmax())]

    @property
    def name(self) -> str:
        return f"{self.step * STEP:.1f} s {self.action} {self.chances.max():.2f}"


@dataclass(frozen=True, eq=False)
class Replay:
    """A whole drive on road `number`; `hit` is the kind of the object that the ego vehicle hit, None if it hit none."""

    number: int
    moments: Sequence[Moment]
    metres: float
    seconds: float
    hit: str | None
    markings: Markings
    names: Sequence[str]  # names of all objects of the road, such as "car 2"

    @property
    def answer(self) -> str:
        """Return the outcome of the drive as text."""
        if self.hit is not None:
            return f"collision with a {self.hit} after {self.metres:.0f} m"
        return f"no collision on {self.metres:.0f} m"

    @property
    def line(self) -> str:
        """Return the outcome of the drive and its duration as text."""
        return f"{self.answer}, {self.seconds:.0f} s"

    def record(self) -> dict[str, Any]:
        """Return the drive as a JSON record: for each step the action, the steering, and the weights of the objects."""
        steps = [
            {
                "seconds": round(one.step * STEP, 1),
                "action": one.action,
                "probability": float(one.chances.max()),
                "steering": one.steering,
                "speed": round(float(one.scene.ego[0, 3]), 2),
                "weights": self._weights(one),
            }
            for one in self.moments
        ]
        facts = {"metres": round(self.metres, 1), "seconds": round(self.seconds, 1), "collision": self.hit}
        return {"road": self.number, "answer": self.answer, **facts, "steps": steps}

    def _weights(self, one: Moment) -> dict[str, float]:
        if one.weights is None:
            return dict[str, float]()
        return {self.names[n]: round(float(w), 4) for n, w in zip(one.objects, one.weights, strict=True)}

    def trace(self) -> Trace | None:
        """Return the weights as a trace: one row for each step, one column for each object observed during the drive.

        The result is None if no step has attention weights.
        """
        shown = [one for one in self.moments if one.weights is not None and len(one.objects)]
        if not shown:
            return None
        known = sorted({int(n) for one in shown for n in one.objects})
        column = {number: place for place, number in enumerate(known)}
        weights = torch.zeros(len(shown), len(known))
        for row, one in enumerate(shown):
            assert one.weights is not None
            weights[row, [column[int(n)] for n in one.objects]] = torch.from_numpy(one.weights)
        trace = Trace.from_weights({"drive": weights[None]}, title=f"road {self.number}: {self.line}")
        places = [[column[int(n)] for n in one.objects] for one in shown]
        extra = scene_labels([one.scene for one in shown], self.markings, places, len(known))
        columns = Labels("objects", tuple(self.names[number] for number in known), extra)
        trace.label(rows=[one.name for one in shown], columns=columns, of="drive")
        return trace


def scene_labels(
    scenes: Sequence[Scenes],
    markings: Markings | None = None,
    places: Sequence[Sequence[int]] | None = None,
    count: int = 0,
) -> dict[str, list[float]]:
    """Return the arrays from which an HTML page draws consecutive scenes of `count` objects, some of them absent.

    `places[i]` are the columns, from 0 to `count` − 1, of the objects that are present in scene i.
    """
    count = count or scenes[0].present.shape[1]
    numbers = np.zeros((len(scenes), count, 7))
    for row, scene in enumerate(scenes):
        there = np.flatnonzero(scene.present[0])
        place = there if places is None else np.asarray(places[row], np.int64)
        speed = np.hypot(scene.velocity[0, there, 0], scene.velocity[0, there, 1])
        own = [scene.place[0, there], scene.heading[0, there, None], speed[:, None], scene.size[0, there]]
        numbers[row, place] = np.concatenate([*own, np.ones((len(there), 1))], 1)
    names = ("x", "y", "heading", "speed", "length", "width", "present")
    extra = {name: _rounded(numbers[..., n]) for n, name in enumerate(names)}
    extra["ego"] = _rounded(np.concatenate([scene.ego[:, :4] for scene in scenes]))
    extra["lanes"] = [-1.5 * LANE, -0.5 * LANE, 0.5 * LANE]
    for name in ("crossings", "zebras", "ramps"):
        extra[name] = _rounded(np.array(getattr(markings, name, ())))
    return extra


def _rounded(values: NDArray[Any]) -> list[float]:
    return [round(value, 3) for value in values.flatten().tolist()]


def road_of(value: Any) -> int | None:
    """Return the number of the simulated road if an input requests a drive, `{"road": number}`; None for a scene."""
    if not isinstance(value, Mapping) or "road" not in value or "objects" in value:
        return None
    number = value["road"]
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _LARGEST or len(value) > 1:
        raise InputError(f'expected {{"road": number}} with a number from 0 to {_LARGEST - 1:,}, or a scene')
    return number


def replay(decide: Decide, seed: int, number: int, *, seen: int) -> Replay:
    """Return the drive of a model on the simulated road with this seed and number."""
    route = road(seed, number)
    traffic = Traffic([route], seen)
    moments = []
    step = 0
    while step < STEPS and traffic.running.all():
        scenes = traffic.observe()
        chances, steering, weights = decide(scenes)
        if step % _EACH == 0:
            there = np.flatnonzero(scenes.present[0])
            own = None if weights is None else weights[0, there]
            moments.append(Moment(step, scenes, traffic.order[0, there], chances[0], round(float(steering[0]), 4), own))
        traffic.step(chances.argmax(1), steering)
        step += 1
    hit = KINDS[KINDS.index(route.movers[traffic.hit[0]].kind)] if traffic.collided[0] else None
    names = _names([one.kind for one in route.movers])
    metres = float(min(traffic.ego[0, 0], LENGTH))
    return Replay(number, moments, metres, step * STEP, hit, route.markings, names)


def _names(kinds: Sequence[str]) -> list[str]:
    """Return names of the objects of a road: the kind and a number."""
    seen = dict.fromkeys(kinds, 0)
    names = []
    for kind in kinds:
        seen[kind] += 1
        names.append(f"{kind} {seen[kind]}")
    return names
