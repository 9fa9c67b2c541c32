"""Tests that NaN, infinite and negative weights of a broken or unusual model are saved, loaded and shown correctly."""

import base64
import gzip
import json
import re

import pytest
import torch
from PIL import Image

from regard.look import heatmap
from regard.look.color_scale import LIGHT
from regard.look.trace import Trace
from regard.look.viewer.page import page
from regard.look.viewer.page_data import as_json, pack

NAN, INF = float("nan"), float("inf")
ODD = {"NaN": NAN, "infinite": INF, "minus infinite": -INF, "negative": -0.25, "large": 1e6}


def with_one(value: float, *shape: int) -> torch.Tensor:
    weights = torch.rand(*shape).softmax(-1)
    weights[..., 1, 2] = value
    return weights


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("whole", [2**21, 0])
def test_what_is_saved_is_read(tmp_path, name, whole):
    weights = with_one(ODD[name], 2, 3, 7, 11)
    trace = Trace.from_weights({"layer": weights})
    found = Trace.load(trace.save(tmp_path / "a.safetensors", whole=whole, top=4))["layer"]
    read = found.weights(batch=1)
    torch.testing.assert_close(read[:, 1, 2], weights[1, :, 1, 2], equal_nan=True, rtol=1e-3, atol=0)
    finite = weights[1].isfinite() & (read != 0)
    torch.testing.assert_close(read[finite], weights[1][finite], rtol=1e-3, atol=1e-5)
    assert page(Trace.load(tmp_path / "a.safetensors"))


def test_a_row_of_nothing_but_nan_stays_one_where_only_the_largest_are_saved(tmp_path):
    weights = torch.rand(1, 3, 99)
    weights[0, 1] = NAN
    found = Trace.load(Trace.from_weights({"layer": weights}).save(tmp_path / "a.safetensors", whole=0, top=4))["layer"]
    assert found.weights()[0, 1].isnan().all()
    assert not found.weights()[0, 0].isnan().any()
    assert found.overview(8, head=0).isnan().any(-1).tolist() == [False, True, False]


def shown(packed, heads: int) -> torch.Tensor:
    """Return the weights in the page's only record, decoded as viewer/assets/source.js documents."""
    [entry] = packed.about["records"]
    numbers = entry["pack"]
    assert numbers["half"]
    # Number of packed maps: one for each head, and the mean over the heads as the last one.
    packed_heads = numbers["heads"]
    count = packed_heads * numbers["mapRows"] * numbers["mapColumns"]
    raw = gzip.decompress(packed.records[0])
    start = len(raw) - -(-2 * count // 4) * 4
    cells = torch.frombuffer(bytearray(raw), dtype=torch.float16, count=count, offset=start).float() * numbers["peak"]
    return cells.reshape(packed_heads, numbers["mapRows"], numbers["mapColumns"])[:heads]


@pytest.mark.parametrize("name", ODD)
def test_a_page_has_them(name):
    weights = with_one(ODD[name], 2, 5, 7) if name != "large" else with_one(-1e6, 2, 5, 7)
    packed = pack(Trace.from_weights({"layer": weights}))
    torch.testing.assert_close(shown(packed, 2)[:, 1, 2], weights[:, 1, 2], equal_nan=True, rtol=1e-3, atol=0)
    [entry] = packed.about["records"]
    assert {"NaN": "2 are NaN", "negative": "2 are negative", "large": "2 are negative"}.get(
        name, "2 are infinite"
    ) in entry["note"]
    json.loads(as_json(packed.about), parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert entry["entropy"] == [None, None, None] or name == "infinite" or name == "minus infinite"


def test_a_pooled_page_does_not_hide_a_nan():
    weights = torch.rand(1, 600, 531)
    weights[0, 401, 77] = NAN
    packed = pack(Trace.from_weights({"layer": weights}))
    cells = shown(packed, 1)
    assert cells.shape[1] < 600
    assert int(cells.isnan().sum()) == 1
    [entry] = packed.about["records"]
    start, (rows, columns) = entry["thumbnails"]["start"], entry["thumbnails"]["shape"]
    assert entry["thumbnails"]["half"]
    data = gzip.decompress(base64.b64decode(packed.about["thumbnails"]))
    small = torch.frombuffer(bytearray(data), dtype=torch.float16, count=rows * columns, offset=start)
    assert int(small.isnan().sum()) == 1


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_an_overview_does_not_hide_a_nan(pool):
    weights = torch.rand(1, 13, 9)
    weights[0, 4, 7] = NAN
    cells = Trace.from_weights({"layer": weights})["layer"].overview(4, head=0, pool=pool)
    assert cells.isnan().nonzero().tolist() == [[1, 3]]


def test_the_largest_of_negative_weights_is_negative():
    record = Trace.from_weights({"layer": torch.full((1, 4, 4), -2.0)})["layer"]
    assert record.overview(2, head=0, pool="max").tolist() == [[-2.0, -2.0], [-2.0, -2.0]]
    assert record.entropy().isnan().all()
    assert record.top(2, magnitude=True).values.tolist()[0][0] == [-2.0, -2.0]


def test_drawings_show_them(tmp_path):
    weights = torch.tensor([[[NAN, 0.5, -0.25, INF]]])
    trace = Trace.from_weights({"layer": weights}, rows=["r"], columns=list("abcd"))
    drawing = trace.svg(tmp_path / "a.svg").read_text()
    for text in ("r → a: NaN", "r → c: −0.25", "r → d: ∞", ">NaN</text>", ">−0.5<"):
        assert text in drawing
    assert not re.search(r"\bnan\b", drawing)
    with Image.open(trace.png(tmp_path / "a.png")) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(2**24)}
    assert LIGHT.odd in colours
    assert max(colours, key=lambda colour: colour[0] - colour[2])[0] > 150  # the negative weight has a warm colour
    assert "NaN" in heatmap.terminal(weights[0], ["r"], list("abcd"))
