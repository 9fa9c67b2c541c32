"""The built-in driving simulator, which simulates many roads at once; policies; scenes with the expert's decisions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.worlds.traffic_expert import ACTIONS, CHANGES, CURVE, EGO, Decisions, Scenes, expert
from regard.data.worlds.traffic_roads import FAR, LENGTH, Road, Values, road, scripts

STEP = 0.2  # duration of a simulation step in seconds
STEPS = 350  # the largest number of simulation steps of a drive
SEEN = 12  # the largest number of objects in a scene; of more objects, the farthest are left out
# the largest distance ahead, distance behind and lateral position |y|, in metres, at which an object is observed
_BEFORE, _BEHIND, _SIDE = 70.0, 25.0, 26.0
_KERBS = (-4.3, 0.8)  # smallest and largest lateral position y of the centre of the ego vehicle, in metres
_FASTEST = 20.0

Action = NDArray[np.int64]
# a policy returns actions (n,) and steering (n,) from −1 to 1 for n scenes
Policy = Callable[[Scenes], tuple[Action, NDArray[Any]]]


@dataclass
class Traffic:
    """Drives on some roads, one step at a time; a drive ends with a collision or at the end of its road."""

    roads: Sequence[Road]
    seen: int = SEEN
    # shape (n, 5): x, y, heading, speed and speed limit of the ego vehicle on each road
    ego: Values = field(init=False)
    collided: NDArray[np.bool_] = field(init=False)
    hit: NDArray[np.int64] = field(init=False)  # index of the object that the ego vehicle hit on each road, −1 for none

    def __post_init__(self) -> None:
        count = len(self.roads)
        self._script = scripts(self.roads)
        self._place = self._script.start.copy()
        self._velocity = self._script.velocities[:, :, 0].copy()
        self._heading = _headings(self._velocity, self._first_headings())
        self._phase = np.zeros(self._script.real.shape, np.int64)
        self._since = np.zeros(self._script.real.shape)
        limit = self._script.limit
        self.ego = np.stack([np.zeros(count), np.zeros(count), np.zeros(count), 0.8 * limit, limit], 1)
        self.collided = np.zeros(count, bool)
        self.hit = np.full(count, -1)
        self.order = np.zeros((count, self.seen), np.int64)  # indices of the objects that the last `observe` returned

    def _first_headings(self) -> Values:
        """Return initial headings: objects at rest face their future direction; a parked car faces along the road."""
        later = self._script.velocities[:, :, 1]
        return _headings(later, np.zeros(later.shape[:2]))

    @property
    def running(self) -> NDArray[np.bool_]:
        """Return which drives have not ended."""
        return ~self.collided & (self.ego[:, 0] < LENGTH)

    def observe(self) -> Scenes:
        """Return the scene of each drive: the ego vehicle and the nearest objects, sorted by distance."""
        apart = self._place - self.ego[:, None, :2]
        ahead, beside = apart[..., 0], np.abs(self._place[..., 1])
        seen = self._script.real & (ahead < _BEFORE) & (ahead > -_BEHIND) & (beside < _SIDE)
        far = np.where(seen, np.hypot(apart[..., 0], apart[..., 1]), FAR)
        order = np.argsort(far, 1, kind="stable")[:, : self.seen]
        self.order = order
        rows = np.arange(len(order))[:, None]
        script = self._script
        return Scenes(
            *(self.ego.copy(), script.kind[rows, order], script.size[rows, order], self._place[rows, order]),
            *(self._velocity[rows, order], self._heading[rows, order], seen[rows, order]),
        )

    def step(self, action: Action, steering: NDArray[Any]) -> None:
        """Advance every running drive by `STEP` seconds."""
        running = self.running
        x, y, heading, speed, _ = self.ego.T
        speed = np.clip(speed + np.asarray(CHANGES)[action] * STEP, 0, _FASTEST)
        heading = np.clip(heading + speed * STEP * CURVE * np.clip(steering, -1, 1), -0.5, 0.5)
        side = y + speed * np.sin(heading) * STEP
        heading = np.where((side < _KERBS[0]) | (side > _KERBS[1]), 0.0, heading)
        along = x + speed * np.cos(heading) * STEP
        moved = np.stack([along, np.clip(side, *_KERBS), heading, speed], 1)
        self.ego[:, :4] = np.where(running[:, None], moved, self.ego[:, :4])
        self._move(running[:, None])
        touching = self._touching()
        self.hit = np.where(running & touching.any(1), touching.argmax(1), self.hit)
        self.collided |= running & touching.any(1)

    def _move(self, running: NDArray[np.bool_]) -> None:
        script = self._script
        wanted = np.take_along_axis(script.velocities, self._phase[..., None, None], 2)[:, :, 0]
        wanted = np.where(script.follows[..., None], self._following(wanted), wanted)
        change = wanted - self._velocity
        size = np.hypot(change[..., 0], change[..., 1])
        agility = np.where(script.follows, 9.0, script.agility)
        share = np.minimum(1.0, agility * STEP / np.maximum(size, 1e-9))
        self._velocity += np.where(running, share, 0.0)[..., None] * change
        self._place += np.where(running[..., None], self._velocity * STEP, 0.0)
        self._heading = _headings(self._velocity, self._heading)
        self._since += np.where(running, STEP, 0.0)
        begins = (self._phase == 0) & (self.ego[:, :1] >= script.trigger)
        there = np.sign(script.velocities[:, :, 1, 1]) * (self._place[..., 1] - script.until) >= 0
        there &= np.abs(script.until) < FAR
        ends = (self._phase == 1) & ((self._since >= script.stay) | there)
        self._phase = np.where(running & (begins | ends), self._phase + 1, self._phase)
        self._since = np.where(begins, 0.0, self._since)

    def _following(self, wanted: Values) -> Values:
        """Return the velocity of vehicles that follow the ego vehicle at two metres plus one second of travel."""
        gap = self.ego[:, None, 0] - self._place[..., 0] - (EGO[0] + self._script.size[..., 0]) / 2
        speed = np.minimum(wanted[..., 0], np.maximum(gap - 2.0, 0.0))
        return np.stack([speed, np.zeros_like(speed)], -1)

    def _touching(self) -> NDArray[np.bool_]:
        script = self._script
        where = Scenes(self.ego, script.kind, script.size, self._place, self._velocity, self._heading, script.real)
        apart = np.abs(self._place - self.ego[:, None, :2])
        return script.real & (apart < (np.asarray(EGO) + where.extent) / 2).all(-1)


def _headings(velocity: Values, before: Values) -> Values:
    """Return the headings of objects: the direction of their velocity, or `before` for objects at rest."""
    moving = np.hypot(velocity[..., 0], velocity[..., 1]) > 0.3
    return np.where(moving, np.arctan2(velocity[..., 1], velocity[..., 0]), before)


class Driven(NamedTuple):
    """Results of drives: metres driven, whether each ended in a collision, and the kind of object hit (−1: none)."""

    metres: Values
    collided: NDArray[np.bool_]
    hit: NDArray[np.int64]

    def figures(self) -> dict[str, float]:
        """Return collisions per 100 km, the fraction of the roads that was driven, and the number of km.

        >>> Driven(np.array([450.0, 50.0]), np.array([False, True]), np.array([-1, 0])).figures()
        {'collisions_per_100km': 200.0, 'progress': 0.5556, 'km': 0.5}
        """
        km = float(self.metres.sum()) / 1000
        return {
            "collisions_per_100km": round(100 * float(self.collided.sum()) / km, 2) if km else 0.0,
            "progress": round(float(np.minimum(self.metres / LENGTH, 1.0).mean()), 4),
            "km": round(km, 1),
        }


def drive(roads: Sequence[Road], policy: Policy, *, seen: int = SEEN, steps: int = STEPS) -> Driven:
    """Run a policy in closed loop on these roads, simulated as one batch, and return the result."""
    traffic = Traffic(roads, seen)
    for _ in range(steps):
        if not traffic.running.any():
            break
        traffic.step(*policy(traffic.observe()))
    kinds = np.take_along_axis(scripts(roads).kind, np.maximum(traffic.hit, 0)[:, None], 1)[:, 0]
    return Driven(traffic.ego[:, 0].copy(), traffic.collided, np.where(traffic.hit < 0, -1, kinds))


def expert_policy(scenes: Scenes) -> tuple[Action, Values]:
    """Return the expert's action and steering in each scene."""
    decisions = expert(scenes)
    return decisions.action, decisions.steering


def idle_policy(scenes: Scenes) -> tuple[Action, Values]:
    """Return actions and steering that hold the speed and go straight ahead in each scene."""
    return np.full(len(scenes), ACTIONS.index("hold")), np.zeros(len(scenes))


def random_policy(seed: int) -> Policy:
    """Return a policy of random actions and steering, resampled at each step."""
    generator = np.random.Generator(np.random.PCG64([seed, 3]))

    def policy(scenes: Scenes) -> tuple[Action, Values]:
        return generator.integers(0, len(ACTIONS), len(scenes)), generator.uniform(-1, 1, len(scenes))

    return policy


def disturbed_policy(seed: int) -> Policy:
    """Return the expert's policy with random disturbances of about a second.

    The disturbances lead to scenes that a trained policy reaches by its mistakes.
    """
    generator = np.random.Generator(np.random.PCG64([seed, 5]))
    left = np.zeros(0, np.int64)
    action, steering = np.zeros(0, np.int64), np.zeros(0)
    often = np.zeros(0)

    def policy(scenes: Scenes) -> tuple[Action, Values]:
        nonlocal left, action, steering, often
        count = len(scenes)
        if len(left) != count:
            left, action, steering = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count)
            often = generator.choice([0.0, 0.03, 0.08], count)
        begins = (left == 0) & (generator.random(count) < often)
        left = np.where(begins, generator.integers(2, 9, count), np.maximum(left - 1, 0))
        action = np.where(begins, generator.integers(-1, len(ACTIONS), count), action)
        steering = np.where(begins, generator.uniform(-0.5, 0.5, count), steering)
        best = expert(scenes)
        strange = left > 0
        return (
            np.where(strange & (action >= 0), action, best.action),
            np.clip(best.steering + np.where(strange, steering, 0.0), -1, 1),
        )

    return policy


class Recorded(NamedTuple):
    """Scenes with the expert's decisions; `roads` (n,) and `steps` (n,) are the road and time step of each scene.

    In scenes read from a file, the decisions are those of the file, and `roads` and `steps` are −1.
    """

    scenes: Scenes
    decisions: Decisions
    roads: NDArray[np.int64]
    steps: NDArray[np.int64]


def record(
    seed: int | str, count: int, *, first: int = 0, seen: int = SEEN, busy: float = 1.0, even: bool = True
) -> Recorded:
    """Return `count` scenes of disturbed drives on generated roads, from road number `first` on.

    If `even`, the scenes are selected so that an object forces the decision in half of them, if there are enough.
    """
    scenes_per_road = 40  # approximate number, used to choose how many roads to generate
    numbers = range(first, first + max(4, -(-count // scenes_per_road)))
    traffic = Traffic([road(seed, number, busy=busy) for number in numbers], seen)
    policy = disturbed_policy(first + len(numbers))
    parts: list[tuple[Scenes, Decisions, NDArray[np.int64], int]] = []
    for step in range(STEPS):
        running = np.flatnonzero(traffic.running)
        if not len(running):
            break
        scenes = traffic.observe()
        if step % 2 == 0:
            chosen = scenes.take(running)
            parts.append((chosen, expert(chosen), running, step))
        traffic.step(*policy(scenes))
    whole = _joined(parts, first)
    return _chosen(whole, count, even, np.random.Generator(np.random.PCG64([first, len(numbers), count])))


def _joined(parts: Sequence[tuple[Scenes, Decisions, NDArray[np.int64], int]], first: int) -> Recorded:
    names = ("ego", "kind", "size", "place", "velocity", "heading", "present")
    scenes = Scenes(*(np.concatenate([getattr(part[0], name) for part in parts]) for name in names))
    names = ("action", "steering", "forced")
    decisions = Decisions(*(np.concatenate([getattr(part[1], name) for part in parts]) for name in names))
    roads = np.concatenate([part[2] for part in parts]) + first
    return Recorded(scenes, decisions, roads, np.concatenate([np.full(len(part[2]), part[3]) for part in parts]))


def _chosen(whole: Recorded, count: int, even: bool, generator: np.random.Generator) -> Recorded:
    order = generator.permutation(len(whole.roads))
    if even:
        forced = whole.decisions.forced[order].any(1)
        wanted = min(int(forced.sum()), max(count // 2, count - int((~forced).sum())))
        order = np.concatenate([order[forced][:wanted], order[~forced][: count - wanted]])
    rows = np.sort(order[:count])
    decided = whole.decisions
    decisions = Decisions(decided.action[rows], decided.steering[rows], decided.forced[rows])
    return Recorded(whole.scenes.take(rows), decisions, whole.roads[rows], whole.steps[rows])
