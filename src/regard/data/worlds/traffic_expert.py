"""The expert driver: brake, hold or accelerate by time to collision, and steer around obstacles at the side.

Every object is evaluated separately, to determine which objects force the decision: those without which the decision
would differ.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.worlds.traffic_roads import Values

ACTIONS = ("brake", "hold", "accelerate")
CHANGES = (-5.0, 0.0, 2.0)  # acceleration of each action in m/s²
EGO = (4.5, 1.9)  # length and width of the ego vehicle in metres
CURVE = 0.05  # curvature of the ego vehicle's path in 1/m at a steering of 1
HORIZON = 3.0  # the expert reacts to collisions within this number of seconds
GAP, BESIDE = 1.5, 0.3  # safety margins around the ego vehicle in metres, ahead and at each side
CLEAR = 0.8  # lateral distance in metres at which the expert passes an object
_SHIFT = 1.2  # the largest distance of the ego vehicle to the left of the lane's centre, in metres
_REACH = 35.0  # distance in metres at which the expert starts to steer around an obstacle
_LOOK = 12.0  # metres that the ego vehicle drives ahead while it shifts sideways by one metre
_TURN = 0.15  # the largest angle between the ego vehicle and the road in radians
_ALONG = 4.0  # distance in metres over which the steering corrects the heading
_DIFFERS = 0.1  # steering values that differ by less than this count as the same decision


@dataclass(frozen=True, eq=False)
class Scenes:
    """Traffic scenes as arrays.

    `ego` (n, 5) is x, y, heading, speed and speed limit of the ego vehicle. The other arrays describe up to s objects:
    `place` and `velocity` (n, s, 2), `size` (n, s, 2) as length and width, `heading` and `kind` (n, s), and `present`
    (n, s), True for the slots that hold an object.
    """

    ego: Values
    kind: NDArray[np.int64]
    size: Values
    place: Values
    velocity: Values
    heading: Values
    present: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ego)

    @property
    def extent(self) -> Values:
        """Return the extent of each object along x and y, (n, s, 2)."""
        cosine, sine = np.abs(np.cos(self.heading)), np.abs(np.sin(self.heading))
        long, wide = self.size[..., 0], self.size[..., 1]
        return np.stack([cosine * long + sine * wide, sine * long + cosine * wide], -1)

    def take(self, rows: NDArray[np.int64]) -> "Scenes":
        """Return the scenes with the indices `rows`."""
        parts: tuple[Any, ...] = (
            *(self.ego, self.kind, self.size, self.place, self.velocity, self.heading, self.present),
        )
        return Scenes(*(part[rows] for part in parts))


@dataclass(frozen=True, eq=False)
class Decisions:
    """The expert's decision in each scene: the action, the steering, and the objects that force this decision.

    `action` and `steering` are (n,). `forced` (n, s) is True for the objects without which the action or the steering
    would differ.
    """

    action: NDArray[np.int64]
    steering: Values
    forced: NDArray[np.bool_]


def time_to_collision(apart: Values, closing: Values, reach: Values) -> Values:
    """Return the seconds until two boxes in straight motion touch; infinite if they never do.

    `apart` (…, 2) is the relative position of the centres, `closing` (…, 2) the relative velocity, and `reach` (…, 2)
    the distance of the centres along each axis at which they touch.

    >>> at = time_to_collision(np.array([[30.0, 0.0]]), np.array([[-10.0, 0.0]]), np.array([[5.0, 2.0]]))
    >>> float(at[0])  # 25 metres at 10 m/s
    2.5
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        one, two = (-reach - apart) / closing, (reach - apart) / closing
    still = closing == 0
    inside = np.abs(apart) < reach
    begins = np.where(still, np.where(inside, -np.inf, np.inf), np.minimum(one, two)).max(-1)
    ends = np.where(still, np.where(inside, np.inf, -np.inf), np.maximum(one, two)).min(-1)
    return np.where((begins < ends) & (ends > 0), np.maximum(begins, 0.0), np.inf)


def expert(scenes: Scenes) -> Decisions:
    """Return the expert's decision in each scene, and the objects that force this decision."""
    _, y, heading, speed, limit = scenes.ego.T
    target = _targets(scenes)
    free = np.where(speed < limit - 0.5, 2, np.where(speed > limit + 1.0, 0, 1))
    most = _permitted(scenes, target)
    action, without = _least(most, free)
    aim, aim_without = _least(target, np.zeros_like(y))
    steering = _steering(aim, y, heading)
    other = _steering(aim_without, y[:, None], heading[:, None])
    forced = (without != action[:, None]) | (np.abs(other - steering[:, None]) > _DIFFERS)
    return Decisions(action, steering, forced & scenes.present)


def _least(values: NDArray[Any], free: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the minimum (n,) of `free` (n,) and the row of `values` (n, s), and this minimum without each column."""
    if not values.shape[1]:
        return free, values
    lowest = np.minimum(values.min(1), free)
    ordered = np.sort(values, 1)
    second = ordered[:, 1] if values.shape[1] > 1 else free
    is_least = np.arange(values.shape[1]) == values.argmin(1)[:, None]
    others = np.where(is_least, second[:, None], ordered[:, :1])
    return lowest, np.minimum(others, free[:, None])


def _targets(scenes: Scenes) -> Values:
    """Return the lateral position y, (n, s), to which the ego vehicle would have to steer to pass each object.

    The position is negative (to the left) for slow objects near the right side of the lane, and 0 for all others.
    """
    x, speed = scenes.ego[:, 0, None], scenes.velocity
    ahead = scenes.place[..., 0] - x
    edge = scenes.place[..., 1] - scenes.extent[..., 1] / 2
    wanted = edge - CLEAR - EGO[1] / 2
    near = (ahead < _REACH) & (ahead > -(EGO[0] + scenes.extent[..., 0]) / 2 - 1.0)
    slow = (speed[..., 0] > -0.5) & (speed[..., 0] < 6.0) & (np.abs(speed[..., 1]) < 0.3)
    passed = scenes.present & near & slow & (scenes.place[..., 1] > 0.5) & (wanted < 0) & (wanted > -_SHIFT - 0.4)
    return np.where(passed, np.maximum(wanted, -_SHIFT), 0.0)


def _permitted(scenes: Scenes, target: Values) -> NDArray[np.int64]:
    """Return, for each object (n, s), the fastest action that avoids a collision with it within `HORIZON` seconds.

    If holding the speed leads to a collision, the action is braking (0), even if braking does not avoid it.
    """
    x, y, _, speed, _ = (column[:, None] for column in scenes.ego.T)
    ahead = scenes.place[..., 0] - x
    # Steering shifts the ego vehicle sideways by one metre in `_LOOK` metres, towards its path around the object.
    most = np.maximum(ahead, 0.0) / _LOOK
    side = np.where(target < 0, y + np.clip(target - y, -most, most), y)
    apart = np.stack([ahead, scenes.place[..., 1] - side], -1)
    reach = (np.asarray(EGO) + scenes.extent) / 2 + np.array([GAP, BESIDE])
    counts = scenes.present & (ahead > 0)
    permitted = np.zeros(ahead.shape, np.int64)
    for action, gain in ((1, 0.0), (2, 1.0)):
        closing = scenes.velocity - np.stack([speed + gain, np.zeros_like(speed)], -1)
        late = time_to_collision(apart, closing, reach) > HORIZON
        permitted = np.where((late | ~counts) & (permitted == action - 1), action, permitted)
    return permitted


def _steering(aim: Values, y: Values, heading: Values) -> Values:
    """Return steering towards y = `aim`, from −1 (left) to 1."""
    wanted = np.clip((aim - y) / _LOOK, -_TURN, _TURN)
    return np.clip((wanted - heading) / _ALONG / CURVE, -1.0, 1.0)
