"""A matrix of attention weights as a heat map: an SVG drawing, a standalone HTML page, or terminal text.

Rows are queries and columns are keys; the darker a cell, the larger its weight.
"""

import html as markup
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

from regard.look.color_scale import DARK, LIGHT, RGB, Scale, hexadecimal, ink, shade
from regard.look.notebook import Document, Drawing


@runtime_checkable
class Matrix(Protocol):
    """A two-dimensional tensor or array."""

    def tolist(self) -> list[list[float]]: ...


Weights = Sequence[Sequence[float]] | Matrix

FONTS = "system-ui, 'Noto Sans', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"
FONT_SIZE = 14
LONGEST_LABEL = 24  # largest number of characters of a label that are drawn; a cell's tooltip has the whole label
BLOCKS = " ░▒▓█"

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #ffffff; --text: #1b1f24; --line: #d6dae0 }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #14181e; --text: #d6dae0; --line: #39414d }} }}
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--page); color: var(--text);
  font: 16px/1.6 {fonts} }}
figure {{ margin: 0; overflow-x: auto }}
figcaption, details {{ max-width: 40rem; margin-top: 1rem }}
table {{ border-collapse: collapse; margin-top: .5rem; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25rem .75rem; border: 1px solid var(--line); text-align: right }}
</style>
</head>
<body>
<figure>
{drawing}<figcaption>{caption}</figcaption>
</figure>
<details>
<summary>The numbers</summary>
<table>
<tr><td></td>{head}</tr>
{body}
</table>
</details>
</body>
</html>
"""


def svg(
    weights: Weights,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str = "Attention weights",
    highest: float | None = None,
) -> Drawing:
    """Return the weights as one SVG drawing, which follows the light or dark colour scheme of the viewer.

    `highest` is the weight with the darkest colour; by default it is the largest weight. A cell shows its weight in a
    tooltip and, if the cell is large enough, as text. A notebook displays the result as a drawing.

    >>> svg([[0.9, 0.1]], rows=["汤姆"], columns=["Tom", "Jerry"]).count("<rect class='cell'")
    2
    """
    grid = _grid(weights, rows, columns, highest)
    place = _layout(grid, title)
    parts = opening(title, place.width, place.height, FONT_SIZE)
    for j, label in enumerate(grid.columns):
        x, y = place.left + place.side * (j + 0.5), place.top - 8
        turn = f"transform='rotate(-45 {x:.1f} {y:.1f})'" if place.slanted else "text-anchor='middle'"
        parts.append(text_at(_short(label), x, y, turn))
    for i, (label, row) in enumerate(zip(grid.rows, grid.weights, strict=True)):
        y = place.top + place.side * i
        middle = "text-anchor='end' dominant-baseline='central'"
        parts.append(text_at(_short(label), place.left - 8, y + place.side / 2, middle))
        for j, weight in enumerate(row):
            tip = f"{label} → {grid.columns[j]}: {number(weight, '.4g')}"
            parts.append(_cell(place.left + place.side * j, y, place.side, weight, grid.share(weight), tip))
    return Drawing("\n".join([*parts, *_legend(grid, place), "</svg>\n"]))


def opening(
    title: str, width: int, height: int, font_size: int, dark: str = "[style] { fill: var(--dark) }"
) -> list[str]:
    """Return the first lines of an SVG drawing, with its title; `dark` is a CSS rule for the dark colour scheme."""
    return [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='regard' role='img' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' font-family=\"{FONTS}\" font-size='{font_size}'>",
        f"<title>{_escape(title)}</title>",
        # A program that does not support colour schemes ignores this rule and uses each element's `fill` attribute,
        # which is the light colour.
        f"<style>@media (prefers-color-scheme: dark) {{ .regard text {{ fill: #d6dae0 }} .regard {dark} }}</style>",
        "<rect width='100%' height='100%' rx='8' fill='#ffffff' style='--dark:#14181e'/>",
        text_at(title, 12.0, 26.0, "font-size='17' font-weight='600'"),
    ]


def html(
    weights: Weights,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str = "Attention weights",
    caption: str = "",
    highest: float | None = None,
) -> Document:
    """Return a standalone HTML page with the heat map and a table of the weights, without scripts or network access.

    >>> page = html([[0.9, 0.1]], rows=["汤姆"], columns=["Tom", "Jerry"], caption="a < b")
    >>> "a &lt; b" in page, "<script" in page
    (True, False)
    """
    grid = _grid(weights, rows, columns, highest)
    page = PAGE.format(
        title=_escape(title),
        fonts=FONTS,
        drawing=svg(grid.weights, grid.rows, grid.columns, title=title, highest=grid.highest),
        caption=_escape(caption),
        head="".join(f"<th scope='col'>{_escape(label)}</th>" for label in grid.columns),
        body="\n".join(
            f"<tr><th scope='row'>{_escape(label)}</th>{''.join(map(_entry, row))}</tr>"
            for label, row in zip(grid.rows, grid.weights, strict=True)
        ),
    )
    return Document(page)


def terminal(
    weights: Weights,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    color: bool = False,
    highest: float | None = None,
) -> str:
    """Return the weights as lines of text: cells in colours with `color=True`, otherwise in shaded block characters.

    >>> print(terminal([[0.9, 0.1]], rows=["汤姆"], columns=["Tom", "Jerry"]))
             Tom      Jerry
    汤姆  ███ 0.90  ░░░ 0.10
    """
    grid = _grid(weights, rows, columns, highest)
    width = max([8, *map(_width, grid.columns)])
    margin = max(map(_width, grid.rows), default=0)
    paint = _colored if color else _shaded
    lines = [(" " * margin + "".join("  " + _pad(label, width) for label in grid.columns)).rstrip()]
    for label, row in zip(grid.rows, grid.weights, strict=True):
        cells = (paint(weight, grid.share(weight), width) for weight in row)
        lines.append(" " * (margin - _width(label)) + label + "".join("  " + cell for cell in cells))
    return "\n".join(lines)


def _entry(weight: float) -> str:
    return f"<td>{number(weight, '.6g')}</td>"


def number(weight: float, form: str = ".2f") -> str:
    """Return a weight as text in the format `form`; NaN and infinite weights are "NaN", "∞" and "−∞".

    >>> [number(weight) for weight in (0.5, -0.25, float("nan"), float("-inf"))]
    ['0.50', '−0.25', 'NaN', '−∞']
    """
    if math.isnan(weight):
        return "NaN"
    size = "∞" if math.isinf(weight) else f"{abs(weight):{form}}"
    return f"−{size}" if weight < 0 else size


def largest(weights: Iterable[float]) -> float:
    """Return the largest finite |weight|, or 1 if there is none above 0."""
    return max((abs(weight) for weight in weights if math.isfinite(weight)), default=0.0) or 1.0


def share_of(weight: float, highest: float) -> float:
    """Return weight / highest, limited to −1 to 1; NaN for NaN or infinite weights."""
    return max(-1.0, min(1.0, weight / highest)) if math.isfinite(weight) else math.nan


class _Grid(NamedTuple):
    """Weights of a heat map with one label for each row and column, and the weight that has the darkest colour."""

    weights: list[list[float]]
    rows: list[str]
    columns: list[str]
    highest: float

    def share(self, weight: float) -> float:
        """Return weight / highest weight, limited to −1 to 1; NaN for NaN or infinite weights."""
        return share_of(weight, self.highest)

    @property
    def negative(self) -> bool:
        return any(weight < 0 for weight in chain.from_iterable(self.weights))


class _Layout(NamedTuple):
    """The positions and sizes of the parts of a heat map, in pixels."""

    side: int  # width and height of a cell
    left: float
    top: float
    slanted: bool  # whether column labels are slanted, because one of them is wider than its column
    width: int
    height: int


def _grid(weights: Weights, rows: Sequence[str], columns: Sequence[str], highest: float | None) -> _Grid:
    table = weights if isinstance(weights, Sequence) else weights.tolist()
    if len(table) != len(rows):
        raise ValueError(f"weights has {len(table)} rows, but there are {len(rows)} row labels")
    for label, row in zip(rows, table, strict=True):
        if len(row) != len(columns):
            raise ValueError(f"row {label!r} has {len(row)} weights, but there are {len(columns)} column labels")
        if any(isinstance(weight, Sequence) for weight in row):
            raise ValueError("weights must have two axes, rows and columns: choose one head, as in weights[0]")
    if highest is None:
        highest = largest(chain.from_iterable(table))
    elif not highest > 0:
        raise ValueError(f"highest must be more than 0, got {highest}")
    return _Grid([[float(weight) for weight in row] for row in table], list(rows), list(columns), float(highest))


def _layout(grid: _Grid, title: str) -> _Layout:
    half = FONT_SIZE * 0.6  # width of a Latin character; a Chinese character is twice as wide
    side = max(14, min(72, 640 // max(1, len(grid.columns))))
    left = 24 + half * max((_width(_short(label)) for label in grid.rows), default=0)
    longest = half * max((_width(_short(label)) for label in grid.columns), default=0)
    slanted = longest > side - 4
    reach = longest * math.sqrt(0.5) if slanted else 0.0  # height and width of a label that is slanted by 45°
    top = 64 + reach
    width = max(left + side * len(grid.columns) + reach, left + 160, half * 1.25 * _width(title)) + 16
    return _Layout(side, left, top, slanted, math.ceil(width), math.ceil(top + side * len(grid.rows) + 52))


def _cell(x: float, y: float, side: int, weight: float, share: float, tip: str) -> str:
    gap = 2 if side > 24 else 0
    rect = (
        f"<rect class='cell' x='{x:.1f}' y='{y:.1f}' width='{side - gap}' height='{side - gap}' rx='{gap}' "
        f"{_fill(shade, share)}><title>{_escape(tip)}</title></rect>"
    )
    if side < 40:  # a cell with a side below 40 pixels is too small for text
        return rect
    middle = (side - gap) / 2
    return rect + (
        f"<text x='{x + middle:.1f}' y='{y + middle:.1f}' text-anchor='middle' dominant-baseline='central' "
        f"pointer-events='none' {_fill(ink, share)}>{number(weight)}</text>"
    )


def _legend(grid: _Grid, place: _Layout) -> list[str]:
    steps, step, y = 20, 8, place.height - 38.0
    start = -1 if grid.negative else 0
    bar = [
        f"<rect x='{place.left + step * i:.1f}' y='{y}' width='{step + 0.5}' height='10' "
        f"{_fill(shade, start + (1 - start) * i / (steps - 1))}/>"
        for i in range(steps)
    ]
    low = text_at(number(-grid.highest, ".3g") if grid.negative else "0", place.left, y + 24, "font-size='11'")
    high = text_at(f"{grid.highest:.3g}", place.left + step * steps, y + 24, "font-size='11' text-anchor='end'")
    return [*bar, low, high]


def text_at(text: str, x: float, y: float, attributes: str) -> str:
    """Return an SVG text element at (x, y)."""
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='#1b1f24' {attributes}>{_escape(text)}</text>"


def _fill(color: Callable[[float, Scale], RGB], share: float) -> str:
    return f"fill='{hexadecimal(color(share, LIGHT))}' style='--dark:{hexadecimal(color(share, DARK))}'"


def _colored(weight: float, share: float, width: int) -> str:
    red, green, blue = shade(share, DARK)
    front = "{};{};{}".format(*ink(share, DARK))
    return f"\x1b[48;2;{red};{green};{blue};38;2;{front}m{_pad(number(weight), width)}\x1b[0m"


def _shaded(weight: float, share: float, width: int) -> str:
    if not math.isfinite(share):
        return "!" * (width - 5) + f" {number(weight):>4}"
    # Weights below 0.005 of the highest weight get the blank block.
    block = BLOCKS[math.ceil((abs(share) - 0.005) * (len(BLOCKS) - 1))]
    written = number(weight)
    return block * (width - 1 - len(written)) + f" {written}"


def _pad(text: str, width: int) -> str:
    room = width - _width(text)
    return " " * (room - room // 2) + text + " " * (room // 2)


def _width(text: str) -> int:
    """Return the width of text in a terminal: Chinese characters take two columns, combining marks none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"


def _escape(text: str) -> str:
    """Return text escaped for HTML and SVG; control characters, which XML forbids even if escaped, become �."""
    return markup.escape("".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text))
