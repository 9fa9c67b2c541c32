"""Curves over length on logarithmic axes, in adjacent panels: one SVG drawing, for light and dark screens."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from regard.look.heatmap import opening, text_at

WIDE, HIGH, LEFT, TOP, GAP = 250.0, 230.0, 66.0, 132.0, 80.0  # sizes of a panel, and the space around it
LEGEND = 4  # number of names in a row of the legend
COLORS = (  # line colours for white and dark backgrounds; they differ in lightness too, for colour-blind readers
    ("#0040a0", "#8fb8ff"),
    ("#6a9be0", "#4f7fd0"),
    ("#00796b", "#4fc3b0"),
    ("#2e8b2e", "#8fdc7a"),
    ("#b3261e", "#ff8a80"),
    ("#c77700", "#ffb74d"),
    ("#7a4fa3", "#c9a6ec"),
)
DASHES = ("", "6 3", "2 3")


class Panel(NamedTuple):
    """The curves of one quantity over length: `lines` has the points (length, value) of each name, and `written`
    formats a value for the axis."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    written: Callable[[float], str]


class Axis(NamedTuple):
    """A logarithmic axis from `base` to the power `low` to `base` to the power `high`."""

    base: float
    low: int
    high: int

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        return (math.log(value, self.base) - self.low) / (self.high - self.low)


def axis(values: Sequence[float], base: float) -> Axis:
    """Return the shortest axis between integer powers of `base` that contains all given positive values.

    >>> axis([3.0, 40.0], 10.0)
    Axis(base=10.0, low=0, high=2)
    """
    low = math.floor(math.log(min(values), base) + 1e-9)
    return Axis(base, low, max(low + 1, math.ceil(math.log(max(values), base) - 1e-9)))


def svg(panels: Sequence[Panel], *, title: str, note: str = "") -> str:
    """Return the drawing; the lines with one name have the same colour in all panels.

    >>> drawing = svg([Panel("a < b", {"R&D": [(1.0, 2.0), (2.0, 4.0)]}, str)], title="Costs")
    >>> "a &lt; b" in drawing, "R&amp;D" in drawing
    (True, True)
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    width = round(LEFT + len(panels) * (WIDE + GAP))
    height = round(TOP + HIGH + 62)
    parts = [
        *opening(title, width, height, 12, "rect { fill: var(--dark) } .regard path { stroke: var(--dark) }"),
        text_at(note, 12.0, height - 12.0, "font-size='11'"),
    ]
    for place, name in enumerate(names):
        x, y = 16.0 + place % LEGEND * 250.0, 50.0 + place // LEGEND * 18.0
        parts += [_path([(x, y), (x + 24.0, y)], place), text_at(name, x + 32.0, y + 4.0, "")]
    for place, panel in enumerate(panels):
        parts += _panel(panel, names, LEFT + place * (WIDE + GAP))
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, names: list[str], left: float) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    parts = [text_at(panel.title, left, TOP - 14.0, "font-weight='600'")]
    if not points:
        return parts
    across, up = axis([x for x, _ in points], 2.0), axis([y for _, y in points], 10.0)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + WIDE * across.share(x), TOP + HIGH * (1.0 - up.share(y))

    for power in range(up.low, up.high + 1):
        _, y = at(2.0**across.low, 10.0**power)
        parts.append(_rule((left, y), (left + WIDE, y)))
        parts.append(text_at(panel.written(10.0**power), left - 6.0, y + 4.0, "font-size='11' text-anchor='end'"))
    for power in range(across.low, across.high + 1, max(1, (across.high - across.low) // 4)):
        x, _ = at(2.0**power, 10.0**up.low)
        parts.append(text_at(f"{2**power:,}", x, TOP + HIGH + 18.0, "font-size='11' text-anchor='middle'"))
    for name, line in panel.lines.items():
        places = [at(x, y) for x, y in line]
        parts.append(_path(places, names.index(name)))
    return parts


def _path(points: Sequence[tuple[float, float]], number: int) -> str:
    light, dark = COLORS[number % len(COLORS)]
    path_data = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashes = DASHES[number % len(DASHES)]
    dashed = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<path d='{path_data}' fill='none' stroke='{light}' stroke-width='2.2' style='--dark:{dark}'{dashed}/>"


def _rule(start: tuple[float, float], end: tuple[float, float]) -> str:
    path_data = f"M{start[0]:.1f} {start[1]:.1f} L{end[0]:.1f} {end[1]:.1f}"
    return f"<path d='{path_data}' stroke='#e3e6ea' stroke-width='1' style='--dark:#39414d'/>"
