"""Roads of the built-in driving data, and the scripted motion of all objects on them.

x runs along the road in metres and y to the right of the ego vehicle's lane, whose centre is y = 0. Traffic keeps to
the right, so that oncoming vehicles have y = −3.5. An object moves with its first velocity until the ego vehicle
reaches its `trigger`; then with its second velocity for `stay` seconds or until its y reaches `until`; then with its
third velocity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

KINDS = ("car", "lorry", "cyclist", "pedestrian")
SIZES = {"car": (4.5, 1.9), "lorry": (8.0, 2.4), "cyclist": (1.8, 0.6), "pedestrian": (0.5, 0.5)}
"""Length and width of each kind of object in metres."""
ROADS = ("straight", "street", "crossing", "merge")
LANE = 3.5  # width of a lane in metres
LENGTH = 450.0  # length of a road in metres
FAR = 1e6
_AHEAD, _APART = 70.0, 75.0  # metres from the start to the first event (such as a crossing), and between events
_AGILE = 12.0  # acceleration of pedestrians and cyclists in m/s², with which they change their velocity almost at once


class Mover(NamedTuple):
    """One object on a road: its start, its three velocities, and the conditions under which the velocity changes."""

    kind: str
    x: float
    y: float
    first: tuple[float, float] = (0.0, 0.0)
    trigger: float = FAR  # x of the ego vehicle at which the second velocity begins
    second: tuple[float, float] = (0.0, 0.0)
    stay: float = FAR  # duration of the second velocity in seconds
    until: float = FAR  # y at which the second velocity ends
    third: tuple[float, float] = (0.0, 0.0)
    agility: float = 3.5  # the largest acceleration of the object in m/s²
    follows: bool = False  # whether the object follows the ego vehicle at a safe distance


class Markings(NamedTuple):
    """Road markings: the x of the centres of crossings, of zebra crossings and of the ends of ramps."""

    crossings: tuple[float, ...] = ()
    zebras: tuple[float, ...] = ()
    ramps: tuple[float, ...] = ()


class Road(NamedTuple):
    """A road with its traffic; `limit` is the speed limit in m/s."""

    name: str
    limit: float
    movers: tuple[Mover, ...]
    markings: Markings


def road(seed: int | str, number: int, *, busy: float = 1.0) -> Road:
    """Return the generated road of a seed and a number; equal seeds and numbers give equal roads on every machine.

    `busy` is a factor of the amount of traffic: 2 means about twice as many objects.

    >>> road(1, 0).name, road(1, 0) == road(1, 0), road(1, 0) == road(2, 0)
    ('merge', True, False)
    """
    random = Random(f"traffic {seed} {number} {busy:g}")
    name = random.choice(ROADS)
    limit = random.uniform(9.0, 13.0)
    movers, markings = _MAKERS[name](random, limit, busy)
    movers += _oncoming(random, round(random.randint(3, 7) * busy))
    movers += _bystanders(random, round(random.randint(12, 20) * busy))
    if random.random() < 0.5:
        movers.append(Mover("car", random.uniform(-30, -14), 0.0, (limit, 0.0), follows=True))
    return Road(name, limit, tuple(movers), markings)


def _events(random: Random, busy: float) -> list[float]:
    apart = _APART / busy
    return [_AHEAD + number * apart + random.uniform(-20, 20) / busy for number in range(int((LENGTH - 60) // apart))]


def _oncoming(random: Random, count: int) -> list[Mover]:
    speed = random.uniform(8, 13)
    places = sorted(random.uniform(40, 900) for _ in range(count))
    return [Mover(random.choice(("car", "car", "lorry")), x, -LANE, (-speed, 0.0)) for x in places]


def _bystanders(random: Random, count: int) -> list[Mover]:
    """Return pedestrians on both pavements and cars parked on the other side: objects that force no decision."""
    movers = []
    for _ in range(count):
        x = random.uniform(-20, LENGTH + 40)
        if random.random() < 0.4:
            movers.append(Mover("car", x, random.uniform(-6.6, -6.2)))
            continue
        side = random.uniform(3.9, 5.5) if random.random() < 0.5 else -random.uniform(7.8, 9.5)
        movers.append(Mover("pedestrian", x, side, (random.choice((-1.3, 0.0, 1.3)), 0.0), agility=_AGILE))
    return movers


def _straight(random: Random, limit: float, busy: float) -> tuple[list[Mover], Markings]:
    """Return a road with a vehicle ahead that brakes at times, cyclists, parked cars and pedestrians on the
    pavement."""
    movers = []
    start = random.uniform(18, 45)
    for _ in range(round(random.choice((1, 1, 2)) * busy)):
        pace, slow = random.uniform(0.6, 1.1) * limit, random.choice((0.0, random.uniform(0, 5)))
        brakes = random.uniform(30, 300)
        kind = random.choice(("car", "car", "lorry"))
        again = (random.uniform(0.7, 1.2) * limit, 0.0)
        hard = random.uniform(2.5, 7.0)
        movers.append(
            Mover(kind, start, 0.0, (pace, 0.0), brakes, (slow, 0.0), random.uniform(3, 7), FAR, again, agility=hard)
        )
        start += random.uniform(25, 60)
    for x in _events(random, busy):
        choice = random.random()
        if choice < 0.35:
            movers.append(Mover("cyclist", x, random.uniform(1.0, 1.5), (random.uniform(3, 5), 0.0), agility=_AGILE))
        elif choice < 0.65:
            movers.append(Mover("pedestrian", x, random.choice((3.8, -7.5)), (random.choice((-1.3, 1.3)), 0.0)))
        else:
            movers.append(Mover("car", x, random.uniform(2.9, 3.3)))
    return movers, Markings()


def _street(random: Random, limit: float, busy: float) -> tuple[list[Mover], Markings]:
    """Return a road with vehicles parked in the lane and pedestrians at the kerb, some of whom step into the road."""
    movers = []
    for x in _events(random, busy):
        if random.random() < 0.6:
            kind = random.choice(("car", "car", "lorry"))
            wide = SIZES[kind][1]
            movers.append(Mover(kind, x, random.uniform(0.7, 2.2) + wide / 2))
        if random.random() < 0.7:
            movers.append(_stepping(random, x + random.uniform(8, 20), random.uniform(11, 45)))
        else:
            movers.append(Mover("pedestrian", x + random.uniform(8, 20), random.choice((2.9, -6.4))))
    return movers, Markings()


def _stepping(random: Random, x: float, far: float) -> Mover:
    """Return a pedestrian who steps into the road when the ego vehicle is `far` metres before them."""
    right = random.random() < 0.7
    start, speed = (2.9, -1.0) if right else (-6.4, 1.0)
    speed *= random.uniform(1.2, 2.2)
    return Mover(
        *("pedestrian", x, start, (0.0, 0.0), x - far, (0.0, speed)), until=-6.4 if right else 3.3, agility=_AGILE
    )


def _crossing(random: Random, limit: float, busy: float) -> tuple[list[Mover], Markings]:
    """Return a road with crossings whose traffic does not yield, and pedestrians on zebra crossings before them."""
    movers: list[Mover] = []
    crossings: list[float] = []
    zebras: list[float] = []
    for x in _events(random, busy)[::2]:
        crossings.append(x)
        for _ in range(random.choice((0, 1, 1, 2))):
            right = random.random() < 0.5
            kind = random.choice(("car", "car", "lorry", "cyclist"))
            pace = random.uniform(4, 6) if kind == "cyclist" else random.uniform(6, 10)
            start, side = (random.uniform(18, 25), 1.75) if right else (-random.uniform(20, 25), -1.75)
            second = (0.0, -pace if right else pace)
            movers.append(
                Mover(
                    *(kind, x + side, start, (0.0, 0.0), x - random.uniform(22, 60), second),
                    until=-60.0 if right else 60.0,
                    agility=5.0,
                )
            )
        if random.random() < 0.5:
            zebras.append(x - 7)
            movers.append(_stepping(random, x - 7, random.uniform(12, 50)))
    return movers, Markings(tuple(crossings), tuple(zebras))


def _merge(random: Random, limit: float, busy: float) -> tuple[list[Mover], Markings]:
    """Return a road with ramps on the right, each with a vehicle that merges into the lane in front of the ego vehicle.

    The vehicle on a ramp starts when the ego vehicle is at a random distance from the ramp.
    """
    movers: list[Mover] = []
    ramps: list[float] = []
    for x in _events(random, busy)[::2]:
        ramps.append(x)
        kind = random.choice(("car", "car", "lorry"))
        pace = random.uniform(5, 0.9 * limit)
        across = random.uniform(0.8, 1.6)
        after = random.uniform(0.7, 1.4) * limit
        movers.append(
            Mover(
                *(kind, x, LANE, (0.0, 0.0), x - random.uniform(20, 60), (pace, -across)),
                until=0.0,
                third=(after, 0.0),
                agility=random.uniform(2.5, 4.0),
            )
        )
    for x in _events(random, busy)[1::2]:
        if random.random() < 0.6:
            movers.append(Mover("car", x, random.uniform(2.9, 3.3)))
    return movers, Markings(ramps=tuple(ramps))


_MAKERS: dict[str, Callable[[Random, float, float], tuple[list[Mover], Markings]]] = {
    "straight": _straight,
    "street": _street,
    "crossing": _crossing,
    "merge": _merge,
}


@dataclass(frozen=True, eq=False)
class Scripts:
    """The objects of many roads as arrays (roads, objects); `real` is False for padding."""

    real: NDArray[np.bool_]
    kind: NDArray[np.int64]
    size: Values  # shape (roads, objects, 2): length and width
    start: Values  # shape (roads, objects, 2): x and y
    velocities: Values  # shape (roads, objects, 3, 2): the three velocities along x and y
    trigger: Values
    stay: Values
    until: Values
    agility: Values
    follows: NDArray[np.bool_]
    limit: Values  # speed limit of each road, shape (roads,)


def scripts(roads: Sequence[Road]) -> Scripts:
    """Return roads as arrays, so that all of them are simulated at once."""
    most = max(1, *(len(one.movers) for one in roads))
    shape = (len(roads), most)
    arrays: dict[str, Any] = {
        "real": np.zeros(shape, bool),
        "kind": np.zeros(shape, np.int64),
        "size": np.ones((*shape, 2)),
        "start": np.zeros((*shape, 2)),
        "velocities": np.zeros((*shape, 3, 2)),
        "follows": np.zeros(shape, bool),
        **{name: np.zeros(shape) for name in ("trigger", "stay", "until", "agility")},
    }
    for row, one in enumerate(roads):
        for column, mover in enumerate(one.movers):
            place = row, column
            arrays["real"][place] = True
            arrays["kind"][place] = KINDS.index(mover.kind)
            arrays["size"][place] = SIZES[mover.kind]
            arrays["start"][place] = mover.x, mover.y
            arrays["velocities"][place] = mover.first, mover.second, mover.third
            for name in ("trigger", "stay", "until", "agility", "follows"):
                arrays[name][place] = getattr(mover, name)
    return Scripts(**arrays, limit=np.array([one.limit for one in roads]))
