"""A bar chart of times relative to regard's, on a logarithmic scale: one SVG drawing, for light and dark screens."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from regard.look.color_scale import DARK, LIGHT, hexadecimal, shade
from regard.look.heatmap import opening, text_at

ROW, GAP, HEADING = 22.0, 26.0, 24.0  # heights of a bar's row, of the space between groups, and of a group's heading
LEFT, BARS, RIGHT = 210.0, 430.0, 150.0  # widths of the labels, the bars and the figures after them
LONGEST = 84  # largest number of characters after a bar
OURS, PEER = 1.0, 0.45  # positions on the colour scale, from 0 to 1, of regard's bars and of all other bars


class Bar(NamedTuple):
    """One contender: its time divided by regard's, and the text after the bar; without a ratio only the text."""

    name: str
    ratio: float | None
    figures: str


class Group(NamedTuple):
    """The bars of one case; the first is regard's."""

    title: str
    bars: Sequence[Bar]


def svg(groups: Sequence[Group], *, title: str, note: str = "") -> str:
    """Return the drawing. A bar ends at the contender's time divided by regard's; a contender whose bar ends beyond
    the line at 1 is slower than regard.

    >>> drawing = svg([Group("a < b", [Bar("regard", 1.0, "1 ms"), Bar("R&D", 8.0, "8 ms")])], title="Times")
    >>> "a &lt; b" in drawing, "R&amp;D" in drawing
    (True, True)
    """
    ratios = [bar.ratio for group in groups for bar in group.bars if bar.ratio]
    low = math.floor(math.log10(min([*ratios, 0.5])))
    high = max(math.ceil(math.log10(max([*ratios, 2.0]))), low + 1)
    height = round(112 + sum(HEADING + GAP + ROW * len(group.bars) for group in groups))
    width = round(LEFT + BARS + RIGHT)
    parts = [
        *opening(title, width, height, 13),
        text_at("time relative to regard's, logarithmic: a longer bar is slower", 12.0, 46.0, "font-size='12'"),
    ]

    def place(ratio: float) -> float:
        return LEFT + BARS * (math.log10(ratio) - low) / (high - low)

    for power in range(low, high + 1):
        x = place(10.0**power)
        parts.append(_rectangle(x, 72.0, 1.0, height - 108.0, "#d6dae0", "#39414d"))
        parts.append(text_at(f"{10.0**power:,g}×", x, 66.0, "font-size='11' text-anchor='middle'"))
    parts.append(text_at(note, 12.0, height - 12.0, "font-size='11'"))
    y = 78.0
    for group in groups:
        parts.append(text_at(group.title, 12.0, y + 16, "font-weight='600' font-size='12'"))
        y += HEADING
        for number, bar in enumerate(group.bars):
            parts.append(text_at(bar.name, LEFT - 8, y + ROW / 2, "text-anchor='end' dominant-baseline='central'"))
            end = LEFT
            if bar.ratio:
                end = place(bar.ratio)
                depth = PEER if number else OURS
                light, dark = hexadecimal(shade(depth, LIGHT)), hexadecimal(shade(depth, DARK))
                parts.append(_rectangle(LEFT, y + 3, max(2.0, end - LEFT), ROW - 6, light, dark))
            parts.append(
                text_at(_short(bar.figures), end + 6, y + ROW / 2, "dominant-baseline='central' font-size='12'")
            )
            y += ROW
        y += GAP
    return "\n".join([*parts, "</svg>\n"])


def _rectangle(x: float, y: float, width: float, height: float, light: str, dark: str) -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}'"
    return f"<rect {place} fill='{light}' style='--dark:{dark}'/>"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
