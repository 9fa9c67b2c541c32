"""Tests of attention maps that `Trace.png` and `Trace.svg` draw over a picture."""

import base64
import io
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regard.look.labels import Labels, patches
from regard.look.trace import Trace
from regard.look.viewer.page_data import about

SVG = "{http://www.w3.org/2000/svg}"
LEFT, TOP, SIDE, STEP = 16, 44, 144, 160  # position, size and distance of the tiles of a picture of 48 × 48 pixels
THICK, SHADOW = 190 / 255, (18, 21, 28)


def caption(colour: int = 255, special: tuple[str, ...] = ()) -> Trace:
    """Return the attention record (`Trace`) of two words that attend to the 2 × 3 cells of a picture of one colour."""
    weights = torch.tensor([[[0.5, 0.1, 0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1, 0.1, 0.5]]])
    beside = torch.full((1, 2, len(special)), 9.0)  # weights of tokens that are not part of the picture
    words = Labels("tokens", ("red", "ball"), {"probability": [0.25, 1.0]})
    columns = patches(Image.new("RGB", (48, 48), (colour,) * 3), (2, 3), special=special)
    return Trace.from_weights({"decoder": torch.cat([beside, weights], -1)}, rows=words, columns=columns)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def centre(tile: int, row: int, column: int) -> tuple[int, int]:
    """Return the position (y, x) of the centre of a cell in a tile of the drawing."""
    return TOP + int((row + 0.5) * SIDE / 2), LEFT + tile * STEP + int((column + 0.5) * SIDE / 3)


def veiled(share: float, colour: int = 255, shadow: tuple[int, ...] = SHADOW) -> list[float]:
    return [colour + (dark - colour) * THICK * (1 - share) for dark in shadow]


@pytest.mark.parametrize("special", [(), ("[CLS]", "[REG]")], ids=["patches alone", "special tokens"])
@pytest.mark.parametrize("view", ["auto", "smooth", "cells"])
def test_each_row_is_clear_where_its_weight_is_largest(tmp_path, view, special):
    found = pixels(caption(special=special).png(tmp_path / "a.png", view=view))
    for tile, best in enumerate([(0, 0), (1, 2)]):
        assert found[centre(tile, *best)] == pytest.approx([255] * 3, abs=2)
    faint = veiled(0.2)
    # Interpolation leaves the weight at the centre of a cell unchanged.
    assert found[centre(0, 1, 2)] == pytest.approx(faint, abs=6)
    assert found[centre(1, 0, 0)] == pytest.approx(faint, abs=6)


def test_the_title_stands_over_the_pictures_where_they_show_all_of_it(tmp_path):
    """If the trace has no title, or several records, the heading of the drawing is the name of the map."""

    def title(trace: Trace) -> str:
        found = ET.parse(trace.svg(tmp_path / "a.svg")).getroot().find(f"{SVG}title")
        assert found is not None
        return found.text or ""

    plain = caption()
    assert title(plain) == "decoder"
    [record] = plain.records
    assert title(Trace("What is it? a ball 0.98", [record])) == "What is it? a ball 0.98"
    assert title(Trace("What is it? a ball 0.98", [record, record])) == "decoder"


def test_cells_have_edges_and_a_smooth_map_has_none(tmp_path):
    edge, y = LEFT + SIDE // 3, centre(0, 0, 0)[0]
    jumps = {}
    for view in ("cells", "smooth"):
        row = pixels(caption().png(tmp_path / "a.png", view=view))[y, edge - 12 : edge + 12].sum(-1)
        jumps[view] = np.abs(np.diff(row)).max()
    assert jumps["cells"] == pytest.approx(765 - sum(veiled(0.2)), abs=8)
    assert jumps["smooth"] < jumps["cells"] / 8


def test_a_dark_picture_has_a_light_veil(tmp_path):
    found = pixels(caption(colour=10).png(tmp_path / "a.png", view="cells"))
    assert found[centre(0, 0, 0)] == pytest.approx([10] * 3, abs=2)
    assert found[centre(0, 1, 1)] == pytest.approx(veiled(0.2, 10, (226, 230, 238)), abs=2)


def test_an_svg_holds_the_picture_once_and_a_veil_for_each_word(tmp_path):
    drawing = ET.fromstring(caption().svg(tmp_path / "a.svg").read_text())
    images = list(drawing.iter(f"{SVG}image"))
    assert [one.get("class") for one in images].count("map") == 2
    data = images[0].get("href", "").removeprefix("data:image/png;base64,")
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert (picture.size, picture.getpixel((5, 5))) == ((48, 48), (255, 255, 255))
    words = [one.text for one in drawing.iter(f"{SVG}text")]
    assert {"red", "largest 0.500 · p 0.25", "ball", "largest 0.500 · p 1.00", "0"} <= set(words)


def test_a_weight_that_is_nan_has_its_own_colour(tmp_path):
    trace = caption()
    weights = trace["decoder"].weights().clone()
    weights[0, 0, 4] = float("nan")
    labels = trace["decoder"].row_labels, trace["decoder"].column_labels
    broken = Trace.from_weights({"decoder": weights}, rows=labels[0], columns=labels[1])
    red, green, blue = pixels(broken.png(tmp_path / "a.png"))[centre(0, 1, 1)]
    assert green < min(red, blue) - 40
    assert pixels(broken.png(tmp_path / "a.png"))[centre(0, 0, 0)] == pytest.approx([255] * 3, abs=2)


def test_rows_and_columns_instead(tmp_path):
    assert caption().svg(tmp_path / "a.svg", view="heatmap").read_text().count("class='cell'") == 12


def test_patches_that_look_at_patches_are_a_heat_map(tmp_path):
    labels = patches(Image.new("RGB", (8, 8)), (2, 2))
    trace = Trace.from_weights({"vit": torch.eye(4)[None]}, rows=labels, columns=labels)
    assert trace.svg(tmp_path / "a.svg").read_text().count("class='cell'") == 16


@pytest.mark.parametrize(
    ("view", "message"), [("cells", "cells of a picture"), ("round", "auto, heatmap, smooth, cells, got 'round'")]
)
def test_a_view_that_cannot_be_drawn(tmp_path, view, message):
    with pytest.raises(ValueError, match=message):
        Trace.from_weights({"a": torch.eye(2)[None]}).png(tmp_path / "a.png", view=view)
    assert not (tmp_path / "a.png").exists()


def test_many_rows_are_cut_and_long_names_too(tmp_path):
    weights = torch.full((1, 70, 4), 0.25)
    trace = Trace.from_weights(
        {"a": weights}, rows=["wide " * 40] * 70, columns=patches(Image.new("RGB", (200, 100)), (2, 2))
    )
    drawing = trace.svg(tmp_path / "a.svg").read_text()
    assert drawing.count("class='map'") == 64
    assert "(the first 64 of 70 rows)" in drawing
    assert "wide wide wide wide wide wide wide" not in drawing


def test_probabilities_are_kept_in_a_file_and_told_to_a_page(tmp_path):
    trace = Trace.load(caption().save(tmp_path / "a.trace"))
    rows, columns = about(trace)["labels"]
    assert rows["probability"] == [0.25, 1.0]
    assert "probability" not in columns
