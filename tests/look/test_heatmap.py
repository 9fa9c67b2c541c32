"""Tests of heat maps: each pair of labels has the right number in any script, and no label can break the markup."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

from regard.look.color_scale import DARK, LIGHT, RGB, ink, shade
from regard.look.heatmap import html, svg, terminal

ROWS = ["汤姆", "追逐"]
COLUMNS = ["Tom", "chases", "Jerry"]
WEIGHTS = [[0.75, 0.25, 0.0], [0.05, 0.85, 0.1]]
SVG = "{http://www.w3.org/2000/svg}"


def cells(drawing: str) -> dict[str, tuple[str, str]]:
    """Return the colours of each cell on a light and on a dark screen, by the cell's tooltip."""
    found = {}
    for rect in ElementTree.fromstring(drawing).iter(f"{SVG}rect"):
        if rect.get("class") == "cell":
            found[rect.findtext(f"{SVG}title")] = (rect.get("fill"), rect.get("style").removeprefix("--dark:"))
    return found


def luminance(color: RGB) -> float:
    """Return the relative luminance as defined by WCAG."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_each_cell_of_the_drawing_names_its_pair_and_weight():
    assert list(cells(svg(WEIGHTS, ROWS, COLUMNS))) == [
        "汤姆 → Tom: 0.75",
        "汤姆 → chases: 0.25",
        "汤姆 → Jerry: 0",
        "追逐 → Tom: 0.05",
        "追逐 → chases: 0.85",
        "追逐 → Jerry: 0.1",
    ]


def test_a_tensor_draws_as_its_list_does():
    assert svg(torch.tensor(WEIGHTS, dtype=torch.float64), ROWS, COLUMNS) == svg(WEIGHTS, ROWS, COLUMNS)


def test_highest_sets_what_is_deepest():
    by_itself = cells(svg([[0.2, 0.1]], ["row"], ["a", "b"]))
    against_one = cells(svg([[0.2, 0.1]], ["row"], ["a", "b"], highest=1.0))
    full = cells(svg([[1.0, 0.5]], ["row"], ["a", "b"]))
    assert by_itself["row → a: 0.2"] == full["row → a: 1"]
    assert by_itself["row → b: 0.1"] == full["row → b: 0.5"]
    assert against_one["row → a: 0.2"] != full["row → a: 1"]


@pytest.mark.parametrize(("columns", "written"), [(3, True), (40, False)])
def test_numbers_are_written_where_there_is_room(columns: int, written: bool):
    drawing = svg([[0.125] * columns], ["row"], [f"c{j}" for j in range(columns)])
    numbers = [text.text for text in ElementTree.fromstring(drawing).iter(f"{SVG}text") if text.text == "0.12"]
    assert len(numbers) == (columns if written else 0)


@pytest.mark.parametrize("label", ["<script>alert(1)</script>", "a & b", "\"quoted\" 'twice'", "bell \x07", "x" * 500])
def test_no_label_breaks_the_drawing(label: str):
    drawing = svg([[1.0]], [label], [label], title=label)
    root = ElementTree.fromstring(drawing)  # the parser raises an error unless the drawing is well-formed XML
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "style", "rect", "text"}
    shown = label.replace("\x07", "\ufffd")
    assert list(cells(drawing)) == [f"{shown} → {shown}: 1"]


class Page(HTMLParser):
    """Parse a page and collect its element types, the addresses that it would fetch, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.fetched: list[str] = []
        self.cells: list[str] = []
        self.said = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data")]

    def handle_data(self, data):
        if self.lasttag == "td" and data.strip():
            self.cells.append(data)
        self.said += data


def test_the_page_stands_alone_and_holds_every_number():
    page = Page(html(WEIGHTS, ROWS, COLUMNS, title="A <b>", caption="5 > 4 & 3"))
    assert "script" not in page.tags
    assert page.fetched == []
    assert page.cells == ["0.75", "0.25", "0", "0.05", "0.85", "0.1"]
    assert "A <b>" in page.said
    assert "5 > 4 & 3" in page.said


def test_plain_terminal_text_is_aligned_for_wide_characters():
    first, *lines = terminal(WEIGHTS, ROWS, COLUMNS).splitlines()
    assert first.split() == COLUMNS
    assert [re.findall(r"\d\.\d\d", line) for line in lines] == [["0.75", "0.25", "0.00"], ["0.05", "0.85", "0.10"]]
    assert lines[0].startswith("汤姆  ███ 0.75")
    assert "\x1b" not in "".join(lines)
    # The labels "Tom " and "chas" are four columns wide in a terminal, like two Chinese characters.
    english = terminal(WEIGHTS, ["Tom ", "chas"], COLUMNS).splitlines()[1:]
    assert [line[2:] for line in lines] == [line[4:] for line in english]


def test_a_weight_of_nothing_is_blank_and_a_small_one_is_not():
    line = terminal([[0.0, 0.01, 1.0]], ["row"], COLUMNS).splitlines()[1]
    assert line == "row      0.00  ░░░ 0.01  ███ 1.00"


def test_colored_terminal_text_says_the_same():
    plain, colored = (terminal(WEIGHTS, ROWS, COLUMNS, color=color) for color in (False, True))
    numbers = re.findall(r"\d\.\d\d", re.sub(r"\x1b\[[\d;]*m", " ", colored))
    assert numbers == re.findall(r"\d\.\d\d", plain)
    assert colored.count("\x1b[0m") == 6  # the terminal's colour is reset after each cell


@pytest.mark.parametrize("draw", [svg, html, terminal])
@pytest.mark.parametrize(
    ("weights", "rows", "message"),
    [
        (torch.ones(3, 3), ROWS, "weights has 3 rows, but there are 2 row labels"),
        (torch.ones(2, 4), ROWS, "row '汤姆' has 4 weights, but there are 3 column labels"),
        (torch.ones(2, 3, 5), ROWS, "two axes, rows and columns: choose one head"),
    ],
)
def test_wrong_weights_are_refused_by_name(draw, weights, rows, message):
    with pytest.raises(ValueError, match=message):
        draw(weights, rows, COLUMNS)


@pytest.mark.parametrize("draw", [svg, html, terminal])
@pytest.mark.parametrize(("weight", "shown"), [(-0.5, "−0.50"), (float("nan"), "NaN"), (float("inf"), "∞")])
def test_odd_weights_are_shown_as_what_they_are(draw, weight, shown):
    drawing = draw([[1.0, 0.0, 0.0], [weight, 0.0, 0.0]], ROWS, COLUMNS)
    assert shown in drawing
    assert "1.00" in drawing


def test_a_highest_of_zero_is_refused():
    with pytest.raises(ValueError, match="highest must be more than 0, got 0"):
        svg(WEIGHTS, ROWS, COLUMNS, highest=0.0)


def test_all_zero_and_empty_weights_draw():
    assert cells(svg([[0.0, 0.0]], ["row"], ["a", "b"])).keys() == {"row → a: 0", "row → b: 0"}
    assert cells(svg([], [], [])) == {}
    assert terminal([], [], []) == ""


@pytest.mark.parametrize("scale", [LIGHT, DARK], ids=["light", "dark"])
def test_a_larger_weight_is_further_from_the_background_and_its_number_readable(scale):
    levels = [luminance(shade(step / 100, scale)) for step in range(101)]
    assert levels == sorted(levels, reverse=scale is LIGHT)
    assert len(set(levels)) == 101
    for step, back in enumerate(levels):
        low, high = sorted([back, luminance(ink(step / 100, scale))])
        # WCAG requires 4.5; the limit is 4.4 because colours are rounded to bytes.
        assert (high + 0.05) / (low + 0.05) >= 4.4, f"at {step} %"
